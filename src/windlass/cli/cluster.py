"""`windlass check`, `launch`, `env` and `submit`: the verbs for the machines of a job."""

from __future__ import annotations

import atexit
import os
import shlex
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from windlass import errors
from windlass.cli import Json, Overrides, print_json
from windlass.processes import WINDLASS, exit_with_parent

if TYPE_CHECKING:
    from windlass.launch.schedulers.base import Allocation
    from windlass.preflight.check import Check
    from windlass.recipe import Recipe


MinBusbw = Annotated[
    float, Option(min=0, metavar="GB/S", help="Least bus bandwidth of the largest all-reduce.")
]


def launch(
    command: list[str] = typer.Argument(metavar="-- CMD...", help="What to run on every rank."),
    ranks: int = Option(0, "-n", min=0, help="Ranks in all; default: as the job asked."),
    per_host: int = Option(
        0, min=0, envvar="WINDLASS_PER_HOST", help="Ranks on each host; default: as the job asked."
    ),
    print_: bool = Option(False, "--print", help="Only print the command, and hosts and ranks."),
) -> int:
    """Run a command on every rank of the allocation.

    It uses srun under SLURM, mpiexec under PBS, else local processes. The exit code is the
    command's: 75 if a signal stopped it, 69 if a job lost a host. A signal to this process reaches
    every rank.

    Example: `windlass launch -n 2 -- windlass check`
    """
    from windlass.launch import allocation as jobs
    from windlass.launch.local import launch as launch_local

    exit_with_parent()  # a cell ends with its sweep; its ranks have other parents
    allocation, words = jobs.plan_launch(command, ranks, per_host, print_)
    if print_:
        _show_allocation(allocation, words[0])
        typer.echo(shlex.join(words))
        return errors.DONE
    if allocation.scheduler == "none":
        return launch_local(words, allocation.ranks)
    typer.echo(shlex.join(words), err=True)
    return jobs.launch_in_job(allocation, words, partial(typer.echo, err=True))


def _show_allocation(allocation: Allocation, launcher: str) -> None:
    """Show hosts and ranks on stderr; stdout has only the command."""
    from windlass.processes import visible_gpus
    from windlass.telemetry.terminal import pairs, rich_console, table

    console = rich_console(sys.stderr)
    rows, first = list[tuple[str, str, str]](), 0
    for host, count in zip(allocation.hosts, allocation.per_host, strict=True):
        numbers = f"{first}-{first + count - 1}" if count > 1 else str(first)
        rows.append((host, str(count), numbers))
        first += count
    console.print(table(["host", "ranks", "numbers"], rows, console.width, text=["host"]))
    facts = {
        "scheduler": allocation.scheduler,
        "job": allocation.job,
        "host file": allocation.hostfile,
        "hosts": str(len(allocation.hosts)),
        "GPUs per host": f"{len(visible_gpus())} (here)",
        "world": str(allocation.ranks),
        "launcher": "local processes" if allocation.scheduler == "none" else launcher,
    }
    console.print(pairs([(name, value) for name, value in facts.items() if value]))


def env(
    save: bool = Option(False, "--save", help="Write this job's variables for your other shells."),
) -> None:
    """Print the variables of a saved job for another shell.

    In the job's own shell: `windlass env --save`. In another one: `eval "$(windlass env)"`.

    Example: `windlass env --save`
    """
    from windlass.launch.allocation import jobs_dir, load_job, save_job
    from windlass.launch.schedulers import find_job

    if save:
        path = save_job(os.environ, jobs_dir())
        typer.echo(f'saved to {path}; in another shell: eval "$(windlass env)"', err=True)
        return
    variables = load_job(jobs_dir(), socket.gethostname())
    job = find_job(variables)[1]
    typer.echo(f"the variables of job {job}, the last one saved for this host", err=True)
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def submit(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|STUDY|RUN", help="What to train; a study: its open cells."),
    ],
    overrides: Overrides,
    scheduler: str = Option("", metavar="slurm|pbs", help="Default: the installed one."),
    nodes: int = Option(1, min=1, help="Hosts (of each cell of a study)."),
    gpus_per_node: int = Option(
        -1, min=-1, metavar="G", help="GPUs of a host; default: the site's.", show_default=False
    ),
    per_host: int = Option(0, min=0, help="Ranks of each host; default: one per GPU."),
    time: str = Option("", metavar="HH:MM:SS", help="Time limit; default: the site's."),
    site: Path | None = Option(None, metavar="FILE", help="Default: ~/.config/windlass/site.toml."),
    max_restarts: int = Option(3, min=0, help="Most restarts after lost hosts."),
    min_busbw: MinBusbw = 0.0,
    retry_failed: bool = Option(False, "--retry-failed", help="Failed cells, too."),
    dry_run: bool = Option(False, "--dry-run", help="Print the script and write nothing."),
    cancel: bool = Option(False, "--cancel", help="End the job; it saves first."),
) -> int:
    """Submit a training or a study to SLURM or PBS.

    A job requeues itself at its time limit and resumes.

    Example: `windlass submit quickstart --gpus-per-node 4 --time 01:00:00 --dry-run`
    """
    from windlass.launch.job import read_site
    from windlass.launch.submit import Resources, submit_run
    from windlass.launch.submit import cancel as cancel_jobs
    from windlass.study.jobs import submit_study
    from windlass.study.study import Study

    directory = Path(recipe)
    if cancel:
        typer.echo(f"job {cancel_jobs(directory)} was told to save and end")
        return errors.DONE
    asked = Resources(nodes, per_host, gpus_per_node, time, max_restarts, min_busbw)
    both: dict[str, Any] = {"scheduler": scheduler, "site": read_site(site), "asked": asked}
    both |= {"dry_run": dry_run}
    if not Study.is_study(recipe):
        done = [submit_run(_startable(recipe, overrides), **both)]
        directory = done[0].directory
    elif overrides:
        problem = f"{recipe} is a study, whose cells have their settings"
        raise errors.UserError(f"{problem}: leave {' '.join(overrides)} out")
    else:
        notify = partial(typer.echo, err=True)
        done = submit_study(Study.open(directory), retry_failed=retry_failed, notify=notify, **both)
    if dry_run:
        sys.stdout.write("\n".join(one.script for one in done))
    elif not done:
        typer.echo("nothing to submit: no cell is open")
    else:
        typer.echo(f"submitted job {', '.join(one.job for one in done)}: {directory}")
    return errors.DONE


