"""`windlass train` and `windlass verify`."""

from __future__ import annotations

import dataclasses
import gc
import os
import platform
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer import Option

from windlass.cli import Json, Overrides, RecipeName, print_json, say
from windlass.errors import DONE, FAILED, UserError, first_line, plural
from windlass.processes import QUIET_END, exit_with_parent

if TYPE_CHECKING:
    from windlass.run import Run
    from windlass.verification import Proof


def train(
    recipe: RecipeName,
    overrides: Overrides,
    world: int = Option(0, min=0, metavar="N", help="Local processes.", show_default=False),
    fresh: bool = Option(False, "--fresh", help="Rename an existing run directory and start over."),
    max_restarts: int = Option(0, min=0, help="Most restarts after the loss of a rank."),
    stop_at: int = Option(0, min=0, metavar="STEP", help="Save and stop here."),
    extend_to: str = Option("", metavar="STEP|EPOCHS", help='Extend a run to 600 or "3 epochs".'),
    branch_from: str = Option("", metavar="RUN@STEP|best", help="Begin a new run from here."),
) -> int:
    """Train a recipe. The same command resumes the run.

    It trains as one process, as N local processes (--world N), or as a rank under torchrun, srun or
    mpiexec. It resumes a run directory with a committed checkpoint, and leaves a finished run
    alone. The end shows the loss curve and the report.

    Exit codes: 0 done, 1 the run failed, 2 bad input, 75 stopped by a signal: it can be resumed.

    Example: `windlass train quickstart --world 2 run.dir=runs/first`
    """
    gc.disable()  # what the imports create stays; the loop of the training enables it
    from windlass.parallel.env import detect_env
    from windlass.recipe import Recipe
    from windlass.run import Run
    from windlass.training import api
    from windlass.training.stop import StopSignals

    exit_with_parent()  # a launcher or a sweep
    loaded = Recipe.load(recipe, overrides)
    env = detect_env(os.environ)
    start: dict[str, Any] = {"fresh": fresh, "extend_to": extend_to, "branch_from": branch_from}
    if env.launcher == "none" and (world > 1 or max_restarts):
        gc.enable()
        code = api.launch_ranks(loaded, world or 1, sys.argv[1:], start, max_restarts)
        if code == DONE:
            return show_end(Run(loaded.run_dir))  # with the recipe that an extension has changed
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C keeps the exit code
        return code
    with StopSignals():  # while torch is imported; the training has its own
        run = api.train(loaded, world=world, **start, stop_at=stop_at)
    return show_end(run) if env.rank == 0 and run.state == "finished" else DONE


PROVED = {True: ("proved", "green"), False: ("FAILED", "red"), None: ("not tried", "yellow")}


def show_end(run: Run) -> int:
    """Show the loss curve, report and next command of a finished run; a failure is a warning."""
    if os.environ.get(QUIET_END):
        return DONE
    try:
        from windlass.cli.runs import show_published
        from windlass.reports.view import RunView, curve
        from windlass.reports.write import report as write_report

        if text := curve(RunView(run)):
            typer.echo(text)
        # PNG files take most of the time, so only an earlier report's files are drawn again.
        drawn = (run.report_dir / "plots").is_dir()
        written = write_report(run, plots=None if drawn else False)
        show_published(written.published)
        typer.echo(f"report: {written.page}")
    except Exception as error:
        kind = "" if isinstance(error, UserError) else f"{type(error).__name__}: "
        why = f"{kind}{first_line(error)}"
        again = f"`windlass report {shlex.quote(str(run.path))}` tries again"
        say(f"no report: {why}; {again}", err=True)
    chat = " --chat" if "chat" in run.recipe.data.formats else ""
    typer.echo(f"sample: windlass sample {shlex.quote(str(run.path))}{chat}")
    return DONE


def verify(
    recipe: RecipeName = "",
    *,
    overrides: Overrides,
    world: int = Option(0, min=0, help="Most ranks; default: 4 on a CPU, else one per GPU."),
    kills: int = Option(10, min=1, help="How often to kill a saving run."),
    only: str = Option("", metavar="NAMES", help="Only these proofs, such as resume,layouts."),
    json_: Json = False,
) -> int:
    """Prove on this machine that training is exact.

    The default RECIPE is a tiny model, and all proofs take a few minutes. resume: every step
    resumes bit-exactly. strategies, layouts: data parallelism, and tensor, context and pipeline
    parallelism, agree with one process. world: world size and accumulation change nothing but
    rounding (with dropout: for equal micro-batches). kills: kills at random moments of a save lose
    no checkpoint. export: the logits are equal.

    Exit codes: 0 no proof failed (some may be impossible here), 1 a proof failed, 2 bad input.

    Example: `windlass verify`
    """
    import torch
    from rich.text import Text

    from windlass import verification
    from windlass.telemetry.terminal import pairs, rich_console

    console = rich_console(sys.stdout)
    names = [name for name in only.split(",") if name]

    def show(proof: Proof) -> None:
        if json_:
            return
        word, color = PROVED[proof.passed]
        claim = f"{proof.claim} ({proof.seconds:.0f} s)"
        measured = [proof.measured, *(f"not tried: {part}" for part in proof.untried)]
        console.print(pairs([(Text(f"{word:<9}", color), claim), ("", "\n".join(measured))]))

    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name(0) if cuda else f"CPU {platform.machine()}"
    conditions = (
        f"bits are compared for equal world, micro-batch, threads and versions (torch "
        f"{torch.__version__}, {device}), with train.deterministic={str(cuda).lower()} and "
        "train.compile=false"
    )
    if not json_:
        number = len(names or verification.PROOFS)
        console.print(f"{plural(number, 'proof')}; all take minutes with the tiny model on a CPU")
        console.print(f"{conditions}\n")
    proofs = verification.verify(recipe, overrides, world, kills, show, names)
    if json_:
        fields = [dataclasses.asdict(proof) for proof in proofs]
        print_json({"conditions": conditions, "proofs": fields})
    else:
        typer.echo(f"\n{summary_of(proofs)}")
    return FAILED if any(proof.passed is False for proof in proofs) else DONE


def summary_of(proofs: Sequence[Proof]) -> str:
    failed = [proof.name for proof in proofs if proof.passed is False]
    untried = [proof.name for proof in proofs if proof.passed is None]
    count = len(proofs) - len(failed) - len(untried)
    words = [f"{count} of {len(proofs)} proved" if failed or untried else "proved"]
    if failed:
        words.append(f"failed: {', '.join(failed)}")
    untried += [part for proof in proofs for part in proof.untried]
    if untried:
        words.append(f"not tried: {', '.join(untried)}")
    return "; ".join(words)
