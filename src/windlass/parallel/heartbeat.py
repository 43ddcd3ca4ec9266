"""The heartbeat: each rank shows every few seconds that it lives, and ends when another one failed or fell silent.

A thread writes this rank's step and phase under the rank's own key of the store, with a count. Rank 0 watches all counts,
the others that of rank 0, and all look for the first failure that any rank reported. A rank whose count stands still for
MISSED intervals (it was suspended, or its host is gone) is lost, and the run ends: within 30 s at the default interval.

A rank whose host waits for a kernel that never ends goes on beating. So on CUDA rank 0 also judges progress: if a rank
stands still in a phase that has collectives for almost the time limit of a collective, the rank that is behind all others
is lost. Rank 0 says so before NCCL's own watchdog, which names neither rank nor phase, aborts the processes.

When rank 0, which holds the store, is suspended, a call to it never returns, in spite of its time limit: see `within`.
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
from typing import Any, TypeVar

import torch.distributed as dist

from windlass.parallel.env import DistEnv
from windlass.processes import Failure, RankStatus

MISSED = 5  # intervals without a beat after which a rank is lost
POLL_SECONDS = 1.0  # how often a rank looks for a reported failure, at least
EXIT_SECONDS = (
    2.0  # how long the main thread has to end with a message of its own, once the run is lost
)
CAUSE_SECONDS = (
    1.0  # how long a rank that only lost contact waits for the report of the one that failed
)

ORDER = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "step",
)  # the phases of a step; what else there is comes after it
HAS_COLLECTIVES = (*ORDER[1:], "evaluation", "sample")  # a user's callbacks may take any time

Result = TypeVar("Result")


class Heartbeat:
    """The watching thread of one rank, with a connection to the store of its own."""

    def __init__(self, status: RankStatus, env: DistEnv, store: dist.Store, interval: float):
        self.status, self.env, self.store, self.interval = status, env, store.clone(), interval
        self.failure: Failure | None = None  # the first one that this rank has heard of
        self._watched = list(range(1, env.world)) if env.rank == 0 else [0]
        self._seen: dict[
            int, tuple[dict[str, Any], float]
        ] = {}  # of each watched rank: the last new beat, and when
        self.progress_seconds = (
            math.inf
        )  # how long a collective may take; rank 0 judges progress by it
        self._still: dict[
            int, tuple[Any, float]
        ] = {}  # of each rank: its last new place in the run, and when
        self._count, self._over = 0, threading.Event()
        self._beat()

    def start(self) -> None:
        """From now on beat and watch; all ranks have their first beat in the store."""
        threading.Thread(target=self._run, name="windlass-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def report(self, failure: Failure) -> Failure:
        """Tell the others, and return the failure that came first: another rank's where this one is secondary.

        Rank 0, whose end takes the store away, waits a moment until all others have read it.
        """
        until = time.monotonic() + (CAUSE_SECONDS if failure.secondary else 0.0)
        while (
            not (first := self.failure or within(EXIT_SECONDS, self._reported))
            and time.monotonic() < until
        ):
            time.sleep(0.02)
        if not first:
            text = within(
                EXIT_SECONDS,
                lambda: self.store.compare_set("failure", "", json.dumps(asdict(failure))),
            )
            first = Failure(**json.loads(text)) if text else failure
        self.failure = first
        within(EXIT_SECONDS, lambda: self.store.set(f"heard/{self.env.rank}", "1"))
        if self.env.rank == 0:
            others = [f"heard/{rank}" for rank in self._watched if rank != first.rank]
            within(POLL_SECONDS + CAUSE_SECONDS, lambda: self.store.wait(others))
        return first

    def last_seen(self) -> str:
        """The last beat of each other rank, to say who is late; empty where the store does not answer."""
        keys = [f"beat/{rank}" for rank in range(self.env.world) if rank != self.env.rank]
        beats = [
            json.loads(beat)
            for beat in within(EXIT_SECONDS, lambda: self.store.multi_get(keys)) or []
        ]
        return "; ".join(
            str(_failure(beat, f"for {time.time() - beat['since']:.0f} s")) for beat in beats
        )

    def _run(self) -> None:
        beat_due, before = 0.0, time.monotonic()
        while not self._over.wait(min(POLL_SECONDS, self.interval)):
            now = time.monotonic()
            if (
                now - before > 3 * self.interval
            ):  # this process itself was suspended: nobody is late because of that
                self._seen.clear()
            watch = now >= beat_due
            beat_due = now + self.interval if watch else beat_due
            answered = within(self.interval * MISSED, lambda watch=watch: self._poll(watch))  # type: ignore[misc]
            before = time.monotonic()
            if not answered and not self._over.is_set():
                unseen = {
                    "rank": 0,
                    "host": self.env.addr,
                    "step": self.status.step,
                    "phase": "unknown",
                }
                beat, _ = self._seen.get(0, (unseen, 0.0))
                self.failure = self.failure or _failure(
                    beat, f"its store did not answer for {before - now:.0f} s"
                )
            if self.failure and not self._over.wait(EXIT_SECONDS):
                # The main thread did not end by itself: it waits in a collective.
                why = self.status.failure(f"it ends, because the run lost {self.failure}")
                print(f"windlass: {why}", file=sys.stderr, flush=True)
                self.status.write(self.failure)
                os._exit(1)

    def _poll(self, watch: bool) -> bool:
        if watch:
            self._beat()
            beats = self.store.multi_get([f"beat/{rank}" for rank in self._watched])
            for rank, beat in zip(self._watched, map(json.loads, beats), strict=True):
                now = time.monotonic()
                last, since = self._seen.get(rank, ({}, now))
                if last.get("count") != beat["count"]:
                    self._seen[rank] = (beat, now)
                elif now - since >= self.interval * MISSED and not self.store.check(
                    [f"done/{rank}"]
                ):
                    lost = _failure(beat, f"no heartbeat for {now - since:.0f} s")
                    self.store.compare_set("failure", "", json.dumps(asdict(lost)))
            if self.env.rank == 0:
                self._judge_progress([self.status.fields(), *map(json.loads, beats)])
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
        # Three intervals earlier than NCCL: a change is seen up to one late, and the end takes up to one.
        limit = max(self.progress_seconds - 3 * self.interval, self.progress_seconds / 2)
        if (number := behind(beats, still, limit)) is not None:
            why = f"no progress for {still[number]:.0f} s, while others wait (parallel.timeout_seconds)"
            self.store.compare_set("failure", "", json.dumps(asdict(_failure(beats[number], why))))

    def _beat(self) -> None:
        self._count += 1
        self.store.set(
            f"beat/{self.env.rank}", json.dumps({"count": self._count, **self.status.fields()})
        )

    def _reported(self) -> Failure | None:
        return (
            Failure(**json.loads(self.store.get("failure")))
            if self.store.check(["failure"])
            else None
        )


def behind(beats: Sequence[dict[str, Any]], still: Sequence[float], limit: float) -> int | None:
    """The number of the beat whose rank is behind all others, if any rank has stood still for `limit` seconds.

    `still`: for how long each rank has been where it is. Of ranks at the same place the one that came there first counts.
    """
    if not any(
        s >= limit and beat["phase"] in HAS_COLLECTIVES
        for beat, s in zip(beats, still, strict=True)
    ):
        return None
    place = {phase: number for number, phase in enumerate(ORDER)}
    return min(
        range(len(beats)),
        key=lambda n: (beats[n]["step"], place.get(beats[n]["phase"], len(ORDER)), -still[n]),
    )


def _failure(beat: dict[str, Any], why: str) -> Failure:
    return Failure(
        beat["rank"], beat["host"], beat["step"], beat["phase"], why, time.time(), lost=True
    )


def within(seconds: float, call: Callable[[], Result]) -> Result | None:
    """What `call` returns, from a thread of its own; None where it fails or takes longer: the thread is left to itself."""
    results: list[Result] = []

    def run() -> None:
        with contextlib.suppress(Exception):  # the store is in rank 0, which may be what was lost
            results.append(call())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None
