"""`windlass scale`: a recipe on growing numbers of ranks, or with several strategies."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from typer import Option

from windlass.cli import Json, Overrides, print_json
from windlass.cli.runs import show_study
from windlass.cli.sweep import RetryFailed, StudyName, exit_code
from windlass.errors import DONE, FAILED, UserError

if TYPE_CHECKING:
    from windlass.study.progress import Progress
    from windlass.study.study import Study

EPILOG = """Modes, and the quantities that stay as the ranks grow:

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
"""


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
    study = studies.scale(
        recipe,
        whole_numbers("worlds", worlds),
        overrides,
        mode=mode,
        grow=grow,
        nodes=whole_numbers("nodes", nodes),
        path=dir_,
        probes=not no_probe,
        retry_failed=retry_failed,
        progress=progress,
    )
    _show(study, progress, json_)
    if study.over_hosts:  # jobs train its cells
        progress.notify(f"`windlass submit {shlex.quote(str(study.path))}` trains the open cells")
        return FAILED if any(result.state == "failed" for result in study.results()) else DONE
    return exit_code(study)


def _show(study: Study, progress: Progress, json_: bool) -> None:
    from windlass.reports.scaling import terminal
    from windlass.study.setups import read_setups

    table = read_setups(study)
    console = progress.console
    if json_:
        names = ("missing", "remarks", "recommended_because")
        rows = []
        for setup in table:
            row = {"setup": setup.name, **setup.assignment, **setup.values}
            row |= {"state": setup.result.state, "reason": setup.result.reason}
            rows.append(row | {name: getattr(setup, name) for name in names})
        print_json(rows)
    else:
        show_study(study)
    for part in terminal(study, table, console.width):
        console.print(part)
    console.out(f"report: windlass report {shlex.quote(str(study.path))}")


def whole_numbers(option: str, text: str) -> list[int]:
    """`1,2,4` as numbers; UserError for anything else."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise UserError(f"--{option} {text}: write whole numbers with commas, as 1,2,4")
    return [int(word) for word in words]
