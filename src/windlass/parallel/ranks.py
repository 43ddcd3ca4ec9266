"""The ranks of a training: what they tell each other over a store, and an end without a hang."""

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
from windlass.launch.schedulers import host_name
from windlass.parallel.env import NO_HOSTS, DistEnv, by_hosts
from windlass.parallel.heartbeat import Heartbeat
from windlass.parallel.mesh import Mesh
from windlass.recipe import Recipe
from windlass.recipe.settings import ParallelSettings
from windlass.recipe.strategies import STRATEGIES, Sizes, Strategy

Value = TypeVar("Value")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # the variable from which gloo takes its network interface
EXIT_SECONDS = 10.0  # after which a failed rank ends even if its communicators still wait
STOP_SECONDS = 30.0  # how long rank 0, which holds the store, waits at a clean end for the others
POLL_SECONDS = 0.02  # between two looks of a rank that waits on the store; signals come through
GLOO_NOISE = r"\[[^]]*\.cc:\d+\] |\. This is typically .*"
LOST_CONTACT = (
    "connection closed by peer|connection reset|timed out|timeout|broken pipe|socket|nccl"
)


class Ranks:
    """This rank among all, from `connect.init_store` to the end of the `with` block.

    A rank that leaves the block by an exception reports it and joins no more collectives.
    """

    def __init__(
        self, env: DistEnv, device: torch.device, strategy: Strategy = STRATEGIES["single"]
    ):
        self.env, self.device, self.strategy = env, device, strategy
        self.rank, self.world, self.main = env.rank, env.world, env.rank == 0
        self.mesh = Mesh(Sizes(), 0)  # without groups before `init_process_group`
        self.store: dist.Store | None = None  # of this attempt; None with the strategy `single`
        self._heartbeat: Heartbeat | None = None  # None for a single rank
        self.status = processes.RankStatus(env.rank, os.environ.get(processes.WATCH_DIR))
        self.mark = self.status.mark
        self._failed = False
        self._timeout = 0.0  # seconds
        self._exchanges = Counter[str]()  # by name
        self._threads = torch.get_num_threads()  # of the process, which a training changes

    def join(self, store: dist.Store, settings: ParallelSettings) -> None:
        """Meet the others at a store, and start the heartbeat; DistError if a rank is missing."""
        # A restart under torchrun sees old keys; so does a second training in the same processes.
        attempt = f"attempt{self.env.attempt}"
        start = store.add(f"{attempt}/starts/{self.rank}", 1)
        self.store = dist.PrefixStore(f"{attempt}/{start}", store)
        self.set_timeout(settings.startup_timeout_seconds)
        if self.world == 1:
            return
        interval = settings.heartbeat_seconds
        self._heartbeat = Heartbeat(self.status, self.env, self.store, interval)
        self._wait({rank: f"beat/{rank}" for rank in range(self.world)})
        self._heartbeat.start()
        if self.env.launcher in NO_HOSTS:
            own = host_name(os.environ) or socket.gethostname()
            self.env = by_hosts(self.env, self.all_gather_object("host", own))

    def connect(self, device: torch.device, recipe: Recipe) -> None:
        """Compute on a device from now on; create the process group of all ranks, and the mesh."""
        self.device = device
        if self.store is None:
            return
        seconds = recipe.parallel.startup_timeout_seconds
        dist.init_process_group(
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=timedelta(seconds=seconds),
            store=dist.PrefixStore("group", self.store),
            rank=self.rank,
            world_size=self.world,
        )
        sizes = recipe.sizes(self.world, self.env.local_world if self.env.nodes > 1 else 0)
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
        torch.set_num_threads(self._threads)
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
