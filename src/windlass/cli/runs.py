"""`windlass runs`, `checkpoints`, `report` and `track`: what there is, what it gave, and the bytes it is kept in."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from windlass.cli import Json, complete, print_json
from windlass.errors import FAILED, UserError, installed, needs

if TYPE_CHECKING:
    from windlass.reports.published import Published
    from windlass.study.study import Study

STYLES = {
    "running": "green",
    "failed": "red",
    "damaged": "red",
    "preempted": "yellow",
    "stopped": "yellow",
    "interrupted": "yellow",
}
REASONS = {
    "last": "among the last",
    "best": "best",
    "every": "kept forever",
    "final": "end of the run",
    "signal": "of a stop",
    "start": "resumed from",
}


def runs(
    directory: str = typer.Argument(
        "runs", metavar="[DIR]", help="Where the runs lie; also a single run or a study."
    ),
    sort: str = typer.Option(
        "name",
        metavar="KEY",
        help="One of name, state, step, left, loss, best, speed, hours, changed.",
    ),
    json_: Json = False,
) -> None:
    """List runs and studies: state, cells done, step, time left, losses, speed, device-hours, and the hours of all of
    them in one line. `windlass runs STUDY` lists its cells.

    The JSON has seconds, tokens a second and full names.
    """
    from rich.text import Text

    from windlass.reports.overview import SORTS, overview
    from windlass.reports.text import show
    from windlass.telemetry.console import duration, short
    from windlass.telemetry.terminal import print_table

    if sort not in SORTS:
        raise UserError(f"--sort {sort}: there are {', '.join(SORTS)}")
    if not Path(directory).is_dir():
        raise UserError(
            f"{directory} is no directory: give the one that holds the runs (the default is `runs`)"
        )
    rows = overview(Path(directory), sort)
    if json_:
        print_json([row._asdict() for row in rows], indent=2)
        return
    cells: list[tuple[str | Text, ...]] = [
        (
            row.run,
            Text(row.state, STYLES.get(row.state, "")),
            "" if row.cells is None else f"{row.cells_done}/{row.cells}",
            "" if row.step is None else f"{row.step}/{'?' if row.steps is None else row.steps}",
            "" if row.left_s is None else duration(row.left_s),
            *("" if loss is None else f"{loss:.4f}" for loss in (row.loss, row.best_loss)),
            "" if row.tokens_per_s is None else short(row.tokens_per_s),
            "" if row.device_hours is None else show(row.device_hours, "hours"),
        )
        for row in rows
    ]
    if not cells:
        typer.echo("no runs here")
    head = ("run", "state", "cells", "step", "left", "loss", "best", "tok/s", "device-h")
    print_table(head, cells, text=("run", "state"))
    if hours := sum(row.device_hours or 0 for row in rows):
        gpu = sum(row.gpu_hours or 0 for row in rows)
        parts = [f"{show(gpu, 'hours')} GPU hours"] * (gpu > 0)
        parts += [f"{show(hours - gpu, 'hours')} device-hours on CPUs"] * (hours > gpu)
        typer.echo(f"all of these: {' and '.join(parts)}")


def checkpoints(
    run: Path = typer.Argument(
        ..., metavar="RUN", help="A run directory.", autocompletion=complete.runs
    ),
    verify: bool = typer.Option(
        False, "--verify", help="Read every byte and compare it with what was written."
    ),
    json_: Json = False,
) -> None:
    """List the checkpoints of a run: step, time, size, loss, why each is kept, good or bad. Exit 1 if one is bad."""
    from windlass.checkpoint.commit import format_bytes
    from windlass.checkpoint.load import list_checkpoints
    from windlass.telemetry.terminal import print_table

    listing = list_checkpoints(run, verify)
    rows, bad = listing.checkpoints, [row for row in listing.checkpoints if row.problem]
    if json_:
        print_json(asdict(listing))
    elif not rows:
        typer.echo(f"{listing.run} has no checkpoint yet")
    else:
        measures = list(dict.fromkeys(("loss", listing.measure)))
        good = "every byte good" if verify else "whole"
        cells = [
            (
                f"{row.step:,}",
                (row.time or "")[:19].replace("T", " "),
                "" if row.bytes is None else format_bytes(row.bytes),
                *("" if (score := row.scores[m]) is None else f"{score:.4f}" for m in measures),
                ", ".join(REASONS[why] for why in row.kept),
                "BAD" if row.problem else good,
            )
            for row in rows
        ]
        head = ("step", "saved (UTC)", "size", *measures, "kept because", "state")
        print_table(head, cells, text=("saved (UTC)", "kept because", "state"))
        for row in bad:
            typer.echo(f"step {row.step} is bad: {row.problem}")
        total = format_bytes(sum(row.bytes or 0 for row in rows))
        typer.echo(
            f"{len(rows)} checkpoints, {total}{'' if verify else '; --verify reads every byte'}"
        )
        for name in listing.temporary:
            typer.echo(
                f"{name} is being written or removed, or was left by a kill: the next start removes it"
            )
        for name in listing.bad:
            typer.echo(
                f"{name} was damaged and set aside; nothing reads it, delete it when you like"
            )
    if bad:
        raise typer.Exit(FAILED)


def report(
    paths: list[str] = typer.Argument(
        ...,
        metavar="RUN|STUDY...",
        help="Run directories, or a study.",
        autocompletion=complete.runs,
    ),
    out: str = typer.Option(
        "", metavar="DIR", help="Where to write; default: report/ in the run or study, else here."
    ),
    skip: int = typer.Option(
        -1, min=-1, metavar="N", help="Steps left out of the second loss plot; -1: a tenth."
    ),
    plots: bool | None = typer.Option(
        None, help="Draw the PNG and PDF files, or page and tables alone; default: with matplotlib."
    ),
    table: str = typer.Option(
        "",
        metavar="NAME",
        help="The published table to fill; default: the preset's, if it has one.",
    ),
    text: bool = typer.Option(
        False, "--text", help="Also print the loss curve, the last sample and the results here."
    ),
) -> None:
    """Write a report: index.html, report.md, tables (CSV, LaTeX), plots (PNG, PDF); print the page's path.

    One run is shown in full, several are compared, with the settings that differ first, and a study shows its measure
    against the swept settings, and the best. The page opens from disk in any browser and needs no network. The same
    runs give the same bytes.
    """
    from windlass.reports.page import report as write_report
    from windlass.reports.tables import results
    from windlass.reports.text import curve, last_sample
    from windlass.telemetry.terminal import print_table

    if plots is None and not installed("matplotlib"):
        typer.echo(f"page and tables alone: a PNG plot {needs('matplotlib')}")
    written = write_report(
        paths, out or None, skip=None if skip < 0 else skip, plots=plots, table=table
    )
    for view in written.views if text else ():
        typer.echo(
            "\n\n".join(part for part in (view.label, curve(view), last_sample(view)) if part)
            + "\n"
        )
        print_table(("measure", ""), results(view, for_people=True).rows, text=("measure",))
        typer.echo()
    show_published(written.published)
    typer.echo(f"report: {written.page}")


def show_published(filled: Published | None) -> None:
    """Print a published table with its note."""
    from windlass.telemetry.terminal import print_table

    if filled:
        head, numeric = filled.table.headings, filled.table.numeric
        text = [heading for place, heading in enumerate(head) if place not in numeric]
        print_table(head, filled.table.shown(), text=text, title=filled.title)
        typer.echo(f"{filled.note}\n".lstrip("\n"), nl=False)


def show_study(study: Study) -> None:
    """Print the published table of a study's preset, if it has one."""
    from windlass.reports.published import of_study

    show_published(of_study(study))


def track(
    run: str = typer.Argument(
        ...,
        metavar="RUN|STUDY",
        help="What to send; a study: all its runs.",
        autocompletion=complete.runs,
    ),
    to: str = typer.Option(..., metavar="wandb|mlflow|tensorboard", help="The tracker."),
    timeout: float = typer.Option(
        0.0, min=0, help="Give up after so many seconds; 0: wait as long as it takes."
    ),
    only: int = typer.Option(
        -1, hidden=True, help="One cell of a study, by number; what an array job's tasks call."
    ),
) -> None:
    """Replay a run's ledger into a tracker; twice gives no duplicate."""
    from windlass.study.study import Study
    from windlass.telemetry.trackers import replay

    runs: list[str | Path] = [run]
    if Study.is_study(run):
        study = Study.open(run)
        cells = study.cells if only < 0 else study.cells[only : only + 1]
        runs = [cell.path for cell in map(study.run_of, cells) if cell.metrics_path.is_file()]
    for path in runs:
        for note in replay(path, to, timeout):
            typer.echo(note.text)
