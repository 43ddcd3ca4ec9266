"""Who am I? The rank, world size and meeting point, from the variables that launchers set. No torch."""

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


@dataclass(frozen=True)
class DistEnv:
    """One process's place among all: global and per host, and where all of them meet.

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
    """This process's place, a pure function of the variables (and of the host file that PBS names, through `read`).

    Variables of the innermost launcher win: our own, torchrun (or RANK and WORLD_SIZE by hand), Open MPI, MPICH and its kin
    (PMI, PALS), then srun. A process in a batch or interactive SLURM shell that srun did not start is no rank, and a
    launcher's single task is a plain process.

    Raises:
        UserError: variables are missing, are no numbers, or contradict each other.
    """
    if slurm_task(environ) and environ.get("PMI_RANK") == environ.get("SLURM_PROCID") and "RANK" not in environ:
        return _checked(_slurm(environ, read))  # srun's own PMI, which says nothing of hosts
    for present, place in (
        (("WINDLASS_LAUNCHED",), _ours),
        (("RANK", "WORLD_SIZE"), _torchrun),
        (("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), _openmpi),
        (("PMI_RANK", "PMI_SIZE"), _mpi),
        (("PALS_RANKID",), _mpi),
    ):
        if any(name in environ for name in present):
            return _checked(place(environ, read))
    if slurm_task(environ):
        return _checked(_slurm(environ, read))
    return DistEnv()


def slurm_task(environ: Environment) -> bool:
    """Whether srun started this process, as one of several tasks.

    The shell of a batch job also has SLURM_PROCID = 0 and the job's SLURM_NTASKS, but no step; an interactive shell is a
    step of its own, with a number near 2**32, and of one task.
    """
    if "SLURM_PROCID" not in environ:
        return False
    step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID", ""))
    if step.isdigit():
        return int(step) < 0xFFFF_FFF0 and _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1) > 1
    return _number(environ, "SLURM_PROCID") > 0


def _ours(environ: Environment, _: Callable[[str], str]) -> DistEnv:
    return _from_torch_names(environ, "windlass", "WINDLASS_ATTEMPT")


def _torchrun(environ: Environment, _: Callable[[str], str]) -> DistEnv:
    elastic = "TORCHELASTIC_RUN_ID" in environ
    return _from_torch_names(environ, "torchrun" if elastic else "environment", "TORCHELASTIC_RESTART_COUNT")


def _from_torch_names(environ: Environment, launcher: str, attempt: str) -> DistEnv:
    needed = ["RANK", "WORLD_SIZE", *(["MASTER_ADDR", "MASTER_PORT"] if environ.get("WORLD_SIZE") != "1" else [])]
    missing = [name for name in needed if not environ.get(name)]
    if missing:
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


def _slurm(environ: Environment, _: Callable[[str], str]) -> DistEnv:
    rank, world = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    node = _number(environ, "SLURM_NODEID", default=0)
    nodes = _number(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES", default=1)
    per_node = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "")
    hosts = (
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or ""
    )
    fallback = world if nodes == 1 else -(-world // nodes)
    return DistEnv(
        rank=rank,
        world=world,
        local_rank=_number(environ, "SLURM_LOCALID", default=rank % fallback),
        local_world=per_node[node] if node < len(per_node) and sum(per_node) == world else fallback,
        node=node,
        nodes=nodes,
        launcher="slurm",
        addr=environ.get("MASTER_ADDR") or _first_host(hosts, nodes, "SLURM_STEP_NODELIST"),
        port=_port(environ, environ.get("SLURM_JOB_ID", ""), environ.get("SLURM_STEP_ID", "")),
        attempt=_number(environ, "SLURM_RESTART_COUNT", default=0),
    )


def _openmpi(environ: Environment, read: Callable[[str], str]) -> DistEnv:
    _complete(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    rank, world = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    local_world = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", default=world)
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", default=rank % max(1, local_world))
    job = environ.get("PMIX_NAMESPACE") or environ.get("OMPI_MCA_ess_base_jobid") or ""
    return _mpi_world(environ, read, "openmpi", (rank, world, local_rank, local_world), job)


def _mpi(environ: Environment, read: Callable[[str], str]) -> DistEnv:
    rank_name = "PMI_RANK" if "PMI_RANK" in environ else "PALS_RANKID"
    _complete(environ, rank_name, "PMI_SIZE")
    rank, world = _number(environ, rank_name), _number(environ, "PMI_SIZE")
    local_world = _number(environ, "PMI_LOCAL_SIZE", "MPI_LOCALNRANKS", "PALS_LOCAL_SIZE", default=world)
    names = ("PMI_LOCAL_RANK", "MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "SLURM_LOCALID")
    local_rank = _number(environ, *names, default=rank % max(1, local_world))
    return _mpi_world(environ, read, "mpi", (rank, world, local_rank, local_world), environ.get("PALS_APID", ""))


def _mpi_world(
    environ: Environment, read: Callable[[str], str], launcher: str, place: tuple[int, int, int, int], job: str
) -> DistEnv:
    rank, world, local_rank, local_world = place
    nodes = -(-world // max(1, local_world))
    addr = environ.get("MASTER_ADDR", "")
    if not addr:
        addr = LOOPBACK if nodes == 1 else _mpi_first_host(environ, read, nodes)
    job = job or environ.get("PBS_JOBID") or environ.get("SLURM_JOB_ID") or environ.get("PALS_APID") or ""
    return DistEnv(
        rank=rank,
        world=world,
        local_rank=local_rank,
        local_world=local_world,
        node=_number(environ, "PALS_NODEID", default=rank // max(1, local_world)),
        nodes=nodes,
        launcher=launcher,
        addr=addr,
        port=_port(environ, job, ""),
    )


def _mpi_first_host(environ: Environment, read: Callable[[str], str], nodes: int) -> str:
    if environ.get("PBS_NODEFILE"):
        try:
            lines = read(environ["PBS_NODEFILE"]).split()
        except OSError as error:
            raise UserError(
                f"the host file of the job cannot be read ({error}); set MASTER_ADDR to rank 0's host"
            ) from None
        if lines:
            return lines[0]
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    return _first_host(hosts, nodes, "PBS_NODEFILE or SLURM_JOB_NODELIST")


def _first_host(nodelist: str, nodes: int, name: str) -> str:
    if nodelist:
        return next(expand_hosts(nodelist))
    if nodes == 1:
        return LOOPBACK
    raise UserError(f"{nodes} hosts, and no {name} says which is the first; set MASTER_ADDR to rank 0's host")


def expand_hosts(nodelist: str) -> Iterator[str]:
    """The hosts of SLURM's short form, in order: `a[08-10,12],b` gives a08, a09, a10, a12, b. Several brackets multiply."""
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip()):
        yield from _expand(item.strip())


