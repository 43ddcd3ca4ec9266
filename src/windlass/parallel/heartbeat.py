"""The heartbeat: each rank shows that it lives, and names the one that does not.

A thread of each rank counts up its own key in the store. Rank 0 watches all keys, the others rank 0's, and all look for the
first failure that anyone reported. A rank whose count stands still for MISSED intervals (it was suspended, or its host is
gone) ends the run: every rank that still answers prints the stacks of its threads and exits. The store itself lives in rank
0 and never answers again when that is suspended, whatever the time limit, so a second thread watches the first.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from windlass import processes
from windlass.parallel.env import DistEnv
from windlass.processes import Failure

MISSED = 6
"""Heartbeats a rank may miss: it is named after at most MISSED + 1 intervals."""
TICK_SECONDS = 1.0
"""How soon at the latest a reported failure is known everywhere."""
LAST_SECONDS = 2.0
"""How long the main thread has to fail by itself, with its own message, once the run is known to be lost."""

ECHO_SECONDS = 0.5
"""How long a rank that only lost contact waits for the word of the one that failed."""

Result = TypeVar("Result")


class Watch:
    """The watching threads of one rank, with connections to the store of their own."""

    def __init__(self, position: processes.Place, place: DistEnv, hosts: list[str], store: dist.Store, interval: float):
        self.position, self.place, self.hosts, self.interval = position, place, hosts, interval
        self.store, self.reports = store.clone(), store.clone()
        self.store.set_timeout(timedelta(seconds=interval * MISSED))
        self.reports.set_timeout(timedelta(seconds=LAST_SECONDS))
        self.first: Failure | None = None
        """The first failure that this rank knows of."""
        self._count, self._tick = 0, min(TICK_SECONDS, interval)
        self._ended = threading.Event()
        self._parent = os.getppid()
        self._peers = [rank for rank in range(place.world) if rank] if place.rank == 0 else [0]
        self._seen: dict[int, tuple[int, float]] = {}
        self._answered = time.monotonic()
        self._beat()

    def start(self) -> None:
        """Begin to beat and to watch."""
        for work in (self._talk, self._judge):
            threading.Thread(target=work, name=f"windlass-watch{work.__name__}", daemon=True).start()

    def stop(self) -> None:
        """No more beats, and no more watching: the run is over."""
        self._ended.set()

    def report(self, failure: Failure) -> Failure:
        """Tell the others, and return the first failure known of.

        Where this one is only an echo, the first may be told a moment later: it is waited for. Rank 0, whose end takes the
        store away, sees to it that all others have heard.
        """
        if not failure.first:
            until = time.monotonic() + ECHO_SECONDS
            while self.first is None and time.monotonic() < until:
                time.sleep(0.02)
        if self.first is None:
            word = _within(LAST_SECONDS, lambda: self.reports.compare_set("failure", "", json.dumps(asdict(failure))))
            self.first = Failure(**json.loads(word)) if word else failure
        if self.place.rank:
            _within(LAST_SECONDS, lambda: self.reports.set(f"heard/{self.place.rank}", "1"))
        elif failure.first:
            _within(TICK_SECONDS + LAST_SECONDS, lambda: self.reports.wait([f"heard/{rank}" for rank in self._peers]))
        return self.first

    def places(self) -> str:
        """Where each rank said last that it was; empty where the store does not answer."""
        keys, now = [f"beat/{rank}" for rank in range(self.place.world)], time.time()
        words = [json.loads(raw) for raw in _within(LAST_SECONDS, lambda: self.reports.multi_get(keys)) or []]
        return "; ".join(
            f"rank {w['rank']} on {self.hosts[w['rank']]} at step {w['step']}, phase {w['phase']}, for {now - w['since']:.0f} s"
            for w in words
        )

    def _talk(self) -> None:
        """Beat, look at the others' beats, and listen for failures."""
        due = 0.0
        while not self._ended.wait(self._tick):
            now = time.monotonic()
            late = (
                now - self._answered > 3 * self.interval
            )  # this process itself was held up: nobody is cell_state by that
            try:
                if now >= due or late:
                    due = now + self.interval
                    self._beat()
                    self._look(now, late)
                if self.first is None and self.store.check(["failure"]):
                    self.first = Failure(**json.loads(self.store.get("failure")))
                    self.store.set(f"heard/{self.place.rank}", "1")
            except Exception as error:
                self._lost(0, f"its store does not answer ({str(error).strip().splitlines()[:1]})")
            self._answered = time.monotonic()

    def _judge(self) -> None:
        """End this rank when the run is lost, or the launcher gone."""
        before = time.monotonic()
        while not self._ended.wait(self._tick):
            now = time.monotonic()
            if now - before > 3 * self.interval:
                self._answered = now
            before = now
            if os.getppid() != self._parent and self.place.launcher not in ("none", "environment"):
                os._exit(1)
            if now - self._answered > self.interval * MISSED:
                self._lost(0, f"its store does not answer, for {round(now - self._answered, 1)} s now")
            if self.first and not self._ended.wait(LAST_SECONDS):
                self._end(self.first)

    def _beat(self) -> None:
        self._count += 1
        self.store.set(f"beat/{self.place.rank}", json.dumps({"count": self._count, **self.position.fields()}))

    def _look(self, now: float, late: bool) -> None:
        for rank, raw in zip(self._peers, self.store.multi_get([f"beat/{r}" for r in self._peers]), strict=True):
            word = json.loads(raw)
            count, since = self._seen.get(rank, (-1, now))
            if word["count"] != count or late:
                self._seen[rank] = (word["count"], now)
            elif now - since > self.interval * MISSED and not self.store.check([f"done/{rank}"]):
                self._lost(rank, f"no sign of life for {round(now - since, 1)} s", word)

    def _lost(self, rank: int, why: str, word: dict[str, Any] | None = None) -> None:
        if self.first is not None or self._ended.is_set():
            return
        step, phase = (word["step"], word["phase"]) if word else (self.position.step, "unknown")
        self.first = Failure(rank=rank, host=self.hosts[rank], step=step, phase=phase, error=why, time=time.time())
        if rank:  # rank 0's loss cannot be told through its own store, and everybody sees it
            self.store.compare_set("failure", "", json.dumps(asdict(self.first)))

    def _end(self, trouble: Failure) -> None:
        """The main thread did not end by itself: show where it stands, and go."""
        me = f"windlass: rank {self.place.rank} ({self.hosts[self.place.rank]}, step {self.position.step}, "
        sys.stderr.write(f"{me}phase {self.position.phase}) ends, because the run lost {trouble}\n")
        faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
        sys.stderr.flush()
        if directory := os.environ.get(processes.WATCH_DIR):
            with contextlib.suppress(OSError):
                trouble.write(directory, self.place.rank)
        os._exit(1)


def _within(seconds: float, ask: Callable[[], Result]) -> Result | None:
    """What `ask` gives, or None where it fails or takes too long; then its thread is left behind."""
    found: list[Result] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # the store is in rank 0, which may be what was lost
            found.append(ask())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
