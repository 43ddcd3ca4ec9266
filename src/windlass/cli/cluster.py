"""`windlass check`, `launch`, `env` and `submit`: from a login node to all ranks of an allocation."""

from __future__ import annotations

import atexit
import itertools
import os
import shlex
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windlass.cli import Json, Overrides, print_json
from windlass.errors import (
    DONE,
    FAILED,
    INTERRUPTED,
    LOST,
    NOT_MEASURED,
    STOPPED,
    TOO_SLOW,
    RunFailed,
    UserError,
)
from windlass.processes import WINDLASS

if TYPE_CHECKING:
    from windlass.launch.allocation import Allocation
    from windlass.preflight.check import Check

MAX_SIZE_HELP = "Largest message, as 4G; default: CPU 16M, GPU 512M, with --min-busbw 4G."


def valid_size(text: str) -> str:
    """What `--max-size` was given; UserError if it is not a number of bytes."""
    from windlass.preflight.findings import size_of

    if text and not size_of(text):
        raise UserError(f"--max-size {text}: write a number of bytes, as 64M or 4G")
    return text


def launch(
    command: list[str] = typer.Argument(
        metavar="-- CMD...", help="What to run on every rank.", show_default=False
    ),
    ranks: int = typer.Option(
        0, "-n", min=0, help="Ranks in all; default: as the job asked, or one a GPU."
    ),
    per_host: int = typer.Option(
        0,
        min=0,
        envvar="WINDLASS_PER_HOST",
        help="Ranks on each host; default: as the job asked.",
        show_default=False,
    ),
    launcher: str = typer.Option(
        "",
        envvar="WINDLASS_LAUNCHER",
        metavar="srun|mpiexec|torchrun",
        help="Default: the site's, or the scheduler's.",
    ),
    print_: bool = typer.Option(
        False, "--print", help="Only print the command, and tables of hosts and ranks."
    ),
) -> int:
    """Run a command on every rank of the allocation: by srun under SLURM, by mpiexec under PBS, else as local processes.

    The exit code is that of the command: 75 where a signal stopped it with everything saved; 69 where a host of a job was
    lost. A signal to this process reaches every rank.
    """
    from windlass import processes
    from windlass.launch import allocation as here
    from windlass.launch.submit import read_site

    # a cell ends with its sweep; its ranks have other parents
    if parent := os.environ.pop(processes.PARENT, ""):
        processes.exit_with_parent(int(parent))
    gpus = len(processes.visible_gpus())
    allocation = here.read_allocation(os.environ, gpus).with_ranks(ranks, per_host)
    launcher = launcher or read_site().launcher
    chosen = here.default_launcher(allocation, launcher)
    by_mpi = "mpiexec" in (chosen, chosen and here.default_launcher(allocation))
    flavor = here.mpi_flavor(needed=not print_) if by_mpi else ""
    # this is the host of rank 0: all ranks meet there
    if port := here.free_port(allocation.hosts[0]):
        os.environ.setdefault("MASTER_ADDR", allocation.hosts[0])
        os.environ.setdefault("MASTER_PORT", str(port))
    words = here.launch_command(allocation, command, flavor, os.environ, launcher)
    if print_:
        _show_allocation(allocation, launcher or words[0], gpus)
        typer.echo(shlex.join(words))
        return DONE
    if allocation.scheduler == "none":
        from windlass.launch.local import launch as launch_local

        return launch_local(words, allocation.ranks)
    typer.echo(shlex.join(words), err=True)
    return _launch_in_job(allocation, words)


