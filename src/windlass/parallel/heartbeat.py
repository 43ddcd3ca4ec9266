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
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist

from windlass.parallel.env import DistEnv
from windlass.processes import STEP_PHASES, Failure, RankStatus

MISSED = 5  # intervals without a beat after which a rank is lost
POLL_SECONDS = 1.0  # how often a rank looks for a reported failure, at least
EXIT_SECONDS = 2.0  # in which the main thread of a lost run may end with its own message
CAUSE_SECONDS = 1.0  # how long a rank that lost contact waits for the report of the one that failed

ORDER = (*STEP_PHASES, "step")  # of a step; other phases come after
HAS_COLLECTIVES = (*ORDER[1:], "evaluation", "sample")  # a user's callbacks may take any time

Result = TypeVar("Result")


class Heartbeat:
    """The watching thread of one rank, with a connection to the store of its own."""

    def __init__(self, status: RankStatus, env: DistEnv, store: dist.Store, interval: float):
        self.status, self.env, self.store, self.interval = status, env, store.clone(), interval
        self.failure: Failure | None = None  # the first one that this rank has heard of
        self._watched = list(range(1, env.world)) if env.rank == 0 else [0]
        # By watched rank: its last new beat, and when.
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        self.progress_seconds = math.inf  # of a collective; rank 0 judges progress by it
        # By rank: its last new place in the run, and when.
        self._still: dict[int, tuple[Any, float]] = {}
        self._count, self._over = 0, threading.Event()
        self._beat()

    def start(self) -> None:
        """From now on beat and watch; all ranks have their first beat in the store."""
        threading.Thread(target=self._run, name="windlass-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def report(self, failure: Failure) -> Failure:
        """Tell the others; returns the first failure: another rank's if this one is secondary."""
        until = time.monotonic() + (CAUSE_SECONDS if failure.secondary else 0.0)
        while not (first := self.failure or within(EXIT_SECONDS, self._reported)):
            if time.monotonic() >= until:
                break
            time.sleep(0.02)
        if not first:
            report = json.dumps(asdict(failure))
            text = within(EXIT_SECONDS, lambda: self.store.compare_set("failure", "", report))
            first = Failure(**json.loads(text)) if text else failure
        self.failure = first
        within(EXIT_SECONDS, lambda: self.store.set(f"heard/{self.env.rank}", "1"))
        if self.env.rank == 0:  # the store ends with it
            others = [f"heard/{rank}" for rank in self._watched if rank != first.rank]
            within(POLL_SECONDS + CAUSE_SECONDS, lambda: self.store.wait(others))
        return first

    def last_seen(self) -> str:
        """The last beat of each other rank."""
        keys = [f"beat/{rank}" for rank in range(self.env.world)]
        raw = within(EXIT_SECONDS, lambda: self.store.multi_get(keys)) or []
        now = time.time()
        return "; ".join(
            str(_failure(beat, f"for {now - beat['since']:.0f} s"))
            for beat in map(json.loads, raw)
            if beat["rank"] != self.env.rank
        )

    def _run(self) -> None:
        beat_due, before = 0.0, time.monotonic()
        while not self._over.wait(min(POLL_SECONDS, self.interval)):
            now = time.monotonic()
            if now - before > 3 * self.interval:  # this process was suspended, so nobody is late
                self._seen.clear()
            watch = now >= beat_due
            beat_due = now + self.interval if watch else beat_due
            answered = within(self.interval * MISSED, partial(self._poll, watch))
            before = time.monotonic()
            if not answered and not self._over.is_set():
                unseen = {"rank": 0, "host": self.env.addr, "step": self.status.step}
                beat, _ = self._seen.get(0, (unseen | {"phase": "unknown", "place": ""}, 0.0))
                why = f"its store did not answer for {before - now:.0f} s"
                self.failure = self.failure or _failure(beat, why)
            if self.failure and not self._over.wait(EXIT_SECONDS):
                # The main thread did not end by itself: it waits in a collective.
                end = self.status.failure(f"it ends, because the run lost {self.failure}")
                print(f"windlass: {end}", file=sys.stderr, flush=True)
                self.status.write(self.failure)
                os._exit(1)

    def _poll(self, watch: bool) -> bool:
        if watch:
            ours = self._beat()
            beats = self.store.multi_get([f"beat/{rank}" for rank in self._watched])
            for rank, beat in zip(self._watched, map(json.loads, beats), strict=True):
                now = time.monotonic()
                last, since = self._seen.get(rank, ({}, now))
                if last.get("count") != beat["count"]:
                    self._seen[rank] = (beat, now)
                elif now - since >= self.interval * MISSED:
                    if self.store.check([f"done/{rank}"]):
                        continue
                    lost = _failure(beat, f"no heartbeat for {now - since:.0f} s")
                    self.store.compare_set("failure", "", json.dumps(asdict(lost)))
            if self.env.rank == 0:
                self._judge_progress([ours, *map(json.loads, beats)])
        self.failure = self.failure or self._reported()
        if self.failure:
            self.store.set(f"heard/{self.env.rank}", "1")
        return True

    def _judge_progress(self, beats: Sequence[dict[str, Any]]) -> None:
        now = time.monotonic()
        for beat in beats:
            place = (beat["step"], beat["phase"], beat["since"])
            if self._still.get(beat["rank"], (None, 0.0))[0] != place:
                self._still[beat["rank"]] = (place, now)
        still = [now - self._still[beat["rank"]][1] for beat in beats]
        # Three intervals before NCCL: a change is seen up to one late, and the end takes up to one.
        limit = max(self.progress_seconds - 3 * self.interval, self.progress_seconds / 2)
        if (number := behind(beats, still, limit)) is not None:
            seconds = f"{still[number]:.0f} s"
            why = f"no progress for {seconds}, while others wait (parallel.timeout_seconds)"
            self.store.compare_set("failure", "", json.dumps(asdict(_failure(beats[number], why))))

    def _beat(self) -> dict[str, Any]:
        self._count += 1
        beat = {"count": self._count, **self.status.fields()}
        self.store.set(f"beat/{self.env.rank}", json.dumps(beat))
        return beat

    def _reported(self) -> Failure | None:
        if not self.store.check(["failure"]):
            return None
        return Failure(**json.loads(self.store.get("failure")))


def behind(beats: Sequence[dict[str, Any]], still: Sequence[float], limit: float) -> int | None:
    """The number of the beat whose rank is behind all, if one stood `still` for `limit` s."""
    pairs = zip(beats, still, strict=True)
    if not any(s >= limit and beat["phase"] in HAS_COLLECTIVES for beat, s in pairs):
        return None
    place = {phase: number for number, phase in enumerate(ORDER)}
    return min(
        range(len(beats)),
        key=lambda n: (beats[n]["step"], place.get(beats[n]["phase"], len(ORDER)), -still[n]),
    )


def _failure(beat: dict[str, Any], why: str) -> Failure:
    place = {key: beat[key] for key in ("rank", "host", "step", "phase", "place")}
    return Failure(**place, error=why, time=time.time(), lost=True)


def within(seconds: float, call: Callable[[], Result]) -> Result | None:
    """The result of `call` in a thread, or None if it fails or is late.

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
