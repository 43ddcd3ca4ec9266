"""`windlass sweep`, `scale` and `ladder`: studies, cell by cell, kill-safe."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from windlass.cli import Json, Overrides, print_json, say
from windlass.cli.runs import show_study
from windlass.errors import DONE, FAILED, UserError, plural

if TYPE_CHECKING:
    from windlass.study.ladder import Best, Ladder
    from windlass.study.progress import Progress
    from windlass.study.study import Study

EPILOGS = {
    "sweep": """Axes, which are crossed:

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
""",
    "scale": """Modes, and the quantities that stay as the ranks grow:

```text
strong         the global batch (train.global_batch) and the steps
fixed-data     the batch of a rank and the data: train.global_batch
               counts for ONE rank; the global batch grows, steps shrink
weak           the batch of a rank (as above) and the steps;
               with --grow model the global batch and the steps, while
               model.layers grows with the ranks
strategies     at one --worlds: ddp, shard_optim, shard_grad_op,
               full_shard, hybrid_shard, with and without offload and
               activation checkpointing
```

The smallest of --worlds is the baseline.
""",
}
StudyName = Annotated[
    str, Argument(metavar="RECIPE|STUDY", help="The recipe of all cells, a study, or its preset.")
]
RetryFailed = Annotated[bool, Option("--retry-failed", help="Train failed cells again.")]
Workers = Annotated[int, Option(min=1, help="Cells side by side, which share threads or devices.")]
Create = Annotated[bool, Option("--create", help="Create the study for `windlass submit STUDY`.")]


def sweep(
    recipe: StudyName,
    axes: list[str] = Argument(None, metavar="KEY=A,B,C", help="Axes; see below."),
    *,
    set_: list[str] = Option([], "--set", metavar="KEY=VALUE", help="A setting of all cells."),
    dir_: Path | None = Option(None, "--dir", help="Default: studies/PRESET-HASH."),
    world: int = Option(0, min=0, help="Ranks of each cell; 0: as the study has it, or 1."),
    workers: Workers = 1,
    retry_failed: RetryFailed = False,
    create: Create = False,
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

    progress = Progress(sys.stderr if json_ else sys.stdout)  # with --json stdout has only JSON
    if create:
        return show_created(studies.create_sweep(recipe, axes or (), set_, dir_, world))
    number = only if only >= 0 else None
    options: dict[str, Any] = {"world": world, "workers": workers, "only": number, "launch": launch}
    options |= {"retry_failed": retry_failed, "progress": progress}
    study = studies.sweep(recipe, axes or (), set_, path=dir_, **options)
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


def scale(
    recipe: StudyName,
    overrides: Overrides,
    mode: str = Option("", help="strong (default), fixed-data, weak or strategies."),
    worlds: str = Option("", metavar="N,N,...", help="Numbers of ranks, as 1,2,4,8."),
    grow: str = Option("", help="With --mode weak: batch (default) or model."),
    no_probe: bool = Option(False, "--no-probe", help="Only train; measure nothing beside it."),
    dir_: Path | None = Option(None, "--dir", help="Default: studies/PRESET-MODE-HASH."),
    retry_failed: RetryFailed = False,
    nodes: str = Option("", metavar="N,N,...", help="Hosts of each of --worlds, for jobs."),
    json_: Json = False,
) -> int:
    """Train on several numbers of ranks, and compare.

    Or compare strategies. Cells run one at a time; the same command resumes a killed
    study. Windlass also measures steps without communication. With --nodes it only creates the
    study, and `windlass submit STUDY` trains the cells.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal, all is saved.

    Example: `windlass scale quickstart --worlds 1,2 --mode strong train.steps=60`
    """
    from windlass.study import scale as studies
    from windlass.study.progress import Progress
    from windlass.study.study import Study

    if Study.is_study(recipe) and overrides and not worlds:
        remedy = f"leave {' '.join(overrides)} out, or add --worlds"
        raise UserError(f"{recipe} is a study, whose cells have their settings: {remedy}")
    progress = Progress(sys.stderr if json_ else sys.stdout)
    numbers, hosts = whole_numbers("worlds", worlds), whole_numbers("nodes", nodes)
    options: dict[str, Any] = {"mode": mode, "grow": grow, "nodes": hosts, "probes": not no_probe}
    options |= {"path": dir_, "retry_failed": retry_failed, "progress": progress}
    study = studies.scale(recipe, numbers, overrides, **options)
    _show_setups(study, progress, json_)
    if study.over_hosts:  # jobs train its cells
        progress.notify(f"`windlass submit {shlex.quote(str(study.path))}` trains the open cells")
        return FAILED if any(result.state == "failed" for result in study.results()) else DONE
    return exit_code(study)


def _show_setups(study: Study, progress: Progress, json_: bool) -> None:
    from windlass.reports.study import recommended, setup_table
    from windlass.study.setups import read_setups

    setups = read_setups(study)
    console = progress.console
    if json_:
        names = ("missing", "remarks", "recommended_because")
        rows = []
        for setup in setups:
            row = {"setup": setup.name, **setup.assignment, **setup.values}
            row |= {"state": setup.result.state, "reason": setup.result.reason}
            rows.append(row | {name: getattr(setup, name) for name in names})
        print_json(rows)
    else:
        show_study(study)
    table = setup_table(study, setups)
    console.print(table.terminal(console.width, str(study.path)), *table.notes, sep="\n")
    for best in recommended(study, setups):
        console.print(f"{best.text}\n  {best.command}")
    console.out(f"report: windlass report {shlex.quote(str(study.path))}")


def whole_numbers(option: str, text: str) -> list[int]:
    """`1,2,4` as numbers; UserError for anything else."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise UserError(f"--{option} {text}: write whole numbers with commas, as 1,2,4")
    return [int(word) for word in words]


