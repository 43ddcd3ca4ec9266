"""`windlass sweep`: a grid of settings as a study, worked through cell by cell, kill-safe."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from windlass.study import GRID_HELP

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.study.study import Study

WIDE = 110
"""Columns of a terminal from which the table has the device-hours too."""


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("sweep", epilog=f"\b\nAxes, which are crossed:\n{GRID_HELP}")(sweep)


def sweep(
    recipe: str = typer.Argument(..., metavar="RECIPE", help="The recipe that all cells share."),
    axes: list[str] = typer.Argument(
        ...,
        metavar="KEY=A,B,C...",
        help="Axes of the grid: values, ranges and zips; see below.",
    ),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="A setting that all cells share."),
    dir_: str = typer.Option("", "--dir", help="The study's directory; default: studies/<preset>-<digest>."),
    world: int = typer.Option(1, min=1, help="Ranks of each cell; parallel.world=1,2,4 makes them an axis."),
    workers: int = typer.Option(1, min=1, help="Cells side by side, each with its share of threads or devices."),
    stop_diverged: bool = typer.Option(False, help="Stop a cell whose loss is not finite or far above its first."),
    halving: bool = typer.Option(
        False,
        help="Asynchronous successive halving: at its 1st, 2nd, 4th, ... evaluation a cell goes on only if it is in the "
        "better half of those that came there before it; nobody waits.",
    ),
    retry_failed: bool = typer.Option(False, help="Try failed and diverged cells again."),
    submit: str = typer.Option("", metavar="slurm|pbs", help="Submit the open cells as an array job instead."),
    submit_arg: list[str] = typer.Option(
        [], metavar="ARG", help="An argument for the scheduler, as --submit-arg=--time=04:00:00; may be repeated."
    ),
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

    from windlass.errors import UserError
    from windlass.recipe import Recipe
    from windlass.study.study import Study
    from windlass.study.sweep import Options, Sweep

    study = Study.create(Recipe.load(recipe, set_), axes, Path(dir_) if dir_ else None)
    options = Options(world, workers, stop_diverged, halving, retry_failed)
    if submit:
        from windlass.study.submit import submit_array

        return submit_array(study, submit, options, dry_run=dry_run, arguments=submit_arg, say=typer.echo)
    if submit_arg or dry_run:
        raise UserError("--submit-arg and --dry-run go with --submit slurm or --submit pbs")
    if not -1 <= only < len(study.cells):
        raise UserError(f"--only {only}: the cells are 0 to {len(study.cells) - 1}")
    cells = [study.cells[only]] if only >= 0 else None
    with _Screen(errors=json_) as screen:
        code = Sweep(study, options, screen.show, cells, screen.say).run()
    if json_:
        import json

        from windlass.study.table import rows

        typer.echo(json.dumps(rows(study), indent=1))
    _say_end(study, code, world, screen)
    return code


WIDTH = 140
"""Characters that a row may take where the output is no terminal."""


class _Screen:
    """The study's table, redrawn in a terminal; elsewhere a line whenever a cell's state changes."""

    def __init__(self, *, errors: bool = False) -> None:
        """With `errors` everything goes to the error stream: the other one is for JSON alone."""
        from rich.console import Console

        self.errors = errors
        self.console = Console(stderr=errors)
        if not self.console.is_terminal:  # a file has no edge, and no number need be cut
            self.console = Console(stderr=errors, width=WIDTH)
        self.live: Any = None
        self.last: Study | None = None
        self.said: dict[str, str] = {}
        self.drawn = 0.0

    def __enter__(self) -> _Screen:
        if self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            if self.last:  # what was drawn last may be a second old
                self._draw(self.last)
            self.live.stop()

    def say(self, text: str) -> None:
        """A line for the user."""
        if self.live:
            self.console.print(text, markup=False, highlight=False)
        else:
            typer.echo(text, err=self.errors)

    def show(self, study: Study) -> None:
        """Called often; draws about once a second."""
        import time

        self.last = study
        if self.live:
            if time.monotonic() - self.drawn > 1 or self.drawn == 0:
                self._draw(study)
                self.drawn = time.monotonic()
            return
        for number, cell in enumerate(study.cells):
            state, reason = study.state_of(cell)
            if self.said.get(cell.key) != state and (state != "waiting" or cell.key in self.said):
                self.said[cell.key] = state
                self.say(f"[{number + 1}/{len(study.cells)}] {cell.label}: {state}{f' ({reason})' if reason else ''}")

    def _draw(self, study: Study) -> None:
        self.live.update(table(study, self.console.width), refresh=True)


def table(study: Study, width: int = WIDE) -> Table:
    """The study as a table for a terminal of so many columns."""
    from rich.table import Table

    from windlass.study.table import rows

    keys, wide = list(study.cells[0].assignment), width >= WIDE
    drawn = Table(title=str(study.path), title_justify="left")
    hours = ["device-h"] if wide else []
    names = ["state", "step", "loss", "val loss", "best", "tokens/s", *hours, "reason"]
    for name in [*(k.rsplit(".", 1)[-1] for k in keys), *names]:
        drawn.add_column(name, justify="left" if name in ("state", "reason") else "right", no_wrap=name == "state")
    for row in rows(study):
        step = f"{row['step']}/{row['steps'] or '?'}" if row["step"] or row["steps"] else ""
        losses = ["" if row[k] is None else f"{row[k]:.4f}" for k in ("loss", "eval_loss", "best_loss")]
        speed = f"{row['tokens_per_s']:,.0f}" if row["tokens_per_s"] else ""
        spent = ["" if row["device_hours"] is None else f"{row['device_hours']:.3g}"] if wide else []
        values = [f"{row[k]:g}" if isinstance(row[k], float) else str(row[k]) for k in keys]
        drawn.add_row(*values, row["state"], step, *losses, speed, *spent, row["reason"])
    return drawn


def _say_end(study: Study, code: int, world: int, screen: _Screen) -> None:
    from windlass.errors import STOPPED
    from windlass.reports.study import named, read_study, winner, winner_command
    from windlass.study.table import by_seed

    if not screen.live:
        screen.console.print(table(study, screen.console.width))

    def say(text: str) -> None:
        typer.echo(text, err=screen.errors)

    for row in by_seed(study):
        if row["median"] is not None:
            rest = named({k: v for k, v in row.items() if k not in ("median", "low", "high", "seeds", "of")})
            seeds = f"{row['of']} seeds" if row["seeds"] == row["of"] else f"{row['seeds']} of {row['of']} seeds"
            say(f"{rest}: median {row['median']:.4f}, {row['low']:.4f} to {row['high']:.4f} over {seeds}")
    seen = read_study(study.path)
    best = winner(seen.cells)
    if best:
        command, remark = winner_command(seen, best.assignment, world)
        over = f", median of {best.seeds}" if best.seeds else ""
        say(f"best: {named(best.assignment)} (validation loss {best.loss:.4f}{over})")
        say(f"  {command}")
        if remark:
            say(f"  {remark}")
    say(f"report: windlass report {study.path}")
    if code == STOPPED:
        typer.echo("stopped with everything saved; the same command goes on", err=True)
