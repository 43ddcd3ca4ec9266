"""The allocation that a shell is in: its scheduler, hosts and ranks per host, and the command that starts all ranks. No torch.

`read_allocation` and `launch_command` are pure. `save_job` writes the variables of a job to a file of the user's, from which
`load_job` gives them to a second shell on one of its hosts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.errors import BAD_INPUT, LOST, NOT_MEASURED, STOPPED, TOO_SLOW, UserError
from windlass.fileio import read_json, write_atomic
from windlass.variables import SECRET_NAME, expand_counts, expand_hosts

SECOND_SHELL = 'run `windlass env --save` in the job\'s own shell, and eval "$(windlass env)" here'
JOB_ID = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID"}
JOB_VARIABLE = re.compile(r"(SLURM|SLURMD|PBS|NCPUS|OMP_NUM_THREADS|CUDA_VISIBLE_DEVICES)(_\w+)?")
OF_ONE_TASK = re.compile(
    r"SLURM_(PROCID|LOCALID|NODEID|STEP\w*|TASK_PID|GTIDS|SRUN_COMM\w*|UMASK|CPU_BIND\w*)|PBS_(TASKNUM|NODENUM|VNODENUM)"
)
PASSED_ON = re.compile(
    r"(NCCL|TORCH|OMP|GOMP|CUDA|HF|WANDB|MLFLOW|WINDLASS|MASTER|GLOO|PYTHON)|(PATH|LD_LIBRARY_PATH|VIRTUAL_ENV)$"
)
JOB_DIR = "WINDLASS_JOB_DIR"  # set by a batch script: its log directory, which all hosts see
LOST_HOSTS = "WINDLASS_LOST_HOSTS"  # set by a batch script: the file that is to name lost hosts
LAUNCHER_SECONDS = 120.0  # srun and mpiexec have ended by then
TORCHRUN_PORT = 29_400
LAUNCHERS = ("srun", "mpiexec", "torchrun")
FLAVORS = {
    "openmpi": r"open ?mpi|openrte|prrte",
    "pals": r"\bpals\b|cray",
    "mpich": r"hydra|mpich|intel\(r\) mpi",
}
"""What `mpiexec --version` prints, by implementation; they have different names for ranks per host."""


@dataclass(frozen=True)
class Allocation:
    """`scheduler` is `slurm`, `pbs` or `none`; `per_host` is the number of ranks of each host, in the order of `hosts`."""

    scheduler: str = "none"
    job: str = ""
    hosts: tuple[str, ...] = ("localhost",)
    per_host: tuple[int, ...] = (1,)
    hostfile: str = ""  # PBS_NODEFILE

    @property
    def ranks(self) -> int:
        return sum(self.per_host)

    def with_ranks(self, ranks: int = 0, per_host: int = 0) -> Allocation:
        """With other numbers of ranks, as `-n` and `--per-host` give them; 0: as it is. UserError where they disagree."""
        if ranks and not per_host and ranks % len(self.hosts) == 0:
            per_host = ranks // len(self.hosts)
        changed = replace(self, per_host=(per_host,) * len(self.hosts)) if per_host else self
        if ranks and changed.ranks != ranks:
            hosts = f"{len(self.hosts)} host{'s' * (len(self.hosts) > 1)}"
            each = f"{changed.per_host[0]} ranks on each of {hosts}"
            raise UserError(f"-n {ranks} is not {each}: give -n and --per-host that agree")
        return changed


def read_allocation(environ: Mapping[str, str], gpus: int) -> Allocation:
    """The allocation of this shell, from its variables and the host file that they name.

    A host has as many ranks as the job asked tasks of it; where it asked for none (or one per host), one for each of the
    `gpus` that this host has, and one where it has none. UserError where a job's variables are incomplete.
    """
    scheduler = next((name for name, variable in JOB_ID.items() if environ.get(variable)), "none")
    job, hostfile = environ.get(JOB_ID.get(scheduler, ""), ""), ""
    if scheduler == "none":
        return Allocation(per_host=(max(1, gpus),), hosts=(socket.gethostname(),))
    if scheduler == "slurm":
        if not (nodes := environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")):
            raise UserError(f"SLURM_JOB_ID={job} is set, SLURM_JOB_NODELIST is not: {SECOND_SHELL}")
        hosts = expand_hosts(nodes)
        tasks = expand_counts(
            environ.get("SLURM_TASKS_PER_NODE", "") if "SLURM_NTASKS" in environ else ""
        )
        per_host = tasks if len(tasks) == len(hosts) else [1] * len(hosts)
    else:
        hostfile = environ.get("PBS_NODEFILE", "")
        try:
            lines = [
                line.strip() for line in Path(hostfile).read_text().splitlines() if line.strip()
            ]
        except OSError:
            raise UserError(
                f"PBS_JOBID={job} is set and PBS_NODEFILE={hostfile!r} cannot be read: {SECOND_SHELL}"
            ) from None
        counts = Counter(lines)  # a host stands there once for each of its MPI processes
        hosts, per_host = list(counts), list(counts.values())
    if set(per_host) == {1} and gpus > 1:
        per_host = [gpus] * len(hosts)
    return Allocation(scheduler, job, tuple(hosts), tuple(per_host), hostfile)


def launch_command(
    allocation: Allocation,
    command: Sequence[str],
    flavor: str = "mpich",
    environ: Mapping[str, str] | None = None,
    launcher: str = "",
) -> list[str]:
    """The `srun` or `mpiexec` that runs `command` on all ranks; the bare command where there is no scheduler.

    `launcher` is `srun`, `mpiexec` or `torchrun` (which one of those starts on each host); by default that of the scheduler.
    `flavor` is the implementation of `mpiexec`: `mpich`, `openmpi` or `pals`; `environ` is what its ranks are to have. Unequal
    hosts get their numbers of ranks from the host file, as PBS writes it.
    """
    hosts, ranks, per_host = allocation.hosts, allocation.ranks, allocation.per_host
    if allocation.scheduler == "none":
        return list(command)
    if launcher == "torchrun":
        if len(set(per_host)) > 1:
            raise UserError(
                "torchrun starts as many ranks on each host, and these hosts differ: give --per-host N"
            )
        environ = environ or {}
        where = (
            f"{environ.get('MASTER_ADDR', hosts[0])}:{environ.get('MASTER_PORT', TORCHRUN_PORT)}"
        )
        words = [
            "env",
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=120",  # seconds for a save; by default it kills after 30
            sys.executable,
            "-m",
            "torch.distributed.run",
            f"--nnodes={len(hosts)}",
            f"--nproc-per-node={per_host[0]}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={where}",
            f"--rdzv-id={allocation.job}",
            "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
            "--no-python",
            *command,
        ]
        if "SLURM_CPUS_PER_TASK" in environ:  # of a rank
            environ = {
                **environ,
                "SLURM_CPUS_PER_TASK": str(int(environ["SLURM_CPUS_PER_TASK"]) * per_host[0]),
            }
        return launch_command(
            replace(allocation, per_host=(1,) * len(hosts)), words, flavor, environ
        )
    if launcher == "srun" or (not launcher and allocation.scheduler == "slurm"):
        if allocation.scheduler == "pbs":
            raise UserError(
                f"job {allocation.job} is one of PBS, which has no srun: launcher = mpiexec or torchrun"
            )
        # Ranks that stop exit with 75, one after another: the first must not end the others (--kill-on-bad-exit). One that
        # is lost is seen by the others, and what is left of them ends 60 s after the first.
        spread = (
            f"--ntasks-per-node={per_host[0]}"
            if len(set(per_host)) == 1
            else "--distribution=block"
        )
        size = [f"--nodes={len(hosts)}", f"--ntasks={ranks}", spread]
        if cores := (environ or {}).get(
            "SLURM_CPUS_PER_TASK"
        ):  # srun leaves the job's out (SLURM 22.05 and later)
            size.append(f"--cpus-per-task={cores}")
        return ["srun", *size, "--kill-on-bad-exit=0", "--wait=60", *command]
    equal = len(set(per_host)) == 1
    if flavor == "openmpi":
        by_host = ["--map-by", f"ppr:{per_host[0]}:node"] if equal else []
        options = [
            "--bind-to",
            "none",
            *by_host,
            *environment_options(environ or {}),
        ]  # bound, a rank may get one core
    else:
        options = ["-ppn", str(per_host[0])] if equal else []
    hostfile = (
        ["--hostfile", allocation.hostfile] if allocation.hostfile else []
    )  # under SLURM mpiexec asks SLURM
    return ["mpiexec", "-n", str(ranks), *options, *hostfile, *command]


def reports_dir() -> tempfile.TemporaryDirectory[str]:
    """A directory where the ranks of a job leave how they ended: that of the batch script, else one at home."""
    base = Path(os.environ.get(JOB_DIR) or jobs_dir())
    with contextlib.suppress(OSError):
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        return tempfile.TemporaryDirectory(prefix=".ends-", dir=base, ignore_cleanup_errors=True)
    return tempfile.TemporaryDirectory(prefix="windlass-")


def wait_for_ranks(
    child: subprocess.Popen[bytes], reports: Path, seconds: float = LAUNCHER_SECONDS
) -> int:
    """The exit code of `srun` or `mpiexec`; killed where it still waits for a lost host so long after a rank has failed."""
    failed_at = None
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return child.wait(2.0)
        if failed_at is None and any(reports.glob("failure-*")):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > seconds:
            child.kill()


def outcome(code: int, reports: Path) -> int:
    """The exit code of a launch, from that of its command and from what its ranks left in `reports`.

    torchrun turns every code into 1, and mpiexec some: a stop, bad input and the codes of a check come from the ranks. 69
    where ranks ended only because others fell silent: a host was lost, or a rank killed.
    """
    codes = {path.read_text() for path in reports.glob("code-*")}
    for known in (STOPPED, BAD_INPUT, NOT_MEASURED, TOO_SLOW) if code else ():
        if str(known) in codes:
            return known
    failures = [failure for path in reports.glob("failure-*.json") if (failure := read_json(path))]
    only_lost = failures and all(failure["secondary"] or failure["lost"] for failure in failures)
    return LOST if code and only_lost else code


def lost_hosts(allocation: Allocation, reports: Path) -> list[str]:
    """The hosts of which no rank has reported why it ended."""
    alive = {path.name.partition("-")[2] for path in reports.glob("host-*")}
    return [
        host
        for host in allocation.hosts
        if host.partition(".")[0] not in alive and host not in alive
    ]


def environment_options(environ: Mapping[str, str]) -> list[str]:
    """Open MPI's options that give other hosts the variables a training reads: srun and the other mpiexec pass on all of them."""
    return [word for name in sorted(environ) if PASSED_ON.match(name) for word in ("-x", name)]


