"""Combinations of settings that cannot work."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import windlass.recipe.settings as sections
from windlass.errors import UserError

Problems = Iterator[tuple[str, str]]  # keys and messages


def model(r: Any) -> Problems:
    m = r.model
    if given := [key for key in m.unused if key in m.model_fields_set]:
        problem = 'it needs model.kind = "hf": write that too, or drop it'
        if "name" in given:
            problem += " (run.name names the run)"
        if m.kind == "hf":
            problem = "config.json of the model decides instead of it: drop it"
        yield ", ".join(f"model.{key}" for key in given), problem
    if m.kind == "hf" and not m.name:
        yield "model.name", 'model.kind = "hf" needs the model\'s name on the Hub or a directory'
    if m.kind == "hf" and m.from_scratch and m.init_from:
        yield "model.init_from", "it names weights, but model.from_scratch asks for none; drop one"
    if m.kernels == "liger" and r.parallel.tensor > 1:
        yield "model.kernels", 'Liger reads whole layers: write "torch", or parallel.tensor=1'
    if m.kernels == "liger" and r.train.precision == "fp64":
        yield "model.kernels", 'Liger computes in float32: write "torch", or drop train.precision'


def gpt(r: Any) -> Problems:
    m, tokens = r.model, r.data.vocab_
    if m.kind != "gpt":
        return
    if m.width % m.heads:
        divisors = [h for h in range(1, m.width + 1) if m.width % h == 0]
        near = min(divisors, key=lambda h: abs(h - m.heads))
        problem = f"{m.heads} heads do not divide the width {m.width}"
        yield "model.heads", f"{problem}; the nearest number that does is {near}"
    elif m.position == "rope" and (m.width // m.heads) % 2:
        yield "model.heads", f"rotary positions need an even head size, not {m.width} / {m.heads}"
    if m.heads % m.kv_heads_:
        near = max(n for n in range(1, m.kv_heads_) if m.heads % n == 0)
        problem = f"{m.kv_heads} key and value heads do not divide the {m.heads} heads"
        yield "model.kv_heads", f"{problem}: write {near}"
    if m.mup_base_width and "." in r.optim.kind:
        advice = 'write "adamw" or "muon", or drop model.mup_base_width'
        yield "optim.kind", f"muP lacks rules for it: {advice}"
    if 0 < m.vocab < tokens:
        problem = f"{m.vocab} is smaller than the tokenizer's vocabulary of {tokens:,}"
        yield "model.vocab", f"{problem}: write 0 (automatic), or at least {tokens}"


def adapters(r: Any) -> Problems:
    lora = r.model.lora
    if lora.modules_to_save and not lora.rank:
        advice = "set model.lora.rank, as 16, or drop it"
        yield "model.lora.modules_to_save", f"it needs adapters: {advice}"
    for key in ("targets", "modules_to_save"):
        for pattern in getattr(lora, key):
            try:
                re.compile(pattern)
            except re.error as error:
                problem = f"{pattern} is not a regular expression: {error}"
                yield f"model.lora.{key}", f"{problem}; write a layer's name, as q_proj"
    if lora.base == "4bit" and (not lora.rank or r.model.from_scratch):
        advice = "set model.lora.rank, on a model with weights"
        yield "model.lora.base", f"4-bit weights cannot be trained: {advice}"


def sources(r: Any) -> Problems:
    d = r.data
    shards = [name.startswith("shards:") for name in (*d.sources, *d.eval_sources)]
    if not d.sources or not all(map(str.strip, d.sources)):
        yield "data.source", "it is empty: name a file, a directory, a pattern or hf:NAME"
    web = ("http://", "https://")
    if any(name.startswith(web) for name in d.sources) and not d.sha256:
        yield "data.sha256", "a source that is downloaded needs the SHA-256 it must have"
    if any(name.startswith(web) for name in d.eval_sources):
        yield "data.eval_source", "data.sha256 checks data.source only: download it, write its path"
    are_hub = {name.startswith("hf:") for name in d.sources}
    if d.eval_split and not (d.mix or any(d.eval_sources)) and len(are_hub) == 2:
        problem = "only a source hf:NAME has splits, and data.source has others"
        yield "data.eval_split", f"{problem}: drop it, or set data.eval_source or data.mix"
    if d.document_mask is True and any(shards):
        yield "data.document_mask", 'shards of other tools lack it: write "auto", or false'
    if d.val_shards and d.tokenizer == "bpe":
        yield "data.val_shards", "byte pairs would be learned from them: write data.val_fraction"
    if d.packing == "best-fit" and {d.format, *(part.format for part in d.mix)} <= {"text", None}:
        yield "data.packing", 'best-fit rows have conversations or questions: write "packed"'
    if d.packing == "best-fit" and d.order != "shuffled":
        yield "data.order", 'best-fit packing changes the order of a file: write "shuffled"'


def items(r: Any) -> Problems:
    d = r.data
    formats = [part.format or d.format for part in d.mix] or [d.format] * len(d.sources)
    validation = [[part.eval_source] for part in d.mix] or [d.eval_sources] * len(d.sources)
    rows = zip(d.sources, validation, formats, strict=True)
    for number, (name, others, kind) in enumerate(rows):
        key = f"data.mix.{number}.format" if d.mix else "data.format"
        if kind == "text" and name.split(":")[0] == "squad":
            yield key, 'the source squad needs data.format = "squad"'
        if kind != "text" and any(one.startswith("shards:") for one in (name, *others)):
            yield key, f'token shards are text: write "text", not "{kind}"'
    names = [*d.sources, *d.eval_sources]
    if d.separator and not ("text" in formats and any(map(is_file, names))):
        yield "data.separator", "only text files have documents between separators: drop it"
    for key in ("answers", "chat_template", "chat_template_kwargs"):
        if getattr(d, key) not in ("auto", "", {}) and "chat" not in formats:
            yield f"data.{key}", 'it is for conversations: write data.format = "chat", or drop it'


def is_file(source: str) -> bool:
    return not source.startswith(("hf:", "shards:", "squad")) and source != "stdlib"


def mixture(r: Any) -> Problems:
    d = r.data
    names = [part.name for part in d.mix]
    if d.stages and not names:
        yield "data.stages", "they change the weights of data.mix, which is empty"
    if not names:
        return
    if twice := {name for name in names if names.count(name) > 1}:
        yield "data.mix", f"two sources have the name {', '.join(sorted(twice))}"
    for key in sorted({"source", "eval_source"} & d.model_fields_set):
        if getattr(d, key):
            problem = f"each source of data.mix has its own {key}"
            yield f"data.{key}", f'{problem}: write data.{key}="", or data.mix=[]'
    weights = {part.name: part.weight for part in d.mix}
    if not any(weights.values()):
        yield "data.mix", "no source has a weight greater than 0"
    for number, stage in enumerate(d.stages):
        key = f"data.stages.{number}"
        if unknown := ", ".join(sorted(set(stage.weights) - set(names))):
            problem = f"data.mix lacks the source {unknown}; there are {', '.join(names)}"
            yield f"{key}.weights", problem
        if not stage.start:
            yield f"{key}.from", "the weights of the start stand in data.mix"
        weights |= stage.weights
        if not any(weights.values()):
            yield f"{key}.weights", "no source has a weight greater than 0"


def evaluations(r: Any) -> Problems:
    suite = r.checkpoint.best.partition(".")[0]
    suites = r.eval.suites
    if suite not in ("loss", *suites) and not suite.startswith(sections.OWN_SUITE):
        more = json.dumps([*suites, suite], separators=(",", ":"))
        write = f'write eval.suites={more}, or checkpoint.best="loss"'
        yield "checkpoint.best", f"eval.suites does not measure {suite}: {write}"
    if not r.train.average and r.checkpoint.best == "loss.average_loss":
        yield "checkpoint.best", 'nothing is averaged: write train.average=0.999, or "loss"'


def batch(r: Any) -> Problems:
    if r.parallel.strategy == "single" and r.parallel.model_ranks > 1:
        return  # `layout` reports it
    shard_size = r.parallel.shard_size if r.strategy(1).grouped else 1
    try:
        r.batch(r.parallel.model_ranks * max(1, shard_size))  # the fewest ranks
    except UserError as error:
        yield "train.micro_batch", str(error)


def layout(r: Any) -> Problems:
    p, m, strategy = r.parallel, r.model, r.strategy(1)
    if p.offload and not strategy.shards_parameters:
        yield "parallel.offload", f'offload belongs to FSDP2; parallel.strategy is "{p.strategy}"'
    if p.shard_size and not strategy.grouped:
        yield "parallel.shard_size", 'it goes with parallel.strategy = "hybrid_shard" alone'
    if r.train.precision == "float8" and p.tensor > 1:
        yield "parallel.tensor", 'float8 scales whole matrices: write 1, or train.precision="bf16"'
    if p.model_ranks == 1:
        return
    if p.strategy == "single":
        yield "parallel.strategy", f'{p.layout} needs {p.model_ranks} ranks: write "auto"'
    if m.kind == "hf":
        for key in ("context", "pipeline"):
            if getattr(p, key) > 1:
                yield f"parallel.{key}", "a model of transformers cannot be divided so: write 1"
        if p.tensor > 1 and m.lora.base == "4bit":
            problem = "it does not divide 4-bit weights, because 64 of them share a scale"
            yield "parallel.tensor", f'{problem}: write 1, or model.lora.base="fp32"'
        return
    if why := tensor_problem(m, p.tensor):
        near = max(ranks for ranks in range(1, p.tensor) if not tensor_problem(m, ranks))
        key, text = why
        yield "parallel.tensor", f"{text}; write {near}, or change {key}"
    if p.pipeline > m.layers:
        yield "parallel.pipeline", f"the model has {m.layers} layers: write at most {m.layers}"


def tensor_problem(m: Any, ranks: int) -> tuple[str, str] | None:
    """Why `ranks` cannot divide the matrices of a GPT, and the key to change; None if they can."""
    counts = {
        "model.heads": (m.heads, "heads"),
        "model.ff_width": (m.ff_width_, "units of the feed-forward layer"),
        "model.kv_heads": (m.kv_heads_, "key and value heads"),
    }
    for key, (count, what) in counts.items():
        if count % ranks:
            return key, f"{ranks} ranks do not divide the {count:,} {what}"
    return None


def optimizer(r: Any) -> Problems:
    kind = r.optim.kind
    if r.optim.options and "." not in kind:
        yield "optim.options", f'only optimizers of a library have options, not "{kind}": drop them'
    if kind == "muon" and r.model.lora.rank:
        yield "optim.kind", "muon orthogonalises whole matrices; train adapters with adamw"
    if kind == "adamw8bit" and r.parallel.tensor > 1:
        problem = "parallel.tensor divides the blocks of 8-bit moments"
        yield "optim.kind", f'{problem}: write "adamw", or parallel.tensor=1'
    if r.train.master == "fp32":
        return
    if r.train.average:
        yield "train.average", 'bf16 is too coarse for an average: write 0, or train.master="fp32"'
    if "." in kind:
        problem = f"{kind} does not round bf16 weights stochastically"
        yield "train.master", f'{problem}: write "fp32", or optim.kind="adamw"'
    if r.train.precision not in ("auto", "bf16"):
        yield "train.master", 'bf16 weights need train.precision="bf16": write that, or "fp32"'


CHECKS = (model, gpt, adapters, sources, items, mixture, evaluations, layout, batch, optimizer)
