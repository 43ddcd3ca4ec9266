"""How long the steps of a run took after its warm-up, and its other numbers for a scaling study, from its ledger. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from windlass.recipe.settings import SQUAD_SUITE
from windlass.run import Line, Run, last_start, timestamp
from windlass.telemetry.timing import BEGINS, STEP_PHASES


def windows(lines: Iterable[Line], warmup: int, since: float = 0.0) -> list[Line]:
    """The `train` lines whose steps begin after `warmup` steps of their start, and after the time `since`.

    A line holds means since the one before it.
    """
    step, start, begun, chosen = 0, 0, 0.0, []
    for line in lines:
        if line["kind"] == "event" and line.get("event") in BEGINS:
            step = start = line["step"]
        elif line["kind"] == "train":
            if line.get("step_ms") and step - start >= warmup and begun >= since:
                chosen.append(line)
            step, begun = line["step"], timestamp(line) if since else 0.0
    return chosen


def times(lines: Sequence[Line]) -> dict[str, float]:
    """Medians of a step's time, its phases and its tokens over `train` lines; empty without lines."""
    columns = {
        f"{name}_ms": [x[f"{name}_ms"] for x in lines if f"{name}_ms" in x]
        for name in ("step", *STEP_PHASES)
    }
    for name in ("tokens", "padded_tokens"):
        per_s = [(x.get(f"{name}_per_s", x["tokens_per_s"]), x["step_ms"]) for x in lines]
        columns[f"{name}_per_step"] = [rate * ms / 1e3 for rate, ms in per_s]
    return {name: statistics.median(column) for name, column in columns.items() if column}


def measure(run: Run, warmup: int) -> dict[str, float]:
    """The numbers of a finished run by name: of its steps after the warm-up, and of the whole run by its summary."""
    lines = run.ledger()
    chosen = windows(lines, warmup)
    numbers = times(chosen)
    if chosen:
        numbers["samples_per_s"] = last_start(lines)["global_batch"] / numbers["step_ms"] * 1e3
        if all("mfu" in x for x in chosen):
            numbers["mfu"] = statistics.median(x["mfu"] for x in chosen)
    summary = [x for x in lines if x["kind"] == "summary"][-1]
    whole: dict[str, Any] = {
        "startup_s": next((x["startup_s"] for x in lines if x.get("event") == "first_step"), None),
        "compile_s": summary["wall_time"]["compile"] or None,
        "train_loss": summary["final_loss"],
    }
    names = ("train_loss_mean", "runtime_s", "samples_per_s_whole_run", "peak_mem_mb")
    whole |= {name: summary.get(name) for name in names}
    whole["util_pct"] = summary.get("avg_gpu_util_pct", summary.get("avg_cpu_util_pct"))
    answers = [x for x in lines if x["kind"] == "eval" and x.get("suite") == SQUAD_SUITE]
    whole |= {name: answers[-1].get(name) for name in ("exact_match", "f1")} if answers else {}
    return numbers | {
        name: float(value) for name, value in whole.items() if value is not None
    }  # NaN is text in JSON
