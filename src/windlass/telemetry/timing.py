"""Time of the phases of a step, wall time of the process, and torch's profile of some steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from windlass.launch.rank_status import STEP_PHASES
from windlass.telemetry.measures import PHASES

PROFILE_ROWS = 60  # of the table of operators


class StepTimer:
    """Milliseconds of a step by phase, averaged from one `read` to the next.

    On CUDA, events measure the phases, and nothing waits for the device before `read`, which the
    loop calls when it logs and has to wait for the loss anyway. Waiting for data is host time on
    every device. `new_event` replaces the events of CUDA.
    """

    def __init__(self, device: Any = "cpu", goodput: Any = None, new_event: Any = None):
        if new_event is None and str(device).startswith("cuda"):
            new_event = partial(torch.cuda.Event, enable_timing=True)
        self._new_event, self._goodput = new_event, goodput
        # phases that are not counted yet: name, first mark, last mark
        self._marks = deque[tuple[str, Any, Any]]()
        self._ms: dict[str, float] = {}
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
        event = self._new_event()
        event.record()
        return event

    def _count(self, name: str, first: Any, last: Any) -> None:
        self._ms[name] = self._ms.get(name, 0.0) + elapsed_ms(first, last)


def elapsed_ms(first: Any, last: Any) -> float:
    """Milliseconds between two marks of a `StepTimer`."""
    return (last - first) * 1e3 if isinstance(first, float) else float(first.elapsed_time(last))


class Goodput:
    """Wall time of a start by phase, to the nanosecond; `began`: its beginning (Unix time)."""

    def __init__(self, began: float) -> None:
        before = max(time.time() - began, 0.0)
        self._since = time.perf_counter_ns()
        self._phase = "startup"
        self._ns = dict.fromkeys(("startup", *PHASES), 0)
        self._ns["startup"] = int(before * 1e9)

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

    def seconds(self) -> dict[str, float]:
        """Seconds in each phase so far, without empty ones, to the millisecond. Thread-safe."""
        running = time.perf_counter_ns() - self._since
        spent = self._ns | {self._phase: self._ns[self._phase] + running}
        return {name: round(ns / 1e9, 3) for name, ns in spent.items() if ns}


class StepProfile:
    """Profiles the steps that `telemetry.profile` names, on rank 0."""

    def __init__(self, setting: str, directory: Path, rank: int, device: torch.device, steps: int):
        """`steps`: of the whole run, whose end also ends the profile."""
        first, count = map(int, setting.split(":")) if setting and rank == 0 else (-1, 0)
        self.first, self.last = first, min(first + count - 1, steps)
        self.name = directory / "profile" / f"steps-{self.first}-{self.last}"
        self.on_gpu = device.type == "cuda"
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        if step == self.first:
            gpu = [ProfilerActivity.CUDA] if self.on_gpu else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            self._profile.start()

    def ends(self, step: int) -> bool:
        return self._profile is not None and step >= self.last

    def write(self) -> tuple[str, list[str]]:
        """Stop the profile, and write its files; returns a message, and their paths in the run."""
        assert self._profile is not None
        running, self._profile = self._profile, None
        running.stop()
        by = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        table = running.key_averages().table(sort_by=by, row_limit=PROFILE_ROWS)
        try:
            self.name.parent.mkdir(exist_ok=True)
            Path(f"{self.name}.txt").write_text(table)
            running.export_chrome_trace(f"{self.name}.json.gz")
        except OSError as error:
            return f"the profile was not written: {error}", []
        names = [f"profile/{self.name.name}{end}" for end in (".json.gz", ".txt")]
        return f"profile: {' and '.join(names)}", names

    def close(self) -> None:
        if self._profile is not None:
            self._profile.stop()