def _expand(item: str) -> Iterator[str]:
    found = re.search(r"\[([^\]]*)\]", item)
    if not found:
        yield item
        return
    head, tail = item[: found.start()], item[found.end() :]
    for part in found.group(1).split(","):
        low, _, high = part.partition("-")
        if not low.isdigit() or (high and not high.isdigit()):
            raise UserError(f"{item!r} is no list of hosts that can be read; set MASTER_ADDR to rank 0's host")
        for number in range(int(low), int(high or low) + 1):
            for rest in _expand(tail):
                yield f"{head}{number:0{len(low)}d}{rest}"


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each host from SLURM's short form: `4(x2),1` gives [4, 4, 1]."""
    counts: list[int] = []
    for item in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if not found:
            return []
        counts += [int(found.group(1))] * int(found.group(2) or 1)
    return counts


def _port(environ: Environment, job: str, step: str) -> int:
    if environ.get("MASTER_PORT"):
        return _number(environ, "MASTER_PORT")
    return FIRST_PORT + zlib.crc32(f"{job}.{step}".encode()) % PORTS


def _complete(environ: Environment, *names: str) -> None:
    missing = [name for name in names if not environ.get(name)]
    if missing:
        have = ", ".join(name for name in names if environ.get(name))
        raise UserError(
            f"{have} is set but {', '.join(missing)} is not: start the ranks with one launcher, or unset {have}"
        )


def _number(environ: Environment, *names: str, default: int | None = None) -> int:
    for name in names:
        text = environ.get(name, "").strip()
        if text:
            if not text.isdigit():
                raise UserError(
                    f"{name}={text!r} in the environment is no number; unset it or start the ranks with a launcher"
                )
            return int(text)
    if default is None:
        raise UserError(f"{' or '.join(names)} is missing in the environment of this rank")
    return default


def _checked(found: DistEnv) -> DistEnv:
    """The world if it is consistent; a launcher's only process is a plain one, but keeps its attempt."""
    for part, whole, what in (
        (found.rank, found.world, "rank"),
        (found.local_rank, found.local_world, "local rank"),
        (found.node, found.nodes, "node"),
    ):
        if not 0 <= part < whole:
            raise UserError(f"the environment ({found.launcher}) says {what} {part} of {whole}; ranks count from 0")
    if found.local_world > found.world:
        raise UserError(
            f"the environment ({found.launcher}) says {found.local_world} ranks on this host, of {found.world} in all"
        )
    if found.world == 1 and found.launcher in ("slurm", "openmpi", "mpi"):
        return DistEnv(attempt=found.attempt)
    if found.world > 1 and not 0 < found.port < 65536:
        raise UserError(f"MASTER_PORT={found.port} is no port; use one between 1024 and 65535")
    return found
