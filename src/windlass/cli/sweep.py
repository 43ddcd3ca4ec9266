"""`windlass sweep`: a grid of settings as a study, worked through cell by cell, kill-safe."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from windlass.study.grid import AXIS_HELP

EPILOG = f"\b\nAxes, which are crossed:\n{AXIS_HELP}"


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
    from windlass.errors import DONE, FAILED, UserError
    from windlass.recipe import Recipe
    from windlass.study.screen import Screen
    from windlass.study.submit import submit_sweep
    from windlass.study.sweep import DONE_STATES
    from windlass.study.sweep import sweep as run_sweep

    base, path = Recipe.load(recipe, set_), Path(dir_) if dir_ else None
    if not submit and (submit_arg or dry_run):
        raise UserError("--submit-arg and --dry-run go with --submit slurm or --submit pbs")
    if submit:
        script = submit_sweep(
            base, axes, submit, path=path, world=world, stop_diverged=stop_diverged, halving=halving,
            retry_failed=retry_failed, arguments=submit_arg, dry_run=dry_run, notify=typer.echo,
        )  # fmt: skip
        typer.echo(script if dry_run else "", nl=False)
        return DONE
    with Screen(errors=json_) as screen:
        study = run_sweep(
            base, axes, path=path, world=world, workers=workers, stop_diverged=stop_diverged, halving=halving,
            retry_failed=retry_failed, only=only if only >= 0 else None, show=screen.show, notify=screen.say,
        )  # fmt: skip
    results = study.results()
    if json_:
        typer.echo(json.dumps([result.row() for result in results], indent=1))
    screen.end(study, world)
    worked_on = [results[only]] if only >= 0 else results
    return DONE if all(result.state in DONE_STATES for result in worked_on) else FAILED
