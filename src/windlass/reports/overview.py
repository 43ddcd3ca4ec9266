"""The state of the runs and studies under a directory, from their ledgers: `windlass runs`."""

from __future__ import annotations

import math
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import UserError, plural
from windlass.reports.view import RunView
from windlass.run import Run, effective, read_lines
from windlass.study.results import CellResult, summarize, time_left
from windlass.study.study import STUDY, Study
from windlass.telemetry.measures import LOSS, show
from windlass.telemetry.summary import device_hours

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


NUMBERS = ("step", "loss", "best_loss", "tokens_per_s")


def overview(directory: Path) -> list[RunRow]:
    """A row for each run and study at or under a directory, by name; a row for each cell of a
    study."""
    if Study.is_study(directory):
        rows = list(map(_cell_row, Study.open(directory).results()))
        return sorted(rows, key=lambda row: row.run)
    rows, listed = list[RunRow](), set[Path]()
    for depth in range(DEPTH + 1):
        files = (directory.glob("*/" * depth + name) for name in ("recipe.toml", STUDY))
        for path in sorted({file.parent for level in files for file in level}):
            if listed.isdisjoint(path.parents):
                listed.add(path)
                name = str(path.relative_to(directory)) if depth else path.resolve().name
                rows.append((_study_row if Study.is_study(path) else _row)(path, name))
    return sorted(rows, key=lambda row: row.run)


def _row(path: Path, name: str) -> RunRow:
    run = Run(path)
    raw = list(read_lines(run.metrics_path))
    lines, state = effective(raw), run.state_by(raw)
    summary = summarize(lines, LOSS)
    steps = summary["steps"]
    if steps is None:
        with suppress(ValueError):  # a recipe of another version: the ledger is still worth a row
            steps = run.recipe.train.steps if isinstance(run.recipe.train.steps, int) else None
    train = [line for line in lines if line["kind"] == "train"]
    return RunRow(
        name,
        state,
        steps=steps,
        left_s=time_left(train, steps) if state == "running" else None,
        **{name: summary[name] for name in NUMBERS},
        **_hours(run),
    )


def _cell_row(result: CellResult) -> RunRow:
    name = result.cell.directory
    if not result.run.exists:
        return RunRow(name, result.state, steps=result.steps)
    numbers = {key: getattr(result, key) for key in ("steps", "left_s", *NUMBERS)}
    return RunRow(name, result.state, **numbers, **_hours(result.run))


def _hours(run: Run) -> dict[str, Any]:
    hours = device_hours(read_lines(run.metrics_path)) or None
    return {"device_hours": hours, "gpu_hours": hours if run.on_gpus else None}


def _study_row(path: Path, name: str) -> RunRow:
    try:
        study = Study.open(path)
    except UserError:
        return RunRow(name, "damaged")
    results, hours = study.results(), list(map(_hours, study.runs()))
    best = study.winners(results).groups
    states = {result.state for result in results}
    state = "finished" if states == {"finished"} else "interrupted"
    if states == {"waiting"}:
        state = "new"
    state = next((urgent for urgent in ("running", "failed") if urgent in states), state)
    return RunRow(
        name,
        state,
        step=sum(r.step for r in results),
        steps=sum(r.steps or 0 for r in results) if all(r.steps for r in results) else None,
        best_loss=best[0].median if best and study.measure == LOSS else None,
        device_hours=sum(own["device_hours"] or 0 for own in hours) or None,
        gpu_hours=sum(own["gpu_hours"] or 0 for own in hours) or None,
        cells=len(results),
        cells_done=sum(r.state == "finished" for r in results),
    )


def curve(view: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as text with axes, the validation loss as `o`; empty if no loss
    is finite. `width`: None is as wide as the terminal, at most 100 columns."""
    curves = []  # steps and losses
    for track in (view.train, view.evals.get(LOSS)):
        if track is not None and track.has("loss"):
            good = np.isfinite(track["loss"])
            curves.append((track["step"][good], track["loss"][good]))
    if not curves:
        return ""
    steps, losses = (np.concatenate(part) for part in zip(*curves, strict=True))
    left, end, bottom = float(steps.min()), float(steps.max()), float(losses.min())
    across, up = end - left or 1.0, float(losses.max()) - bottom or 1.0
    digits = max(0, 2 - math.floor(math.log10(up)))
    values = [bottom + up * row / (height - 1) for row in reversed(range(height))]
    ticks = [f"{value:.{digits}f}" if row % 4 == 0 else "" for row, value in enumerate(values)]
    gutter = max(map(len, ticks)) + 1
    columns = max(10, (width or min(100, shutil.get_terminal_size((80, 24)).columns)) - gutter - 2)
    canvas = [[" "] * columns for _ in range(height)]

    def put(mark: str, step: float, loss: float) -> None:
        row = round((1 - (loss - bottom) / up) * (height - 1))
        canvas[row][round((step - left) / across * (columns - 1))] = mark

    drawn = np.linspace(left, end, columns)
    for step, loss in zip(drawn, np.interp(drawn, *curves[0]), strict=True):
        put("·", step, loss)
    for step, loss in zip(*curves[-1], strict=True) if len(curves) > 1 else ():
        put("o", step, loss)
    head = "loss in nats per token: ·· training" + (", o validation" if len(curves) > 1 else "")
    rows = zip(ticks, map("".join, canvas), strict=True)
    lines = [head, "", *(f"{tick:>{gutter}} ┤{row}".rstrip() for tick, row in rows)]
    lines.append(f"{'':>{gutter}} └{'─' * columns}")
    first, last = show(left, "count") if end > left else "", plural(int(end), "step")
    return "\n".join([*lines, f"{'':>{gutter}}  {first}{last:>{max(1, columns - len(first))}}"])
