"""Combinations of settings that cannot work, one function for each check.

A check reads its settings from the recipe. `load.py` calls it also for a recipe in which some settings are wrong: these are
missing there, so that a check that reads one of them raises AttributeError and has no result.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import windlass.recipe.settings as sections
from windlass.errors import UserError

Problems = Iterator[tuple[str, str]]  # keys and messages
Check = Callable[[Any], Problems]  # its argument is a Recipe, which imports this module


def hf_name(r: Any) -> Problems:
    if r.model.kind == "hf" and not r.model.name:
        yield "model.name", 'model.kind = "hf" needs the model\'s name on the Hub or a directory'


def first_weights(r: Any) -> Problems:
    m = r.model
    if m.kind == "hf" and m.from_scratch and m.init_from:
        yield (
            "model.init_from",
            "it names first weights, and model.from_scratch asks for none; leave one out",
        )


def unused_keys(r: Any) -> Problems:
    m = r.model
    if not (given := [key for key in m.unused if key in m.model_fields_set]):
        return
    keys = ", ".join(f"model.{key}" for key in given)
    if m.kind == "gpt":
        yield (
            keys,
            'for model.kind = "hf" alone: write that too, or leave them out (run.name names the run)',
        )
    else:
        copy = (
            "give model.name a directory with an edited copy of it"
            if m.from_scratch
            else "leave them out"
        )
        yield (
            keys,
            f'no effect with model.kind = "hf", where the model\'s own config.json decides: {copy}',
        )


def four_bits(r: Any) -> Problems:
    lora = r.model.lora
    if lora.base == "4bit" and (not lora.rank or r.model.from_scratch):
        yield (
            "model.lora.base",
            "weights in 4 bits are not trained: set model.lora.rank, on a model that has weights",
        )


def heads(r: Any) -> Problems:
    m = r.model
    if m.kind == "gpt" and m.width % m.heads:
        near = min(
            (h for h in range(1, m.width + 1) if m.width % h == 0), key=lambda h: abs(h - m.heads)
        )
        yield (
            "model.heads",
            f"{m.heads} heads do not divide the width {m.width}; the nearest that does is {near}",
        )
    elif m.kind == "gpt" and m.position == "rope" and (m.width // m.heads) % 2:
        yield (
            "model.heads",
            f"rotary positions need an even size per head, and {m.width} / {m.heads} is odd",
        )


def kv_heads(r: Any) -> Problems:
    m = r.model
    if m.kind == "gpt" and m.heads % m.kv_heads_:
        yield "model.kv_heads", f"{m.kv_heads} key/value heads do not divide the {m.heads} heads"


def vocab(r: Any) -> Problems:
    m, tokens = r.model, r.data.vocab_
    if m.kind == "gpt" and 0 < m.vocab < tokens:
        yield "model.vocab", f"{m.vocab} is smaller than the tokenizer's vocabulary of {tokens:,}"


def source(r: Any) -> Problems:
    sources = r.data.sources
    if not sources or not all(map(str.strip, sources)):
        yield (
            "data.source",
            'it is empty: name a file, a directory, a pattern or hf:NAME ("." is this directory)',
        )


def download(r: Any) -> Problems:
    if (
        any(name.startswith(("http://", "https://")) for name in r.data.sources)
        and not r.data.sha256
    ):
        yield "data.sha256", "a source that is downloaded needs the SHA-256 it must have"


def squad_format(r: Any) -> Problems:
    if r.data.format == "text" and any(name.split(":")[0] == "squad" for name in r.data.sources):
        yield "data.format", 'the source squad needs data.format = "squad"'


def shards_beside_texts(r: Any) -> Problems:
    shards = [name.startswith("shards:") for name in r.data.sources]
    if any(shards) and not all(shards):
        yield (
            "data.source",
            "token shards and texts cannot be in one list: tokens are not made again",
        )


def packing(r: Any) -> Problems:
    d = r.data
    if d.packing == "documents" and any(name.startswith("shards:") for name in d.sources):
        yield "data.packing", 'shards that others wrote are streams of tokens: write "packed"'


def streaming(r: Any) -> Problems:
    if r.data.streaming and not all(name.startswith("hf:") for name in r.data.sources):
        yield "data.streaming", "only sources hf:... are streamed"


def best(r: Any) -> Problems:
    value, suites = r.checkpoint.best, r.eval.suites
    suite = value.partition(".")[0]
    if suite not in ("loss", *suites) and not suite.startswith(sections.OWN_SUITE):
        more = json.dumps([*suites, suite], separators=(",", ":"))
        write = f'write eval.suites={more}, or checkpoint.best="loss"'
        yield (
            "checkpoint.best",
            f'it is "{value}", and eval.suites does not measure {suite}: {write}',
        )


def train_batches(r: Any) -> Problems:
    if r.eval.train_batches and sections.LOSS_SUITE not in r.eval.suites:
        problem = (
            "it is measured with the suite loss, which eval.suites leaves out: add it, or write 0"
        )
        yield "eval.train_batches", problem


def early_stop(r: Any) -> Problems:
    if r.train.early_stop and not r.eval.every:
        yield (
            "train.early_stop",
            "it needs evaluations, and eval.every is 0: set that, or leave this out",
        )


def batch(r: Any) -> Problems:
    try:
        r.batch(1)
    except UserError as error:
        yield "train.micro_batch", str(error)


def offload(r: Any) -> Problems:
    p = r.parallel
    if p.offload and p.strategy not in sections.SHARDED:
        yield "parallel.offload", f'offload belongs to FSDP2; parallel.strategy is "{p.strategy}"'


def shard_size(r: Any) -> Problems:
    if r.parallel.shard_size and r.parallel.strategy != "hybrid_shard":
        yield (
            "parallel.shard_size",
            'a sharding group\'s size goes with parallel.strategy = "hybrid_shard"',
        )


def options(r: Any) -> Problems:
    if r.optim.options and not r.optim.kind.startswith("torch."):
        yield (
            "optim.options",
            f'they are for optim.kind = "torch.optim...", and it is "{r.optim.kind}"',
        )


def muon(r: Any) -> Problems:
    if r.optim.kind == "muon" and r.model.lora.rank:
        yield "optim.kind", "muon orthogonalises whole matrices; adapters are trained with adamw"


def schedule(r: Any) -> Problems:
    s, run_steps = r.optim.schedule, r.train.steps
    warmup, decay = s.warmup, s.decay if s.kind == "wsd" else 0
    steps = sum(part for part in (warmup, decay) if isinstance(part, int))
    share = sum(part for part in (warmup, decay) if isinstance(part, float))
    length, what = (s.steps, "schedule") if s.steps else (run_steps, "run")
    if share > 1 or (isinstance(length, int) and steps > length):
        alone = isinstance(warmup, int) and isinstance(length, int) and warmup > length
        key = "decay" if decay and not alone else "warmup"
        problem = f"warm-up {warmup} and decay {decay} are longer than the {what} ({length} steps)"
        yield (
            f"optim.schedule.{key}",
            f"{problem}: shorten it, or write a share of the run, as 0.02",
        )


CHECKS: tuple[Check, ...] = (
    hf_name,
    first_weights,
    unused_keys,
    four_bits,
    heads,
    kv_heads,
    vocab,
    source,
    download,
    squad_format,
    shards_beside_texts,
    packing,
    streaming,
    best,
    train_batches,
    early_stop,
    batch,
    offload,
    shard_size,
    options,
    muon,
    schedule,
)
