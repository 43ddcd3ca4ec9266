"""`windlass sweep`: a grid of settings as a study, worked through cell by cell, kill-safe."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.study.study import Study


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("sweep")(sweep)


def sweep(
    recipe: str = typer.Argument(..., metavar="RECIPE", help="The recipe that all cells share."),
    axes: list[str] = typer.Argument(
        ...,
        metavar="KEY=A,B,C...",
        help="Axes of the grid: KEY=A,B,C; KEY=LOW:HIGH:log:N or :lin:N; A+B=1+2,3+4 (a zip: both change together).",
    ),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="A setting that all cells share."),
    dir_: str = typer.Option("", "--dir", help="The study's directory; default: studies/<preset>-<digest>."),
    world: int = typer.Option(1, min=1, help="Ranks of each cell."),
    workers: int = typer.Option(1, min=1, help="Cells side by side, each with its share of threads or devices."),
    stop_diverged: bool = typer.Option(False, help="Stop a cell whose loss is not finite or far above its first."),
    halving: bool = typer.Option(
        False, help="Successive halving: at each rung of evaluations only the better half goes on."
    ),
    retry_failed: bool = typer.Option(False, help="Try failed and diverged cells again."),
    submit: str = typer.Option("", metavar="slurm|pbs", help="Submit the open cells as an array job instead."),
    dry_run: bool = typer.Option(False, help="With --submit: print the batch script, submit nothing."),
    only: int = typer.Option(-1, hidden=True, help="Work on one cell by number; what an array job's tasks call."),
    json_: bool = typer.Option(False, "--json", help="Print the table as JSON at the end."),
) -> int:
    """Train every cell of a grid, and tabulate what came out.

    Each cell is a run like any other, in its own directory. Kill it anywhere and give the same command again: finished
    cells are left alone, interrupted ones resume. A failed cell stays in the table with its reason, and does not stop the
    others. With run.seed as an axis the table adds medians and spread.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from pathlib import Path

    from windlass.recipe import Recipe
    from windlass.study.study import Study
    from windlass.study.sweep import Options, Sweep

    study = Study.create(Recipe.load(recipe, set_), axes, Path(dir_) if dir_ else None)
    if submit:
        from windlass.study.submit import submit_array

        return submit_array(study, submit, world, dry_run=dry_run)
    options = Options(world, workers, stop_diverged, halving, retry_failed)
    cells = [study.cells[only]] if only >= 0 else None
    with _Screen() as screen:
        code = Sweep(study, options, screen.show, cells).run()
    if json_:
        import json

        from windlass.study.table import rows

        typer.echo(json.dumps(rows(study), indent=1))
    _say_end(study, code)
    return code


class _Screen:
    """The study's table, redrawn in a terminal; elsewhere a line whenever a cell's state changes."""

    def __init__(self) -> None:
        self.live: Any = None
        self.said: dict[str, str] = {}
        self.drawn = 0.0

    def __enter__(self) -> _Screen:
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()

    def show(self, study: Study) -> None:
        """Called often; draws about once a second."""
        import time

        if self.live:
            if time.monotonic() - self.drawn > 1 or self.drawn == 0:
                self.live.update(table(study), refresh=True)
                self.drawn = time.monotonic()
            return
        for number, cell in enumerate(study.cells):
            state, reason = study.state_of(cell)
            if self.said.get(cell.label) != state and state != "waiting":
                self.said[cell.label] = state
                typer.echo(f"[{number + 1}/{len(study.cells)}] {cell.label}: {state}{f' ({reason})' if reason else ''}")


def table(study: Study) -> Table:
    """The study as a table for the terminal."""
    from rich.table import Table

    from windlass.study.table import rows

    keys = list(study.cells[0].assignment)
    drawn = Table(title=str(study.path), title_justify="left")
    for name in [
        *(k.rsplit(".", 1)[-1] for k in keys),
        "state",
        "step",
        "loss",
        "val loss",
        "best",
        "tokens/s",
        "reason",
    ]:
        drawn.add_column(name, justify="left" if name in ("state", "reason") else "right", no_wrap=name == "state")
    for row in rows(study):
        step = f"{row['step']}/{row['steps'] or '?'}" if row["step"] else ""
        losses = ["" if row[k] is None else f"{row[k]:.4f}" for k in ("loss", "eval_loss", "best_loss")]
        speed = f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else ""
        values = [f"{row[k]:g}" if isinstance(row[k], float) else str(row[k]) for k in keys]
        drawn.add_row(*values, row["state"], step, *losses, speed, row["reason"])
    return drawn


def _say_end(study: Study, code: int) -> None:
    from rich.console import Console

    from windlass.errors import STOPPED
    from windlass.study.table import by_seed, winner

    console = Console()
    if not sys.stdout.isatty():
        console.print(table(study))
    for row in by_seed(study):
        if row["median"] is not None:
            rest = " ".join(f"{k}={v}" for k, v in row.items() if k not in ("median", "low", "high", "seeds"))
            typer.echo(
                f"{rest}: median {row['median']:.4f}, {row['low']:.4f} to {row['high']:.4f} over {row['seeds']} seeds"
            )
    best = winner(study)
    if best:
        settings = " ".join(f"{k}={v}" for k, v in best.items() if k != "best_loss")
        typer.echo(f"best: {settings} (validation loss {best['best_loss']:.4f})")
        typer.echo(f"  windlass train {study.path / 'recipe.toml'} {settings}")
    typer.echo(f"report: windlass report {study.path}")
    if code == STOPPED:
        typer.echo("stopped with everything saved; the same command goes on", err=True)
