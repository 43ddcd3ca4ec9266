"""What was predicted of a run beside what was measured: part of every finished run's summary. Pure reading, no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from windlass.estimate.foreseen import foreseen_time
from windlass.estimate.memory import layout_of, memory
from windlass.estimate.optimum import vocab_of
from windlass.model.size import HfSizes, checkpoint_bytes, count, flops_per_token

if TYPE_CHECKING:
    from windlass.recipe import Recipe
    from windlass.run import Line, Run


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


def predict_hf(recipe: Recipe, world: int, hf: HfSizes, device: str = "cpu", precision: str = "") -> dict[str, Any]:
    """The same of a model of `transformers`, from its counted sizes; `parameters` are those that are trained."""
    taken = memory(hf, hf.vocab, layout_of(recipe, world, device, precision), recipe.optim.kind)
    return {
        "parameters": hf.trained,
        "flops_per_token": hf.flops_per_token(),
        "memory_mb": taken.total / 1e6,
        "weights_mb": taken.parameters / 1e6,
        "checkpoint_mb": hf.checkpoint_bytes(recipe.optim.kind) / 1e6,
    }


def sizes_in(run: Run) -> HfSizes | None:
    """The sizes of a model of `transformers` as a run wrote them down, at its end or its start; None where there are none."""
    for line in reversed([*run.lines("event"), *run.lines("summary")]):
        try:
            return HfSizes.from_dict(line["model_sizes"])
        except (KeyError, TypeError, ValueError):
            continue
    return None


def predicted_beside_measured(run: Run, hf: HfSizes | None = None) -> dict[str, Any]:
    """Pairs of `predicted` and `measured` for `memory_mb`, `checkpoint_mb` and `runtime_s`, as far as both are there.

    Memory on CUDA is the allocator's peak. On a CPU it is how much the resident memory grew since the weights were made,
    against all but the weights: noisy, because evaluation, samples and saves grow it too and memory that was freed stays
    resident. The time is what could be said after the first 5 % of the steps, pauses left out; or `why`
    nothing could be said.
    `hf`: the sizes of a model of `transformers`; None: those in the run's summary, if there are any.
    """
    ledger = run.ledger()
    started = next((x for x in ledger if x["kind"] == "event" and "world" in x and "steps" in x), None)
    if started is None:
        return {}
    found: dict[str, Any] = {}
    if run.recipe.model.kind == "hf":
        hf = hf or sizes_in(run)
    if (run.recipe.model.kind == "gpt" or hf) and started.get("strategy"):
        found |= _sizes(run, started, hf)
    time = foreseen_time(run)
    return found | ({"runtime_s": time} if time else {})


def _sizes(run: Run, started: Line, hf: HfSizes | None) -> dict[str, Any]:
    vocab = hf.vocab if hf else vocab_of(run.recipe, int(started["parameters"]))
    cuda = str(started.get("device", "CPU")).upper() != "CPU"
    if not vocab:
        return {}
    where = ("cuda" if cuda else "cpu", str(started.get("precision") or ""))
    world = int(started["world"])
    guess = predict_hf(run.recipe, world, hf, *where) if hf else predict(run.recipe, world, vocab, *where)
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
    sizes = [e["bytes"] for e in run.events if e["event"] == "checkpoint"]
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
