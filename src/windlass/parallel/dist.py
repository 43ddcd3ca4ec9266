"""The ranks as one group: start, meshes and time limits, small exchanges over the store, stop, and failure without a hang."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import itertools
import json
import os
import socket
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass import processes
from windlass.errors import BAD_INPUT, FAILED, RunFailed, UserError
from windlass.parallel.env import DistEnv
from windlass.parallel.failing import end_here, headline, last_collective, lost_contact, orderly
from windlass.parallel.heartbeat import Watch
from windlass.recipe import Recipe

SHARDED = ("full_shard", "shard_grad_op", "hybrid_shard")
EXIT_SECONDS = 10.0
"""A rank that failed is gone after this long, whatever its communicators wait for."""
LAST_WORD_SECONDS = 30.0
"""How long rank 0, which holds the store, waits for the others to say that they are done."""
LOOK_SECONDS = 0.02
"""How often a rank that waits for others on the store looks: between two looks Python sees to its signals."""


class Ranks:
    """This rank among all, from `start` (or `init_store`) to `stop`. A context manager: leaving it by an exception waits for nobody.

    Attributes:
        env: rank, world, host and launcher.
        device: this rank's device; before `init_process_group` the CPU.
        strategy: `single`, `ddp`, `full_shard`, `shard_grad_op` or `hybrid_shard`.
        mesh: with a sharded strategy, one dimension `shard` or two, `replicate` and `shard`; else None.
        store: the key-value store of this attempt; None for a process of its own.
        control: a gloo group for small exchanges that never touch the device's stream; None in a world of 1.
        hosts: the host name of each rank.
        position: where this rank is (`mark`).
    """

    def __init__(self, env: DistEnv, device: torch.device, strategy: str):
        self.env, self.device, self.strategy = env, device, strategy
        self.mesh: DeviceMesh | None = None
        self.store: dist.Store | None = None
        self.control: dist.ProcessGroup | None = None
        self.hosts: list[str] = [socket.gethostname()]
        self.position = processes.Place(env.rank, os.environ.get(processes.WATCH_DIR))
        self._watch: Watch | None = None
        self._failed = False
        self._limit_seconds = 0.0
        self._counters: dict[str, itertools.count[int]] = defaultdict(itertools.count)

    @property
    def rank(self) -> int:
        """This process's number."""
        return self.env.rank

    @property
    def world(self) -> int:
        """How many there are."""
        return self.env.world

    @property
    def main(self) -> bool:
        """Whether this is rank 0, which speaks and writes for all."""
        return self.env.rank == 0

    def mark(self, step: int, phase: str) -> None:
        """Note where this rank is, for messages about it; costs microseconds and waits for nothing.

        On CUDA that is where the host is: the device may still be at what the host gave it earlier.
        """
        self.position.mark(step, phase)

    @property
    def step(self) -> int:
        """The step of the last `mark`."""
        return self.position.step

    @property
    def phase(self) -> str:
        """The phase of the last `mark`."""
        return self.position.phase

    def set_timeout(self, seconds: float) -> None:
        """From now on a collective or a wait on the store may take so long."""
        self._limit_seconds = seconds
        if self.store is not None:
            self.store.set_timeout(timedelta(seconds=seconds))
        for group in self._groups():
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def all_gather_object(self, name: str, value: Any) -> list[Any]:
        """Every rank's value (anything that JSON holds), in order of the ranks; waits for all. Not for the hot path."""
        if self.store is None or self.world == 1:
            return [json.loads(json.dumps(value))]
        key = f"gather/{name}/{next(self._counters[name])}"
        self.store.set(f"{key}/{self.rank}", json.dumps(value))
        keys = [f"{key}/{rank}" for rank in range(self.world)]
        self._await(keys)
        return [json.loads(raw) for raw in self.store.multi_get(keys)]

    def broadcast_object(self, name: str, value: Any = None) -> Any:
        """Rank 0's value, on every rank; the others' values are ignored."""
        if self.store is None or self.world == 1:
            return json.loads(json.dumps(value))
        key = f"share/{name}/{next(self._counters[name])}"
        if self.rank == 0:
            self.store.set(key, json.dumps(value))
        self._await([key])
        return json.loads(self.store.get(key))

    def _await(self, keys: list[str]) -> None:
        """Wait for keys in the store: not in one call, in which Python would see no signal, but looking again and again."""
        assert self.store is not None
        until, pause = time.monotonic() + self._limit_seconds, 0.0005
        while not self.store.check(keys):
            if time.monotonic() > until:
                missing = ", ".join(key for key in keys if not self.store.check([key]))
                raise dist.DistStoreError(f"timed out after {self._limit_seconds:g} s waiting for {missing}")
            time.sleep(pause)
            pause = min(2 * pause, LOOK_SECONDS)

    def stop(self) -> None:
        """A clean end. Rank 0 leaves last, because the store lives in it."""
        if self.store is not None and self.world > 1:
            self.store.set(f"done/{self.rank}", "1")
        if self._watch:
            self._watch.stop()
        if self.store is not None and self.world > 1 and self.rank == 0:
            with contextlib.suppress(dist.DistError):  # a rank that failed after its last collective says so itself
                self.store.set_timeout(timedelta(seconds=LAST_WORD_SECONDS))
                self.store.wait([f"done/{rank}" for rank in range(self.world)])
        self._leave()

    def fail(self, error: BaseException) -> processes.Failure:
        """This rank cannot go on: leave word for the others and the launcher, and join no collective any more.

        The process is ended by force after EXIT_SECONDS if it does not end by itself. Returns what happened first: another
        rank's failure where this error is only its consequence.
        """
        self._failed = True
        mine = processes.Failure(
            rank=self.rank,
            host=self.hosts[self.rank] if len(self.hosts) == self.world else socket.gethostname(),
            step=self.position.step,
            phase=self.position.phase,
            error=headline(error),
            time=time.time(),
            first=not lost_contact(error),
            collective=last_collective(),
        )
        if self.world > 1:
            faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
            atexit.register(end_here, BAD_INPUT if isinstance(error, UserError) else FAILED)
        if directory := os.environ.get(processes.WATCH_DIR):
            with contextlib.suppress(OSError):
                mine.write(directory, self.rank)
        if not self._watch:
            return mine
        cause = self._watch.report(mine)
        self._watch.stop()
        return cause

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is None or self.world == 1 or orderly(error):
            self.stop()
            return
        if self._failed:  # and has said so
            return
        places = self._watch.places() if self._watch and lost_contact(error) else ""
        cause = self.fail(error)
        if lost_contact(error):
            where = f"rank {self.rank} at step {self.position.step}, phase {self.position.phase}"
            if cause.rank != self.rank:
                raise RunFailed(f"{where} lost the others; first there was {cause}") from None
            known = f"; {places}" if places else ""
            raise RunFailed(
                f"{where} lost the others: {cause.error}; last collective: {cause.collective or 'unknown'}{known}"
            ) from error

    def _groups(self) -> Iterator[dist.ProcessGroup]:
        if not dist.is_initialized() or self.store is None:
            return
        yield dist.distributed_c10d._get_default_group()
        if self.control is not None:
            yield self.control
        if self.mesh is not None and self.mesh.ndim > 1:
            yield from self.mesh.get_all_groups()

    def _leave(self) -> None:
        if self.store is not None and dist.is_initialized():
            dist.destroy_process_group()
        self.store = self.control = self.mesh = None


