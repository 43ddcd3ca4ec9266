"""`windlass scale`: one recipe on growing numbers of ranks, or with several strategies, as a study; kill-safe."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli import Json, Overrides, complete, print_json
from windlass.cli.cluster import MAX_SIZE_HELP, valid_size
from windlass.cli.runs import show_study
from windlass.cli.sweep import show_cells
from windlass.errors import DONE, FAILED, UserError

if TYPE_CHECKING:
    from windlass.recipe import Recipe

EPILOG = """\b
Modes, and what stays equal as the ranks grow:
    strong         the global batch (train.global_batch) and the steps
    fixed-data     the batch of a rank and the data: train.global_batch is
                   that of ONE rank, the global batch grows, the steps shrink
    weak           the batch of a rank (as above) and the steps;
                   with --grow model the global batch and the steps, while
                   model.layers grows with the ranks
    strategies     at one --worlds: ddp, shard_optim, shard_grad_op,
                   full_shard, hybrid_shard, with and without offload and
                   activation checkpointing, --precisions
The smallest of --worlds is the baseline.
"""
RECIPE_HELP = "What is trained, a study to continue, or a preset of one."


def scale(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|STUDY", help=RECIPE_HELP, autocompletion=complete.studies),
    ],
    overrides: Overrides,
    mode: str = typer.Option(
        "", help="strong (default), fixed-data, weak or strategies; see below."
    ),
    worlds: str = typer.Option("", metavar="N,N,...", help="Numbers of ranks, as 1,2,4,8."),
    grow: str = typer.Option("", help="With --mode weak: batch (default) or model."),
    repeats: int | None = typer.Option(
        None, min=1, metavar="R", help="Runs of each setup; default 1."
    ),
    warmup: int | None = typer.Option(
        None, min=0, metavar="STEPS", help="First steps, which do not count; default 5."
    ),
    precisions: str = typer.Option(
        "", metavar="P,P", help="With strategies: train.precision, as fp32,bf16."
    ),
    project: str = typer.Option(
        "", metavar="N,N,...", help="More ranks, to predict; marked as such."
    ),
    no_probe: bool = typer.Option(
        False, "--no-probe", help="Do not measure machine and steps without communication."
    ),
    dir_: Path | None = typer.Option(
        None, "--dir", help="The study; default: studies/<preset>-<mode>-<hash>."
    ),
    retry_failed: bool = typer.Option(False, help="Train failed cells again, and their probes."),
    nodes: str = typer.Option(
        "", metavar="N,N,...", help="Numbers of hosts instead of --worlds: submits array jobs."
    ),
    gpus_per_node: int = typer.Option(
        -1,
        min=-1,
        metavar="G",
        help="GPUs of each, a rank for each; default: the site's.",
        show_default=False,
    ),
    scheduler: str = typer.Option(
        "", metavar="slurm|pbs", help="With --nodes; default: the one that is installed."
    ),
    time: str = typer.Option(
        "", metavar="HH:MM:SS", help="Time limit of a cell; default: the site's."
    ),
    min_busbw: float = typer.Option(
        0.0, min=0, metavar="GB/S", help="Bus bandwidth that a cell's hosts must have."
    ),
    max_size: str = typer.Option("", metavar="BYTES", help=MAX_SIZE_HELP, show_default=False),
    site: Path | None = typer.Option(
        None, metavar="FILE", help="Site file; default: ~/.config/windlass/site.toml."
    ),
    dry_run: bool = typer.Option(
        False, "--dry-run", help="With --nodes: print the scripts and write nothing."
    ),
    only: int = typer.Option(
        -1, hidden=True, help="Work on one cell by number; what an array job's tasks call."
    ),
    json_: Json = False,
) -> int:
    """Train a recipe on several numbers of ranks, or with several strategies, and tabulate speed, efficiency and memory.

    Cells run one at a time. Kill it anywhere and give the same command again: what is done is left alone. After the first
    cell of each setup some steps are measured without communication, on one rank's share of the batch.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from windlass.launch.submit import Resources, read_site
    from windlass.study.presets import load_study
    from windlass.study.study import Study

    base, options = load_study(recipe, "scale", overrides)
    path = dir_ or (Path(recipe) if Study.is_study(recipe) else None)
    if Study.is_study(recipe) and overrides and not worlds:
        given = " ".join(overrides)
        raise UserError(
            f"{recipe} is a study, whose cells have their settings: leave {given} out, or add --worlds"
        )
    asked: dict[str, Any] = {"mode": mode, "grow": grow, "repeats": repeats, "warmup": warmup}
    asked |= {"worlds": numbers("worlds", worlds), "project": numbers("project", project)}
    asked |= {"precisions": [word for word in precisions.split(",") if word]}
    options |= {name: value for name, value in asked.items() if value not in (None, "", [])}
    if nodes and worlds:
        raise UserError(
            "--worlds and --nodes: with hosts the ranks are nodes x gpus-per-node; leave --worlds out"
        )
    if nodes:
        resources = Resources(
            gpus_per_node=gpus_per_node,
            time=time,
            min_busbw=min_busbw,
            max_size=valid_size(max_size),
        )
        how = {
            "scheduler": scheduler,
            "site": read_site(site),
            "asked": resources,
            "retry_failed": retry_failed,
        }
        return _submit(base, options | {"nodes": numbers("nodes", nodes)}, path, how, dry_run)
    if not options.get("worlds") and not (path and Study.is_study(path)):
        raise UserError("which numbers of ranks? Write --worlds 1,2 (the smallest is the baseline)")
    options |= {
        "path": path,
        "probes": not no_probe,
        "retry_failed": retry_failed,
        "only": only if only >= 0 else None,
    }
    return _train(base, options, json_)


