"""`windlass runs`: what runs there are, how far they are, and what they gave."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from windlass.reports.overview import SORTS, overview

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.reports.overview import RunRow


def runs(
    directory: str = typer.Argument("runs", metavar="[DIR]", help="Where the runs lie; also a single run or a study."),
    sort: str = typer.Option("name", "--sort", metavar="KEY", help=f"One of {', '.join(SORTS)}."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: seconds, tokens a second, full names."),
    watch: bool = typer.Option(False, "--watch", help="Show it again and again, until Ctrl-C."),
    every: float = typer.Option(2.0, "--every", help="With --watch: seconds between two looks."),
) -> None:
    """List runs: state, step, time left, losses, speed."""
    from windlass.errors import UserError

    if sort not in SORTS:
        raise UserError(f"--sort {sort}: there are {', '.join(SORTS)}")
    if every <= 0:
        raise UserError(f"--every {every:g}: give a number of seconds above 0")
    top = Path(directory)
    if not top.is_dir():
        raise UserError(f"{directory} is no directory: give the one that holds the runs (the default is `runs`)")
    if as_json:
        import json

        from windlass.telemetry.ledger import plain

        rows = [{key: plain(value) for key, value in vars(row).items()} for row in overview(top, sort)]
        typer.echo(json.dumps(rows, indent=2))
    elif watch:
        _watch(top, sort, every)
    else:
        _terminal().print(table(overview(top, sort)))


def table(rows: list[RunRow]) -> Table:
    """The rows as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    from windlass.telemetry.console import duration, short

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state"):
        shown.add_column(name, no_wrap=True)
    for name in ("step", "left", "loss", "best", "tok/s"):
        shown.add_column(name, justify="right", no_wrap=True)
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


def _terminal() -> Any:
    from rich.console import Console

    terminal = Console(highlight=False)
    if not terminal.is_terminal:
        terminal.width = 200  # a pipe has no width to keep to
    return terminal


def _watch(top: Path, sort: str, every: float) -> None:
    import time

    from rich.live import Live

    terminal = _terminal()
    try:
        with Live(
            table(overview(top, sort)), console=terminal, auto_refresh=False, screen=terminal.is_terminal
        ) as live:
            while True:
                time.sleep(every)
                live.update(table(overview(top, sort)), refresh=True)
    except KeyboardInterrupt:
        terminal.print(table(overview(top, sort)))
