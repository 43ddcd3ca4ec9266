"""`windlass scale`: one recipe on growing numbers of ranks, or with several strategies, as a study; kill-safe."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from windlass.cli import Json, Overrides, complete
from windlass.cli.sweep import _show, cells_table
from windlass.errors import DONE, FAILED, UserError

EPILOG = """\b
Modes, and what stays equal as the ranks grow:
    strong       the global batch (train.global_batch) and the steps
    fixed-data   the batch of a rank and the data: train.global_batch is that of
                 ONE rank, the global batch grows, the steps shrink
    weak         the batch of a rank (as above) and the steps
    weak --grow model
                 the global batch and the steps; model.layers grows with the ranks
    strategies   at one --worlds: ddp, full_shard, shard_grad_op, hybrid_shard, with
                 and without offload and activation checkpointing, --precisions
The smallest of --worlds is the baseline.
"""
RECIPE_HELP = "What is trained, a study to continue, or a preset of one."


def scale(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE|STUDY", help=RECIPE_HELP, autocompletion=complete.studies)],
    overrides: Overrides,
    mode: str = typer.Option("", help="strong (default), fixed-data, weak or strategies; see below."),
    worlds: str = typer.Option("", metavar="N,N,...", help="Numbers of ranks, as 1,2,4,8."),
    grow: str = typer.Option("", help="With --mode weak: batch (default) or model."),
    repeats: int | None = typer.Option(None, min=1, metavar="R", help="Runs of each setup; default 1."),
    warmup: int | None = typer.Option(None, min=0, metavar="STEPS", help="First steps, which do not count; default 5."),
    precisions: str = typer.Option("", metavar="P,P", help="With strategies: train.precision, as fp32,bf16."),
    project: str = typer.Option("", metavar="N,N,...", help="More ranks, to predict; marked as such."),
    no_probe: bool = typer.Option(False, "--no-probe", help="Do not measure machine and steps without communication."),
    dir_: Path | None = typer.Option(None, "--dir", help="The study; default: studies/<preset>-<mode>-<hash>."),
    retry_failed: bool = typer.Option(False, help="Train failed cells again, and their probes."),
    only: int = typer.Option(-1, hidden=True, help="Work on one cell by number; what an array job's tasks call."),
    json_: Json = False,
) -> int:
    """Train a recipe on several numbers of ranks, or with several strategies, and tabulate speed, efficiency and memory.

    Cells run one at a time. Kill it anywhere and give the same command again: what is done is left alone. After the first
    cell of each setup some steps are measured without communication, on one rank's share of the batch.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from rich.live import Live

    from windlass.study import scale as studies
    from windlass.study.presets import load_study
    from windlass.study.study import Study
    from windlass.study.sweep import DONE_STATES
    from windlass.telemetry.terminal import rich_console

    is_study = Study.is_study(recipe)
    base, options = load_study(recipe, "scale", overrides)
    if is_study and overrides and not worlds:
        raise UserError(
            f"{recipe} is a study, whose cells have their settings: leave {' '.join(overrides)} out, or add --worlds"
        )
    given = {"mode": mode, "grow": grow, "repeats": repeats, "warmup": warmup, "worlds": numbers("worlds", worlds)}
    given |= {"precisions": [word for word in precisions.split(",") if word], "project": numbers("project", project)}
    options |= {name: value for name, value in given.items() if value not in (None, "", [])}
    path = dir_ or (Path(recipe) if is_study else None)
    if not options.get("worlds") and not (path and Study.is_study(path)):
        raise UserError("which numbers of ranks? Write --worlds 1,2 (the smallest is the baseline)")
    shown, console = dict[str, tuple[str, float]](), rich_console(sys.stderr if json_ else sys.stdout)
    with Live(console=console, auto_refresh=False) as live:
        work: dict[str, Any] = {
            "show": partial(_show, live, shown),
            "notify": console.out,
            "retry_failed": retry_failed,
        }
        study = studies.scale(base, **options, **work, path=path, probes=not no_probe, only=only if only >= 0 else None)
    results = study.results()
    if json_:
        typer.echo(json.dumps([result.row() for result in results], indent=1))
    if not console.is_interactive:
        console.print(cells_table(study, results, console.width))
    console.out(f"report: windlass report {study.path}")
    worked_on = results if only < 0 else [results[only]]
    return DONE if all(result.state in DONE_STATES for result in worked_on) else FAILED


def numbers(option: str, text: str) -> list[int]:
    """`1,2,4` as numbers; UserError for anything else."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise UserError(f"--{option} {text}: write whole numbers with commas, as 1,2,4")
    return [int(word) for word in words]
