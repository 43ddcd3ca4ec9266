"""Who am I? The rank, world size and address of the store, from the variables that launchers set. No torch."""

from __future__ import annotations

import contextlib
import os
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import UserError
from windlass.variables import expand_counts, expand_hosts

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = (
    15_000,
    15_000,
)  # derived ports: under the range from which Linux hands out ports
INTERACTIVE_STEP = (
    0xFFFF_FFF0  # SLURM's steps that are no srun of the user's (batch, interactive) begin here
)

TORCH = {
    "rank": "RANK",
    "world": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world": "LOCAL_WORLD_SIZE",
    "node": "GROUP_RANK",
    "nodes": "GROUP_WORLD_SIZE",
    "attempt": "WINDLASS_ATTEMPT TORCHELASTIC_RESTART_COUNT",
}
VARIABLES = {
    "windlass": TORCH,
    "torchrun": TORCH,
    "environment": TORCH,
    "openmpi": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world": "OMPI_COMM_WORLD_LOCAL_SIZE",
        "job": "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid PBS_JOBID SLURM_JOB_ID",
    },
    "mpi": {
        "rank": "PMI_RANK PALS_RANKID",
        "world": "PMI_SIZE",
        "local_rank": "PMI_LOCAL_RANK MPI_LOCALRANKID PALS_LOCAL_RANKID SLURM_LOCALID",
        "local_world": "PMI_LOCAL_SIZE MPI_LOCALNRANKS PALS_LOCAL_SIZE",
        "node": "PALS_NODEID",
        "job": "PALS_APID PBS_JOBID SLURM_JOB_ID",
    },
    "slurm": {
        "rank": "SLURM_PROCID",
        "world": "SLURM_STEP_NUM_TASKS SLURM_NTASKS",
        "local_rank": "SLURM_LOCALID",
        "node": "SLURM_NODEID",
        "nodes": "SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES",
        "attempt": "SLURM_RESTART_COUNT",
        "job": "SLURM_JOB_ID",
    },
}
"""By launcher: the variables that hold each number, the first one that is set counts; what none holds is derived."""
SIGNS = {
    "windlass": {"WINDLASS_LAUNCHED"},
    "environment": {"RANK", "WORLD_SIZE"},
    "openmpi": {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    "mpi": {"PMI_RANK", "PMI_SIZE", "PALS_RANKID"},
}


@dataclass(frozen=True)
class DistEnv:
    """One process among all: its numbers, globally and on its host, and the address where rank 0 holds the store.

    `launcher` is `none` (a plain process), `windlass`, `torchrun`, `environment` (RANK and WORLD_SIZE set by hand),
    `slurm`, `openmpi` or `mpi`. `attempt` counts restarts of the same job from 0.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str = "none"
    addr: str = LOOPBACK
    port: int = 0
    attempt: int = 0


def detect_env(environ: Mapping[str, str] = os.environ) -> DistEnv:
    """This process's numbers, from the variables (and, under PBS and MPI, from the host file that they name).

    Variables of the innermost launcher win: our own, torchrun (or RANK and WORLD_SIZE by hand), Open MPI, MPICH and its kin
    (PMI, PALS), then srun. A launcher's single task is a plain process. UserError where variables are missing or wrong.
    """
    # Whether srun started this process, as one of several tasks. The shell of a batch job also has SLURM_PROCID = 0 and the
    # job's SLURM_NTASKS, but no step; an interactive shell is a step of its own, with a number near 2**32, and of one task.
    step, tasks = (
        environ.get("SLURM_STEP_ID", ""),
        _number(environ, "SLURM_STEP_NUM_TASKS SLURM_NTASKS", 1),
    )
    in_slurm = (
        "SLURM_PROCID" in environ and step.isdigit() and int(step) < INTERACTIVE_STEP and tasks > 1
    )
    launcher = next(
        (name for name, signs in SIGNS.items() if signs & environ.keys()),
        "slurm" if in_slurm else "none",
    )
    if launcher == "environment" and "TORCHELASTIC_RUN_ID" in environ:
        launcher = "torchrun"
    own_pmi = (environ.get("PMI_RANK"), environ.get("PMI_SIZE")) == (
        environ.get("SLURM_PROCID"),
        str(tasks),
    )
    if in_slurm and own_pmi and "RANK" not in environ:
        launcher = "slurm"  # PMI is srun's own, and names no hosts
    if launcher == "none":
        return DistEnv()
    env = _build(environ, launcher)
    if not (env.rank < env.world and env.local_rank < env.local_world <= env.world):
        here = f"rank {env.rank} of {env.world}, and on its host rank {env.local_rank} of {env.local_world}"
        raise UserError(f"the environment ({launcher}) says {here}; ranks count from 0")
    is_alone = env.world == 1 and VARIABLES[launcher] is not TORCH
    return DistEnv(attempt=env.attempt) if is_alone else env


def _build(environ: Mapping[str, str], launcher: str) -> DistEnv:
    names = VARIABLES[launcher]

    def number(what: str, default: int | None = None) -> int:
        return _number(environ, names.get(what, ""), default)

    rank, world, nodes = number("rank"), number("world"), number("nodes", 0)
    local_world = max(1, number("local_world", -(-world // max(1, nodes))))
    nodes = nodes or -(-world // local_world)
    node, local_rank = number("node", rank // local_world), number("local_rank", rank % local_world)
    if launcher == "slurm":  # hosts may have unequal numbers of tasks: `4(x2),1` is 4, 4, 1
        tasks = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        local_world = tasks[node] if node < len(tasks) and sum(tasks) == world else local_world
    addr = environ.get("MASTER_ADDR") or (LOOPBACK if nodes == 1 else _first_host(environ, nodes))
    job = next((environ[name] for name in names.get("job", "").split() if environ.get(name)), "")
    step = environ.get("SLURM_STEP_ID", "") if launcher == "slurm" else ""
    derived = (
        FIRST_PORT + zlib.crc32(f"{job}.{step}".encode()) % PORTS
    )  # the same on all ranks of the job
    port = _number(environ, "MASTER_PORT", None if names is TORCH and world > 1 else derived)
    return DistEnv(
        rank,
        world,
        local_rank,
        local_world,
        node,
        nodes,
        launcher,
        addr,
        port,
        number("attempt", 0),
    )


def interface_to(host: str) -> str:
    """The name of this machine's network interface on the route to a host; empty where only the loopback leads there."""
    import psutil

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks the kernel for the route
        own = probe.getsockname()[0]
        names = [
            name
            for name, addresses in psutil.net_if_addrs().items()
            if own in {a.address for a in addresses}
        ]
        return "" if own.startswith("127.") or not names else names[0]
    return ""


def _first_host(environ: Mapping[str, str], nodes: int) -> str:
    hosts = ""
    with contextlib.suppress(OSError):
        hosts = Path(environ.get("PBS_NODEFILE", "")).read_text()
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        hosts = hosts or environ.get(name, "")
    with contextlib.suppress(UserError):
        if names := expand_hosts(hosts):
            return names[0]
    raise UserError(
        f"no variable says which of {nodes} hosts is the first: set MASTER_ADDR to rank 0's host"
    )


def _number(environ: Mapping[str, str], names: str, default: int | None = None) -> int:
    """The first of some variables that is set."""
    for name in names.split():
        if text := environ.get(name, "").strip():
            if not text.isdigit():
                raise UserError(
                    f"{name}={text!r} in the environment is no number: unset it, or start with a launcher"
                )
            return int(text)
    if default is None:
        missing = f"in the environment {' or '.join(names.split())} is missing"
        raise UserError(
            f"{missing}: start all ranks with one launcher, or unset its other variables"
        )
    return default
