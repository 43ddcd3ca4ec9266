"""`windlass runs`: what runs there are, how far they are, and what they gave."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.run import Run

Row = dict[str, Any]

DEPTH = 3
"""How deep below the directory runs are looked for: a study keeps its runs in directories of its own."""

SORTS = {
    "name": ("run", False), "state": ("state", False), "step": ("step", True), "left": ("left_s", False),
    "loss": ("loss", False), "best": ("best_loss", False), "speed": ("tokens_per_s", True), "changed": ("changed", True),
}  # fmt: skip
"""What to sort by: the field, and whether the largest comes first."""

RECENT = 10
"""Logged steps that speed and time left are taken from."""


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("runs")(runs)


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

        typer.echo(json.dumps([_strict(row) for row in rows(top, sort)], indent=2))
    elif watch:
        _watch(top, sort, every)
    else:
        _terminal().print(table(rows(top, sort)))


def rows(top: Path, sort: str) -> list[Row]:
    """A row for each run under a directory, sorted; rows without the value come last."""
    field, largest_first = SORTS[sort]
    found = [overview(path, top) for path in find(top)]
    known = [row for row in found if row[field] is not None and row[field] == row[field]]  # NaN is not equal to itself
    unknown = [row for row in found if row not in known]
    return sorted(known, key=lambda row: row[field], reverse=largest_first) + unknown


def find(top: Path) -> Iterator[Path]:
    """The run directories at or under a directory, in the order of their names."""
    if (top / "recipe.toml").is_file():
        yield top
        return
    level = [top]
    for _ in range(DEPTH):
        below = sorted(path for parent in level for path in parent.iterdir() if path.is_dir())
        yield from (path for path in below if (path / "recipe.toml").is_file())
        level = [path for path in below if not (path / "recipe.toml").is_file()]


def overview(path: Path, top: Path) -> Row:
    """How a run stands, from its ledger: names, seconds, losses in nats, tokens a second; None where not known."""
    from windlass.run import Run

    run = Run(path)
    lines = run.ledger()
    train = [line for line in lines if line["kind"] == "train"]
    losses = [_number(x.get("loss")) for x in lines if x["kind"] == "eval" and x.get("suite", "loss") == "loss"]
    finite = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    speeds = [line["tokens_per_s"] for line in train[-RECENT:] if line.get("tokens_per_s")]
    state, steps = run.state, _steps(run, lines)
    step = max((line["step"] for line in lines), default=0)
    return {
        "run": str(path.relative_to(top)) if path != top else path.resolve().name,
        "state": state,
        "step": step,
        "steps": steps,
        "left_s": _left(train, steps) if state == "running" else None,
        "loss": _number(train[-1].get("loss")) if train else None,
        "best_loss": min(finite, default=None),
        "tokens_per_s": sum(speeds) / len(speeds) if speeds else None,
        "changed": lines[-1]["time"] if lines else None,
    }


def _number(value: Any) -> float | None:
    """A loss; the ledger writes what JSON cannot say as a word."""
    return None if value is None else float(value)


def _steps(run: Run, lines: list[dict[str, Any]]) -> int | None:
    """Steps of the whole run: as the last start worked them out, or as the recipe says."""
    told = [line["steps"] for line in lines if line["kind"] == "event" and isinstance(line.get("steps"), int)]
    if told:
        return int(told[-1])
    try:
        steps = run.recipe.train.steps
    except ValueError:  # a recipe of another version: the ledger is still worth a row
        return None
    return steps if isinstance(steps, int) else None


def _left(train: list[dict[str, Any]], steps: int | None) -> float | None:
    """Seconds to the end at the pace of the last logged steps, with evaluations and saves."""
    from datetime import datetime

    own = [line for line in train if line.get("attempt") == train[-1].get("attempt")][-RECENT:]
    if steps is None or len(own) < 2 or own[-1]["step"] == own[0]["step"]:
        return None
    first, last = (datetime.fromisoformat(line["time"].replace("Z", "+00:00")) for line in (own[0], own[-1]))
    pace = (last - first).total_seconds() / (own[-1]["step"] - own[0]["step"])
    return max(steps - own[-1]["step"], 0) * pace


def table(found: list[Row]) -> Table:
    """The rows as a table for the terminal."""
    from rich.markup import escape
    from rich.table import Table

    from windlass.telemetry.console import duration, short

    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("run", no_wrap=True)
    shown.add_column("state", no_wrap=True)
    for name in ("step", "left", "loss", "best", "tok/s"):
        shown.add_column(name, justify="right", no_wrap=True)
    styles = {"running": "green", "failed": "red", "preempted": "yellow"}
    for row in found:
        shown.add_row(
            escape(row["run"]),
            f"[{styles[row['state']]}]{row['state']}[/]" if row["state"] in styles else row["state"],
            f"{row['step']}/{'?' if row['steps'] is None else row['steps']}",
            duration(row["left_s"]) if row["left_s"] is not None else "",
            *("" if row[name] is None else f"{row[name]:.4f}" for name in ("loss", "best_loss")),
            "" if row["tokens_per_s"] is None else short(row["tokens_per_s"]),
        )
    if not found:
        shown.add_row("no runs here")
    return shown


def _strict(row: Row) -> Row:
    """A row as strict JSON can say it: a number that is none becomes a word, as in the ledger."""
    from windlass.telemetry.ledger import plain

    return {key: plain(value) for key, value in row.items()}


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
        with Live(table(rows(top, sort)), console=terminal, auto_refresh=False, screen=terminal.is_terminal) as live:
            while True:
                time.sleep(every)
                live.update(table(rows(top, sort)), refresh=True)
    except KeyboardInterrupt:
        terminal.print(table(rows(top, sort)))