def free_port(host: str) -> int:
    """A free port of this machine where `host` is one of its addresses; 0 elsewhere: the ranks then compute one from the job's id."""
    try:
        with socket.create_server((socket.gethostbyname(host), 0)) as listening:
            return int(listening.getsockname()[1])
    except OSError:
        return 0


def mpi_flavor(needed: bool = True) -> str:
    """Which `mpiexec` this machine has; where it has none UserError, or MPICH's if it is not `needed`."""
    if shutil.which("mpiexec") is None:
        if not needed:
            return "mpich"
        raise UserError("there is no mpiexec here: load the machine's MPI module, then start again")
    done = subprocess.run(
        ["mpiexec", "--version"], capture_output=True, text=True, check=False, timeout=60
    )
    text = (done.stdout + done.stderr).lower()
    return next((name for name, words in FLAVORS.items() if re.search(words, text)), "mpich")


def jobs_dir() -> Path:
    return (
        Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        / "windlass"
        / "jobs"
    )


def job_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """What a second shell needs to act as the job's own, by allow-list; nothing of a single task, nothing secret."""
    return {
        name: value
        for name, value in sorted(environ.items())
        if JOB_VARIABLE.fullmatch(name)
        and not OF_ONE_TASK.fullmatch(name)
        and not SECRET_NAME.search(name)
    }