def _launch_in_job(allocation: Allocation, words: list[str]) -> int:
    """Run the launcher of a job to its end, pass signals on, and name the hosts that were lost."""
    from windlass import processes
    from windlass.launch import allocation as here

    with here.reports_dir() as reports:
        environ = os.environ | {processes.REPORTS: reports}
        try:
            child = subprocess.Popen(words, env=environ, preexec_fn=processes.kill_with_parent)  # noqa: PLW1509 - no threads here
        except OSError as error:
            raise UserError(
                f"{words[0]} cannot be started: {error.strerror}; load the module for it"
            ) from None
        # Every launcher passes SIGUSR1 on; at SIGTERM some end the ranks before they have saved.
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda *_: child.send_signal(signal.SIGUSR1))
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
        code = here.wait_for_ranks(child, Path(reports))
        code = here.outcome(code if code >= 0 else 128 - code, Path(reports))
        if code == LOST and (gone := here.lost_hosts(allocation, Path(reports))):
            typer.echo(
                f"windlass: no rank of {', '.join(gone)} has reported its end: lost", err=True
            )
            if path := os.environ.get(here.LOST_HOSTS):
                Path(path).write_text(",".join(gone))
        return code


def _show_allocation(allocation: Allocation, launcher: str, gpus: int) -> None:
    """Its hosts and ranks as tables, on stderr: the command alone is on stdout."""
    from windlass.telemetry.terminal import pairs, rich_console, table

    console, firsts = (
        rich_console(sys.stderr),
        list(itertools.accumulate(allocation.per_host, initial=0)),
    )
    rows = [
        (host, str(count), f"{first}-{first + count - 1}" if count > 1 else str(first))
        for host, count, first in zip(allocation.hosts, allocation.per_host, firsts, strict=False)
    ]
    console.print(table(["host", "ranks", "numbers"], rows, console.width, text=["host"]))
    facts = {
        "scheduler": allocation.scheduler,
        "job": allocation.job,
        "host file": allocation.hostfile,
        "hosts": str(len(allocation.hosts)),
        "GPUs per host": f"{gpus} (here)",
        "world": str(allocation.ranks),
        "launcher": "local processes" if allocation.scheduler == "none" else launcher,
    }
    console.print(pairs([(name, value) for name, value in facts.items() if value]))


def env(
    save: bool = typer.Option(
        False, "--save", help="Write this job's variables, for other shells of yours."
    ),
) -> int:
    """Print the variables of a saved job, so that another shell of the allocation joins it: eval "$(windlass env)".

    First, in the job's own shell: windlass env --save.
    """
    from windlass.launch import allocation as here
    from windlass.launch.schedulers import find_job

    if save:
        path = here.save_job(os.environ, here.jobs_dir())
        typer.echo(f'saved to {path}; in another shell: eval "$(windlass env)"', err=True)
        return DONE
    variables = here.load_job(here.jobs_dir(), socket.gethostname())
    job = find_job(variables)[1]
    typer.echo(f"the variables of job {job}, which was the last to be saved on this host", err=True)
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")
    return DONE


def submit(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE|STUDY|RUN", help="What to train; a study: its open cells."),
    ],
    overrides: Overrides,
    scheduler: str = typer.Option("", metavar="slurm|pbs|lsf", help="Default: the installed one."),
    nodes: int = typer.Option(1, min=1, help="Hosts (of each cell of a study)."),
    gpus_per_node: int = typer.Option(
        -1, metavar="G", help="GPUs of each; default: the site's.", show_default=False
    ),
    per_host: int = typer.Option(
        0, min=0, help="Ranks of each host; default: one a GPU.", show_default=False
    ),
    time: str = typer.Option("", metavar="HH:MM:SS", help="Time limit; default: the site's."),
    site: Path | None = typer.Option(
        None, metavar="FILE", help="Site file; default: ~/.config/windlass/site.toml."
    ),
    max_restarts: int = typer.Option(3, min=0, help="Starts after lost hosts, at most."),
    min_busbw: float = typer.Option(
        0.0, min=0, metavar="GB/S", help="What `windlass check` must measure first."
    ),
    max_size: str = typer.Option("", metavar="BYTES", help=MAX_SIZE_HELP, show_default=False),
    retry_failed: bool = typer.Option(False, "--retry-failed", help="Failed cells, too."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the script and write nothing."),
    watch: bool = typer.Option(False, "--watch", help="Follow state and log to the job's end."),
    cancel: bool = typer.Option(False, "--cancel", help="End the job; it saves first."),
) -> int:
    """Submit a training, or the open cells of a study, to SLURM, PBS or LSF (LSF was not run).

    A job requeues itself at its time limit and resumes.

    Exit codes: 0 submitted, 2 bad input, also for the scheduler; with --watch those of the run.
    """
    from windlass.launch import submit as jobs
    from windlass.study.study import Study

    directory = Path(recipe)
    if cancel:
        typer.echo(f"job {jobs.cancel(directory)} was told to save and end")
        return DONE
    if watch and not dry_run and jobs.queued(directory)[1]:
        return _watch(directory)
    asked = jobs.Resources(
        nodes, per_host, gpus_per_node, time, max_restarts, min_busbw, valid_size(max_size)
    )
    chosen = jobs.read_site(site)
    how = {"scheduler": scheduler, "site": chosen, "asked": asked, "dry_run": dry_run}
    submit_it = _submit_study if Study.is_study(directory) else _submit_run
    where, script, job = submit_it(recipe, overrides, how, retry_failed)
    if dry_run:
        sys.stdout.write(script)
        return DONE
    if not job:
        typer.echo("nothing to submit: no cell is open")
        return DONE
    typer.echo(f"submitted job {job}: {where}")
    return _watch(where) if watch else DONE