def _startable(recipe: str, overrides: list[str]) -> Recipe:
    """The recipe of a job; UserError now for what the job would reject after its time in the queue,
    and the end of this verb if the run is finished."""
    from windlass.recipe import Recipe
    from windlass.training.api import say_finished
    from windlass.training.start import resolve_start

    start = resolve_start(loaded := Recipe.load(recipe, overrides))
    if start.finished:
        say_finished(start)
        raise typer.Exit
    return loaded


def check(
    recipe: Annotated[
        str, typer.Argument(metavar="RECIPE", help="It gives device and directories.")
    ] = "quickstart",
    *,
    overrides: Overrides,
    world: int = Option(1, min=1, help="Local processes; under a launcher, its ranks."),
    min_busbw: MinBusbw = 0.0,
    json_: Json = False,
) -> int:
    """Check machine, packages, disk and interconnect.

    It measures the speed of matrix products and collectives on all ranks of a launch. On
    several hosts: windlass launch -- windlass check --min-busbw 5.

    Exit codes: 0 no problem (warnings too), 1 a problem, 2 bad input, 44 the bandwidth could not be
    measured, 46 it is too low.

    Example: `windlass check --world 2`
    """
    from windlass.parallel.env import detect_env
    from windlass.recipe import Recipe

    loaded = Recipe.load(recipe, overrides)
    env = detect_env()
    if env.launcher == "none" and world > 1:
        from windlass.launch.local import launch as launch_local

        return launch_local([*WINDLASS, *sys.argv[1:]], world)
    from windlass.parallel.ranks import exit_now
    from windlass.preflight.check import check as run_check

    def show(text: str) -> None:
        if env.rank == 0 and not json_ and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        done = run_check(loaded, gate=bool(min_busbw), show=show)
    except errors.RunFailed as error:
        show("")
        if not min_busbw:
            raise
        typer.echo(f"windlass: the bandwidth could not be measured: {error}", err=True)
        # runs before the exit that a failed rank registers
        atexit.register(exit_now, errors.NOT_MEASURED)
        return errors.NOT_MEASURED
    show("")
    if env.rank == 0:
        _show_check(done, min_busbw, json_)
    return done.exit_code(min_busbw)


def _show_check(done: Check, min_busbw: float, json_: bool) -> None:
    from windlass.telemetry.terminal import print_table

    code = done.exit_code(min_busbw)
    if json_:
        outcome = {"busbw": done.busbw, "min_busbw": min_busbw or None, "exit_code": code}
        findings = [vars(finding) for finding in done.findings]
        print_json(outcome | {"findings": findings, "ranks": done.ranks, "rates": done.rates})
        return
    rows = [(f.status.replace("ok", ""), f.name, f.text, f.advice) for f in done.findings]
    print_table(["", "what", "found", "advice"], rows, text=["what", "found", "advice"])
    typer.echo("\nMatrix products")
    places = ("rank", "host", "device")
    names = [f"{name} TFLOP/s" for name in done.ranks[0]["tflops"]]
    products = []
    for r in done.ranks:
        speeds = [f"{speed:.3g}" for speed in r["tflops"].values()]
        products.append([*(str(r[place]) for place in places), *speeds])
    print_table([*places, *names], products)
    if done.rates:
        typer.echo("\nCollectives: GB/s by the formulas of nccl-tests, medians of the slowest rank")
        rates = []
        for r in done.rates:
            numbers = (f"{1e6 * r['seconds']:,.0f}", f"{r['algbw']:.3g}", f"{r['busbw']:.3g}")
            rates.append((r["group"], r["collective"], f"{r['size']:,}", *numbers))
        print_table(["group", "collective", "bytes", "us", "algbw", "busbw"], rates)
    measured = "not measured: one rank" if done.busbw is None else f"{done.busbw:.3g} GB/s"
    required = f"; required: {min_busbw:g}" if min_busbw else ""
    typer.echo(f"\nbus bandwidth of the largest all-reduce: {measured}{required}")
    problems = sum(finding.status == "problem" for finding in done.findings)
    outcomes = {errors.NOT_MEASURED: "NOT MEASURED", errors.TOO_SLOW: "TOO SLOW"}
    typer.echo(outcomes.get(code, errors.plural(problems, "problem") if problems else "fine"))
