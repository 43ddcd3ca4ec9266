"""How the runs under a directory stand, from their ledgers: what `windlass runs` lists."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from windlass.run import Run
from windlass.study.study import summarize

DEPTH = 3  # how deep below the directory runs are looked for: a study keeps its runs in directories of its own
RECENT = 10  # logged steps that the time left is taken from

SORTS = {
    "name": ("run", False), "state": ("state", False), "step": ("step", True), "left": ("left_s", False),
    "loss": ("loss", False), "best": ("best_loss", False), "speed": ("tokens_per_s", True), "changed": ("changed", True),
}  # fmt: skip
"""What to sort by: the field of RunRow, and whether the largest comes first."""


class RunRow(NamedTuple):
    """How a run stands; None where there is no value (yet)."""

    run: str  # its path below the directory that was asked about
    state: str
    step: int
    steps: int | None
    left_s: float | None  # seconds to the end, of a run that is running
    loss: float | None  # the last training loss, in nats
    best_loss: float | None  # the lowest evaluation loss
    tokens_per_s: float | None
    changed: str | None  # the time of its last line


def overview(directory: Path, sort: str = "name") -> list[RunRow]:
    """A row for each run at or under a directory, sorted by one of SORTS; rows without that value come last."""
    field, largest_first = SORTS[sort]
    rows = [_row(path, directory) for path in find_runs(directory)]
    without = [row for row in rows if (value := getattr(row, field)) is None or value != value]  # noqa: PLR0124 (NaN)
    ordered = sorted((r for r in rows if r not in without), key=lambda r: getattr(r, field), reverse=largest_first)
    return ordered + without


def find_runs(top: Path) -> Iterator[Path]:
    """The run directories at or under a directory, in the order of their names."""
    runs: set[Path] = set()
    for depth in range(DEPTH + 1):
        for path in sorted(file.parent for file in top.glob("*/" * depth + "recipe.toml")):
            if not (path / "study.json").is_file() and runs.isdisjoint(path.parents):
                runs.add(path)
                yield path


def _row(path: Path, top: Path) -> RunRow:
    run = Run(path)
    lines, state, left = run.ledger(), run.state, None
    train = [line for line in lines if line["kind"] == "train"]
    summary = summarize(lines, "loss")
    steps = summary["steps"]
    if steps is None:
        with suppress(ValueError):  # a recipe of another version: the ledger is still worth a row
            steps = run.recipe.train.steps if isinstance(run.recipe.train.steps, int) else None
    own = [line for line in train if line.get("attempt") == train[-1].get("attempt")][-RECENT:]
    if state == "running" and steps and len(own) > 1:
        # by the clock and not by the time of steps: evaluations and saves come again too
        first, last = (datetime.fromisoformat(line["time"]) for line in (own[0], own[-1]))
        pace = (last - first).total_seconds() / (own[-1]["step"] - own[0]["step"])
        left = max(steps - own[-1]["step"], 0) * pace
    return RunRow(
        run=str(path.relative_to(top)) if path != top else path.resolve().name,
        state=state,
        step=max((line["step"] for line in lines), default=0),
        steps=steps,
        left_s=left,
        loss=summary["loss"],
        best_loss=summary["best_loss"],
        tokens_per_s=summary["tokens_per_s"],
        changed=lines[-1]["time"] if lines else None,
    )
