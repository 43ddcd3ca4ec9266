"""`windlass runs`, `checkpoints`, `report` and `track`: the verbs that read runs and studies."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from windlass.cli import Json, RunPath, print_json, say
from windlass.errors import FAILED, UserError, installed, needs, plural

if TYPE_CHECKING:
    from windlass.reports.tables import Table
    from windlass.study.study import Study

STYLES = {"running": "green", "failed": "red", "damaged": "red"}
STYLES |= dict.fromkeys(("preempted", "stopped", "interrupted"), "yellow")
REASONS = {
    "last": "among the last",
    "best": "best",
    "every": "kept forever",
    "final": "end of the run",
}


def runs(
    directory: str = Argument("runs", metavar="DIR", help="Directory of runs, a run or a study."),
    json_: Json = False,
) -> None:
    """List runs and studies with their state and loss.

    Also cells done, step, time left, speed and device-hours. The last line adds up the hours.
    `windlass runs STUDY` lists its cells. The JSON has seconds, tokens per second and full names.

    Example: `windlass runs`
    """
    from rich.text import Text

    from windlass.reports.overview import overview
    from windlass.telemetry.measures import show
    from windlass.telemetry.terminal import print_table

    if not Path(directory).is_dir():
        raise UserError(f"{directory} is not a directory; give the one that holds the runs")
    rows = overview(Path(directory))
    if json_:
        print_json([row._asdict() for row in rows], indent=2)
        return
    cells: list[tuple[str | Text, ...]] = []
    for row in rows:
        state = Text(row.state, STYLES.get(row.state, ""))
        done = "" if row.cells is None else f"{row.cells_done}/{row.cells}"
        step = "" if row.step is None else f"{row.step}/{'?' if row.steps is None else row.steps}"
        left = show(row.left_s, "duration", missing="")
        losses = (show(loss, "loss", missing="") for loss in (row.loss, row.best_loss))
        speed = show(row.tokens_per_s, "short", missing="")
        hours = show(row.device_hours, "hours", missing="")
        cells.append((row.run, state, done, step, left, *losses, speed, hours))
    if not cells:
        typer.echo("no runs here")
    head = ("run", "state", "cells", "step", "left", "loss", "best", "tok/s", "device-h")
    print_table(head, cells, text=("run", "state"))
    if total := sum(row.device_hours or 0 for row in rows):
        gpu = sum(row.gpu_hours or 0 for row in rows)
        parts = []
        if gpu:
            parts.append(f"{show(gpu, 'hours')} GPU hours")
        if total > gpu:
            parts.append(f"{show(total - gpu, 'hours')} device-hours on CPUs")
        typer.echo(f"in all: {' and '.join(parts)}")


def checkpoints(
    run: RunPath,
    verify: bool = Option(False, "--verify", help="Compare every byte with its checksum."),
    json_: Json = False,
) -> None:
    """List the checkpoints of a run, and verify their bytes.

    Each has step, time, size, loss, reason to keep it, and state. Exit code 1: one is damaged.

    Example: `windlass checkpoints runs/first --verify`
    """
    from rich.filesize import decimal

    from windlass.checkpoint.listing import list_checkpoints
    from windlass.telemetry.measures import show
    from windlass.telemetry.terminal import print_table

    listing = list_checkpoints(Path(run), verify)
    rows = listing.checkpoints
    bad = [row for row in rows if row["problem"]]
    if json_:
        print_json(asdict(listing))
    elif not rows:
        typer.echo(f"{listing.run}: no checkpoint yet")
    else:
        measures = list(dict.fromkeys(("loss", listing.measure)))
        good = "every byte good" if verify else "whole"
        cells = []
        for row in rows:
            saved = (row["time"] or "")[:19].replace("T", " ")
            size = "" if row["bytes"] is None else decimal(row["bytes"])
            scores = [row["scores"][measure] for measure in measures]
            shown = (show(score, "loss", missing="") for score in scores)
            reasons = ", ".join(REASONS[why] for why in row["kept"])
            state = "BAD" if row["problem"] else good
            cells.append((f"{row['step']:,}", saved, size, *shown, reasons, state))
        head = ("step", "saved (UTC)", "size", *measures, "kept because", "state")
        print_table(head, cells, text=("saved (UTC)", "kept because", "state"))
        for row in bad:
            say(f"step {row['step']} is bad: {row['problem']}")
        total = decimal(sum(row["bytes"] or 0 for row in rows))
        hint = "" if verify else "; --verify reads every byte"
        typer.echo(f"{plural(len(rows), 'checkpoint')}, {total}{hint}")
        for base in listing.bases:
            state = ", every byte good" if verify and not base["problem"] else ""
            typer.echo(f"base {base['name']}: {decimal(base['bytes'])}{state}")
            if base["problem"]:
                say(f"base {base['name']} is bad: {base['problem']}")
    if bad or any(base["problem"] for base in listing.bases):
        raise typer.Exit(FAILED)


def report(
    paths: Annotated[list[str], Argument(metavar="RUN|STUDY", help="Runs, or a study.")],
    out: str = Option("", metavar="DIR", help="Where to write; default: report/ in the run."),
    skip: int = Option(-1, min=-1, metavar="N", help="Steps to omit in the second loss plot."),
    plots: bool | None = Option(None, help="Draw plot files; default: if matplotlib is there."),
    table: str = Option("", metavar="NAME", help="A published table; default: the preset's."),
    law: str = Option("", metavar="LADDER", help="Predict the loss by the law of a ladder."),
    pdf: bool = Option(False, "--pdf", help="Draw every plot as PDF too."),
) -> None:
    """Write tables, plots and an interactive page about runs.

    They are index.html, report.md, tables (CSV, LaTeX) and plots. The report shows one run in
    full, compares several with the differing settings first, and shows a study's measure
    against the swept settings. The page opens from disk in any browser and needs no network.
    The same runs give the same bytes.

    Example: `windlass report runs/first`
    """
    from windlass.reports.write import report as write_report

    if plots is None and not installed("matplotlib"):
        say(f"page and tables only: a PNG plot {needs('matplotlib')}")
    steps = None if skip < 0 else skip
    written = write_report(
        paths, out or None, skip=steps, plots=plots, pdf=pdf, table=table, law=law
    )
    show_published(written.published)
    typer.echo(f"report: {written.page}")


def show_published(table: Table | None) -> None:
    """Print a published table with its notes, and a blank line."""
    from windlass.telemetry.terminal import rich_console

    if table:
        console = rich_console(sys.stdout)
        console.print(table.terminal(console.width, table.title), *table.notes, "", sep="\n")


def show_study(study: Study) -> None:
    """Print the published table of a study's preset, if any."""
    from windlass.reports.published import of_study

    show_published(of_study(study))


def track(
    run: Annotated[str, Argument(metavar="RUN|STUDY", help="A run, or a study: all its runs.")],
    to: str = Option(..., metavar="wandb|mlflow|tensorboard", help="The tracker."),
) -> None:
    """Replay a run into W&B, MLflow or TensorBoard.

    A second replay makes no duplicates.

    Example: `windlass track runs/first --to tensorboard`
    """
    from windlass.study.study import Study
    from windlass.telemetry import trackers

    runs: list[str | Path] = [run]
    if Study.is_study(run):
        study = Study.open(run)
        cells = map(study.run_of, study.cells)
        runs = [cell.path for cell in cells if cell.metrics_path.is_file()]
    for path in runs:
        for note in trackers.track(path, to):
            say(note.text)
