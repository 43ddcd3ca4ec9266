"""The ranks as one group: store, process groups, exchanges, time limits, an end without a hang."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import json
import os
import re
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from windlass import processes
from windlass.errors import (
    BAD_INPUT,
    FAILED,
    OutOfMemory,
    RunFailed,
    Stopped,
    UserError,
    first_line,
)
from windlass.launch.schedulers import host_name
from windlass.parallel.env import NO_HOSTS, DistEnv
from windlass.parallel.heartbeat import Heartbeat
from windlass.parallel.mesh import Mesh
from windlass.recipe import Recipe
from windlass.recipe.strategies import STRATEGIES, Sizes, Strategy

Value = TypeVar("Value")

INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable from which gloo takes its network interface
EXIT_SECONDS = 10.0  # after which a failed rank ends even if its communicators still wait
STOP_SECONDS = 30.0  # how long rank 0, which holds the store, waits at a clean end for the others
POLL_SECONDS = 0.02  # between two looks of a rank that waits on the store; signals come through
GLOO_NOISE = r"\[[^]]*\.cc:\d+\] |\. This is typically .*"
STORES: dict[tuple[str, int], dist.Store] = {}
"""The stores of this process by address. They outlast a training: a rank that is ahead may begin
the next one before rank 0 has ended this one, and our launcher's socket serves only once."""
LOST_CONTACT = (
    "connection closed by peer|connection reset|timed out|timeout|broken pipe|socket|nccl"
)


class Ranks:
    """This rank among all, from `init_store` to the end of the `with` block.

    A rank that leaves the block by an exception reports it and joins no more collectives.
    """

    def __init__(
        self, env: DistEnv, device: torch.device, strategy: Strategy = STRATEGIES["single"]
    ):
        self.env, self.device, self.strategy = env, device, strategy
        self.rank, self.world, self.main = env.rank, env.world, env.rank == 0
        self.mesh = Mesh(Sizes(), 0)  # without groups before `init_process_group`
        self.store: dist.Store | None = None  # of this attempt; None with the strategy `single`
        self.status = processes.RankStatus(env.rank, os.environ.get(processes.WATCH_DIR))
        self.mark = self.status.mark
        self._heartbeat: Heartbeat | None = None
        self._failed, self._timeout, self._exchanges = False, 0.0, Counter[str]()
        self._restore = process_settings()

    def set_timeout(self, seconds: float) -> None:
        self._timeout = seconds
        # gloo's collectives end in time by themselves.
        if self._heartbeat is not None and self.device.type == "cuda":
            self._heartbeat.progress_seconds = seconds
        if self.store is None:
            return
        self.store.set_timeout(timedelta(seconds=seconds))
        # torch 2.14 has a public function, and warns of the private one.
        public = hasattr(dist, "set_timeout")
        set_timeout = dist.set_timeout if public else dist.distributed_c10d._set_pg_timeout
        for group in self.mesh.groups():
            set_timeout(timedelta(seconds=seconds), group)

    def all_gather_object(self, name: str, value: Any) -> list[Any]:
        """Every rank's value (anything that JSON holds), in order of the ranks; waits for all."""
        return self._exchange(f"gather/{name}", value, range(self.world))

    def broadcast_object(self, name: str, value: Any = None) -> Any:
        """Rank 0's value, on every rank; the others' values are ignored."""
        return self._exchange(f"broadcast/{name}", value, range(1))[0]

    def decide(self, name: str, decision: Callable[[], Value]) -> Value:
        """Rank 0's decision (a value for JSON) on every rank; its error is raised on every rank."""
        value, error, failed = None, "", False
        if self.main:
            try:
                value = decision()
            except (UserError, RunFailed) as raised:
                error, failed = raised.text, isinstance(raised, RunFailed)
            except OSError as raised:
                place = f"{raised.filename}: " if raised.filename else ""
                error = f"{place}{raised.strerror or raised}; give another run.dir"
        value, error, failed = self.broadcast_object(name, [value, error, failed])
        if error:
            raise RunFailed(error) if failed else UserError(error)
        return value  # type: ignore[return-value]

    def _exchange(self, name: str, value: Any, senders: Sequence[int]) -> list[Any]:
        if self.store is None or self.world == 1:
            return [json.loads(json.dumps(value))]
        self._exchanges[name] += 1
        keys = {rank: f"{name}/{self._exchanges[name]}/{rank}" for rank in senders}
        if self.rank in keys:
            self.store.set(keys[self.rank], json.dumps(value))
        return self._wait(keys)

    def _wait(self, keys: dict[int, str]) -> list[Any]:
        """The value of each rank's key; DistStoreError if it is late or a rank has failed."""
        assert self.store is not None
        until, pause = time.monotonic() + self._timeout, 0.0005
        while not self.store.check(list(keys.values())):
            if pause >= POLL_SECONDS and self.store.check(["failure"]):
                raise dist.DistStoreError("another rank has failed")
            if time.monotonic() > until:
                late = ", ".join(str(r) for r, key in keys.items() if not self.store.check([key]))
                waited = f"waited {self._timeout:g} s for rank {late}"
                raise dist.DistStoreError(f"timed out: {waited}")
            time.sleep(pause)
            pause = min(2 * pause, POLL_SECONDS)
        return [json.loads(raw) for raw in self.store.multi_get(list(keys.values()))]

    def stop(self) -> None:
        """A clean end. Rank 0 ends last, because the store lives in it."""
        if self._heartbeat:
            self._heartbeat.stop()
        if self.store is not None:
            everyone = [f"done/{rank}" for rank in range(self.world)]
            # A rank that fails after its last collective reports that itself.
            with contextlib.suppress(dist.DistError):
                self.store.set(f"done/{self.rank}", "1")
                if self.main:
                    self.store.wait(everyone, timedelta(seconds=STOP_SECONDS))
            if dist.is_initialized():
                dist.destroy_process_group()
        self.store, self.mesh = None, Mesh(Sizes(), 0)

    def fail(self, error: BaseException) -> processes.Failure:
        """Report that this rank cannot continue; returns the first failure of any rank."""
        self._failed = True
        text = f"{type(error).__name__}: {re.sub(GLOO_NOISE, '', first_line(error))}"
        again = isinstance(error, OutOfMemory)
        failure = self.status.failure(text, lost_contact(error), again)
        if self.world > 1:
            faulthandler.dump_traceback_later(EXIT_SECONDS, exit=True)
            atexit.register(exit_now, BAD_INPUT if isinstance(error, UserError) else FAILED)
        self.status.write(failure)
        if self._heartbeat is None:
            return failure
        first = self._heartbeat.report(failure)
        self._heartbeat.stop()
        return first

    def __enter__(self) -> Ranks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._restore()
        if error is None or self.world == 1 or isinstance(error, Stopped):  # all stop together
            self.stop()
        elif not self._failed:
            lost = lost_contact(error)
            last_seen = self._heartbeat.last_seen() if self._heartbeat and lost else ""
            first = self.fail(error)
            why = f"{first.error}; last seen: {last_seen or 'nothing'}"
            if first.rank != self.rank:
                why = f"the first failure was {first}"
            if lost:
                raise RunFailed(str(self.status.failure(f"it lost the others: {why}"))) from error


