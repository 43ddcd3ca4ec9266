"""The state of the runs and studies under a directory, from their ledgers: `windlass runs`."""

from __future__ import annotations

import itertools
import math
import shutil
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass.errors import UserError, plural
from windlass.reports.view import RunView
from windlass.run import Run, effective, read_lines
from windlass.study.probe import PROBES
from windlass.study.results import CellResult, summarize, time_left
from windlass.study.study import STUDY, Study
from windlass.telemetry.ledger import LOSS
from windlass.telemetry.measures import show
from windlass.telemetry.timing import device_hours

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
    changed: str | None = None  # the time of its last line
    device_hours: float | None = None  # of all starts; for a study, of all cells
    gpu_hours: float | None = None  # the part on GPUs
    cells: int | None = None  # of a study
    cells_done: int | None = None


def overview(directory: Path) -> list[RunRow]:
    """A row for each run and study at or under a directory, by name; a row for each cell of a
    study."""
    try:
        rows = list(map(_cell_row, Study.open(directory).results()))
    except UserError:  # not a study, or a damaged one, whose cells are still listed
        tops = [directory]
        if Study.is_study(directory):
            tops = [path for path in sorted(directory.iterdir()) if path.name != PROBES]
        rows, listed = [], set[Path]()
        for top, depth in itertools.product(tops, range(DEPTH + 1)):
            files = (top.glob("*/" * depth + name) for name in ("recipe.toml", STUDY))
            for path in sorted({file.parent for level in files for file in level}):
                if listed.isdisjoint(path.parents):
                    listed.add(path)
                    rows.append(_row(path, directory))
    return sorted(rows, key=lambda row: row.run)


def _row(path: Path, top: Path) -> RunRow:
    name = str(path.relative_to(top)) if path != top else path.resolve().name
    if Study.is_study(path):
        return _study_row(path, name)
    run = Run(path)
    raw = list(read_lines(run.metrics_path))
    lines, state, hours = effective(raw), run.state_by(raw), device_hours(raw) or None
    summary = summarize(lines, LOSS)
    steps = summary["steps"]
    if steps is None:
        with suppress(ValueError):  # a recipe of another version: the ledger is still worth a row
            steps = run.recipe.train.steps if isinstance(run.recipe.train.steps, int) else None
    train = [line for line in lines if line["kind"] == "train"]
    return RunRow(
        name,
        "ended early" if state == "finished" and lines[-1].get("early_stop") else state,
        step=max((line["step"] for line in lines), default=0),
        steps=steps,
        left_s=time_left(train, steps) if state == "running" else None,
        **{key: summary[key] for key in ("loss", "best_loss", "tokens_per_s")},
        changed=lines[-1]["time"] if lines else None,
        device_hours=hours,
        gpu_hours=hours if run.on_gpus else None,
    )


def _cell_row(result: CellResult) -> RunRow:
    name, state = result.cell.directory, result.state
    if not result.run.exists:
        return RunRow(name, state, steps=result.steps)
    row = _row(result.run.path, result.run.path)._replace(run=name)
    ended_early = state == "finished" and row.state == "ended early"
    return row if ended_early else row._replace(state=state, left_s=result.left_s)


def _study_row(path: Path, name: str) -> RunRow:
    try:
        study = Study.open(path)
    except UserError:
        return RunRow(name, "damaged")
    results, runs = study.results(), study.runs()
    best = study.winners(results).groups
    hours = [(run.on_gpus, device_hours(read_lines(run.metrics_path))) for run in runs]
    changed = [run.metrics_path.stat().st_mtime for run in runs if run.metrics_path.is_file()]
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
        changed=f"{datetime.fromtimestamp(max(changed), UTC):%FT%T.%fZ}" if changed else None,
        device_hours=sum(own for _, own in hours) or None,
        gpu_hours=sum(own for on_gpus, own in hours if on_gpus) or None,
        cells=len(results),
        cells_done=sum(r.state == "finished" for r in results),
    )


# the bits of a braille character by row and column of its dots
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))


def curve(view: RunView, width: int | None = None, height: int = 13) -> str:
    """The training loss over steps as text with axes, the validation loss as `o`; empty if no loss
    is finite. `width`: None is as wide as the terminal, at most 100 columns."""
    tracks = [track for track in (view.train, view.evals.get("loss")) if track is not None]
    curves = []  # steps and losses
    for track in tracks:
        good = np.isfinite(track["loss"])
        curves.append((track["step"][good], track["loss"][good]))
    steps, losses = (np.concatenate(part) for part in zip(*curves, strict=True))
    if not len(losses):
        return ""
    left, end, bottom = float(steps.min()), float(steps.max()), float(losses.min())
    across, up = end - left or 1.0, float(losses.max()) - bottom or 1.0
    digits = max(0, 2 - math.floor(math.log10(up)))
    values = [bottom + up * row / (height - 1) for row in reversed(range(height))]
    ticks = [f"{value:.{digits}f}" if row % 4 == 0 else "" for row, value in enumerate(values)]
    gutter = max(map(len, ticks)) + 1
    columns = max(10, (width or min(100, shutil.get_terminal_size((80, 24)).columns)) - gutter - 2)

    # A character has 2 × 4 dots. The curve joins the means of the losses in each column of dots.
    x, y = curves[0]
    places = ((x - left) / across * (2 * columns - 1)).round()
    means = {int(at): float(y[places == at].mean()) for at in np.unique(places)}
    dots = [(at, (1 - (mean - bottom) / up) * (4 * height - 1)) for at, mean in means.items()]
    bits = np.zeros((height, columns), dtype=np.int64)
    for (a, from_row), (b, to_row) in itertools.pairwise(dots[:1] + dots):
        count = 1 + max(b - a, math.ceil(abs(to_row - from_row)), 1)
        for column, row in np.linspace((a, from_row), (b, to_row), count).round().astype(int):
            bits[row // 4, column // 2] |= DOTS[row % 4][column % 2]
    canvas = [[chr(0x2800 + int(cell)) if cell else " " for cell in line] for line in bits]
    for step, loss in zip(*curves[-1], strict=True) if len(curves) > 1 else ():
        row = round((1 - (loss - bottom) / up) * (height - 1))
        canvas[row][round((step - left) / across * (columns - 1))] = "o"

    head = "loss in nats per token: ⠒⠒ training" + (", o validation" if len(tracks) > 1 else "")
    rows = zip(ticks, map("".join, canvas), strict=True)
    lines = [head, "", *(f"{tick:>{gutter}} ┤{row}".rstrip() for tick, row in rows)]
    lines.append(f"{'':>{gutter}} └{'─' * columns}")
    first, last = show(left, "count") if end > left else "", plural(int(end), "step")
    return "\n".join([*lines, f"{'':>{gutter}}  {first}{last:>{max(1, columns - len(first))}}"])
