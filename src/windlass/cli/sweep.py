"""`windlass sweep`: a grid of settings as a study, worked through cell by cell, kill-safe."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli import Json, complete, print_json
from windlass.cli.runs import show_study
from windlass.errors import DONE, FAILED

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.live import Live

    from windlass.study.result import CellResult
    from windlass.study.study import Study

PROGRESS_SECONDS = 30.0  # between two lines of a cell that trains, where there is no terminal
EPILOG = """\b
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
RECIPE_HELP = "The recipe that all cells share, a study, or a preset of one."


def sweep(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|STUDY", help=RECIPE_HELP, autocompletion=complete.studies),
    ],
    axes: list[str] = typer.Argument(
        None, metavar="KEY=A,B,C...", help="Axes: values, ranges and zips; see below."
    ),
    set_: list[str] = typer.Option(
        [], "--set", metavar="KEY=VALUE", help="A setting that all cells share."
    ),
    dir_: Path | None = typer.Option(
        None, "--dir", help="The study's directory; default: studies/<preset>-<hash>."
    ),
    world: int = typer.Option(
        0, min=0, help="Ranks of each cell, where it sets no parallel.world; 0: 1."
    ),
    workers: int = typer.Option(
        1, min=1, help="Cells side by side, each with its share of threads or devices."
    ),
    stop_diverged: bool = typer.Option(
        False, help="Stop a cell whose loss is not finite or 1 nat above its first."
    ),
    halving: bool = typer.Option(
        False, help="Asynchronous successive halving, by checkpoint.best: see above."
    ),
    retry_failed: bool = typer.Option(False, help="Train failed and diverged cells again."),
    create: bool = typer.Option(
        False, "--create", help="Only create the study, for `windlass submit STUDY`."
    ),
    only: int = typer.Option(
        -1, hidden=True, help="Work on one cell by number; what an array job's tasks call."
    ),
    launch: bool = typer.Option(False, hidden=True, help="A cell has all ranks of the allocation."),
    json_: Json = False,
) -> int:
    """Train every cell of a grid, and tabulate what came out.

    Each cell is a run like any other, in its own directory. Kill it anywhere and give the same command again: finished
    cells are left alone, interrupted ones resume. With more values or another axis the study grows: cells that it has are not
    trained again. A failed cell stays in the table with its reason, and does not stop the others. With run.seed as an axis the
    table adds medians and spread. With --halving a cell continues at its 1st, 2nd, 4th, ... evaluation only if it is in the
    better half of those that came there before it.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from rich.live import Live

    from windlass.study import sweep as studies
    from windlass.study.presets import load_study, preset_dir
    from windlass.study.study import Study
    from windlass.telemetry.terminal import rich_console

    base, preset = load_study(recipe, "sweep", set_)
    axes, world = axes or preset.get("axes", []), world or preset.get("world", 1)
    path = dir_ or (Path(recipe) if Study.is_study(recipe) else preset_dir(base, preset))
    settings: dict[str, Any] = {"path": path, "world": world, "retry_failed": retry_failed}
    settings |= {"stop_diverged": stop_diverged, "halving": halving, "launch": launch}
    if create:
        study = Study.create(base, axes, path)
        for note in study.notes:
            typer.echo(note)
        typer.echo(
            f"{study.path}: {len(study.cells)} cells; `windlass submit {study.path}` trains them"
        )
        return DONE
    one, shown = only if only >= 0 else None, dict[str, tuple[str, float]]()
    console = rich_console(
        sys.stderr if json_ else sys.stdout
    )  # with --json stdout is for JSON alone
    with Live(console=console, auto_refresh=False) as live:
        show = partial(show_cells, live, shown)
        study = studies.sweep(
            base, axes, **settings, workers=workers, only=one, show=show, notify=console.out
        )
    results = study.results()
    if json_:
        print_json([result.row() for result in results])
    if not console.is_interactive:
        console.print(cells_table(study, results, console.width))
    _print_end(console, study, world)
    if not json_:
        show_study(study)
    worked_on = results if one is None else [results[one]]
    return DONE if all(result.state in studies.DONE_STATES for result in worked_on) else FAILED


def show_cells(live: Live, shown: dict[str, tuple[str, float]], study: Study) -> None:
    """Draw the table again in a terminal; elsewhere print a line for each cell whose state changed, or that trains on.

    `shown`: by cell the state that was printed last, and when.
    """
    from windlass.telemetry.console import duration
    from windlass.telemetry.terminal import size

    results = study.results()
    if live.console.is_interactive:
        live.console.width = size(live.console.file).columns
        live.update(cells_table(study, results, live.console.width), refresh=True)
        return
    for number, result in enumerate(results, 1):
        key, state = result.cell.key, result.state
        before, when = shown.get(key, ("waiting", 0.0))
        trains = state == "running" and result.step and time.monotonic() - when > PROGRESS_SECONDS
        if state != before or trains:
            shown[key] = state, time.monotonic()
            left = "" if result.left_s is None else f", {duration(result.left_s)} left"
            more = f" ({result.reason})" if result.reason else ""
            if trains:
                more = f", step {result.step}/{result.steps}{left}"
            live.console.out(f"[{number}/{len(results)}] {result.cell.label}: {state}{more}")


def _print_end(console: Console, study: Study, world: int) -> None:
    """Medians over seeds, and the command that trains each winner, or why there is none."""
    for group in study.groups():
        if group.seeds and group.median is not None:
            low, high = min(group.scores), max(group.scores)
            console.out(
                f"{group.label}: median {group.median:.4f}, {low:.4f} to {high:.4f} over {group.seeds}"
            )
    winners, remark = study.winners()
    for best in winners:
        name = NAMES.get(study.measure, study.measure)
        console.out(
            f"best: {best.label} ({name} {best.median:.4f}{f', median of {best.seeds}' if best.seeds else ''})"
        )
        console.out(
            "\n".join(f"  {line}" for line in study.winner_command(best.assignment, world) if line)
        )
    if remark:
        console.print(remark)
    console.out(f"report: windlass report {study.path}")


def cells_table(study: Study, results: Sequence[CellResult], width: int) -> Group:
    """The study as a table for a terminal of that width."""
    from windlass.study.grid import short_names
    from windlass.telemetry.console import duration, short
    from windlass.telemetry.terminal import table

    best = "best" if study.measure == "loss" else f"best {NAMES.get(study.measure, study.measure)}"
    head = [
        "cell",
        *short_names(study.keys).values(),
        "state",
        "step",
        "left",
        "loss",
        "val loss",
        best,
        "tok/s",
        "device-h",
        "reason",
    ]
    rows = []
    for number, r in enumerate(results, 1):
        settings = [
            f"{v:g}" if isinstance(v, float) else str(v) for v in r.cell.assignment.values()
        ]
        step = f"{r.step}/{r.steps or '?'}" if r.step or r.steps else ""
        left = "" if r.left_s is None else duration(r.left_s)
        numbers = ["" if v is None else f"{v:.4f}" for v in (r.loss, r.eval_loss, r.score)]
        speed = "" if r.tokens_per_s is None else short(r.tokens_per_s)
        hours = "" if r.device_hours is None else f"{r.device_hours:.3g}"
        rows.append((str(number), *settings, r.state, step, left, *numbers, speed, hours, r.reason))
    return table(head, rows, width, text=("state", "reason"), title=str(study.path))
