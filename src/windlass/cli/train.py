"""`windlass train` and `windlass verify`: the runs, and the proof that nothing in them is lost or wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import shlex
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import typer

from windlass.cli import Json, Overrides, RecipeName, print_json
from windlass.errors import DONE, FAILED, UserError, first_line

if TYPE_CHECKING:
    from windlass.run import Run
    from windlass.verification import Proof


QUIET_END = "WINDLASS_QUIET_END"  # set for a run whose end another process shows: a cell, the ranks of `--world N`


def train(
    recipe: RecipeName,
    overrides: Overrides,
    world: str = typer.Option(
        "", metavar="N|A..B", help="Local processes; A..B: fewer after a rank was lost."
    ),
    fresh: bool = typer.Option(
        False, "--fresh", help="Rename an existing run directory and start over."
    ),
    max_restarts: int = typer.Option(
        0, min=0, help="Restarts from the last checkpoint when a rank is lost, at most."
    ),
    stop_at: int = typer.Option(
        0, min=0, metavar="STEP", help="Save and stop here; the same command resumes."
    ),
    extend_to: str = typer.Option(
        "",
        metavar="STEP|EPOCHS",
        help='Train on to here (600, "3 epochs"), with the longer run\'s schedule.',
    ),
    branch_from: str = typer.Option(
        "", metavar="RUN@STEP|best", help="Start a new run from another run's checkpoint."
    ),
) -> int:
    """Train a recipe; train again to resume.

    As one process, as N local processes (--world N), or as a rank under torchrun, srun or mpiexec. A run directory that already
    holds a committed checkpoint is resumed; a finished run says so. The end shows the loss curve, a sample and the report.

    Exit codes: 0 done, 1 the run failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from windlass.parallel.env import detect_env
    from windlass.processes import PARENT, WINDLASS, exit_with_parent
    from windlass.recipe import Recipe
    from windlass.run import Run
    from windlass.training.start import resolve_start
    from windlass.training.stop import StopSignals

    if parent := os.environ.pop(
        PARENT, ""
    ):  # a rank never outlives its launcher, nor a cell of a sweep the sweep
        exit_with_parent(int(parent))
    loaded, env = Recipe.load(recipe, overrides), detect_env(os.environ)
    start: dict[str, Any] = {"fresh": fresh, "extend_to": extend_to, "branch_from": branch_from}
    if env.launcher == "none":
        plan = resolve_start(loaded, **start)
        if plan.finished:
            typer.echo(f"{plan.run.path} is finished: {plan.why_finished}.")
            return show_end(plan.run, sample=True)
        plan.recipe.check_packages()
        if world not in ("", "1") or max_restarts:
            from windlass.data.prepare import prepare
            from windlass.launch.local import launch, parse_worlds

            worlds = parse_worlds(world or "1")
            for number in worlds:
                loaded.batch(number)
            with StopSignals():  # once, before the ranks, which find recipe and data in order
                prepare(loaded)
            with quiet_end():  # this process shows the end, and not rank 0
                code = launch([*WINDLASS, *sys.argv[1:]], worlds, max_restarts)
            if code == DONE:
                return show_end(
                    Run(plan.run.path)
                )  # its recipe is read again: an extension has changed it
            signal.signal(
                signal.SIGINT, signal.SIG_IGN
            )  # a second Ctrl-C while this process ends changes no exit code
            return code
    elif env.launcher != "windlass" and world not in ("", str(env.world)):
        raise UserError(
            f"--world {world}: this process is one of {env.world} ({env.launcher}); leave --world out"
        )
    with StopSignals():  # importing torch takes seconds; the training then has its own
        from windlass.training.setup import train as run_training

        run = run_training(loaded, **start, stop_at=stop_at)
    return show_end(run) if env.rank == 0 and run.state == "finished" else DONE