def _submit_study(
    name: str, overrides: list[str], how: dict[str, Any], retry_failed: bool
) -> tuple[Path, str, str]:
    """The study's directory, the scripts of its jobs, and their ids."""
    from windlass.study.study import Study
    from windlass.study.submit import submit_study

    if overrides:
        raise UserError(
            f"{name} is a study, whose cells have their settings: leave {' '.join(overrides)} out"
        )
    notify = partial(typer.echo, err=True)
    jobs = submit_study(Study.open(Path(name)), **how, retry_failed=retry_failed, notify=notify)
    script, ids = "\n".join(one.script for one in jobs), ", ".join(one.job for one in jobs)
    return Path(name), script, ids


def _submit_run(
    name: str, overrides: list[str], how: dict[str, Any], retry_failed: bool
) -> tuple[Path, str, str]:
    """The run's directory, the script of its job, and the job's id."""
    from windlass.launch.submit import submit_run
    from windlass.recipe import Recipe

    loaded = Recipe.load(name, overrides)
    script, job = submit_run(loaded, **how)
    return Path(how["site"].scratch or Path.cwd()) / loaded.run_dir, script, job


def _watch(directory: Path) -> int:
    """Follow the job of a run or study to its end; the exit code of what it trained."""
    from windlass.cli.train import show_end
    from windlass.launch.batch import EXIT_CODE
    from windlass.launch.submit import watch
    from windlass.run import Run
    from windlass.study.study import Study

    try:
        watch(directory, typer.echo)
    except KeyboardInterrupt:
        typer.echo(
            f"the job goes on; windlass submit --watch {shlex.quote(str(directory))} follows it again",
            err=True,
        )
        return INTERRUPTED
    if Study.is_study(directory):
        states = [result.state for result in Study.open(directory).results()]
        typer.echo(f"cells finished: {states.count('finished')} of {len(states)}")
        return DONE if states.count("finished") == len(states) else FAILED
    run, exits = Run(directory), directory / EXIT_CODE
    state, text = run.state, exits.read_text().strip() if exits.is_file() else ""
    if state == "finished":
        typer.echo("the run is finished")
        return show_end(run)
    ended = "the job ended" + (f" with exit code {text}" if text else "")
    typer.echo(
        f"{ended} before the run began" if state == "new" else f"the run is {state}; {ended}"
    )
    return int(text or (STOPPED if state == "preempted" else FAILED))


