"""What no single field can know: combinations of settings that cannot work, found before anything starts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from windlass.recipe.units import plan_batch

if TYPE_CHECKING:
    from windlass.recipe.load import Recipe

Problems = list[tuple[str, str]]
"""Pairs of a dotted key and what is wrong with it."""

SOURCES_OF_ITEMS = ("squad", "chat")


def _model(recipe: Recipe) -> Problems:
    m, found = recipe.model, []
    if m.kind == "hf":
        if not m.name:
            found.append(("model.name", 'model.kind = "hf" needs the model\'s name on the Hub or a directory'))
        if m.from_scratch and m.init_from:
            found.append(
                ("model.init_from", "it names first weights, and model.from_scratch asks for none; leave one out")
            )
        return found
    if m.name:
        found.append(("model.name", 'a model\'s name goes with model.kind = "hf"; use run.name to name the run'))
    if m.width % m.heads:
        near = [h for h in range(1, m.width + 1) if m.width % h == 0]
        best = min(near, key=lambda h: abs(h - m.heads))
        found.append(
            ("model.heads", f"{m.heads} heads do not divide the width {m.width}; the nearest that does is {best}")
        )
    elif m.position == "rope" and (m.width // m.heads) % 2:
        found.append(("model.heads", f"rotary positions need an even size per head, and {m.width} / {m.heads} is odd"))
    if m.heads % m.kv_heads_:
        found.append(("model.kv_heads", f"{m.kv_heads} key/value heads do not divide the {m.heads} heads"))
    if m.head_bias and m.tie_head and m.init_from:
        found.append(
            ("model.head_bias", "no known checkpoint format has a tied head with a bias; leave one of them out")
        )
    if m.lora.rank:
        found.append(("model.lora.rank", 'adapters are for model.kind = "hf"'))
    return found


def _data(recipe: Recipe) -> Problems:
    d, found = recipe.data, []
    if d.source.startswith(("http://", "https://")) and not d.sha256:
        found.append(("data.sha256", "a source that is downloaded needs the SHA-256 it must have"))
    if d.format == "text" and (d.source == "squad" or d.source.startswith("squad:")):
        found.append(("data.format", 'the source squad needs data.format = "squad"'))
    if d.source.startswith("shards:") and d.packing == "documents":
        found.append(("data.packing", 'shards that others wrote are streams of tokens: write "packed"'))
    if d.streaming and not d.source.startswith("hf:"):
        found.append(("data.streaming", "only sources hf:... are streamed"))
    known = {"byte": 257, "gpt2": 50257}.get(d.tokenizer.split(":")[0])
    if d.tokenizer == "bpe":
        known = d.tokenizer_vocab
    if recipe.model.kind == "gpt" and known and recipe.model.vocab and recipe.model.vocab < known:
        found.append(("model.vocab", f"{recipe.model.vocab} is smaller than the tokenizer's vocabulary of {known:,}"))
    return found


def _training(recipe: Recipe) -> Problems:
    found = []
    t, p = recipe.train, recipe.parallel
    try:
        plan_batch(t.global_batch, t.micro_batch, 1, recipe.model.context)
    except ValueError as error:
        found.append(("train.micro_batch", str(error)))
    sharded = p.strategy in ("full_shard", "shard_grad_op", "hybrid_shard")
    if p.offload and not sharded:
        found.append(("parallel.offload", f'offload belongs to FSDP2; parallel.strategy is "{p.strategy}"'))
    if p.shard_size and p.strategy != "hybrid_shard":
        found.append(("parallel.shard_size", 'a sharding group\'s size goes with parallel.strategy = "hybrid_shard"'))
    if p.device == "cpu" and t.precision == "fp16" and t.compile:
        found.append(("train.compile", "fp16 on a CPU is for tests and is not compiled; use bf16 or fp32"))
    if t.precision == "fp64" and t.compile:
        found.append(("train.compile", "fp64 is for proofs and is not compiled"))
    if recipe.optim.kind == "muon" and recipe.model.kind == "hf" and recipe.model.lora.rank:
        found.append(("optim.kind", "muon orthogonalises whole matrices; adapters are trained with adamw"))
    s = recipe.optim.schedule
    if isinstance(s.warmup, float) and isinstance(s.decay, float) and s.kind == "wsd" and s.warmup + s.decay > 1:
        found.append(
            ("optim.schedule.decay", f"warm-up ({s.warmup}) and decay ({s.decay}) together are longer than the run")
        )
    if isinstance(t.steps, int):
        lengths = {"warmup": s.warmup, **({"decay": s.decay} if s.kind == "wsd" else {})}
        steps = sum(v for v in lengths.values() if isinstance(v, int))
        if steps > t.steps:
            where = "warmup" if len(lengths) == 1 else "decay"
            found.append(
                (f"optim.schedule.{where}", f"{' and '.join(lengths)} take {steps} steps, and the run has {t.steps}")
            )
    return found


def _best(recipe: Recipe) -> Problems:
    measure, suites = recipe.checkpoint.best, recipe.eval.suites
    suite = measure.partition(".")[0]
    if measure == "loss" or suite in suites:
        return []
    more = ",".join(f'"{name}"' for name in [*suites, suite])
    return [
        (
            "checkpoint.best",
            f'it is "{measure}", and eval.suites does not measure {suite}: write eval.suites=[{more}], or '
            'checkpoint.best="loss"',
        )
    ]


def check(recipe: Recipe) -> Problems:
    """All problems of a recipe whose fields are each valid; empty when it can run."""
    return [*_model(recipe), *_data(recipe), *_training(recipe), *_best(recipe)]