def process_settings() -> Callable[[], None]:
    """A function that restores the process's present settings, which a training changes."""
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    interface = os.environ.get(INTERFACE)

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
        use_deterministic(deterministic, warn_only)
        os.environ.pop(INTERFACE, None)
        if interface is not None:
            os.environ[INTERFACE] = interface

    return restore


def use_deterministic(mode: bool, warn_only: bool = False) -> None:
    now = torch.are_deterministic_algorithms_enabled()
    if (now, torch.is_deterministic_algorithms_warn_only_enabled()) != (mode, warn_only):
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)


def alone(device: str | torch.device | None = None) -> Ranks:
    """A group of this process only, on CUDA if available."""
    here = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Ranks(DistEnv(), torch.device(here))


def init_ranks(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(init_store(env, recipe, store))
        init_process_group(ranks, recipe)
        stack.pop_all()
    return ranks


def init_store(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    """Connect by a store, in which a failed rank writes its failure; start the heartbeat."""
    strategy = recipe.strategy(env.world)
    if env.launcher not in ("none", "environment"):
        processes.exit_with_parent(default=os.getppid())
    ranks = Ranks(env, torch.device("cpu"), strategy)
    if not strategy.distributed:
        return ranks
    seconds = recipe.parallel.startup_timeout_seconds
    # Rank 0 holds the store, on the socket that our launcher opened; under torchrun the agent may.
    is_master = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    fd = os.environ.get(processes.STORE_FD) if is_master and env.launcher == "windlass" else None
    options: dict[str, Any] = {"timeout": timedelta(seconds=seconds), "wait_for_workers": False}
    try:
        if store is None and env.world == 1:
            store = dist.HashStore()
        elif store is None:
            address = (env.addr, env.port)
            if address not in STORES:
                options["master_listen_fd"] = int(fd) if fd else None
                STORES[address] = dist.TCPStore(*address, env.world, is_master, **options)
            store = STORES[address]
        # A restart under torchrun sees old keys; so does a second training in the same processes.
        start = store.add(f"attempt{env.attempt}/starts/{env.rank}", 1)
        ranks.store = dist.PrefixStore(f"attempt{env.attempt}/{start}", store)
        ranks.set_timeout(seconds)
        if env.world > 1:
            interval = recipe.parallel.heartbeat_seconds
            ranks._heartbeat = Heartbeat(ranks.status, env, ranks.store, interval)
            ranks._wait({rank: f"beat/{rank}" for rank in range(env.world)})
            ranks._heartbeat.start()
            if env.launcher in NO_HOSTS:
                own = host_name(os.environ) or socket.gethostname()
                ranks.env = by_hosts(env, ranks.all_gather_object("host", own))
    except (dist.DistError, RuntimeError) as error:
        first = ranks.fail(error)
        is_ours = first.rank == env.rank
        why = first_line(error) if is_ours else f"the first failure was {first}"
        where = f"rank {env.rank} of {env.world} did not meet the others at {env.addr}:{env.port}"
        raise RunFailed(f"{where}: {why}") from error
    return ranks


def init_process_group(ranks: Ranks, recipe: Recipe) -> None:
    """Choose the device; create the process group (NCCL on CUDA, gloo on CPU) and the mesh."""
    env, settings = ranks.env, recipe.parallel
    ranks.device = device = choose_device(settings.device, env)
    on_host = device.type == "cpu" or settings.offload
    if recipe.train.threads:
        torch.set_num_threads(recipe.train.threads)
    elif env.local_world > 1 and on_host and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(processes.thread_share(env.local_world))
    if device.type == "cpu":
        processes.keep_freed_memory()
    tf32 = recipe.train.tf32 and device.type == "cuda"
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if not ranks.strategy.distributed:
        return
    if interface := gloo_interface(ranks):
        # gloo takes the host name's interface, which may be missing, slow, or a foreign network.
        os.environ.setdefault(INTERFACE, interface)
    timeout = timedelta(seconds=settings.startup_timeout_seconds)
    backend = "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl"
    store: Any = dist.PrefixStore("group", ranks.store)
    place: Any = {"store": store, "rank": env.rank, "world_size": env.world}
    dist.init_process_group(backend, timeout=timeout, **place)
    ranks_of_host = env.local_world if env.nodes > 1 else 0
    sizes = recipe.sizes(env.world, ranks_of_host)
    sequence = settings.sequence and recipe.model.kind == "gpt"
    ranks.mesh, ranks.status.place = Mesh(sizes, env.rank, sequence), sizes.place(env.rank)
    ranks.mesh.connect(ranks.strategy, device.type, timeout)
    ranks.set_timeout(settings.startup_timeout_seconds)


def address_to(host: str) -> str:
    """This machine's address on the route to a host; empty for the loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks the kernel for the route
        own = str(probe.getsockname()[0])
        return "" if own.startswith("127.") else own
    return ""


def interface_to(host: str) -> str:
    import psutil

    address, interfaces = address_to(host), psutil.net_if_addrs().items()
    return next((name for name, every in interfaces if address in {a.address for a in every}), "")


def by_hosts(env: DistEnv, hosts: Sequence[str]) -> DistEnv:
    """`env` with the node and local numbers that follow from every rank's host."""
    own, order = hosts[env.rank], list(dict.fromkeys(hosts))
    local_rank, local_world = hosts[: env.rank].count(own), hosts.count(own)
    return replace(
        env, node=order.index(own), nodes=len(order), local_rank=local_rank, local_world=local_world
    )


def gloo_interface(ranks: Ranks) -> str:
    env = ranks.env
    if env.nodes == 1:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    # On the first host the route to its own name may be the loopback.
    places = ranks.all_gather_object("address", [env.node, address_to(env.addr)])
    others = (address for node, address in places if node and address)
    return interface_to(env.addr if env.node else next(others, env.addr))


def lost_contact(error: BaseException) -> bool:
    lost = type(error) is RuntimeError and re.search(LOST_CONTACT, str(error).lower()) is not None
    return lost or isinstance(error, dist.DistError)


def exit_now(code: int) -> None:
    """End a failed process. The interpreter would destroy groups whose threads wait, and abort."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def choose_device(wanted: str, env: DistEnv) -> torch.device:
    """This rank's GPU if there are GPUs, else the CPU; UserError if a wanted GPU is missing."""
    visible = torch.cuda.device_count() if wanted != "cpu" and torch.cuda.is_available() else 0
    if not visible and wanted == "cuda":
        problem = 'parallel.device = "cuda", but torch finds no CUDA device here'
        raise UserError(f'{problem}; use "auto" or "cpu"')
    if not visible:
        return torch.device("cpu")
    # A single visible device may be this rank's own; if it is not, NCCL says so.
    if env.local_world > visible > 1:
        here = f"{env.local_world} ranks on this host and {visible} CUDA devices"
        raise UserError(f'{here}: start one rank for each device, or set parallel.device = "cpu"')
    device = torch.device("cuda", env.local_rank if visible > 1 else 0)
    torch.cuda.set_device(device)
    return device
