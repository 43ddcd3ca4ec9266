"""How a cell stands, from its run's ledger, which is read again only when it has changed. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from windlass.run import Line, Run, effective, read_lines

DIVERGED_NATS = 1.0
"""A loss this far above the run's first one counts as diverged."""


@dataclass
class Progress:
    """How a cell stands, from its ledger."""

    step: int = 0
    steps: int = 0
    reached: int = 0
    """The last step that any line is of: also of an evaluation, where no step's own line was written."""
    loss: float | None = None
    first_loss: float | None = None
    eval_loss: float | None = None
    best_loss: float | None = None
    tokens: int = 0
    tokens_per_s: float | None = None

    @property
    def diverged(self) -> str:
        """Why the cell counts as diverged; empty while it does not."""
        if self.loss is not None and not math.isfinite(self.loss):
            return f"loss {self.loss} at step {self.step}"
        if self.loss is not None and self.first_loss is not None and self.loss > self.first_loss + DIVERGED_NATS:
            return f"loss {self.loss:.3f} at step {self.step}, {DIVERGED_NATS:g} above the first"
        return ""

    @property
    def at_end(self) -> bool:
        """Whether all steps are done, though the last save may not be."""
        return bool(self.steps) and self.reached >= self.steps


class Evaluation(NamedTuple):
    """One evaluation of the validation loss."""

    step: int
    loss: float
    time: str
    """UTC, ISO 8601: sorts as text."""


@dataclass(frozen=True)
class Ledger:
    """A ledger as it was read once."""

    seams: list[Line]
    """The events as they were written, for the run's state."""
    lines: list[Line]
    """The effective lines."""

    @cached_property
    def progress(self) -> Progress:
        """How far it is and what it has reached."""
        found = Progress()
        for line in self.lines:
            _count(found, line)
        return found

    @cached_property
    def evaluations(self) -> list[Evaluation]:
        """The evaluations of the validation loss after step 0."""
        lines = [x for x in self.lines if _is_loss(x) and x["step"] > 0]
        return [Evaluation(x["step"], _loss(x), str(x.get("time", ""))) for x in lines]

    @property
    def summary(self) -> Line:
        """The last `summary` line; empty before the end."""
        return next((x for x in reversed(self.lines) if x["kind"] == "summary"), {})


_seen: dict[Path, tuple[tuple[int, ...], Ledger]] = {}


def ledger_of(run: Run) -> Ledger:
    """A run's ledger as it is now; read from disk where its size or time of change differ from the last look."""
    try:
        about = run.metrics_path.stat()
    except OSError:
        return Ledger([], [])
    mark = (about.st_ino, about.st_size, about.st_mtime_ns)
    known = _seen.get(run.metrics_path)
    if known is None or known[0] != mark:
        raw = list(read_lines(run.metrics_path))
        known = _seen[run.metrics_path] = (mark, Ledger([x for x in raw if x["kind"] == "event"], effective(raw)))
    return known[1]


def progress(run: Run) -> Progress:
    """How a run stands."""
    return ledger_of(run).progress


def evaluations(run: Run) -> list[Evaluation]:
    """Step, validation loss and time of each evaluation after step 0."""
    return ledger_of(run).evaluations


def _count(found: Progress, line: Line) -> None:
    if line["kind"] == "train":
        found.step, found.loss = line["step"], _number(line.get("loss"))
        found.reached = max(found.reached, found.step)
        found.first_loss = found.loss if found.first_loss is None else found.first_loss
        found.tokens, found.tokens_per_s = int(line.get("tokens", 0)), line.get("tokens_per_s")
    elif _is_loss(line):
        found.eval_loss = _number(line.get("loss"))
        found.reached = max(found.reached, line["step"])
        if found.eval_loss is not None and math.isfinite(found.eval_loss):
            best = found.best_loss
            found.best_loss = found.eval_loss if best is None else min(best, found.eval_loss)
    elif line["kind"] == "event" and line.get("steps"):
        found.steps = int(line["steps"])


def _is_loss(line: Line) -> bool:
    return line["kind"] == "eval" and line.get("suite", "loss") == "loss"


def _loss(line: Line) -> float:
    value = _number(line.get("loss"))
    return math.nan if value is None else value


def _number(value: Any) -> float | None:
    return None if value is None else float(value)