@contextlib.contextmanager
def quiet_end() -> Iterator[None]:
    """Child processes do not show the end of their run."""
    before = os.environ.get(QUIET_END)
    os.environ[QUIET_END] = "1"
    try:
        yield
    finally:
        os.environ.pop(QUIET_END)
        os.environ.update({QUIET_END: before} if before else {})


def show_end(run: Run, sample: bool = False) -> int:
    """The loss curve, the report and the next command of a finished run; what fails here is a warning.

    `sample`: with the last sample, where the training has not shown it.
    """
    if os.environ.get(QUIET_END):
        return DONE
    try:
        from windlass.cli.runs import show_published
        from windlass.reports.page import report as write_report
        from windlass.reports.text import curve, last_sample
        from windlass.reports.view import view

        run_view = view(run)
        typer.echo(
            "\n".join(
                part for part in (curve(run_view), last_sample(run_view) if sample else "") if part
            )
        )
        written = write_report(run)
        show_published(written.published)
        typer.echo(f"report: {written.page}")
    except Exception as error:
        why = (
            str(error)
            if isinstance(error, UserError)
            else f"{type(error).__name__}: {first_line(error)}"
        )
        typer.echo(f"no report: {why}; `windlass report {run.path}` tries again", err=True)
    chat = " --chat" if run.recipe.data.format == "chat" else ""
    typer.echo(f"sample: windlass sample {shlex.quote(str(run.path))}{chat}")
    return DONE


def verify(
    recipe: RecipeName = "",
    *,
    overrides: Overrides,
    world: int = typer.Option(
        0, min=0, help="Use at most so many ranks; default: 4 on a CPU, else one a GPU."
    ),
    kills: int = typer.Option(10, min=1, help="Kill a saving run so often."),
    json_: Json = False,
    keep: str = typer.Option(
        "", metavar="DIR", help="Keep the runs of the proofs in this directory."
    ),
) -> int:
    """Prove, on this machine, that nothing is lost and nothing is wrong in silence. Without a RECIPE: of a tiny model.

    Six proofs with real runs, in a few minutes: resume is bit-exact at every step; strategies agree with one process; world
    size and accumulation change nothing but rounding (with dropout: for equal micro-batches); the sample sequence has no
    repeat and no gap over worlds; kills at random moments of saving lose no checkpoint; export gives equal logits.

    Exit codes: 0 no proof failed (one that could not be tried is named), 1 a proof failed, 2 bad input.
    """
    import torch
    from rich.text import Text

    from windlass import verification
    from windlass.telemetry.terminal import pairs, rich_console

    console = rich_console(sys.stdout)

    def show(proof: Proof) -> None:
        word, color = {
            True: ("proved", "green"),
            False: ("FAILED", "red"),
            None: ("not tried", "yellow"),
        }[proof.passed]
        claim = f"{proof.claim} ({proof.seconds:.0f} s)"
        console.print(pairs([(Text(f"{word:<9}", color), claim), ("", proof.measured)]))

    device = (
        torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU {platform.machine()}"
    )
    conditions = (
        f"bits are compared for equal world, micro-batch, threads and versions (torch "
        f"{torch.__version__}, {device}), with train.deterministic=true and train.compile=false"
    )
    if not json_:
        console.print(f"{conditions}\n")
    proofs = verification.verify(
        recipe, overrides, world, kills, keep or None, (lambda proof: None) if json_ else show
    )
    failed, untried = (
        [proof.name for proof in proofs if proof.passed is passed] for passed in (False, None)
    )
    if json_:
        fields = [dataclasses.asdict(proof) for proof in proofs]
        print_json({"conditions": conditions, "proofs": fields})
    else:
        words = (
            [f"{len(proofs) - len(failed) - len(untried)} of {len(proofs)} proved"]
            if failed or untried
            else ["proved"]
        )
        words += [f"failed: {', '.join(failed)}"] * bool(failed) + [
            f"not tried: {', '.join(untried)}"
        ] * bool(untried)
        typer.echo("\n" + "; ".join(words))
    return FAILED if failed else DONE
