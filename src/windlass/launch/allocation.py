"""The allocation that a shell is in, and the command that starts all its ranks. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from windlass import processes
from windlass.errors import BAD_INPUT, FAILED, LOST, NOT_MEASURED, STOPPED, TOO_SLOW, UserError
from windlass.fileio import read_json, write_atomic
from windlass.launch import rank_status
from windlass.launch.job import read_site
from windlass.launch.schedulers import SCHEDULERS, find_job
from windlass.launch.schedulers.base import Allocation
from windlass.processes import WINDLASS, visible_gpus
from windlass.variables import SECRET_NAME

COMMON_VARIABLES = r"(OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES)(_\w+)?"
PASSED_ON = re.compile(
    r"(NCCL|TORCH|OMP|GOMP|CUDA|HF|WANDB|MLFLOW|WINDLASS|MASTER|GLOO|PYTHON)"
    r"|(PATH|LD_LIBRARY_PATH|VIRTUAL_ENV)$"
)
JOB_DIR = "WINDLASS_JOB_DIR"  # set by a batch script: its log directory, which all hosts see
LOST_HOSTS = "WINDLASS_LOST_HOSTS"  # set by a batch script: the file in which to name lost hosts
LAUNCHER_SECONDS = 120.0  # srun and mpiexec have ended by then
POLL_SECONDS = 2.0  # between two looks at the ranks' reports
OPENMPI = r"open ?mpi|openrte|prrte"  # in `mpiexec --version`; MPICH, Intel MPI and PALS are alike


def read_allocation(environ: Mapping[str, str], gpus: int) -> Allocation:
    """The allocation of this shell, from its variables and the host file that they name.

    A host has one rank for each task that the job asked for. If the job asked for none (or one per
    host), it has one for each of the `gpus` of this host, and one without GPUs.
    """
    scheduler = find_job(environ)[0]
    if scheduler == "none":
        return Allocation(per_host=(max(1, gpus),), hosts=(socket.gethostname(),))
    asked = SCHEDULERS[scheduler].allocation(environ)
    if len(asked.per_host) == len(asked.hosts) and set(asked.per_host) != {1}:
        return asked
    return replace(asked, per_host=(max(1, gpus),) * len(asked.hosts))


def launch_command(
    allocation: Allocation,
    command: Sequence[str],
    openmpi: bool,
    environ: Mapping[str, str],
    more_options: str = "",
) -> list[str]:
    """The `srun` or `mpiexec` that runs `command` on all ranks; outside a job `command` itself."""
    more = shlex.split(more_options)
    if allocation.scheduler == "none":
        return list(command)
    if words := SCHEDULERS[allocation.scheduler].launcher(allocation, environ):
        return [*words, *more, *command]
    per_host = allocation.per_host[0] if len(set(allocation.per_host)) == 1 else 0
    options = ["-ppn", str(per_host)] if per_host else []
    if openmpi:
        options = ["--map-by", f"ppr:{per_host}:node"] if per_host else []
        options = ["--bind-to", "none", *options]  # bound, a rank may get one core
        for name in filter(PASSED_ON.match, sorted(environ)):  # the others pass all variables
            options += ["-x", name]
    # without a host file mpiexec asks the scheduler
    hostfile = ["--hostfile", allocation.hostfile] if allocation.hostfile else []
    return ["mpiexec", "-n", str(allocation.ranks), *options, *hostfile, *more, *command]


def wait_for_ranks(
    child: subprocess.Popen[bytes], reports: Path, seconds: float = LAUNCHER_SECONDS
) -> int:
    """The exit code of a launcher, which is killed `seconds` after a rank's failure."""
    deadline = math.inf
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(POLL_SECONDS)
        codes = {path.read_text() for path in reports.glob("code-*")} - {"", "0", str(STOPPED)}
        if codes or any(reports.glob("failure-*")):
            deadline = min(deadline, time.monotonic() + seconds)
        if time.monotonic() > deadline:
            child.kill()


def outcome(code: int, reports: Path) -> int:
    """The exit code of a launch, from its command's exit code and the ranks' `reports`.

    mpiexec changes codes, so a stop, bad input and the codes of a check come from the ranks. 69 if
    ranks ended only because others fell silent: a host or rank was lost.
    """
    codes = {path.read_text() for path in reports.glob("code-*")}
    if code == 0:
        return 0
    for special in (STOPPED, BAD_INPUT, NOT_MEASURED, TOO_SLOW):
        if str(special) in codes:
            return special
    failures = [failure for path in reports.glob("failure-*.json") if (failure := read_json(path))]
    only_lost = failures and all(failure["secondary"] or failure["lost"] for failure in failures)
    return LOST if only_lost else code


