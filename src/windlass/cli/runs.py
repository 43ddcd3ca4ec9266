"""`windlass runs`: what runs there are, how far they are, and what they gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.reports.overview import RunRow

SORTS = "name, state, step, left, loss, best, speed, changed"


def runs(
    directory: str = typer.Argument("runs", metavar="[DIR]", help="Where the runs lie; also a single run or a study."),
    sort: str = typer.Option("name", "--sort", metavar="KEY", help=f"One of {SORTS}."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: seconds, tokens a second, full names."),
) -> None:
    """List runs: state, step, time left, losses, speed."""
    from rich.console import Console

    from windlass.errors import UserError
    from windlass.reports.overview import overview
    from windlass.telemetry.ledger import plain

    if sort not in SORTS.split(", "):
        raise UserError(f"--sort {sort}: there are {SORTS}")
    if not Path(directory).is_dir():
        raise UserError(f"{directory} is no directory: give the one that holds the runs (the default is `runs`)")
    rows = overview(Path(directory), sort)
    if as_json:
        typer.echo(json.dumps([{key: plain(value) for key, value in row._asdict().items()} for row in rows], indent=2))
    else:
        terminal = Console(highlight=False)
        if not terminal.is_terminal:
            terminal.width = 200  # a pipe has no width to keep to
        terminal.print(table(rows))


def table(rows: list[RunRow]) -> Table:
    """The rows as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    from windlass.telemetry.console import duration, short

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "step", "left", "loss", "best", "tok/s"):
        shown.add_column(name, justify="left" if name in ("run", "state") else "right", no_wrap=True)
    styles = {"running": "green", "failed": "red", "preempted": "yellow"}
    for row in rows:
        shown.add_row(
            escape(row.run),
            f"[{styles[row.state]}]{row.state}[/]" if row.state in styles else row.state,
            f"{row.step}/{'?' if row.steps is None else row.steps}",
            "" if row.left_s is None else duration(row.left_s),
            *("" if loss is None else f"{loss:.4f}" for loss in (row.loss, row.best_loss)),
            "" if row.tokens_per_s is None else short(row.tokens_per_s),
        )
    if not rows:
        shown.add_row("no runs here")
    return shown
