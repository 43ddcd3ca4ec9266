"""This process among all: its numbers, from launchers' variables. No torch."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from windlass.errors import UserError
from windlass.launch.schedulers import SCHEDULERS, find_job

LOOPBACK = "127.0.0.1"
# derived ports: below the range from which Linux hands out ports
FIRST_PORT, PORTS = 15_000, 15_000

TORCH = {
    "rank": "RANK",
    "world": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world": "LOCAL_WORLD_SIZE",
    "node": "GROUP_RANK",
    "nodes": "GROUP_WORLD_SIZE",
    "attempt": "WINDLASS_ATTEMPT TORCHELASTIC_RESTART_COUNT",
}
PMI_LOCAL_RANKS = "PMI_LOCAL_RANK MPI_LOCALRANKID PALS_LOCAL_RANKID"
VARIABLES: dict[str, Mapping[str, str]] = {
    "windlass": TORCH,
    "torchrun": TORCH,
    "environment": TORCH,
    "openmpi": {
        "rank": "OMPI_COMM_WORLD_RANK",
        "world": "OMPI_COMM_WORLD_SIZE",
        "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
        "local_world": "OMPI_COMM_WORLD_LOCAL_SIZE",
        "job": "PMIX_NAMESPACE OMPI_MCA_ess_base_jobid",
    },
    "mpi": {
        "rank": "PMI_RANK PALS_RANKID",
        "world": "PMI_SIZE",
        "local_rank": " ".join(
            (PMI_LOCAL_RANKS, *(one.RANK.get("local_rank", "") for one in SCHEDULERS.values()))
        ),
        "local_world": "PMI_LOCAL_SIZE MPI_LOCALNRANKS PALS_LOCAL_SIZE",
        "node": "PALS_NODEID",
        "job": "PALS_APID",
    },
    **{name: one.RANK for name, one in SCHEDULERS.items()},
}
"""The variables that hold each number, by launcher; the first that is set counts."""
NO_HOSTS = ("environment", "openmpi", "mpi")
"""Launchers whose variables do not tell reliably which ranks share a host."""
SIGNS = {
    "windlass": {"WINDLASS_LAUNCHED"},
    "environment": {"RANK", "WORLD_SIZE"},
    "openmpi": {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"},
    "mpi": {"PMI_RANK", "PMI_SIZE", "PALS_RANKID"},
}


@dataclass(frozen=True)
class DistEnv:
    """One process of several: its numbers, globally and on its host, and the address of the store.

    For `NO_HOSTS` the numbers of hosts and on the host are guesses until the ranks have met.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    node: int = 0
    nodes: int = 1
    launcher: str = "none"  # a plain process; else a key of VARIABLES
    addr: str = LOOPBACK
    port: int = 0
    attempt: int = 0


def detect_env(environ: Mapping[str, str] = os.environ) -> DistEnv:
    """This process's numbers, from the variables of the innermost launcher; UserError if wrong.

    A launcher's single task is a plain process.
    """
    launcher = find_launcher(environ)
    if launcher == "none":
        return DistEnv()
    names = VARIABLES[launcher]

    def number(what: str, default: int | None = None) -> int:
        return _number(environ, names.get(what, ""), default)

    rank, world, nodes = number("rank"), number("world"), number("nodes", 0)
    local_world = max(1, number("local_world", -(-world // max(1, nodes))))
    nodes = nodes or -(-world // local_world)
    node = number("node", rank // local_world)
    local_rank = number("local_rank", rank % local_world)
    if launcher in SCHEDULERS and (step := SCHEDULERS[launcher].step(environ)):
        counts = step.per_host  # hosts may have unequal numbers of tasks
        if node < len(counts) and sum(counts) == world:
            local_world = counts[node]
    if not (rank < world and local_rank < local_world <= world):
        here = f"on its host rank {local_rank} of {local_world}"
        problem = f"the environment ({launcher}) says rank {rank} of {world}, and {here}"
        raise UserError(f"{problem}; ranks count from 0")
    attempt = number("attempt", 0)
    if world == 1 and names is not TORCH:
        return DistEnv(attempt=attempt)
    addr = environ.get("MASTER_ADDR") or (LOOPBACK if nodes == 1 else "")
    for scheduler in SCHEDULERS.values() if not addr else ():
        with contextlib.suppress(UserError):
            if hosts := (scheduler.step(environ) or scheduler.allocation(environ)).hosts:
                addr = addr or hosts[0]
    if not addr:
        problem = f"no variable says which of {nodes} hosts is the first"
        raise UserError(f"{problem}: set MASTER_ADDR to rank 0's host")
    port = None  # must be given
    if names is not TORCH or world == 1:  # the same on all ranks of the job
        job = _first(environ, names["job"]) or find_job(environ)[1] if "job" in names else ""
        step_number = _first(environ, names.get("step", ""))
        port = FIRST_PORT + zlib.crc32(f"{job}.{step_number}".encode()) % PORTS
    port = _number(environ, "MASTER_PORT", port)
    return DistEnv(rank, world, local_rank, local_world, node, nodes, launcher, addr, port, attempt)


def find_launcher(environ: Mapping[str, str]) -> str:
    """The innermost launcher that started this process: a key of VARIABLES, or `none`."""
    scheduler = next((name for name, one in SCHEDULERS.items() if one.step(environ)), "none")
    launcher = next((name for name, signs in SIGNS.items() if signs & environ.keys()), scheduler)
    if launcher == "environment" and "TORCHELASTIC_RUN_ID" in environ:
        return "torchrun"
    if launcher in ("mpi", "openmpi") and scheduler != "none":
        numbers = [_first(environ, VARIABLES[scheduler][name]) for name in ("rank", "world")]
        if numbers == [environ.get("PMI_RANK"), environ.get("PMI_SIZE")]:
            return scheduler  # srun's own PMI, which names no hosts
    return launcher


def by_hosts(env: DistEnv, hosts: Sequence[str]) -> DistEnv:
    """`env` with the node and local numbers that follow from every rank's host."""
    own, order = hosts[env.rank], list(dict.fromkeys(hosts))
    local_rank, local_world = hosts[: env.rank].count(own), hosts.count(own)
    return replace(
        env, node=order.index(own), nodes=len(order), local_rank=local_rank, local_world=local_world
    )


def _first(environ: Mapping[str, str], names: str) -> str:
    """The first of some variables that is set; empty if none is."""
    return next((environ[name] for name in names.split() if environ.get(name)), "")


def _number(environ: Mapping[str, str], names: str, default: int | None = None) -> int:
    for name in names.split():
        if text := environ.get(name, "").strip():
            if not text.isdigit():
                problem = f"{name}={text!r} in the environment is not a number"
                raise UserError(f"{problem}: unset it, or start with a launcher")
            return int(text)
    if default is None:
        problem = f"in the environment {' or '.join(names.split())} is missing"
        advice = "start all ranks with one launcher, or unset its other variables"
        raise UserError(f"{problem}: {advice}")
    return default
