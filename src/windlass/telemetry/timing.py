"""The time of a step and of a run, throughput and MFU. No torch. `StepTimer` and `Goodput` measure
in the training; the functions compute from the ledger, also of a killed and resumed run."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from windlass.run import STARTS, Line

STEP_PHASES = ("data", "forward", "backward", "optimizer")
RUN_PHASES = ("startup", "compile", "data", "train", "eval", "save", "sample")

Seconds = dict[str, float]


class StepTimer:
    """Milliseconds of a step by phase, averaged from one `read` to the next.

    On CUDA, events measure the phases, and nothing waits for the device before `read`, which the
    loop calls when it logs and has to wait for the loss anyway. Waiting for data is host time on
    every device. `new_event` replaces the events of CUDA.
    """

    def __init__(self, device: Any = "cpu", goodput: Any = None, new_event: Any = None):
        if new_event is None and str(device).startswith("cuda"):
            cuda = sys.modules["torch"].cuda  # loaded by the training
            new_event = partial(cuda.Event, enable_timing=True)
        self._new_event, self._goodput = new_event, goodput
        # phases that are not counted yet: name, first mark, last mark
        self._marks = deque[tuple[str, Any, Any]]()
        self._free: list[Any] = []  # events to record again
        self._ms: Seconds = {}
        self._steps = 0
        self._begin = self._mark()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time one of STEP_PHASES, of which the last ends the step, or `outside` (a save)."""
        data = name == "data"
        first = self._mark(host=data)
        try:
            with self._goodput.phase("data") if data and self._goodput else nullcontext():
                yield
            self._steps += name == "optimizer"
        finally:
            self._marks.append((name, first, self._mark(host=data)))
        # count the phases that the device has passed; the host does not wait
        while self._marks and (isinstance(last := self._marks[0][2], float) or last.query()):
            self._count(*self._marks.popleft())

    def read(self) -> dict[str, float]:
        """`step_ms` and `<phase>_ms`, averaged since the last call; waits for the device."""
        end = self._mark()
        if self._new_event:
            end.synchronize()  # and so everything recorded before it
        while self._marks:
            self._count(*self._marks.popleft())
        ms, steps = self._ms, self._steps
        ms["step"] = max(elapsed_ms(self._begin, end) - ms.get("outside", 0.0), 0.0)
        self._ms, self._steps, self._begin = {}, 0, end
        names = [name for name in ("step", *STEP_PHASES) if name in ms and steps]
        return {f"{name}_ms": ms[name] / steps for name in names}

    def _mark(self, host: bool = False) -> Any:
        """Now: seconds of the host's clock, or an event at the end of the current stream."""
        if host or self._new_event is None:
            return time.perf_counter()
        event = self._free.pop() if self._free else self._new_event()
        event.record()
        return event

    def _count(self, name: str, first: Any, last: Any) -> None:
        self._ms[name] = self._ms.get(name, 0.0) + elapsed_ms(first, last)
        self._free += [mark for mark in (first, last) if not isinstance(mark, float)]


def elapsed_ms(first: Any, last: Any) -> float:
    """Milliseconds between two marks of a `StepTimer`."""
    return (last - first) * 1e3 if isinstance(first, float) else float(first.elapsed_time(last))


class Goodput:
    """Wall time of one process by phase, to the nanosecond; imports count as `startup`."""

    def __init__(self) -> None:
        import psutil

        before = max(time.time() - psutil.Process().create_time(), 0.0)
        self._since = time.perf_counter_ns()
        self._phase = "startup"
        self._ns = dict.fromkeys(RUN_PHASES, 0) | {"startup": int(before * 1e9)}

    def enter(self, name: str) -> str:
        now = time.perf_counter_ns()
        self._ns[self._phase] += now - self._since
        before, self._phase, self._since = self._phase, name, now
        return before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> Seconds:
        """Seconds in each phase so far, without empty ones, to the millisecond. Thread-safe."""
        running = time.perf_counter_ns() - self._since
        spent = self._ns | {self._phase: self._ns[self._phase] + running}
        return {name: round(ns / 1e9, 3) for name, ns in spent.items() if ns}


class Throughput(NamedTuple):
    """Work divided by the time of its steps, without evaluations, saves and starts."""

    steps_per_s: float
    samples_per_s: float
    tokens_per_s: float  # padding not counted
    mfu: float | None  # None without a peak of the device


