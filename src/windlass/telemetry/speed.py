"""How fast, and where the time goes: milliseconds by phase of a step, wall time by phase of a run, MFU."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

from windlass.telemetry.walltime import RUN_PHASES, device_hours, wall_time

if TYPE_CHECKING:
    import torch

__all__ = [
    "RUN_PHASES", "STEP_PHASES", "CudaClock", "Goodput", "HostClock", "StepTimer", "device_hours", "mfu", "process_age",
    "wall_time",
]  # fmt: skip

STEP_PHASES = ("data", "forward", "backward", "optimizer")


class _Clock(Protocol):
    """Marks points of time on the device's own time line, and says later how far apart they were."""

    def mark(self) -> Any: ...

    def done(self, mark: Any) -> bool: ...

    def ms(self, first: Any, second: Any) -> float: ...

    def free(self, mark: Any) -> None: ...

    def wait(self, mark: Any) -> None: ...


class HostClock:
    """The host's clock, for a CPU, and for waiting on data, which the host does."""

    def mark(self) -> float:
        """Now."""
        return time.perf_counter()

    def done(self, mark: float) -> bool:
        """Always: host time needs no waiting."""
        return True

    def ms(self, first: float, second: float) -> float:
        """Milliseconds between two marks."""
        return (second - first) * 1e3

    def free(self, mark: float) -> None:
        """Nothing to give back."""

    def wait(self, mark: float) -> None:
        """Nothing to wait for."""


class CudaClock:
    """CUDA events on the current stream: marking costs microseconds and never waits for the device."""

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def mark(self) -> torch.cuda.Event:
        """An event at the present end of the current stream."""
        import torch

        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def done(self, mark: torch.cuda.Event) -> bool:
        """Whether the device has passed the mark; asks without waiting."""
        return mark.query()

    def ms(self, first: torch.cuda.Event, second: torch.cuda.Event) -> float:
        """Milliseconds of device time between two marks that are done."""
        return first.elapsed_time(second)

    def free(self, mark: torch.cuda.Event) -> None:
        """Give an event back for another mark."""
        self._free.append(mark)

    def wait(self, mark: torch.cuda.Event) -> None:
        """Wait until the device has passed the mark."""
        mark.synchronize()


class StepTimer:
    """Milliseconds of a step by phase, averaged from one `read` to the next.

    On CUDA the phases are measured with events and nothing is synchronised before `read`, which the loop calls when it
    logs and has to wait for the loss anyway. Waiting for data is host time on every device.

    Args:
        device: `cpu`, `cuda`, `cuda:1` …, as text or as a `torch.device`.
        goodput: Is told of the `data` phases, so that waiting for data counts there too.
        clock: Measures the phases other than `data`; by default what fits the device.
    """

    def __init__(self, device: Any = "cpu", goodput: Goodput | None = None, clock: _Clock | None = None):
        self._host = HostClock()
        self._clock: _Clock = clock or (CudaClock() if str(device).startswith("cuda") else self._host)
        self._goodput = goodput
        self._open: deque[tuple[str, _Clock, Any, Any]] = deque()
        self._sum: dict[str, float] = {}
        self._steps = 0
        self._inside = ""
        self._begin = self._clock.mark()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of a step: `data`, `forward`, `backward` or `optimizer`; the last one ends the step."""
        assert name in STEP_PHASES, name
        with self._timed(name, self._host if name == "data" else self._clock):
            if name == "data" and self._goodput is not None:
                with self._goodput.phase("data"):
                    yield
            else:
                yield
        self._steps += name == "optimizer"

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Leave what happens inside out of the steps' time: an evaluation, a save, a sample."""
        with self._timed("outside", self._clock):
            yield

    @contextlib.contextmanager
    def _timed(self, name: str, clock: _Clock) -> Iterator[None]:
        assert not self._inside, f"phase {name!r} inside of {self._inside!r}"
        self._inside = name
        first = clock.mark()
        try:
            yield
        finally:
            self._inside = ""
            self._open.append((name, clock, first, clock.mark()))
            if len(self._open) > 256:
                self._harvest(wait=False)

    def _harvest(self, wait: bool) -> None:
        while self._open:
            name, clock, first, second = self._open[0]
            if wait:
                clock.wait(second)
            elif not clock.done(second):
                return
            self._open.popleft()
            self._sum[name] = self._sum.get(name, 0.0) + clock.ms(first, second)
            clock.free(first)
            clock.free(second)

    def read(self, steps: int | None = None) -> dict[str, float]:
        """`step_ms` and `<phase>_ms`, a step each, since the last `read`; then start anew. Waits for the device.

        Args:
            steps: Steps done since then; None: as many as there were `optimizer` phases.
        """
        end = self._clock.mark()
        self._harvest(wait=True)
        self._clock.wait(end)
        steps = self._steps if steps is None else steps
        whole = self._clock.ms(self._begin, end) - self._sum.pop("outside", 0.0)
        found = {}
        if steps:
            found["step_ms"] = max(whole, 0.0) / steps
            found |= {f"{name}_ms": self._sum[name] / steps for name in STEP_PHASES if name in self._sum}
        self._clock.free(self._begin)
        self._sum, self._steps, self._begin = {}, 0, end
        return found


class Goodput:
    """Wall time of one start of a run, told apart by phase; the parts sum to the whole, to the last nanosecond.

    The clock starts when the process did, so that imports count as `startup`. There is always exactly one phase.

    Args:
        listeners: Called with the name of each new phase, for example `DeviceSampler.phase`.
        before: Seconds that passed before this object was made; None: since the process was started.
    """

    def __init__(self, listeners: Iterable[Callable[[str], None]] = (), before: float | None = None):
        self._listeners = list(listeners)
        self._since = time.perf_counter_ns()
        self._now = "startup"
        self._ns = dict.fromkeys(RUN_PHASES, 0)
        self._ns["startup"] = int((process_age() if before is None else before) * 1e9)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Tell `listener` the present phase, and each later one."""
        self._listeners.append(listener)
        listener(self._now)

    def enter(self, name: str) -> str:
        """From now on time counts as `name`; returns the phase that ended."""
        assert name in RUN_PHASES, name
        now = time.perf_counter_ns()
        self._ns[self._now] += now - self._since
        before, self._now, self._since = self._now, name, now
        if before != name:
            for listener in self._listeners:
                listener(name)
        return before

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`, then go back to the phase before."""
        before = self.enter(name)
        try:
            yield
        finally:
            self.enter(before)

    def seconds(self) -> dict[str, float]:
        """Seconds in each phase so far that had any, to the millisecond."""
        self.enter(self._now)
        return {name: round(ns / 1e9, 3) for name, ns in self._ns.items() if ns}

    def stamp(self) -> dict[str, dict[str, float]]:
        """The field `seconds` of a ledger line: give this to `Ledger(stamp=…)`."""
        return {"seconds": self.seconds()}


def process_age() -> float:
    """Seconds since this process was started."""
    import psutil

    return max(time.time() - psutil.Process().create_time(), 0.0)


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops: float | None, devices: int) -> float | None:
    """Model FLOPs utilisation, a fraction (arXiv 2204.02311): model FLOPs a second over the devices' peak.

    `flops_per_token` counts forward and backward by the 6N convention plus attention, and no recomputation. None where
    the peak is not known.
    """
    return tokens_per_s * flops_per_token / (peak_flops * devices) if peak_flops else None
