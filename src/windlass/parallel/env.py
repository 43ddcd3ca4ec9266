"""Who am I? The rank, world size and address of the store, from the variables that launchers set. No torch."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import UserError

Environment = Mapping[str, str]

LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 15_000, 15_000
"""Derived ports lie in [15000, 30000): above the services, below the range from which Linux hands out ports."""
INTERACTIVE_STEP = 0xFFFF_FFF0
"""SLURM's numbers of steps that are no srun of the user's (batch, interactive, ...) begin here."""


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


def detect_env(
    environ: Environment = os.environ, read: Callable[[str], str] = lambda path: Path(path).read_text()
) -> DistEnv:
    """This process's numbers, a pure function of the variables (and of the host file that PBS names, through `read`).

    Variables of the innermost launcher win: our own, torchrun (or RANK and WORLD_SIZE by hand), Open MPI, MPICH and its kin
    (PMI, PALS), then srun. A process in a batch or interactive SLURM shell that srun did not start is no rank, and a
    launcher's single task is a plain process.

    Raises:
        UserError: variables are missing, are no numbers, or contradict each other.
    """
    in_slurm = slurm_task(environ)
    if in_slurm and environ.get("PMI_RANK") == environ.get("SLURM_PROCID") and "RANK" not in environ:
        return _checked(_slurm(environ))  # PMI is srun's own, and names no hosts
    if "WINDLASS_LAUNCHED" in environ:
        return _checked(_from_torch_names(environ, "windlass", "WINDLASS_ATTEMPT"))
    if "RANK" in environ or "WORLD_SIZE" in environ:
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environ else "environment"
        return _checked(_from_torch_names(environ, launcher, "TORCHELASTIC_RESTART_COUNT"))
    if "OMPI_COMM_WORLD_RANK" in environ or "OMPI_COMM_WORLD_SIZE" in environ:
        job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        return _checked(_mpi(environ, read, "openmpi", job, *([name] for name in names)))
    if any(name in environ for name in ("PMI_RANK", "PMI_SIZE", "PALS_RANKID")):
        rank = "PMI_RANK" if "PMI_RANK" in environ else "PALS_RANKID"
        local_rank = ["PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID"]
        local_world = ["PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE"]
        job = environ.get("PALS_APID", "")
        return _checked(_mpi(environ, read, "mpi", job, [rank], ["PMI_SIZE"], local_rank, local_world))
    return _checked(_slurm(environ)) if in_slurm else DistEnv()


def slurm_task(environ: Environment) -> bool:
    """Whether srun started this process, as one of several tasks.

    The shell of a batch job also has SLURM_PROCID = 0 and the job's SLURM_NTASKS, but no step; an interactive shell is a
    step of its own, with a number near 2**32, and of one task.
    """
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if step.isdigit():
        return int(step) < INTERACTIVE_STEP and _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1) > 1
    return _number(environ, "SLURM_PROCID") > 0


def _from_torch_names(environ: Environment, launcher: str, attempt: str) -> DistEnv:
    needed = ["RANK", "WORLD_SIZE", *(["MASTER_ADDR", "MASTER_PORT"] if environ.get("WORLD_SIZE") != "1" else [])]
    if missing := [name for name in needed if not environ.get(name)]:
        have = ", ".join(f"{name}={environ[name]}" for name in needed if environ.get(name)) or "none of the others"
        raise UserError(
            f"the environment describes only half a rank: {have}, but {', '.join(missing)} missing; "
            "set all of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun does), or unset them"
        )
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    local_world = _number(environ, "LOCAL_WORLD_SIZE", default=world)
    return DistEnv(
        rank=rank,
        world=world,
        local_rank=_number(environ, "LOCAL_RANK", default=rank % max(1, local_world)),
        local_world=local_world,
        node=_number(environ, "GROUP_RANK", default=rank // max(1, local_world)),
        nodes=_number(environ, "GROUP_WORLD_SIZE", default=-(-world // max(1, local_world))),
        launcher=launcher,
        addr=environ.get("MASTER_ADDR", LOOPBACK),
        port=_number(environ, "MASTER_PORT", default=0),
        attempt=_number(environ, attempt, default=0),
    )


def _slurm(environ: Environment) -> DistEnv:
    rank, world = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    node = _number(environ, "SLURM_NODEID", default=0)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    even = -(-world // nodes)
    return DistEnv(
        rank=rank,
        world=world,
        local_rank=_number(environ, "SLURM_LOCALID", default=rank % even),
        local_world=per_node[node] if node < len(per_node) and sum(per_node) == world else even,
        node=node,
        nodes=nodes,
        launcher="slurm",
        addr=environ.get("MASTER_ADDR") or _slurm_first_host(environ, nodes),
        port=_port(environ, environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")),
        attempt=_number(environ, "SLURM_RESTART_COUNT", default=0),
    )


def _mpi(environ: Environment, read: Callable[[str], str], launcher: str, job: str, *names: list[str]) -> DistEnv:
    """`names`: the variables of rank, world, local rank and local world; the first two have to be there."""
    (rank_name,), (world_name,), local_rank_names, local_world_names = names
    have = [name for name in (rank_name, world_name) if environ.get(name)]
    if missing := {rank_name, world_name} - set(have):
        raise UserError(
            f"{', '.join(have)} is set but {missing.pop()} is not: start the ranks with one launcher, or unset it"
        )
    rank, world = _number(environ, rank_name), _number(environ, world_name)
    local_world = _number(environ, *local_world_names, default=world)
    nodes = -(-world // max(1, local_world))
    addr = environ.get("MASTER_ADDR") or (LOOPBACK if nodes == 1 else "")
    if not addr and environ.get("PBS_NODEFILE"):
        try:
            addr = (read(environ["PBS_NODEFILE"]).split() or [""])[0]
        except OSError as error:
            raise UserError(
                f"the host file of the job cannot be read ({error}); set MASTER_ADDR to rank 0's host"
            ) from None
    return DistEnv(
        rank=rank,
        world=world,
        local_rank=_number(environ, *local_rank_names, default=rank % max(1, local_world)),
        local_world=local_world,
        node=_number(environ, "PALS_NODEID", default=rank // max(1, local_world)),
        nodes=nodes,
        launcher=launcher,
        addr=addr or _slurm_first_host(environ, nodes),
        port=_port(environ, job or environ.get("PBS_JOBID") or environ.get("SLURM_JOB_ID") or "", ""),
    )


def _slurm_first_host(environ: Environment, nodes: int) -> str:
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return next(expand_hosts(environ[name]))
    if nodes == 1:
        return LOOPBACK
    raise UserError(
        f"{nodes} hosts, and neither SLURM_JOB_NODELIST nor PBS_NODEFILE says which is the first; "
        "set MASTER_ADDR to rank 0's host"
    )


def expand_hosts(nodelist: str) -> Iterator[str]:
    """The hosts of SLURM's short form, in order: `a[08-10,12],b` gives a08, a09, a10, a12, b. Several brackets multiply."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip()):
        head, bracket, rest = item.strip().partition("[")
        if not bracket:
            yield head
            continue
        numbers, _, tail = rest.partition("]")
        for part in numbers.split(","):
            low, _, high = part.partition("-")
            if not low.isdigit() or (high and not high.isdigit()):
                raise UserError(f"{item!r} is no list of hosts that can be read; set MASTER_ADDR to rank 0's host")
            for number in range(int(low), int(high or low) + 1):
                for end in expand_hosts(tail) if tail else [""]:
                    yield f"{head}{number:0{len(low)}d}{end}"


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each host from SLURM's short form: `4(x2),1` gives [4, 4, 1]; empty where it is none."""
    counts: list[int] = []
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if not match:
            return []
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def _port(environ: Environment, job: str, step: str) -> int:
    """MASTER_PORT, or one that all ranks of the job derive alike."""
    return _number(environ, "MASTER_PORT", default=FIRST_PORT + zlib.crc32(f"{job}.{step}".encode()) % PORTS)


def _number(environ: Environment, *names: str, default: int | None = None) -> int:
    """The first of some variables that is set."""
    for name in names:
        if text := environ.get(name, "").strip():
            if not text.isdigit():
                raise UserError(
                    f"{name}={text!r} in the environment is no number; unset it or start the ranks with a launcher"
                )
            return int(text)
    if default is None:
        raise UserError(f"{' or '.join(names)} is missing in the environment of this rank")
    return default


def _checked(env: DistEnv) -> DistEnv:
    """The same if it is consistent; a launcher's only process is a plain one, but keeps its attempt."""
    for number, count, what in (
        (env.rank, env.world, "rank"),
        (env.local_rank, env.local_world, "local rank"),
        (env.node, env.nodes, "node"),
        (env.local_world - 1, env.world, "last local rank"),
    ):
        if not 0 <= number < count:
            raise UserError(f"the environment ({env.launcher}) says {what} {number} of {count}; ranks count from 0")
    if env.world == 1 and env.launcher in ("slurm", "openmpi", "mpi"):
        return DistEnv(attempt=env.attempt)
    if env.world > 1 and not 0 < env.port < 65536:
        raise UserError(f"MASTER_PORT={env.port} is no port; use one between 1024 and 65535")
    return env
