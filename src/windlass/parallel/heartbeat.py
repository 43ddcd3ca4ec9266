"""The heartbeat: each rank shows every few seconds that it lives, and ends if another is lost.

Rank 0 watches the counts of all, the others watch rank 0's. On CUDA rank 0 also judges progress,
because NCCL's watchdog would abort the processes and name neither rank nor phase.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from windlass.launch.rank_status import STEP_PHASES, Failure, RankStatus
from windlass.parallel.env import DistEnv

MISSED = 5  # intervals without a beat after which a rank is lost
POLL_SECONDS = 1.0  # how often a rank looks for a reported failure, at least
EXIT_SECONDS = 2.0  # in which the main thread of a lost run may end with its own message
CAUSE_SECONDS = 1.0  # how long a rank that lost contact waits for the report of the one that failed

ORDER = (*STEP_PHASES, "step")  # of a step; other phases come after
HAS_COLLECTIVES = (*ORDER[1:], "evaluation", "sample")  # a user's callbacks may take any time

Result = TypeVar("Result")


@dataclass(frozen=True)
class Beat:
    """Where a rank is in the run, since when (Unix time), and how many beats it has made."""

    rank: int
    host: str
    step: int
    phase: str
    since: float = 0.0
    place: str = ""
    count: int = 0

    def failure(self, why: str) -> Failure:
        where = (self.rank, self.host, self.step, self.phase)
        return Failure(*where, why, time.time(), lost=True, place=self.place)


class Heartbeat:
    """The watching thread of one rank, with a connection to the store of its own."""

    def __init__(self, status: RankStatus, env: DistEnv, store: dist.Store, interval: float):
        self.status, self.env, self.interval = status, env, interval
        self.store = store.clone()
        self.failure: Failure | None = None  # the first one that this rank has heard of
        self.progress_seconds = math.inf  # of a collective; rank 0 judges progress by it
        self._watched = list(range(1, env.world)) if env.rank == 0 else [0]
        self._beats: dict[int, Beat] = {}  # the last one of each watched rank
        self._seen: dict[tuple[str, int], tuple[Any, float]] = {}  # a rank's value, and since when
        self._count = 0  # beats of this rank
        self._over = threading.Event()
        self._beat()

    def start(self, beats: Sequence[dict[str, Any]]) -> None:
        """From now on beat and watch; `beats` are the first ones of all ranks."""
        self._beats = {beat["rank"]: Beat(**beat) for beat in beats}
        threading.Thread(target=self._run, name="windlass-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def report(self, failure: Failure) -> Failure:
        """Tell the others; returns the first failure: another rank's if this one is secondary."""
        until = time.monotonic() + (CAUSE_SECONDS if failure.secondary else 0.0)
        while not (first := self.failure or call_with_timeout(EXIT_SECONDS, self._reported)):
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
        if not first:
            text = call_with_timeout(EXIT_SECONDS, partial(self._set_failure, failure))
            first = Failure(**json.loads(text)) if text else failure
        self.failure = first
        call_with_timeout(EXIT_SECONDS, lambda: self.store.set(f"heard/{self.env.rank}", "1"))
        if self.env.rank == 0:  # the store ends with it
            others = [f"heard/{rank}" for rank in self._watched if rank != first.rank]
            call_with_timeout(POLL_SECONDS + CAUSE_SECONDS, lambda: self.store.wait(others))
        return first

    def last_seen(self) -> str:
        """The last beat of each other rank."""
        others = [rank for rank in range(self.env.world) if rank != self.env.rank]
        beats = call_with_timeout(EXIT_SECONDS, lambda: self._read(others)) or []
        now = time.time()
        return "; ".join(str(beat.failure(f"for {now - beat.since:.0f} s")) for beat in beats)

    def _run(self) -> None:
        beat_due, before = 0.0, time.monotonic()
        while not self._over.wait(min(POLL_SECONDS, self.interval)):
            now = time.monotonic()
            if now - before > 3 * self.interval:  # this process was suspended, so nobody is late
                self._seen.clear()
            watch = now >= beat_due
            if watch:
                beat_due = now + self.interval
            answered = call_with_timeout(self.interval * MISSED, partial(self._poll, watch))
            before = time.monotonic()
            if not answered and not self._over.is_set():
                why = f"its store did not answer for {before - now:.0f} s"
                self.failure = self.failure or self._beats[0].failure(why)
            if self.failure and not self._over.wait(EXIT_SECONDS):
                # The main thread did not end by itself: it waits in a collective.
                end = self.status.failure(f"it ends, because the run lost {self.failure}")
                print(f"windlass: {end}", file=sys.stderr, flush=True)
                self.status.write(self.failure)
                os._exit(1)

    def _poll(self, watch: bool) -> bool:
        if watch:
            ours, others = self._beat(), self._read(self._watched)
            for beat in others:
                self._beats[beat.rank] = beat
                silent = self._unchanged("count", beat.rank, beat.count)
                if silent >= self.interval * MISSED and not self.store.check([f"done/{beat.rank}"]):
                    self._set_failure(beat.failure(f"no heartbeat for {silent:.0f} s"))
            if self.env.rank == 0:
                self._judge_progress([ours, *others])
        self.failure = self.failure or self._reported()
        if self.failure:
            self.store.set(f"heard/{self.env.rank}", "1")
        return True

    def _judge_progress(self, beats: Sequence[Beat]) -> None:
        places = [(beat.step, beat.phase, beat.since) for beat in beats]
        ranks = [beat.rank for beat in beats]
        still = [self._unchanged("place", *pair) for pair in zip(ranks, places, strict=True)]
        # Three intervals before NCCL: a change is seen up to one late, and the end takes up to one.
        limit = max(self.progress_seconds - 3 * self.interval, self.progress_seconds / 2)
        if (number := behind(beats, still, limit)) is not None:
            seconds = f"{still[number]:.0f} s"
            why = f"no progress for {seconds}, while others wait (parallel.timeout_seconds)"
            self._set_failure(beats[number].failure(why))

    def _unchanged(self, what: str, rank: int, value: Any) -> float:
        """The seconds for which this rank has seen the same value of another rank."""
        now = time.monotonic()
        before, since = self._seen.get((what, rank), (None, now))
        if before != value:
            self._seen[what, rank] = (value, now)
            return 0.0
        return now - since

    def _beat(self) -> Beat:
        self._count += 1
        beat = Beat(**self.status.fields(), count=self._count)
        self.store.set(f"beat/{self.env.rank}", json.dumps(asdict(beat)))
        return beat

    def _read(self, ranks: Sequence[int]) -> list[Beat]:
        texts = self.store.multi_get([f"beat/{rank}" for rank in ranks])
        return [Beat(**json.loads(text)) for text in texts]

    def _set_failure(self, failure: Failure) -> bytes:
        """Report a failure, if it is the first; returns the first as JSON."""
        return self.store.compare_set("failure", "", json.dumps(asdict(failure)))

    def _reported(self) -> Failure | None:
        if not self.store.check(["failure"]):
            return None
        return Failure(**json.loads(self.store.get("failure")))


def behind(beats: Sequence[Beat], still: Sequence[float], limit: float) -> int | None:
    """The number of the beat whose rank is behind all, if one stood `still` for `limit` s."""
    pairs = zip(beats, still, strict=True)
    if not any(s >= limit and beat.phase in HAS_COLLECTIVES for beat, s in pairs):
        return None

    def place(number: int) -> tuple[int, int, float]:
        beat = beats[number]
        phase = ORDER.index(beat.phase) if beat.phase in ORDER else len(ORDER)
        return beat.step, phase, -still[number]

    return min(range(len(beats)), key=place)


def call_with_timeout(seconds: float, call: Callable[[], Result]) -> Result | None:
    """The result of `call` in a thread, or None if it fails or takes longer.

    A call to the store ignores its own time limit if rank 0 is suspended.
    """
    results: list[Result] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # the store is in rank 0, which may be lost
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