def save_job(environ: Mapping[str, str], directory: Path) -> Path:
    """Write the job's variables, and the lines of its host file, for other shells of this user; returns the file."""
    allocation = read_allocation(environ, 0)
    if allocation.scheduler == "none":
        raise UserError(
            "this shell is in no job (SLURM_JOB_ID, PBS_JOBID): run it in the job's own shell"
        )
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    nodes = Path(allocation.hostfile).read_text() if allocation.hostfile else ""
    path = directory / f"{allocation.scheduler}-{allocation.job}.json"
    saved = {"hosts": allocation.hosts, "variables": job_variables(environ), "nodes": nodes}
    write_atomic(path, json.dumps(saved, indent=1) + "\n")
    return path


def load_job(directory: Path, host: str) -> dict[str, str]:
    """The variables of the newest saved job that has this host; the host file is written anew where its own is gone."""
    short, jobs = host.partition(".")[0], []
    for path in sorted(directory.glob("*.json"), key=lambda p: p.stat().st_mtime, reverse=True):
        saved = json.loads(path.read_text())
        jobs.append(path.stem)
        if short not in {name.partition(".")[0] for name in saved["hosts"]}:
            continue
        variables: dict[str, str] = saved["variables"]
        if saved["nodes"] and not Path(variables["PBS_NODEFILE"]).is_file():
            nodes = path.with_suffix(".nodes")
            write_atomic(nodes, saved["nodes"])
            variables["PBS_NODEFILE"] = str(nodes)
        return variables
    others = f"; those of {', '.join(jobs)} have other hosts" if jobs else ""
    raise UserError(
        f"no saved job has the host {host}{others}: run `windlass env --save` in the job's own shell first"
    )
