"""`windlass train`: one recipe, one process or many, from the start or from where it stopped."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import typer

from windlass.errors import UserError, first_line

if TYPE_CHECKING:
    from windlass.recipe import Recipe
    from windlass.run import Run


def train(
    recipe: str = typer.Argument(..., metavar="RECIPE", help="A preset's name, a .toml file or a run directory."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Settings to change, as optim.lr=3e-4."),
    world: str = typer.Option(
        "", metavar="N|A..B", help="Number of local processes; A..B: fewer after a rank was lost."
    ),
    fresh: bool = typer.Option(False, "--fresh", help="Rename an existing run directory and start over."),
    max_restarts: int = typer.Option(0, min=0, help="Restarts from the last checkpoint when a rank is lost, at most."),
    stop_at: int = typer.Option(
        0, min=0, metavar="STEP", help="Save and stop after this step; the same command resumes."
    ),
    extend_to: int = typer.Option(
        0, min=0, metavar="STEPS", help="Train an existing run to this step, with the schedule of the longer run."
    ),
    branch_from: str = typer.Option(
        "", metavar="RUN@STEP", help="A new run that starts from another run's checkpoint."
    ),
) -> int:
    """Train a recipe; train again to resume.

    As one process, as N local processes (--world N), or as a rank under torchrun, srun or mpiexec. A run directory that already
    holds a committed checkpoint is resumed; a finished run says so. The end shows the loss curve, a sample and the report.

    Exit codes: 0 done, 1 the run failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from windlass.parallel.env import detect_env
    from windlass.processes import PARENT, exit_with_parent
    from windlass.recipe import Recipe
    from windlass.training.start import resolve_start
    from windlass.training.stop import StopSignals

    if parent := os.environ.pop(PARENT, ""):  # a rank never outlives its launcher, nor a cell of a sweep the sweep
        exit_with_parent(int(parent))
    loaded, env = Recipe.load(recipe, overrides or []), detect_env(os.environ)
    if env.launcher == "none":
        plan = resolve_start(loaded, fresh=fresh, extend_to=extend_to, branch_from=branch_from)
        if plan.finished:
            typer.echo(f"{plan.run.path} is finished: all {plan.run.summary.get('steps', '')} steps are done.")
            show_end(plan.run)
            return 0
        if world not in ("", "1") or max_restarts:
            return _launch(loaded, world or "1", max_restarts, plan.run)
    elif env.launcher != "windlass" and world not in ("", str(env.world)):
        raise UserError(f"--world {world}: this process is one of {env.world} ({env.launcher}); leave --world out")
    with StopSignals():  # importing torch takes seconds; the training then has its own
        from windlass.training.setup import train as run_training

        run = run_training(loaded, fresh=fresh, extend_to=extend_to, branch_from=branch_from, stop_at=stop_at)
    if env.launcher == "none" and run.state == "finished":
        show_end(run)
    return 0


def _launch(recipe: Recipe, world: str, max_restarts: int, run: Run) -> int:
    """Start this very command line on N local processes, which find recipe and data in order."""
    from windlass.data.prepare import prepare
    from windlass.launch.local import launch, parse_worlds, worker_command
    from windlass.training.stop import StopSignals

    worlds = parse_worlds(world)
    for number in worlds:
        recipe.batch(number)
    with StopSignals():
        prepare(recipe)
    code = launch(worker_command(sys.argv[1:]), worlds, max_restarts)
    if code == 0:
        show_end(run)
    return code


def show_end(run: Run) -> None:
    """The loss curve, the last sample and the report of a finished run; what fails here is a warning."""
    if os.environ.get("WINDLASS_QUIET_END"):
        return
    try:
        from windlass.reports.page import report as write_report
        from windlass.reports.text import curve, last_sample
        from windlass.reports.view import view

        run_view = view(run)
        typer.echo("\n".join(part for part in (curve(run_view), last_sample(run_view)) if part))
        typer.echo(f"report: {write_report(run).page}")
    except BrokenPipeError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
        typer.echo(f"no report: {why}; `windlass report {run.path}` tries again", err=True)