def plan_launch(
    command: Sequence[str], ranks: int, per_host: int, dry_run: bool
) -> tuple[Allocation, list[str]]:
    """The allocation, and the words that start `command` on its ranks, by the site's settings.

    A batch script has set these when it was submitted. UserError if `mpiexec` is missing, but for a
    `dry_run`.
    """
    site, environ = read_site(), os.environ
    allocation = read_allocation(environ, len(visible_gpus())).with_ranks(ranks, per_host)
    in_job, openmpi = allocation.scheduler != "none", False
    if in_job and SCHEDULERS[allocation.scheduler].LAUNCHER == "mpiexec":
        if shutil.which("mpiexec"):
            version = ["mpiexec", "--version"]
            done = subprocess.run(version, capture_output=True, text=True, check=False, timeout=60)
            openmpi = bool(re.search(OPENMPI, (done.stdout + done.stderr).lower()))
        elif not dry_run:
            remedy = "load the machine's MPI module, then start again"
            raise UserError(f"mpiexec is missing here: {remedy}")
    # Rank 0 is on the first host, and all ranks meet there; on another machine they derive a port.
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(allocation.hosts[0])
        with socket.create_server((address, 0)) as listening:
            environ.setdefault("MASTER_ADDR", allocation.hosts[0])
            environ.setdefault("MASTER_PORT", str(listening.getsockname()[1]))
    if in_job and (program := environ.get("WINDLASS_PROGRAM", site.program)):
        for ours in (WINDLASS, ("windlass",)):
            if tuple(command[: len(ours)]) == ours:
                command = [*shlex.split(program), *command[len(ours) :]]
    more = environ.get("WINDLASS_LAUNCHER_OPTIONS", site.launcher_options)
    return allocation, launch_command(allocation, command, openmpi, environ, more)


def launch_in_job(
    allocation: Allocation, words: Sequence[str], show: Callable[[str], object]
) -> int:
    """Run a job's launcher to its end, pass signals on, name lost hosts; returns the exit code."""
    # The ranks report their ends in the batch script's directory, or at home.
    base = Path(os.environ.get(JOB_DIR) or jobs_dir())
    with contextlib.suppress(OSError):
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
    parent = base if os.access(base, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix=".ends-", dir=parent) as folder:
        reports = Path(folder)
        try:
            child = subprocess.Popen(
                words,
                env=os.environ | {rank_status.REPORTS: folder},
                preexec_fn=processes.kill_with_parent,  # noqa: PLW1509 - no threads here
            )
        except OSError as error:
            why = f"{words[0]} cannot be started: {error.strerror}"
            raise UserError(f"{why}; load the module for it") from None
        stopped = list[int]()

        def stop(number: int, _: object) -> None:
            # Every launcher passes SIGUSR1 on; at SIGTERM some end the ranks before a save.
            child.send_signal(signal.SIGUSR1)
            stopped.append(number)

        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, stop)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to the child as well
        code = wait_for_ranks(child, reports)
        was_killed = code < 0  # a launcher ends by itself once every host has reported its ranks
        code = outcome(code if code >= 0 else 128 - code, reports)
        alive = {path.name.partition("-")[2] for path in reports.glob("host-*")}
        lost = [host for host in allocation.hosts if not alive & {host, host.partition(".")[0]}]
        if code == LOST and lost:
            show(f"windlass: lost {', '.join(lost)}: no rank there has reported its end")
            # After a kill of a rank, for example for its memory, the host is well.
            if was_killed and (path := os.environ.get(LOST_HOSTS)):
                Path(path).write_text(",".join(lost))
        again = any(read_json(path).get("again") for path in reports.glob("failure-*.json"))
    if code == FAILED and again and not stopped:  # memory ran out; micro-batches are smaller now
        show("windlass: starting the ranks again")
        return launch_in_job(allocation, words, show)
    return code


def jobs_dir() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state, "windlass", "jobs")


def save_job(environ: Mapping[str, str], directory: Path) -> Path:
    """Write the job's variables, and the lines of its host file, for other shells of this user."""
    allocation = read_allocation(environ, 0)
    if allocation.scheduler == "none":
        ids = ", ".join(one.JOB_ID for one in SCHEDULERS.values())
        raise UserError(f"this shell is not in a job, because it lacks {ids}: use a job's shell")
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    nodes = Path(allocation.hostfile).read_text() if allocation.hostfile else ""
    path = directory / f"{allocation.scheduler}-{allocation.job}.json"
    # the variables that a second shell needs, without a task's own variables and secrets
    of_job = "|".join([COMMON_VARIABLES, *(one.JOB_VARIABLES for one in SCHEDULERS.values())])
    of_task = "|".join(one.TASK_VARIABLES for one in SCHEDULERS.values())
    names = [name for name in sorted(environ) if re.fullmatch(of_job, name)]
    left_out = [name for name in names if re.fullmatch(of_task, name) or SECRET_NAME.search(name)]
    variables = {name: environ[name] for name in names if name not in left_out}
    saved = {"hosts": allocation.hosts, "variables": variables, "nodes": nodes}
    write_atomic(path, json.dumps(saved, indent=1) + "\n")
    return path


def load_job(directory: Path, host: str) -> dict[str, str]:
    """The variables of the newest saved job that has this host, with a host file that exists."""
    short = host.partition(".")[0]
    jobs = []
    for path in sorted(directory.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        saved = json.loads(path.read_text())
        jobs.append(path.stem)
        if short not in {name.partition(".")[0] for name in saved["hosts"]}:
            continue
        variables: dict[str, str] = saved["variables"]
        nodefile = SCHEDULERS[find_job(variables)[0]].NODEFILE
        if saved["nodes"] and not Path(variables[nodefile]).is_file():
            nodes = path.with_suffix(".nodes")
            write_atomic(nodes, saved["nodes"])
            variables[nodefile] = str(nodes)
        return variables
    others = f" ({', '.join(jobs)} have other hosts)" if jobs else ""
    remedy = "first run `windlass env --save` in the job's own shell"
    raise UserError(f"no saved job has the host {host}{others}: {remedy}")
