"""The ranks of a training: how they meet, what they tell each other over a store, and an end without
a hang."""

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
from windlass.launch import rank_status
from windlass.launch.schedulers import host_name
from windlass.parallel.env import NO_HOSTS, DistEnv, by_hosts
from windlass.parallel.heartbeat import Heartbeat
from windlass.parallel.mesh import Mesh
from windlass.recipe import Recipe
from windlass.recipe.settings import ParallelSettings
from windlass.recipe.strategies import STRATEGIES, Sizes, Strategy

Value = TypeVar("Value")

EXIT_SECONDS = 10.0  # after which a failed rank ends even if its communicators still wait
STOP_SECONDS = 30.0  # how long rank 0, which holds the store, waits at a clean end for the others
POLL_SECONDS = 0.02  # between two looks of a rank that waits on the store; signals come through
GLOO_NOISE = r"\[[^]]*\.cc:\d+\] |\. This is typically .*"
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
        self.mesh = Mesh(Sizes(), 0)  # without groups before `connect`
        self.store: dist.Store | None = None  # of this attempt; None with the strategy `single`
        self._heartbeat: Heartbeat | None = None  # None for a single rank
        self.status = rank_status.RankStatus(env.rank, os.environ.get(rank_status.WATCH_DIR))
        self.mark = self.status.mark
        self._failed = False
        self._timeout = 0.0  # seconds
        self._exchanges = Counter[str]()  # by name
        self._threads = torch.get_num_threads()  # of the process, which a training changes

    def join(self, store: dist.Store | None, settings: ParallelSettings) -> None:
        """Meet the others at a store, by default at the one that rank 0 serves, and start the
        heartbeat; RunFailed if a rank is missing."""
        env = self.env
        try:
            store = store or open_store(env, settings.startup_timeout_seconds)
            # A restart under torchrun sees old keys; so does a second training in the same
            # processes.
            attempt = f"attempt{env.attempt}"
            start = store.add(f"{attempt}/starts/{self.rank}", 1)
            self.store = dist.PrefixStore(f"{attempt}/{start}", store)
            self.set_timeout(settings.startup_timeout_seconds)
            if self.world == 1:
                return
            self._heartbeat = Heartbeat(self.status, env, self.store, settings.heartbeat_seconds)
            self._heartbeat.start(self._wait({rank: f"beat/{rank}" for rank in range(self.world)}))
            if env.launcher in NO_HOSTS:
                own = host_name(os.environ) or socket.gethostname()
                self.env = by_hosts(env, self.all_gather_object("host", own))
        except (dist.DistError, RuntimeError) as error:
            first = self.fail(error)
            is_ours = first.rank == self.rank
            why = first_line(error) if is_ours else f"the first failure was {first}"
            where = f"rank {self.rank} of {self.world} did not meet the others at"
            raise RunFailed(f"{where} {env.addr}:{env.port}: {why}") from error

    def connect(self, recipe: Recipe) -> None:
        """Choose the device; create the process group (NCCL on CUDA, gloo on CPU) and the mesh."""
        env, settings = self.env, recipe.parallel
        self.device = device = choose_device(settings.device, env)
        on_host = device.type == "cpu" or settings.offload
        if recipe.train.threads:
            torch.set_num_threads(recipe.train.threads)
        elif env.local_world > 1 and on_host and "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(processes.thread_share(env.local_world))
        if device.type == "cpu":
            processes.keep_freed_memory()
        tf32 = recipe.train.tf32 and device.type == "cuda"
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        if self.store is None:
            return
        if interface := gloo_interface(self):
            # gloo takes the host name's interface, which may be missing, slow, or a foreign network.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        seconds = settings.startup_timeout_seconds
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=timedelta(seconds=seconds),
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
        )
        sizes = recipe.sizes(self.world, env.local_world if env.nodes > 1 else 0)
        self.status.place = sizes.place(self.rank)
        self.mesh = Mesh(sizes, self.rank)
        self.mesh.connect(self.strategy, device.type, timedelta(seconds=seconds))
        self.set_timeout(seconds)

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

    def fail(self, error: BaseException) -> rank_status.Failure:
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
        torch.set_num_threads(self._threads)
        if error is None or self.world == 1 or isinstance(error, Stopped):  # all stop together
            self.stop()
        elif not self._failed:
            lost = lost_contact(error)
            last_seen = self._heartbeat.last_seen() if self._heartbeat and lost else ""
            first = self.fail(error)
            why = f"{first.error}; last seen: {last_seen or 'nothing'}"
            # A secondary failure: a rank is gone without a word.
            if first.rank != self.rank and not first.secondary:
                why = f"the first failure was {first}"
            if lost:
                raise RunFailed(str(self.status.failure(f"it lost the others: {why}"))) from error


def init_ranks(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(init_store(env, recipe, store))
        ranks.connect(recipe)
        stack.pop_all()
    return ranks


def init_store(env: DistEnv, recipe: Recipe, store: dist.Store | None = None) -> Ranks:
    """The ranks, which can exchange values but have no device and no process group yet."""
    if env.launcher not in ("none", "environment"):
        processes.exit_with_parent(default=os.getppid())
    ranks = Ranks(env, torch.device("cpu"), recipe.strategy(env.world))
    if ranks.strategy.distributed:
        ranks.join(store, recipe.parallel)
    return ranks


def open_store(env: DistEnv, seconds: float) -> dist.Store:
    """The store of all ranks, which rank 0 serves (under torchrun the agent may)."""
    if env.world == 1:
        return dist.HashStore()
    serves = env.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    fd = os.environ.get(processes.STORE_FD) if serves and env.launcher == "windlass" else None
    store = dist.TCPStore(
        env.addr,
        env.port,
        env.world,
        serves,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # a later training of this process has the server that is there
        master_listen_fd=int(fd) if fd else None,
    )
    if serves:
        # The server outlasts the training: a rank that is ahead may begin the next one before rank
        # 0 has ended this one, and the launcher's socket serves only once. `id` does nothing.
        atexit.register(id, store)
    return store


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


def gloo_interface(ranks: Ranks) -> str:
    """The network interface by which this rank reaches the others; empty: gloo's own choice."""
    import psutil

    env = ranks.env
    if env.nodes == 1:
        return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
    # On the first host the route to its own name may be the loopback.
    places = ranks.all_gather_object("address", [env.node, address_to(env.addr)])
    others = (address for node, address in places if node and address)
    own = address_to(env.addr if env.node else next(others, env.addr))
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, every in interfaces if own in {a.address for a in every}), "")


def address_to(host: str) -> str:
    """This machine's address on the route to a host; empty for the loopback."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only asks the kernel for the route
        own = str(probe.getsockname()[0])
        return "" if own.startswith("127.") else own
    return ""


def lost_contact(error: BaseException) -> bool:
    lost = type(error) is RuntimeError and re.search(LOST_CONTACT, str(error).lower()) is not None
    return lost or isinstance(error, dist.DistError)


def exit_now(code: int) -> None:
    """End a failed process. The interpreter would destroy groups whose threads wait, and abort."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def alone(device: str | torch.device | None = None) -> Ranks:
    """A group of this process only, on CUDA if available."""
    here = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return Ranks(DistEnv(), torch.device(here))