def check(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="[RECIPE]", help="Whose device, directories and trackers are looked at."
        ),
    ] = "quickstart",
    *,
    overrides: Overrides,
    world: int = typer.Option(1, min=1, help="Local processes; under a launcher, its ranks."),
    min_busbw: float = typer.Option(
        0.0, min=0, metavar="GB/S", help="Least bus bandwidth of the largest all-reduce."
    ),
    max_size: str = typer.Option("", metavar="BYTES", help=MAX_SIZE_HELP, show_default=False),
    json_: Json = False,
) -> int:
    """Check this machine, or all ranks of a launch: packages, devices, disks, the speed of matrix products and collectives.

    On several hosts: windlass launch -- windlass check --min-busbw 5.

    Exit codes: 0 fine (warnings too), 1 a problem, 2 bad input, 44 the bandwidth could not be measured, 46 it is too low.
    """
    from windlass.parallel.env import detect_env
    from windlass.recipe import Recipe

    loaded, env = Recipe.load(recipe, overrides), detect_env()
    if env.launcher == "none" and world > 1:
        from windlass.launch.local import launch as launch_local

        return launch_local([*WINDLASS, *sys.argv[1:]], world)
    from windlass.preflight.check import check as run_check
    from windlass.preflight.findings import size_of

    largest = size_of(valid_size(max_size))
    show = _progress if env.rank == 0 and not json_ and sys.stderr.isatty() else lambda text: None
    try:
        done = run_check(loaded, max_bytes=largest, gate=bool(min_busbw), show=show)
    except RunFailed as error:
        show("")
        if not min_busbw:
            raise
        typer.echo(f"windlass: the bandwidth could not be measured: {error}", err=True)
        from windlass.parallel.dist import exit_now

        atexit.register(
            exit_now, NOT_MEASURED
        )  # runs before the one that a rank which failed has registered
        return NOT_MEASURED
    show("")
    if env.rank == 0:
        _show_check(done, min_busbw, json_)
    return done.exit_code(min_busbw)


def _show_check(done: Check, min_busbw: float, json_: bool) -> None:
    """Findings, rates and the outcome."""
    from windlass.telemetry.terminal import print_table

    code = done.exit_code(min_busbw)
    if json_:
        outcome = {"busbw": done.busbw, "min_busbw": min_busbw or None, "exit_code": code}
        fields = {
            "findings": [vars(finding) for finding in done.findings],
            "ranks": done.ranks,
            "rates": done.rates,
        }
        print_json(outcome | fields)
        return
    rows = [(f.status if f.status != "ok" else "", f.name, f.text, f.advice) for f in done.findings]
    print_table(["", "what", "found", "advice"], rows, text=["what", "found", "advice"])
    typer.echo("\nMatrix products")
    places = ("rank", "host", "device")
    names = [f"{name} TFLOP/s" for name in done.ranks[0]["tflops"]]
    products = [
        (*(str(r[x]) for x in places), *(f"{v:.3g}" for v in r["tflops"].values()))
        for r in done.ranks
    ]
    print_table([*places, *names], products)
    if done.rates:
        typer.echo("\nCollectives: GB/s by nccl-tests' formulas, medians; the slowest rank's")
        formats = {
            "group": "",
            "collective": "",
            "size": ",",
            "us": ",.0f",
            "algbw": ".3g",
            "busbw": ".3g",
        }
        timed = [r | {"us": 1e6 * r["seconds"]} for r in done.rates]
        rates = [[format(row[key], form) for key, form in formats.items()] for row in timed]
        print_table(["group", "collective", "bytes", "us", "algbw", "busbw"], rates)
    measured = "not measured: one rank" if done.busbw is None else f"{done.busbw:.3g} GB/s"
    asked = f"; asked for: {min_busbw:g}" if min_busbw else ""
    problems = sum(finding.status == "problem" for finding in done.findings)
    typer.echo(f"\nbus bandwidth of the largest all-reduce: {measured}{asked}")
    words = {
        FAILED: f"{problems} problem{'s' * (problems != 1)}",
        NOT_MEASURED: "NOT MEASURED",
        TOO_SLOW: "TOO SLOW",
    }
    typer.echo(words.get(code, "fine"))


def _progress(text: str) -> None:
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