def throughput(ledger: Iterable[Line]) -> Throughput | None:
    """The speed over a run, from its effective ledger; None if it timed nothing.

    A `train` line holds means over the steps since the line or start before it, so it counts by the
    time of these steps. The first line of each start (caches, compilation) counts only if there are
    no others.
    """
    lines = [(line, steps) for line, steps in timed(ledger) if "tokens_per_s" in line]
    windows = [(line, line["step_ms"] / 1e3 * steps) for line, steps in lines]
    total = sum(seconds for _, seconds in windows)
    if not total:
        return None

    def mean(field: str) -> float:
        return float(sum(line.get(field, 0.0) * seconds for line, seconds in windows) / total)

    steps = sum(1e3 / line["step_ms"] * seconds for line, seconds in windows) / total
    share = mean("mfu") if all("mfu" in line for line, _ in windows) else None
    return Throughput(steps, mean("samples_per_s"), mean("tokens_per_s"), share)


def timed(ledger: Iterable[Line]) -> list[tuple[Line, int]]:
    windows: list[tuple[Line, int, bool]] = []  # a line, its steps, whether it is the start's first
    step, first = 0, True
    for line in ledger:
        if line["kind"] == "event" and line.get("event") in STARTS:
            step, first = line["step"], True
        elif line["kind"] == "train":
            if line.get("step_ms"):
                windows.append((line, max(line["step"] - step, 1), first))
            step, first = line["step"], False
    later = [window for window in windows if not window[2]]
    return [(line, steps) for line, steps, _ in later or windows]


def evaluation_speed(ledger: Iterable[Line]) -> float | None:
    """Samples a second of all evaluations of the loss."""
    seconds = samples = 0.0
    for line in ledger:
        if line["kind"] == "eval" and line.get("suite", "loss") == "loss" and line.get("runtime_s"):
            seconds += line["runtime_s"]
            samples += max(line.get("samples", 0), line.get("full_samples", 0))
            samples += line.get("train_samples", 0)
    return samples / seconds if seconds and samples else None


def averages(ledger: Sequence[Line]) -> dict[str, float]:
    speed, starts = throughput(ledger), [x for x in ledger if x.get("event") == "first_step"]
    speeds = speed._asdict() if speed else {}
    means = {f"{name}_mean": x for name, x in speeds.items() if x is not None}
    means |= {"startup_s": starts[0]["startup_s"]} if starts else {}
    evaluated = evaluation_speed(ledger)
    return means | ({"eval_samples_per_s": evaluated} if evaluated else {})


def wall_time(lines: Iterable[Line]) -> Seconds:
    """Seconds by phase over all starts, with `lost` and their sum `total`, from the raw ledger.

    The `seconds` of a line count its process so far. If an attempt resumes from step *s*, the
    time that earlier attempts spent after step *s* is `lost`. The time between an attempt's last
    line and its death is in no line.
    """
    attempts = _attempts(lines)
    totals = dict.fromkeys((*RUN_PHASES, "lost"), 0.0)
    for number, own in attempts.items():
        later = [lines[0][0] for other, lines in attempts.items() if other > number]
        resumed_at = min(later, default=float("inf"))
        # The event of a checkpoint written in the background may come after lines of later steps:
        # only the lines before the first one beyond that step count.
        valid = takewhile(lambda line, end=resumed_at: line[0] <= end, own)  # type: ignore[misc]
        last, useful = own[-1][1], [Seconds(), *(seconds for _, seconds in valid)][-1]
        for name in last:
            totals[name] = totals.get(name, 0.0) + useful.get(name, 0.0)
            totals["lost"] += last[name] - useful.get(name, 0.0)
    rounded = {name: round(value, 3) for name, value in totals.items()}
    return rounded | {"total": round(sum(rounded.values()), 3)}


def device_hours(lines: Iterable[Line]) -> float:
    """Hours of wall time times ranks, over all starts of a run, from the raw ledger."""
    lines = list(lines)
    started = (line for line in lines if isinstance(line.get("world"), int))
    worlds = {int(line.get("attempt", 0)): line["world"] for line in started}
    hours, ranks = 0.0, 1
    for number, own in sorted(_attempts(lines).items()):
        ranks = worlds.get(number, ranks)
        hours += sum(own[-1][1].values()) * ranks / 3600
    return hours


def _attempts(lines: Iterable[Line]) -> dict[int, list[tuple[float, Seconds]]]:
    """Step and seconds of each line by attempt."""
    attempts: dict[int, list[tuple[float, Seconds]]] = {}
    for line in lines:
        if isinstance(line.get("seconds"), dict):
            own = attempts.setdefault(int(line.get("attempt", 0)), [])
            own.append((line["step"], line["seconds"]))
    return attempts


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops: float | None, devices: int
) -> float | None:
    """Model FLOPs utilisation, a fraction (arXiv 2204.02311); None without a peak.

    `flops_per_token`: forward and backward by the 6N convention plus attention, no recomputation.
    """
    return tokens_per_s * flops_per_token / (peak_flops * devices) if peak_flops else None