def ladder(
    recipe: StudyName,
    overrides: Overrides,
    sizes: str = Option("", metavar="N,N,...", help="Parameters, as 1M,3M,10M; or 4x128 shapes."),
    tokens: str = Option("", metavar="N,N,...", help="Per parameter; default 5,10,20,40."),
    dir_: Path | None = Option(None, "--dir", help="Default: studies/PRESET-ladder-HASH."),
    world: int = Option(0, min=0, help="Ranks of each cell; 0: 1."),
    workers: Workers = 1,
    retry_failed: RetryFailed = False,
    create: Create = False,
    add: list[str] = Option([], "--add", metavar="RUN", help="A run that joins the law."),
    flops: float = Option(0.0, min=0, metavar="C", help="Budget: the best size and tokens for it."),
    hours: float = Option(0.0, min=0, metavar="H", help="Budget in hours of a --device."),
    money: float = Option(0.0, min=0, metavar="M", help="Budget in money; needs --price."),
    price: float = Option(0.0, min=0, metavar="P", help="Price of an hour of the --device."),
    device: str = Option("", metavar="NAME", help="Kind of device, such as A100-80GB."),
    json_: Json = False,
) -> int:
    """Train several sizes, fit the law of scaling, predict the next.

    Each size has the recipe's proportions. Its learning rate is the recipe's times (N / N of the
    recipe)^(-1/3), unless the recipe has muP, and its batch the recipe's times that ratio^(2/3).
    If you kill the ladder, give the same command again. Without --sizes a STUDY is continued. The
    law is the form that best predicts the largest size from the smaller ones.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal, all is saved.

    Example: `windlass ladder quickstart --sizes 100k,300k,1M --tokens 5,10,20`
    """
    from windlass.run import Run
    from windlass.study import ladder as ladders
    from windlass.study import runner as studies
    from windlass.study.progress import Progress

    if sum(map(bool, (flops, hours, money))) > 1:
        raise UserError("give one budget: --flops, --hours or --money")
    if bool(money) != bool(price):
        raise UserError("--money and --price, of an hour of the device, belong together")
    added = [Run.open(path) for path in add]
    names = [name.strip() for name in sizes.split(",") if name.strip()]
    study = ladders.create_ladder(recipe, names, _ratios(tokens), overrides, dir_, world)
    if create:
        return show_created(study)
    hours = money / price if money else hours
    if hours:
        ladders.flops_per_hour(study.recipe, device)  # fails before anything trains
    progress = Progress(sys.stderr if json_ else sys.stdout)
    studies.sweep(study, workers=workers, retry_failed=retry_failed, progress=progress)
    seen = ladders.open_ladder(study, added)
    best = seen.best(flops) if flops else seen.best_in(hours, device) if hours else None
    if json_:
        print_json(_law_as_json(seen, best))
    else:
        paid = f"{hours:.3g} h of {device or 'this device'}, " if hours else ""
        _show_law(seen, best, paid, progress)
    if added:
        ladders.join(study, added)
    return exit_code(study)


def _ratios(tokens: str) -> list[float]:
    """`5,10,20` as numbers above 0; UserError for anything else."""
    ratios = list[float]()
    with contextlib.suppress(ValueError):
        ratios = [float(word) for word in tokens.split(",") if word.strip()]
    if tokens and min(ratios, default=0) <= 0:
        raise UserError(f"--tokens {tokens}: write tokens per parameter with commas, as 5,10,20")
    return ratios


def _show_law(seen: Ladder, best: Best | None, paid: str, progress: Progress) -> None:
    """`best`: the answer to a budget; `paid`: the hours of a device, if it is not of FLOPs."""
    from windlass.reports.law import error_table, law_table, predicted_table
    from windlass.telemetry.measures import short

    tables = [law_table(seen), error_table(seen)]
    tables += [predicted_table(seen)] if seen.further else []
    for table in tables:
        progress.console.print(table.terminal(progress.console.width, table.title))
        for note in table.notes:
            progress.console.print(note)
    if best:
        answer = f"{short(best.size)} {seen.law.counted}, {short(best.tokens)} tokens"
        progress.notify(f"best for {paid}{best.flops:.3g} FLOPs: {answer}, loss {best.loss}")
        progress.console.out(f"  {best.command}")
    progress.notify(f"report: windlass report {shlex.quote(str(seen.study.path))}")


def _law_as_json(seen: Ladder, best: Best | None) -> dict[str, Any]:
    """The law, and the best size for the budget, if there is one."""
    law, chosen = seen.law, seen.forms[0]
    values: dict[str, Any] = {
        "form": law.form,
        "embeddings": law.embeddings,
        "constants": {name: list(values) for name, values in law.constants().items()},
        "measure": seen.measure,
        "mean_error": chosen.mean,
        "errors": chosen.errors,
        "left_out": seen.left_out,
    }
    if best:
        optimum = {**best._asdict(), "parameters": best.size, **best.loss._asdict()}
        values["optimum"] = {name: x for name, x in optimum.items() if name != "size"}
    return values
