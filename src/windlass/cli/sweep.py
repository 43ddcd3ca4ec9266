"""`windlass sweep`: a grid of settings as a study, worked through cell by cell, kill-safe."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import typer

from windlass.study.grid import AXIS_HELP

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.study.study import Study

WIDE = 110
"""Columns of a terminal from which the table shows device-hours too."""


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("sweep", epilog=f"\b\nAxes, which are crossed:\n{AXIS_HELP}")(sweep)


def sweep(
    recipe: str = typer.Argument(..., metavar="RECIPE", help="The recipe that all cells share."),
    axes: list[str] = typer.Argument(..., metavar="KEY=A,B,C...", help="Axes: values, ranges and zips; see below."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="A setting that all cells share."),
    dir_: str = typer.Option("", "--dir", help="The study's directory; default: studies/<preset>-<hash>."),
    world: int = typer.Option(1, min=1, help="Ranks of each cell; parallel.world=1,2,4 makes them an axis."),
    workers: int = typer.Option(1, min=1, help="Cells side by side, each with its share of threads or devices."),
    stop_diverged: bool = typer.Option(False, help="Stop a cell whose loss is not finite or 1 nat above its first."),
    halving: bool = typer.Option(
        False,
        help="Asynchronous successive halving: at its 1st, 2nd, 4th, ... evaluation a cell goes on only if it is in the "
        "better half, by checkpoint.best, of those that came there before it.",
    ),
    retry_failed: bool = typer.Option(False, help="Train failed and diverged cells again."),
    submit: str = typer.Option("", metavar="slurm|pbs", help="Submit the open cells as an array job instead."),
    submit_arg: list[str] = typer.Option(
        [], metavar="ARG", help="An argument for the scheduler, as --submit-arg=--time=04:00:00; may be repeated."
    ),
    dry_run: bool = typer.Option(False, help="With --submit: print the batch script, write and submit nothing."),
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

    from windlass.errors import DONE, FAILED, UserError
    from windlass.recipe import Recipe
    from windlass.study.study import Study
    from windlass.study.submit import submit_sweep
    from windlass.study.sweep import DONE_STATES
    from windlass.study.sweep import sweep as run_sweep

    base, path = Recipe.load(recipe, set_), Path(dir_) if dir_ else None
    if submit:
        if halving:
            raise UserError("--halving compares cells while one sweep runs them: it does not go with --submit")
        study = Study.create(base, axes, path, write=not dry_run)
        flags = {"world": world, "stop_diverged": stop_diverged, "retry_failed": retry_failed, "arguments": submit_arg}
        script = submit_sweep(study, submit, dry_run=dry_run, notify=typer.echo, **flags)  # type: ignore[arg-type]
        if dry_run:
            typer.echo(script, nl=False)
        return DONE
    if submit_arg or dry_run:
        raise UserError("--submit-arg and --dry-run go with --submit slurm or --submit pbs")
    with Screen(errors=json_) as screen:
        study = run_sweep(
            base, axes, path=path, world=world, workers=workers, stop_diverged=stop_diverged, halving=halving,
            retry_failed=retry_failed, only=only if only >= 0 else None, show=screen.show, notify=screen.say,
        )  # fmt: skip
    results = study.results()
    if json_:
        typer.echo(json.dumps([result.row() for result in results], indent=1))
    screen.end(study, world)
    worked = [results[only]] if only >= 0 else results
    return DONE if all(result.state in DONE_STATES for result in worked) else FAILED


class Screen:
    """The study's table, redrawn in a terminal; elsewhere a line whenever a cell's state changes."""

    def __init__(self, *, errors: bool = False) -> None:
        """With `errors` everything goes to stderr: stdout is for JSON alone."""
        from rich.console import Console

        self.errors = errors
        self.console = Console(stderr=errors)
        if not self.console.is_terminal:  # a file has no width, so that no number need be cut
            self.console = Console(stderr=errors, width=140)
        self.live: Any = None
        self.study: Study | None = None
        self.states: dict[str, str] = {}
        self.drawn = 0.0

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            if self.study:  # what is on the screen may be a second old
                self.live.update(table(self.study, self.console.width), refresh=True)
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a line for the user."""
        if self.live:
            self.console.print(text, markup=False, highlight=False)
        else:
            typer.echo(text, err=self.errors)

    def show(self, study: Study) -> None:
        """Called often; draws about once a second."""
        self.study = study
        if self.live:
            if time.monotonic() - self.drawn > 1 or self.drawn == 0:
                self.live.update(table(study, self.console.width), refresh=True)
                self.drawn = time.monotonic()
            return
        for number, result in enumerate(study.results(), 1):
            key, state = result.cell.key, result.state
            if self.states.get(key) != state and (state != "waiting" or key in self.states):
                self.states[key] = state
                reason = f" ({result.reason})" if result.reason else ""
                self.say(f"[{number}/{len(study.cells)}] {result.cell.label}: {state}{reason}")

    def end(self, study: Study, world: int) -> None:
        """The final table, medians over seeds, and the command that trains the winner."""
        if not self.live:
            self.console.print(table(study, self.console.width))
        groups, best = study.groups(), study.winner()
        for group in groups:
            if group.seeds and group.median is not None:
                low, high = min(group.scores), max(group.scores)
                self.say(f"{group.label}: median {group.median:.4f}, {low:.4f} to {high:.4f} over {group.seeds}")
        if best:
            command, remark = study.winner_command(best.assignment, world)
            name = "validation loss" if study.measure == "loss" else study.measure
            self.say(
                f"best: {best.label} ({name} {best.median:.4f}{f', median of {best.seeds}' if best.seeds else ''})"
            )
            self.say("\n".join(f"  {line}" for line in (command, remark) if line))
        self.say(f"report: windlass report {study.path}")


def table(study: Study, width: int = WIDE) -> Table:
    """The study as a table for a terminal of so many columns."""
    from rich.table import Table

    wide = width >= WIDE
    best = "best" if study.measure == "loss" else f"best {study.measure}"
    names = ["state", "step", "loss", "val loss", best, "tokens/s", *(["device-h"] if wide else []), "reason"]
    drawn = Table(title=str(study.path), title_justify="left")
    for name in [*(key.rsplit(".", 1)[-1] for key in study.keys), *names]:
        drawn.add_column(name, justify="left" if name in ("state", "reason") else "right", no_wrap=name == "state")
    for r in study.results():
        settings = [f"{v:g}" if isinstance(v, float) else str(v) for v in r.cell.assignment.values()]
        step = f"{r.step}/{r.steps or '?'}" if r.step or r.steps else ""
        numbers = ["" if v is None else f"{v:.4f}" for v in (r.loss, r.eval_loss, r.score)]
        speed = f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else ""
        hours = ["" if r.device_hours is None else f"{r.device_hours:.3g}"] if wide else []
        drawn.add_row(*settings, r.state, step, *numbers, speed, *hours, r.reason)
    return drawn
