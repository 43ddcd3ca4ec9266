"""How the runs and studies under a directory stand, from their ledgers: what `windlass runs` lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from windlass.checkpoint.retention import LOSS
from windlass.errors import UserError
from windlass.run import Line, Run, effective, read_lines
from windlass.study.compare import common_measure
from windlass.study.results import DONE_STATES, summarize, time_left
from windlass.study.study import Study
from windlass.telemetry.timing import device_hours

DEPTH = 3  # how deep below the directory runs are looked for: a study keeps its runs in directories of its own

SORTS = {
    "name": ("run", False),
    "state": ("state", False),
    "step": ("step", True),
    "left": ("left_s", False),
    "loss": ("loss", False),
    "best": ("best_loss", False),
    "speed": ("tokens_per_s", True),
    "hours": ("device_hours", True),
    "changed": ("changed", True),
}
"""What to sort by: the field of RunRow, and whether the largest comes first."""


class RunRow(NamedTuple):
    """How a run, or a study with all its cells together, stands; None where there is no value (yet)."""

    run: str  # its path below the directory that was asked about
    state: str
    step: int | None
    steps: int | None
    left_s: float | None  # seconds to the end, of a run that is running
    loss: float | None  # the last training loss, in nats
    best_loss: (
        float | None
    )  # the lowest evaluation loss; of a study only where its cells' losses can be compared
    tokens_per_s: float | None
    changed: str | None  # the time of its last line
    device_hours: float | None  # of all starts; of a study those of all cells
    gpu_hours: float | None  # those of them on GPUs
    cells: int | None = None  # of a study, and how many of them are done
    cells_done: int | None = None


def overview(directory: Path, sort: str = "name") -> list[RunRow]:
    """A row for each run and each study at or under a directory, sorted by one of SORTS; rows without that value come last.

    Of a directory that is a study itself, a row for each of its runs.
    """
    field, largest_first = SORTS[sort]
    rows = [_row(path, directory) for path in find_runs(directory)]
    without = [row for row in rows if (value := getattr(row, field)) is None or value != value]  # noqa: PLR0124 (NaN)
    ordered = sorted(
        (r for r in rows if r not in without),
        key=lambda r: getattr(r, field),
        reverse=largest_first,
    )
    return ordered + without


def find_runs(top: Path) -> Iterator[Path]:
    """The directories of runs at or under a directory, and of studies under it, in the order of their names."""
    runs: set[Path] = set()
    for depth in range(DEPTH + 1):
        for path in sorted(file.parent for file in top.glob("*/" * depth + "recipe.toml")):
            if runs.isdisjoint(path.parents) and (depth or not Study.is_study(path)):
                runs.add(path)
                yield path


def _study_row(path: Path, name: str) -> RunRow:
    try:
        study = Study.open(path)
    except UserError:
        return RunRow(name, "damaged", *[None] * 9)
    results = study.results()
    states, losses = (
        {r.state for r in results},
        [r.best_loss for r in results if r.best_loss is not None],
    )
    comparable = common_measure([r.evaluated for r in results])[0] == LOSS
    state = (
        "new"
        if states == {"waiting"}
        else "finished"
        if states <= set(DONE_STATES)
        else "interrupted"
    )
    state = next((one for one in ("running", "failed") if one in states), state)
    hours = [_hours(run, list(read_lines(run.metrics_path))) for run in study.runs()]
    changed = [
        run.metrics_path.stat().st_mtime for run in study.runs() if run.metrics_path.is_file()
    ]
    return RunRow(
        run=name,
        state=state,
        step=sum(r.step for r in results),
        steps=sum(r.steps or 0 for r in results) if all(r.steps for r in results) else None,
        left_s=None,
        loss=None,
        best_loss=min(losses, default=None) if comparable else None,
        tokens_per_s=None,
        changed=f"{datetime.fromtimestamp(max(changed), UTC):%FT%T.%fZ}" if changed else None,
        device_hours=sum(h[0] for h in hours) or None,
        gpu_hours=sum(h[1] for h in hours) or None,
        cells=len(results),
        cells_done=sum(r.state in DONE_STATES for r in results),
    )


def _hours(run: Run, raw: Sequence[Line]) -> tuple[float, float]:
    """Device-hours of a run, and those on GPUs."""
    hours = device_hours(raw)
    return hours, hours * run.on_gpus


def _row(path: Path, top: Path) -> RunRow:
    name = str(path.relative_to(top)) if path != top else path.resolve().name
    if Study.is_study(path):
        return _study_row(path, name)
    run = Run(path)
    raw = list(read_lines(run.metrics_path))
    lines, state, left, hours = effective(raw), run.state_by(raw), None, _hours(run, raw)
    train = [line for line in lines if line["kind"] == "train"]
    summary = summarize(lines, "loss")
    steps = summary["steps"]
    if steps is None:
        with suppress(ValueError):  # a recipe of another version: the ledger is still worth a row
            steps = run.recipe.train.steps if isinstance(run.recipe.train.steps, int) else None
    if state == "running":
        left = time_left(train, steps)
    return RunRow(
        run=name,
        state="ended early" if state == "finished" and lines[-1].get("early_stop") else state,
        step=max((line["step"] for line in lines), default=0),
        steps=steps,
        left_s=left,
        loss=summary["loss"],
        best_loss=summary["best_loss"],
        tokens_per_s=summary["tokens_per_s"],
        changed=lines[-1]["time"] if lines else None,
        device_hours=hours[0] or None,
        gpu_hours=hours[1] or None,
    )
