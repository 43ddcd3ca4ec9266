"""The heartbeat: each rank shows every few seconds that it lives, and ends when another one failed or fell silent.

A thread writes this rank's step and phase under the rank's own key of the store, with a count. Rank 0 watches all counts,
the others that of rank 0, and all look for the first failure that any rank reported. A rank whose count stands still for
MISSED intervals (it was suspended, or its host is gone) is lost, and the run ends: within 30 s at the default interval.

The store lives in rank 0. When that is suspended a call to the store never returns, whatever its time limit; so each call
is made in a helper thread, which is left behind when it takes too long.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

import torch.distributed as dist

from windlass import processes
from windlass.parallel.env import DistEnv
from windlass.processes import Failure

MISSED = 5
"""Intervals without a beat after which a rank is lost."""
POLL_SECONDS = 1.0
"""How often a rank looks for a reported failure, at least."""
EXIT_SECONDS = 2.0
"""How long the main thread has to end with a message of its own, once the run is known to be lost."""
CAUSE_SECONDS = 1.0
"""How long a rank that only lost contact waits for the report of the one that failed."""

Result = TypeVar("Result")


class Heartbeat:
    """The watching thread of one rank, with a connection to the store of its own."""

    def __init__(self, status: processes.RankStatus, env: DistEnv, store: dist.Store, interval: float):
        self.status, self.env, self.store, self.interval = status, env, store.clone(), interval
        self.host = socket.gethostname()
        self.failure: Failure | None = None
        """The first failure that this rank knows of."""
        self._watched = list(range(1, env.world)) if env.rank == 0 else [0]
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self._count = 0
        self._over = threading.Event()
        self._beat()

    def start(self) -> None:
        """From now on beat and watch; all ranks have their first beat in the store."""
        threading.Thread(target=self._run, name="windlass-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """This rank ends as it should."""
        self._over.set()

    def report(self, failure: Failure) -> Failure:
        """Tell the others, and return the failure that came first: another rank's where this one is secondary.

        Rank 0, whose end takes the store away, waits a moment until all others have read it.
        """
        until = time.monotonic() + (CAUSE_SECONDS if failure.secondary else 0.0)
        self.failure = self.failure or within(EXIT_SECONDS, self._reported)
        while self.failure is None and time.monotonic() < until:
            time.sleep(0.02)
            self.failure = within(EXIT_SECONDS, self._reported)
        if self.failure is None:
            text = within(EXIT_SECONDS, lambda: self.store.compare_set("failure", "", json.dumps(asdict(failure))))
            self.failure = Failure(**json.loads(text)) if text else failure
        within(EXIT_SECONDS, lambda: self.store.set(f"heard/{self.env.rank}", "1"))
        if self.env.rank == 0:
            others = [f"heard/{rank}" for rank in self._watched if rank != self.failure.rank]
            within(POLL_SECONDS + CAUSE_SECONDS, lambda: self.store.wait(others))
        return self.failure

    def last_seen(self) -> str:
        """The last beat of each other rank, to say who is late; empty where the store does not answer."""
        ranks, now = [r for r in range(self.env.world) if r != self.env.rank], time.time()
        beats = within(EXIT_SECONDS, lambda: self.store.multi_get([f"beat/{r}" for r in ranks])) or []
        texts = []
        for rank, beat in zip(ranks, map(json.loads, beats), strict=False):
            age = now - beat["since"]
            texts.append(
                f"rank {rank} on {beat['host']} at step {beat['step']}, phase {beat['phase']}, for {age:.0f} s"
            )
        return "; ".join(texts)

    def _run(self) -> None:
        beat_due, before = 0.0, time.monotonic()
        while not self._over.wait(min(POLL_SECONDS, self.interval)):
            now = time.monotonic()
            if now - before > 3 * self.interval:  # this process itself was suspended: nobody is late because of that
                self._seen.clear()
            watch = now >= beat_due
            if watch:
                beat_due = now + self.interval
            answer = within(self.interval * MISSED, lambda: self._poll(watch))  # noqa: B023 - it has ended, or is left behind
            before = time.monotonic()
            if answer is None and not self._over.is_set():
                last = self._seen.get(0, ({"host": self.env.addr, "step": self.status.step, "phase": "unknown"}, 0.0))[
                    0
                ]
                self.failure = self.failure or self._lost(0, last, f"its store did not answer for {before - now:.0f} s")
            if self.failure and not self._over.wait(EXIT_SECONDS):
                self._exit(self.failure)

    def _poll(self, watch: bool) -> bool:
        if watch:
            self._beat()
            for rank, text in zip(
                self._watched, self.store.multi_get([f"beat/{r}" for r in self._watched]), strict=True
            ):
                beat, now = json.loads(text), time.monotonic()
                last, since = self._seen.get(rank, ({}, now))
                if last.get("count") != beat["count"]:
                    self._seen[rank] = (beat, now)
                elif now - since >= self.interval * MISSED and not self.store.check([f"done/{rank}"]):
                    lost = self._lost(rank, beat, f"no heartbeat for {now - since:.0f} s")
                    self.store.compare_set("failure", "", json.dumps(asdict(lost)))
        self.failure = self.failure or self._reported()
        if self.failure:
            self.store.set(f"heard/{self.env.rank}", "1")
        return True

    def _beat(self) -> None:
        self._count += 1
        beat = {"count": self._count, "host": self.host, **self.status.fields()}
        self.store.set(f"beat/{self.env.rank}", json.dumps(beat))

    def _reported(self) -> Failure | None:
        return Failure(**json.loads(self.store.get("failure"))) if self.store.check(["failure"]) else None

    def _lost(self, rank: int, beat: dict[str, Any], why: str) -> Failure:
        return Failure(rank, beat["host"], beat["step"], beat["phase"], why, time.time())

    def _exit(self, failure: Failure) -> None:
        """The main thread did not end by itself: it waits in a collective."""
        where = f"rank {self.env.rank} on {self.host} at step {self.status.step}, phase {self.status.phase}"
        sys.stderr.write(f"windlass: {where} ends, because the run lost {failure}\n")
        sys.stderr.flush()
        if directory := os.environ.get(processes.WATCH_DIR):
            with contextlib.suppress(OSError):
                failure.write(directory, self.env.rank)
        os._exit(1)


def within(seconds: float, call: Callable[[], Result]) -> Result | None:
    """What `call` returns; None where it fails or takes longer, and then its thread is left behind."""
    results: list[Result] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # the store is in rank 0, which may be what was lost
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
