"""`windlass sweep` and `windlass scale`'s common parts: a study, cell by cell, kill-safe."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from windlass.cli import Json, print_json, say
from windlass.cli.runs import show_study
from windlass.errors import DONE, FAILED, plural

if TYPE_CHECKING:
    from windlass.study.progress import Progress
    from windlass.study.study import Study

EPILOG = """Axes, which are crossed:

```text
optim.lr=1e-2,1e-3,1e-4              three values
optim.lr=1e-4:1e-2:log:5             five values, evenly in the logarithm
model.width=128:512:lin:4            four values, evenly; whole numbers
optim.lr+train.global_batch=1e-3+64,5e-4+128
                                     two values: both change together
run.seed=1,2,3                       seeds: the table adds medians
parallel.strategy=ddp,full_shard     any setting of a recipe
parallel.world=1,2,4                 ranks of a cell; overrides --world
```
"""
StudyName = Annotated[
    str, Argument(metavar="RECIPE|STUDY", help="The recipe of all cells, a study, or its preset.")
]
RetryFailed = Annotated[bool, Option("--retry-failed", help="Train failed cells again.")]


def sweep(
    recipe: StudyName,
    axes: list[str] = Argument(None, metavar="KEY=A,B,C", help="Axes; see below."),
    *,
    set_: list[str] = Option([], "--set", metavar="KEY=VALUE", help="A setting of all cells."),
    dir_: Path | None = Option(None, "--dir", help="Default: studies/PRESET-HASH."),
    world: int = Option(0, min=0, help="Ranks of each cell; 0: as the study has it, or 1."),
    workers: int = Option(1, min=1, help="Cells side by side, which share threads or devices."),
    retry_failed: RetryFailed = False,
    create: bool = Option(False, "--create", help="Create the study for `windlass submit STUDY`."),
    only: int = Option(-1, hidden=True, help="Train one cell, as a task of an array job."),
    launch: bool = Option(False, hidden=True, help="A cell has all ranks of the allocation."),
    json_: Json = False,
) -> int:
    """Train every cell of a grid, and tabulate the results.

    Each cell is a run in its own directory. After a kill the same command resumes. More values
    or another axis add cells to the study. A failed cell stays in the table with its reason,
    and the others continue.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal, all is saved.

    Example: `windlass sweep quickstart optim.lr=1e-3,3e-3 --set train.steps=200`
    """
    from windlass.study import runner as studies
    from windlass.study.progress import Progress

    progress = Progress(sys.stderr if json_ else sys.stdout)  # with --json stdout has JSON alone
    if create:
        return show_created(studies.create_sweep(recipe, axes or (), set_, dir_, world))
    number = only if only >= 0 else None
    study = studies.sweep(
        recipe,
        axes or (),
        set_,
        path=dir_,
        world=world,
        workers=workers,
        only=number,
        launch=launch,
        retry_failed=retry_failed,
        progress=progress,
    )
    if json_:
        print_json([result.row() for result in study.results()])
    progress.show_end(study)
    if not json_:
        show_study(study)
    show_winners(progress, study)
    return exit_code(study, number)


def show_created(study: Study) -> int:
    cells = f"{study.path}: {plural(len(study.cells), 'cell')}"
    say(f"{cells}; `windlass submit {shlex.quote(str(study.path))}` trains them")
    return DONE


def exit_code(study: Study, only: int | None = None) -> int:
    """DONE if all cells, or the one with this number, are finished."""
    results = study.results()
    chosen = results if only is None else [results[only]]
    return DONE if all(result.state == "finished" for result in chosen) else FAILED


def show_winners(progress: Progress, study: Study) -> None:
    """Print medians over seeds, and the command that trains each winner, or why there is none."""
    from windlass.study.results import seed_groups
    from windlass.telemetry.measures import show, title_of

    for group in seed_groups(study.results()):
        if group.seeds and group.median is not None:
            median = show(group.median, "loss")
            low, high = show(min(group.scores), "loss"), show(max(group.scores), "loss")
            spread = f"{low} to {high} over {group.seeds}"
            progress.notify(f"{group.label}: median {median}, {spread}")
    winners, remark = study.winners()
    for place, group in enumerate(winners):
        over = f", median of {group.seeds}" if group.seeds else ""
        score = f"{title_of(study.measure)} {show(group.median, 'loss')}{over}"
        of_all = " of all" if len(winners) > 1 and not place else ""
        progress.notify(f"best{of_all}: {group.label} ({score})")
        command = study.winner_command(group.assignment)
        progress.console.out(f"  {command}")  # whole, so that one can copy it
    progress.notify(remark)
    progress.console.out(f"report: windlass report {shlex.quote(str(study.path))}")
