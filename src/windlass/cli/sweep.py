"""`windlass sweep`: a grid of settings as a study, worked through cell by cell, kill-safe."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli import Json, complete
from windlass.errors import DONE, FAILED, UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    from windlass.study.study import CellResult, Study

AXES = """\b
Axes, which are crossed:
    optim.lr=1e-2,1e-3,1e-4              three values
    optim.lr=1e-4:1e-2:log:5             five values from 1e-4 to 1e-2, evenly on a logarithmic axis
    model.width=128:512:lin:4            four values evenly on a linear axis (whole numbers stay whole)
    optim.lr+train.global_batch=1e-3+64,5e-4+128
                                         a zip: both change together, two values
    run.seed=1,2,3                       seeds: the table adds medians and spread
    parallel.strategy=ddp,full_shard     any setting of a recipe, also those that change no result
    parallel.world=1,2,4                 the ranks of a cell: no setting, but an axis; overrides --world
"""


NAMES = {"loss": "validation loss", "loss.bits_per_byte": "bits per byte"}


RECIPE_HELP = "The recipe that all cells share, or a study."
RecipeOrStudy = Annotated[
    str, typer.Argument(metavar="RECIPE|STUDY", help=RECIPE_HELP, autocompletion=complete.recipes)
]


def sweep(
    recipe: RecipeOrStudy,
    axes: list[str] = typer.Argument(None, metavar="KEY=A,B,C...", help="Axes: values, ranges and zips; see below."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="A setting that all cells share."),
    dir_: Path = typer.Option(None, "--dir", help="The study's directory; default: studies/<preset>-<hash>."),
    world: int = typer.Option(1, min=1, help="Ranks of each cell; parallel.world=1,2,4 makes them an axis."),
    workers: int = typer.Option(1, min=1, help="Cells side by side, each with its share of threads or devices."),
    stop_diverged: bool = typer.Option(False, help="Stop a cell whose loss is not finite or 1 nat above its first."),
    halving: bool = typer.Option(False, help="Asynchronous successive halving, by checkpoint.best: see above."),
    retry_failed: bool = typer.Option(False, help="Train failed and diverged cells again."),
    submit: str = typer.Option("", metavar="slurm|pbs", help="Submit the open cells as an array job instead."),
    submit_arg: list[str] = typer.Option([], metavar="ARG", help="For the scheduler, as --submit-arg=--time=04:00:00."),
    dry_run: bool = typer.Option(False, help="With --submit: print the batch script, write and submit nothing."),
    only: int = typer.Option(-1, hidden=True, help="Work on one cell by number; what an array job's tasks call."),
    json_: Json = False,
) -> int:
    """Train every cell of a grid, and tabulate what came out.

    Each cell is a run like any other, in its own directory. Kill it anywhere and give the same command again: finished
    cells are left alone, interrupted ones resume. With more values or another axis the study grows: cells that it has are
    not trained again. A failed cell stays in the table with its reason, and does not stop the
    others. With run.seed as an axis the table adds medians and spread. With --halving a cell continues at its 1st, 2nd, 4th,
    ... evaluation only if it is in the better half of those that came there before it.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from rich.console import Console
    from rich.live import Live

    from windlass.recipe import Recipe
    from windlass.study import sweep as studies
    from windlass.study.study import Study

    base, axes = Recipe.load(recipe, set_), axes or []
    dir_ = dir_ or (Path(recipe) if Study.is_study(recipe) else None)
    settings: dict[str, Any] = {"path": dir_, "world": world, "retry_failed": retry_failed}
    settings |= {"stop_diverged": stop_diverged, "halving": halving}
    if submit:
        more: dict[str, Any] = {"arguments": submit_arg, "dry_run": dry_run, "notify": typer.echo}
        script = studies.submit_sweep(base, axes, submit, **settings, **more)
        typer.echo(script if dry_run else "", nl=False)
        return DONE
    if submit_arg or dry_run:
        raise UserError("--submit-arg and --dry-run go with --submit slurm or --submit pbs")
    one, states = only if only >= 0 else None, dict[str, str]()
    console = Console(stderr=json_, highlight=False)  # with --json stdout is for JSON alone
    console.width = console.width if console.is_terminal else 140  # a file has no width
    with Live(console=console, auto_refresh=False) as live:
        study = studies.sweep(
            base, axes, **settings, workers=workers, only=one, show=partial(_show, live, states), notify=console.out
        )
    results = study.results()
    if json_:
        typer.echo(json.dumps([result.row() for result in results], indent=1))
    if not console.is_terminal:
        console.print(table(study, results))
    _print_end(console, study, world)
    worked_on = results if one is None else [results[one]]
    return DONE if all(result.state in studies.DONE_STATES for result in worked_on) else FAILED


def _show(live: Live, states: dict[str, str], study: Study) -> None:
    """Draw the table anew in a terminal; elsewhere print a line for each cell whose state is not that in `states`."""
    results = study.results()
    if live.console.is_terminal:
        live.update(table(study, results), refresh=True)
        return
    for number, result in enumerate(results, 1):
        key, state = result.cell.key, result.state
        if state != states.get(key, "waiting"):
            states[key] = state
            reason = f" ({result.reason})" if result.reason else ""
            live.console.out(f"[{number}/{len(results)}] {result.cell.label}: {state}{reason}")


def _print_end(console: Console, study: Study, world: int) -> None:
    """Medians over seeds, and the command that trains each winner, or why there is none."""
    for group in study.groups():
        if group.seeds and group.median is not None:
            low, high = min(group.scores), max(group.scores)
            console.out(f"{group.label}: median {group.median:.4f}, {low:.4f} to {high:.4f} over {group.seeds}")
    winners, remark = study.winners()
    for best in winners:
        name = NAMES.get(study.measure, study.measure)
        console.out(f"best: {best.label} ({name} {best.median:.4f}{f', median of {best.seeds}' if best.seeds else ''})")
        console.out("\n".join(f"  {line}" for line in study.winner_command(best.assignment, world) if line))
    if remark:
        console.print(remark)
    console.out(f"report: windlass report {study.path}")


def table(study: Study, results: Sequence[CellResult]) -> Table:
    """The study as a table for a terminal; in a narrow one numbers continue on the next line."""
    from rich.table import Table

    best = "best" if study.measure == "loss" else f"best {NAMES.get(study.measure, study.measure)}"
    names = ["state", "step", "loss", "val loss", best, "tokens/s", "device-h", "reason"]
    drawn = Table(title=str(study.path), title_justify="left")
    for name in [*(key.rsplit(".", 1)[-1] for key in study.keys), *names]:
        drawn.add_column(name, justify="left" if name in ("state", "reason") else "right", overflow="fold")
    for r in results:
        settings = [f"{v:g}" if isinstance(v, float) else str(v) for v in r.cell.assignment.values()]
        step = f"{r.step}/{r.steps or '?'}" if r.step or r.steps else ""
        numbers = ["" if v is None else f"{v:.4f}" for v in (r.loss, r.eval_loss, r.score)]
        speed = f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else ""
        hours = "" if r.device_hours is None else f"{r.device_hours:.3g}"
        drawn.add_row(*settings, r.state, step, *numbers, speed, hours, r.reason)
    return drawn
