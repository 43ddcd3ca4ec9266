"""The heartbeat: each rank shows that it lives, and names the one that does not.

A thread of each rank counts up its own key in the store. Rank 0 watches all keys, the others watch rank 0's and the first
failure that any rank reported. A rank whose count stands still for MISSED intervals (it was stopped, or
its host is gone) ends the run: every rank that still answers prints the stacks of its threads and exits.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from windlass import processes
from windlass.parallel.env import World
from windlass.processes import Failure

MISSED = 6
"""Heartbeats a rank may miss. It is named after at most MISSED + 1 intervals, and every other rank knows one later."""
LAST_SECONDS = 2.0
"""How long the main thread has to fail by itself, with its own message, once the run is known to be lost."""


class Watch(threading.Thread):
    """The watching thread of one rank, with connections to the store of its own."""

    def __init__(self, position: processes.Place, place: World, hosts: list[str], store: dist.Store, interval: float):
        super().__init__(name="windlass-watch", daemon=True)
        self.position, self.place, self.hosts, self.interval = position, place, hosts, interval
        self.store, self.reports = store.clone(), store.clone()
        self.store.set_timeout(timedelta(seconds=interval * MISSED))
        self.reports.set_timeout(timedelta(seconds=LAST_SECONDS))
        self._count = 0
        self._ended = threading.Event()
        self._parent = os.getppid()
        self._peers = [rank for rank in range(place.world) if rank] if place.rank == 0 else [0]
        self._seen: dict[int, tuple[int, float]] = {}
        self._beat()

    def stop(self) -> None:
        """No more beats, and no more watching: the run is over."""
        self._ended.set()

    def report(self, failure: Failure, wait: bool) -> Failure | None:
        """Tell the others; returns the first failure known of. `wait`: another rank's word may come a moment later."""
        until = time.monotonic() + (LAST_SECONDS if wait else 0.0)
        with contextlib.suppress(Exception):  # the store is in rank 0, which may be what was lost
            if not wait:
                return Failure(**json.loads(self.reports.compare_set("failure", "", json.dumps(asdict(failure)))))
            while not self.reports.check(["failure"]) and time.monotonic() < until:
                time.sleep(0.05)
            return Failure(**json.loads(self.reports.get("failure")))
        return None

    def run(self) -> None:
        """Beat and look until the end."""
        before = time.monotonic()
        while not self._ended.wait(self.interval):
            now = time.monotonic()
            late = now - before > 3 * self.interval  # this process itself was held up: judge nobody by that time
            before = now
            if os.getppid() != self._parent and self.place.launcher not in ("none", "environment"):
                os._exit(1)
            try:
                self._beat()
                trouble = self._look(now, late)
            except Exception as error:
                trouble = self._lost(0, f"its store does not answer ({str(error).splitlines()[0][:120]})")
            if trouble and not self._ended.wait(LAST_SECONDS):
                self._end(trouble)

    def _beat(self) -> None:
        self._count += 1
        self.store.set(f"beat/{self.place.rank}", json.dumps({"count": self._count, **self.position.fields()}))

    def _look(self, now: float, late: bool) -> Failure | None:
        for rank, raw in zip(self._peers, self.store.multi_get([f"beat/{r}" for r in self._peers]), strict=True):
            word = json.loads(raw)
            count, since = self._seen.get(rank, (-1, now))
            if word["count"] != count or late:
                self._seen[rank] = (word["count"], now)
            elif now - since > self.interval * MISSED and not self.store.check([f"done/{rank}"]):
                return self._lost(rank, f"no sign of life for {round(now - since)} s", word)
        if self.store.check(["failure"]):
            return Failure(**json.loads(self.store.get("failure")))
        return None

    def _lost(self, rank: int, why: str, word: dict[str, Any] | None = None) -> Failure:
        word = word or {}
        failure = Failure(
            rank=rank,
            host=self.hosts[rank],
            step=word.get("step", self.position.step),
            phase=word.get("phase", "unknown"),
            error=why,
            time=time.time(),
        )
        if rank:  # rank 0's loss cannot be told through its own store; everybody sees it
            with contextlib.suppress(Exception):
                self.store.compare_set("failure", "", json.dumps(asdict(failure)))
        return failure

    def _end(self, trouble: Failure) -> None:
        """The main thread did not end by itself: show where it stands, and go."""
        me = f"windlass: rank {self.place.rank} ({self.hosts[self.place.rank]}, step {self.position.step}, "
        sys.stderr.write(f"{me}phase {self.position.phase}) ends, because the run lost {trouble}\n")
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        if directory := os.environ.get(processes.WATCH_DIR):
            with contextlib.suppress(OSError):
                Failure(**{**asdict(trouble), "first": True}).write(directory)
        os._exit(1)
