"""A cell of a study as its run's ledger, and what a sweep decided about it, say that it stands. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.checkpoint.retention import LOSS, best_step, comparable, scores_by_step
from windlass.run import Line, Run, last_start, timestamp
from windlass.study.compare import Evaluated
from windlass.study.grid import Cell
from windlass.telemetry.timing import throughput

RECENT = 10  # logged steps that the time left is taken from


def diverged(first: float, last: float) -> bool:
    """Whether a training loss diverged: the last one is not finite, or more than 1 nat above the first."""
    return not math.isfinite(last) or last > first + 1.0


@dataclass(frozen=True)
class CellResult:
    """How a cell stands, from its run's ledger; None for what the ledger does not have (yet)."""

    cell: Cell
    run: Run  # whether it has begun or not
    measure: str  # what cells are compared by: the recipe's `checkpoint.best`
    state: str = "waiting"  # `waiting`, `running`, `interrupted`, `finished`, `failed`, `diverged` or `pruned`
    reason: str = ""
    step: int = 0  # the last one with a `train` line
    last_step: int = (
        0  # the last one with any line: an evaluation may come where no `train` line is due
    )
    steps: int | None = None
    loss: float | None = None
    first_loss: float | None = None
    eval_loss: float | None = None
    best_loss: float | None = None
    score: float | None = None  # the best value of `measure`, step 0 included
    evaluations: tuple[
        tuple[str, int, float], ...
    ] = ()  # time (sorts as text), step > 0, and value of `measure`
    evaluated: Evaluated | None = None  # what the loss was measured on
    tokens: int = 0
    tokens_per_s: float | None = None  # tokens over time in steps
    device_hours: float | None = None
    left_s: float | None = None  # seconds to the last step, while it runs

    @property
    def begun(self) -> bool:
        return self.run.recipe_path.is_file()

    @property
    def divergence(self) -> str:
        if self.loss is None or self.first_loss is None or not diverged(self.first_loss, self.loss):
            return ""
        return f"loss {self.loss:.3f} at step {self.step}, after {self.first_loss:.3f} at the first"

    def row(self) -> dict[str, Any]:
        """What the cell sets and how it stands, as plain values for a table or JSON."""
        left_out = ("cell", "run", "measure", "last_step", "first_loss", "evaluations", "evaluated")
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**self.cell.assignment, **values, "run": str(self.run.path)}


def cell_state(
    run_state: str, events: Sequence[Line], status: Mapping[str, str] | None
) -> tuple[str, str]:
    """A cell's state and the reason for it: from its run's state and events, and from what a sweep decided about it."""
    decided = (status["state"], status["reason"]) if status else ("", "")
    if run_state == "finished":
        return run_state, ""
    if decided[0] not in ("", "interrupted"):
        return decided
    last = max((x.get("attempt", 0) for x in events), default=0)
    own = [x for x in events if x["event"] == "failed" and x.get("attempt", 0) == last]
    if run_state == "failed" and own:  # a run that was killed has no such event: it is interrupted
        return "failed", str(own[-1].get("reason", ""))
    if run_state == "running" or not decided[0]:
        words = {"new": "waiting"} | dict.fromkeys(
            ("stopped", "preempted", "failed"), "interrupted"
        )
        return words.get(run_state, run_state), ""
    return decided


def time_left(train: Sequence[Line], steps: int | None) -> float | None:
    """Seconds to the last step, by the clock of the last `train` lines: evaluations and saves come again, too."""
    own = [line for line in train if line.get("attempt") == train[-1].get("attempt")][-RECENT:]
    if not steps or len(own) < 2:
        return None
    pace = (timestamp(own[-1]) - timestamp(own[0])) / (own[-1]["step"] - own[0]["step"])
    return max(steps - own[-1]["step"], 0) * pace


def summarize(lines: Sequence[Line], measure: str) -> dict[str, Any]:
    """The fields of a CellResult that come from the effective lines of a run's ledger."""
    train, evals = ([x for x in lines if x["kind"] == kind] for kind in ("train", "eval"))
    # JSON has non-finite numbers as text
    losses = [float(x["loss"]) for x in evals if x.get("suite", "loss") == "loss" and "loss" in x]
    suite, _, name = measure.partition(".")  # `loss`, or as `squad.f1`
    alike = comparable([x for x in evals if x.get("suite", LOSS) == suite])
    own = [x for x in alike if x.get(name or suite) is not None and x["step"] > 0]
    scores, speed = scores_by_step(lines, measure), throughput(lines)
    top, last = best_step(scores, measure), train[-1] if train else {}
    return {
        "step": last.get("step", 0),
        "last_step": max((x["step"] for x in (*train, *evals)), default=0),
        "steps": last_start(lines).get("steps"),
        "loss": float(last["loss"]) if "loss" in last else None,
        "first_loss": float(train[0]["loss"]) if train and "loss" in train[0] else None,
        "eval_loss": losses[-1] if losses else None,
        "best_loss": min(scores_by_step(lines, LOSS).values(), default=None),
        "score": None if top is None else scores[top],
        "evaluations": tuple(
            (str(x.get("time", "")), x["step"], float(x[name or suite])) for x in own
        ),
        "tokens": int(last.get("tokens", 0)),
        "tokens_per_s": speed.tokens_per_s if speed else None,
        "device_hours": next(
            (x.get("device_hours") for x in reversed(lines) if x["kind"] == "summary"), None
        ),
    }
