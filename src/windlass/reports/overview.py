"""The state of the runs and studies under a directory, from their ledgers: `windlass runs`."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from windlass.errors import UserError
from windlass.run import Run
from windlass.study.numbers import RunNumbers, read_numbers
from windlass.study.results import CellResult
from windlass.study.study import STUDY, Study
from windlass.telemetry.measures import LOSS

DEPTH = 3  # levels below the directory in which runs are listed; a study's own are not


class RunRow(NamedTuple):
    """A run, or a study with all its cells together; None for a missing value."""

    run: str  # its path below the listed directory
    state: str
    step: int | None = None
    steps: int | None = None
    left_s: float | None = None  # seconds to the end of a run that is running
    loss: float | None = None  # the last training loss, in nats
    best_loss: float | None = None  # lowest validation loss; of a study, the best that it reports
    tokens_per_s: float | None = None
    device_hours: float | None = None  # of all starts; for a study, of all cells
    gpu_hours: float | None = None  # the part on GPUs
    cells: int | None = None  # of a study
    cells_done: int | None = None


def overview(directory: Path) -> list[RunRow]:
    """A row for each run and study at or under a directory, by name; a row for each cell of a
    study."""
    rows, listed = list[RunRow](), set[Path]()
    if Study.is_study(directory):
        listed.add(directory)
        rows = [_cell_row(result) for result in Study.open(directory).results()]
    for depth in range(DEPTH + 1):
        files = (directory.glob("*/" * depth + name) for name in ("recipe.toml", STUDY))
        for path in sorted({file.parent for level in files for file in level}):
            if not listed.isdisjoint((path, *path.parents)):
                continue
            listed.add(path)
            name = str(path.relative_to(directory)) if depth else path.resolve().name
            if Study.is_study(path):
                rows.append(_study_row(path, name))
                continue
            run = Run(path)
            alive, numbers = run.alive, read_numbers(run)
            state, steps = run.state_by(numbers.history, alive), numbers.steps
            left = numbers.seconds_left(steps) if state == "running" else None
            rows.append(_row(RunRow(name, state, steps=steps, left_s=left), run, numbers))
    return sorted(rows, key=lambda row: row.run)


def _cell_row(result: CellResult) -> RunRow:
    row = RunRow(result.cell.directory, result.state, steps=result.steps, left_s=result.left_s)
    return _row(row, result.run, result.numbers) if result.run.exists else row


def _row(row: RunRow, run: Run, numbers: RunNumbers) -> RunRow:
    names = ("step", "loss", "best_loss", "tokens_per_s", "device_hours")
    values = {name: getattr(numbers, name) for name in names}
    return row._replace(**values, gpu_hours=numbers.device_hours if run.on_gpus else None)


def _study_row(path: Path, name: str) -> RunRow:
    try:
        study = Study.open(path)
    except UserError:
        return RunRow(name, "damaged")
    results = study.results()
    best = study.winners(results).groups
    rows = [_cell_row(result) for result in results]
    states = {result.state for result in results}
    state = "interrupted"
    if "running" in states:
        state = "running"
    elif "failed" in states:
        state = "failed"
    elif states == {"finished"}:
        state = "finished"
    elif states == {"waiting"}:
        state = "new"
    return RunRow(
        name,
        state,
        step=sum(row.step or 0 for row in rows),
        steps=sum(row.steps or 0 for row in rows) if all(row.steps for row in rows) else None,
        best_loss=best[0].median if best and study.measure == LOSS else None,
        device_hours=sum(row.device_hours or 0 for row in rows) or None,
        gpu_hours=sum(row.gpu_hours or 0 for row in rows) or None,
        cells=len(results),
        cells_done=[result.state for result in results].count("finished"),
    )
