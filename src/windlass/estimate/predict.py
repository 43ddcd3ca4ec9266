"""What was predicted of a run beside what was measured: part of every finished run's summary. Pure reading, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from windlass.estimate.memory import layout_of, memory
from windlass.estimate.milestones import milestones
from windlass.estimate.optimum import vocab_of
from windlass.estimate.time import speed_of_lines, time_left
from windlass.model.size import checkpoint_bytes, count, flops_per_token
from windlass.recipe import Horizon

if TYPE_CHECKING:
    from windlass.recipe import Recipe
    from windlass.run import Line, Run

EARLY = 0.05
"""Share of a run's steps after which its time to finish is predicted."""


def predict(recipe: Recipe, world: int, vocab: int, device: str = "cpu", precision: str = "") -> dict[str, Any]:
    """Memory of a rank, checkpoint size, parameters and FLOPs of a token, from the recipe alone.

    Args:
        recipe: of our own GPT.
        world: number of ranks.
        vocab: the tokenizer's ids; `model.vocab` goes before it.
        device: `cpu` or `cuda`.
        precision: with `auto` resolved; empty: as `layout_of` resolves it.
    """
    model, rows = recipe.model, recipe.model.vocab or vocab
    taken = memory(model, rows, layout_of(recipe, world, device, precision), recipe.optim.kind)
    return {
        "parameters": count(model, rows).total,
        "flops_per_token": flops_per_token(model, rows),
        "memory_mb": taken.total / 1e6,
        "weights_mb": taken.parameters / 1e6,
        "checkpoint_mb": checkpoint_bytes(model, rows, recipe.optim.kind) / 1e6,
    }


def predicted_beside_measured(run: Run) -> dict[str, Any]:
    """Pairs of `predicted` and `measured` for `memory_mb`, `checkpoint_mb` and `runtime_s`, as far as both are there.

    Memory on CUDA is the allocator's peak. On a CPU it is how much the resident memory grew since the weights were made,
    against all but the weights: noisy, because evaluation, samples and saves grow it too and memory that was freed stays
    resident. The time is what could be said after the first 5 % of the steps of a run that was never interrupted.
    """
    ledger = run.ledger()
    started = next((x for x in ledger if x["kind"] == "event" and "world" in x and "steps" in x), None)
    if started is None:
        return {}
    found: dict[str, Any] = {}
    if run.recipe.model.kind == "gpt" and started.get("strategy"):
        found |= _sizes(run, started)
    time = _time(run, ledger, started)
    return found | ({"runtime_s": time} if time else {})


def _sizes(run: Run, started: Line) -> dict[str, Any]:
    vocab = vocab_of(run.recipe, int(started["parameters"]))
    cuda = str(started.get("device", "CPU")).upper() != "CPU"
    if not vocab:
        return {}
    guess = predict(run.recipe, int(started["world"]), vocab, "cuda" if cuda else "cpu", str(started["precision"]))
    if guess["parameters"] != int(started["parameters"]):
        return {}  # a model of the user's own, which the recipe does not describe
    found: dict[str, Any] = {}
    measured = _memory(run, "peak_alloc_mb" if cuda else "rss_mb", growth=not cuda)
    if measured:
        found["memory_mb"] = {
            "predicted": guess["memory_mb"] if cuda else guess["memory_mb"] - guess["weights_mb"],
            "measured": measured,
            "what": "peak of the allocator" if cuda else "growth of resident memory, weights left out; noisy",
        }
    sizes = [c["bytes"] for c in run.checkpoint_index().get("checkpoints", []) if c.get("bytes")]
    if sizes:
        found["checkpoint_mb"] = {"predicted": guess["checkpoint_mb"], "measured": sizes[-1] / 1e6}
    return found


def _memory(run: Run, name: str, growth: bool) -> float | None:
    """The largest value of a column of the ranks' device files, or its largest growth; of the fullest rank."""
    best = None
    for path in sorted(run.devices_dir.glob("rank-*.jsonl")):
        values = [float(x[name]) for x in _samples(path.read_text(encoding="utf-8", errors="replace")) if name in x]
        if values:
            value = max(values) - (values[0] if growth else 0.0)
            best = value if best is None else max(best, value)
    return best


def _samples(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(found, dict):
            yield found


def _time(run: Run, ledger: list[Line], started: Line) -> dict[str, Any] | None:
    """The end foreseen from the ledger's first 5 %, and the true one; None for a run that was interrupted."""
    steps = int(started["steps"])
    early = [x for x in ledger if x["kind"] == "train" and x["step"] >= max(EARLY * steps, 2)]
    last = ledger[-1]
    stamped = [x for x in ledger if isinstance(x.get("seconds"), dict)]
    if not early or not stamped or any(x.get("attempt", 0) for x in ledger) or last["step"] < steps:
        return None
    now = early[0]
    known = [x for x in ledger if x["step"] <= now["step"]]
    speed = speed_of_lines(known, run.name)
    if speed is None or now["step"] >= steps:
        return None
    horizon = Horizon(steps, int(started.get("samples_per_epoch", 0)), run.recipe.train.global_batch)
    per_step = now["tokens"] / now["step"]
    spent = sum(now["seconds"].values()) if isinstance(now.get("seconds"), dict) else 0.0
    left = time_left(milestones(run.recipe, horizon), now["step"], steps, per_step, speed)
    measured = sum(stamped[-1]["seconds"].values())
    return {"predicted": spent + left.seconds, "measured": measured, "after_step": now["step"]}
