"""How the runs under a directory stand, from their ledgers: what `windlass runs` lists."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from windlass.run import Line, Run
from windlass.study.study import summarize

DEPTH = 3
"""How deep below the directory runs are looked for: a study keeps its runs in directories of its own."""
RECENT = 10
"""Logged steps that speed and time left are taken from."""

SORTS = {
    "name": ("run", False), "state": ("state", False), "step": ("step", True), "left": ("left_s", False),
    "loss": ("loss", False), "best": ("best_loss", False), "speed": ("tokens_per_s", True), "changed": ("changed", True),
}  # fmt: skip
"""What to sort by: the field of RunRow, and whether the largest comes first."""


@dataclass(frozen=True)
class RunRow:
    """How a run stands; None for what is not known."""

    run: str
    """Its path below the directory that was asked about."""
    state: str
    step: int
    steps: int | None
    left_s: float | None
    """Seconds to the end, of a run that is running."""
    loss: float | None
    """The last training loss, in nats."""
    best_loss: float | None
    """The lowest evaluation loss."""
    tokens_per_s: float | None
    """Over the last RECENT logged steps."""
    changed: str | None
    """The time of its last line."""


def overview(directory: Path, sort: str = "name") -> list[RunRow]:
    """A row for each run at or under a directory, sorted by one of SORTS; rows without that value come last."""
    field, largest_first = SORTS[sort]
    rows = [_row(path, directory) for path in find_runs(directory)]

    def known(row: RunRow) -> bool:
        value = getattr(row, field)
        return value is not None and not (isinstance(value, float) and math.isnan(value))

    ordered = sorted(filter(known, rows), key=lambda row: getattr(row, field), reverse=largest_first)
    return ordered + [row for row in rows if not known(row)]


def find_runs(top: Path) -> Iterator[Path]:
    """The run directories at or under a directory, in the order of their names."""
    if (top / "recipe.toml").is_file() and not (top / "study.json").is_file():
        yield top
        return
    level = [top]
    for _ in range(DEPTH):
        below = sorted(path for parent in level for path in parent.iterdir() if path.is_dir())
        runs = [path for path in below if (path / "recipe.toml").is_file() and not (path / "study.json").is_file()]
        yield from runs
        level = [path for path in below if path not in runs]


def _row(path: Path, top: Path) -> RunRow:
    run = Run(path)
    lines = run.ledger()
    train = [line for line in lines if line["kind"] == "train"]
    state, summary = run.state, summarize(lines, "loss")
    steps = summary["steps"]
    if steps is None:
        try:
            planned = run.recipe.train.steps
            steps = planned if isinstance(planned, int) else None
        except ValueError:  # a recipe of another version: the ledger is still worth a row
            steps = None
    return RunRow(
        run=str(path.relative_to(top)) if path != top else path.resolve().name,
        state=state,
        step=max((line["step"] for line in lines), default=0),
        steps=steps,
        left_s=_left(train, steps) if state == "running" else None,
        loss=summary["loss"],
        best_loss=summary["best_loss"],
        tokens_per_s=recent_speed(train[-RECENT:]),
        changed=lines[-1]["time"] if lines else None,
    )


def recent_speed(train: Sequence[Line]) -> float | None:
    """Tokens divided by the time of the steps, over a few `train` lines; None where they have no times."""
    timed = [line for line in train if line.get("step_ms") and line.get("tokens_per_s")]
    seconds = math.fsum(line["step_ms"] for line in timed) / 1e3
    return math.fsum(line["tokens_per_s"] * line["step_ms"] for line in timed) / 1e3 / seconds if timed else None


def _left(train: Sequence[Line], steps: int | None) -> float | None:
    """Seconds to the end at the pace of the last logged steps, with evaluations and saves."""
    own = [line for line in train if line.get("attempt") == train[-1].get("attempt")][-RECENT:]
    if steps is None or len(own) < 2 or own[-1]["step"] == own[0]["step"]:
        return None
    first, last = (datetime.fromisoformat(line["time"]) for line in (own[0], own[-1]))
    pace = (last - first).total_seconds() / (own[-1]["step"] - own[0]["step"])
    return max(steps - own[-1]["step"], 0) * pace