def init_ranks(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    """Join the other ranks: device, process group (NCCL on CUDA, gloo on CPU), meshes, control group, heartbeat.

    A process of its own with the strategy `single` gets no process group at all. `store`: one that the ranks share already,
    instead of one on the env's address.

    Raises:
        UserError: strategy, device and world do not go together.
        RunFailed: the other ranks could not be reached in `parallel.startup_timeout_seconds`.
    """
    ranks = init_store(env, recipe, store)
    init_process_group(ranks, recipe)
    return ranks


def init_store(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    """The first half of `start`: the store alone, over which ranks can agree while each opens its data; raises the same."""
    strategy = recipe.strategy(env.world)
    if strategy == "single" and env.world > 1:
        raise UserError(f'parallel.strategy = "single" is for one rank, and there are {env.world}; use "ddp" or "auto"')
    if env.launcher not in ("none", "environment"):
        processes.die_with_parent(os.getppid())
        processes.dump_stacks_on_request(env.rank, os.environ.get(processes.WATCH_DIR))
    ranks = Ranks(env, torch.device("cpu"), strategy)
    if strategy != "single":
        with _meeting(ranks):
            limit = recipe.parallel.startup_timeout_seconds
            if store is None:
                store = dist.HashStore() if env.world == 1 else _tcp_store(env, timedelta(seconds=limit))
            ranks.store = dist.PrefixStore(f"attempt{env.attempt}", store)
            ranks.set_timeout(limit)
    return ranks


def init_process_group(ranks: Ranks, recipe: Recipe) -> None:
    """The second half of `start`: device, process group, meshes, control group, heartbeat; raises the same."""
    env = ranks.env
    ranks.device = device = choose_device(recipe.parallel.device, env)
    _set_threads(recipe.train.threads, env, device)
    if device.type == "cpu":
        processes.keep_freed_memory()
    if ranks.strategy != "single":
        with _meeting(ranks):
            _join(ranks, recipe)


@contextlib.contextmanager
def _meeting(ranks: Ranks) -> Iterator[None]:
    """What keeps the ranks from meeting, in plain words."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if isinstance(error, UserError):
            raise
        ranks.fail(error)
        env = ranks.env
        raise RunFailed(
            f"rank {env.rank} of {env.world} could not meet the others at {env.addr}:{env.port}: {error}"
        ) from error


def _join(ranks: Ranks, recipe: Recipe) -> None:
    env, device, settings = ranks.env, ranks.device, recipe.parallel
    timeout = timedelta(seconds=settings.startup_timeout_seconds)
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "256")  # the flight recorder names the last collective
    if env.nodes == 1 and (loopback := _loopback()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # a laptop's host name may lead nowhere
    dist.init_process_group(
        backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
        store=dist.PrefixStore("group", ranks.store),
        rank=env.rank,
        world_size=env.world,
        timeout=timeout,
    )
    if env.world > 1:
        ranks.control = dist.new_group(backend="gloo", timeout=timeout)
        uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
        homes = ranks.all_gather_object("home", [socket.gethostname(), uuid])
        ranks.hosts = [host for host, _ in homes]
        if wrong := shared_device(homes):
            raise UserError(wrong)
        ranks._watch = Watch(ranks.position, env, ranks.hosts, ranks.store, settings.heartbeat_seconds)
        ranks._watch.start()
    if ranks.strategy == "hybrid_shard":
        size = shard_size(settings.shard_size, env)
        shape, names = (env.world // size, size), ("replicate", "shard")
        ranks.mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    elif ranks.strategy in SHARDED:
        ranks.mesh = init_device_mesh(device.type, (env.world,), mesh_dim_names=("shard",))
    ranks.set_timeout(settings.startup_timeout_seconds)


def _tcp_store(env: DistEnv, timeout: timedelta) -> dist.Store:
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # torchrun's agent holds a store already
    hosts_it = env.rank == 0 and not agent
    listening = os.environ.get(processes.STORE_FD) if env.launcher == "windlass" else None
    return dist.TCPStore(
        env.addr,
        env.port,
        env.world,
        is_master=hosts_it,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=int(listening) if hosts_it and listening else None,
    )


def shard_size(wanted: int, env: DistEnv) -> int:
    """Ranks in a sharding group: as wanted, else those of one host, else (on one host) the largest share up to a half.

    Raises:
        UserError: the wanted size does not divide the world.
    """
    if wanted:
        if env.world % wanted:
            near = min((d for d in range(1, env.world + 1) if env.world % d == 0), key=lambda d: abs(d - wanted))
            raise UserError(
                f"parallel.shard_size = {wanted} does not divide the {env.world} ranks; the nearest that does is {near}"
            )
        return wanted
    if env.nodes > 1 and env.world % env.local_world == 0:
        return env.local_world
    return max(d for d in range(1, max(1, env.world // 2) + 1) if env.world % d == 0)


def choose_device(wanted: str, env: DistEnv) -> torch.device:
    """This rank's device: its own GPU where there are GPUs (or `cuda` is asked for), else the CPU.

    Raises:
        UserError: CUDA is asked for and is not there, or a host has more ranks than devices.
    """
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise UserError('parallel.device = "cuda", but torch finds no CUDA device here; use "auto" or "cpu"')
    visible = torch.cuda.device_count()
    if env.local_world > visible > 1:  # one visible device may be this rank's own: `_join` sees to that
        raise UserError(
            f"{env.local_world} ranks on this host and {visible} CUDA device(s): start as many ranks as devices, "
            'or set parallel.device = "cpu"'
        )
    index = env.local_rank if visible > 1 else 0
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def shared_device(homes: list[list[str]]) -> str | None:
    """What is wrong where two ranks would use one device; `homes` holds each rank's host and the UUID of its device."""
    seen: dict[tuple[str, ...], int] = {}
    for rank, (host, uuid) in enumerate(homes):
        if uuid and (host, uuid) in seen:
            return f"ranks {seen[host, uuid]} and {rank} on {host} both see the same one CUDA device: give each rank its own"
        seen[host, uuid] = rank
    return None


def _set_threads(wanted: int, env: DistEnv, device: torch.device) -> None:
    if wanted:
        torch.set_num_threads(wanted)
    elif env.world > 1 and device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // env.local_world))


def _loopback() -> str | None:
    names = {name for _, name in socket.if_nameindex()}
    return next((name for name in ("lo", "lo0") if name in names), None)


def say(text: str) -> None:
    """To stderr at once, in one write, so that ranks do not interleave."""
    sys.stderr.write(text.rstrip() + "\n")
    sys.stderr.flush()