def _train(base: Recipe, options: dict[str, Any], json_: bool) -> int:
    """Work through the study with a table of its cells, and show its numbers."""
    from rich.live import Live

    from windlass.reports.scaling import endings, scaling_table, sentences
    from windlass.study import scale as studies
    from windlass.study.grid import NODES
    from windlass.study.scaling import rows
    from windlass.study.sweep import DONE_STATES
    from windlass.telemetry.terminal import rich_console

    shown, console = (
        dict[str, tuple[str, float]](),
        rich_console(sys.stderr if json_ else sys.stdout),
    )
    with Live(console=console, auto_refresh=False) as live:
        study = studies.scale(
            base, **options, show=partial(show_cells, live, shown), notify=console.out
        )
    results, only = study.results(), options["only"]
    table = rows(study, results)
    if json_:
        more = ("state", "reason", "spread", "missing", "remarks")
        values = ({"setup": row.setup, **row.assignment, **row.values} for row in table)
        listed = [
            one | {name: getattr(r, name) for name in more}
            for one, r in zip(values, table, strict=True)
        ]
        print_json(listed)
    console.print(scaling_table(table, console.width, str(study.path)))
    for sentence in sentences(study, table):
        console.print(sentence, highlight=False)
    for part in endings(study, table, console.width):
        console.print(part)
    if not json_:
        show_study(study)
    console.out(f"report: windlass report {study.path}")
    if NODES in study.keys and only is None:  # jobs train its cells
        return FAILED if any(result.state == "failed" for result in results) else DONE
    worked_on = results if only is None else [results[only]]
    return DONE if all(result.state in DONE_STATES for result in worked_on) else FAILED


def _submit(
    base: Recipe, options: dict[str, Any], path: Path | None, how: dict[str, Any], dry_run: bool
) -> int:
    """Create a study over hosts and submit the cells that are open, one array job for each number of hosts."""
    from windlass.study.scale import create_study
    from windlass.study.submit import submit_scaling

    on_cpu, site, asked = base.parallel.device == "cpu", how["site"], how["asked"]
    gpus = asked.gpus_per_node if asked.gpus_per_node >= 0 else site.gpus_per_node
    ranks = 1 if on_cpu else max(1, gpus)
    options |= {
        "worlds": [n * ranks for n in options["nodes"]],
        "threads": site.cores(0) if on_cpu else 0,
    }
    study = create_study(base, path=path, write=False, **options)
    scripts = submit_scaling(
        study, **how, dry_run=True
    )  # refuses what cannot be before anything is written
    if dry_run:
        sys.stdout.write("\n".join(script for _, script, _ in scripts))
        return DONE
    study = create_study(base, path=path, **options)
    jobs = submit_scaling(study, **how, notify=typer.echo)
    for directory, _, job in jobs:
        typer.echo(
            f"submitted job {job}: its log is in {directory}; `windlass submit --cancel {directory}` ends it"
        )
    if not jobs:
        typer.echo("nothing to submit: no cell is open")
    typer.echo(f"`windlass scale {study.path}` shows the table")
    return DONE


def numbers(option: str, text: str) -> list[int]:
    """`1,2,4` as numbers; UserError for anything else."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not all(word.isdigit() for word in words):
        raise UserError(f"--{option} {text}: write whole numbers with commas, as 1,2,4")
    return [int(word) for word in words]
