"""What can stop a training: signals, a non-finite step, a loss spike.

Signals only set a flag; the loop polls it and all ranks agree, so that all stop after the same step.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

from windlass.errors import Stopped

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
"""Those that schedulers and people send to ask a job to end: SLURM's and PBS's warnings are SIGTERM or SIGUSR1/2."""

SPIKE_WINDOW = 128
"""Logged losses that a spike is measured against."""


class Signals:
    """Turns the stop signals into a flag while the context is open; a second SIGINT exits at once.

    Outside the main thread (a notebook's worker, a server) no handler can be set, and the flag stays down.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.received_at: float | None = None
        self._before: dict[int, Any] = {}
        self._at_once = False

    def __enter__(self) -> Signals:
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            os._exit(130)
        if self.received is None:
            self.received, self.received_at = number, time.monotonic()
        if self._at_once:
            self._stop()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, a signal raises Stopped instead of being polled: for work before training, which goes on where it was."""
        if self.asked:
            self._stop()
        self._at_once = True
        try:
            yield
        finally:
            self._at_once = False

    def _stop(self) -> None:
        self._at_once = False
        raise Stopped(f"stopped by {self.name} before the training began; the same command goes on from there")

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self.received is not None

    @property
    def name(self) -> str:
        """The signal's name, or `a stop` when another rank received it."""
        return signal.Signals(self.received).name if self.received is not None else "a stop signal on another rank"

    def seconds_since(self) -> float:
        """Seconds since the first signal on this rank; 0 where there was none."""
        return time.monotonic() - self.received_at if self.received_at is not None else 0.0


def is_spike(window: list[float], loss: float, sigmas: float) -> bool:
    """Whether `loss` lies `sigmas` standard deviations above the mean of the last logged losses.

    At least 16 losses are needed to speak of a spread; before that nothing is a spike.
    """
    recent = [x for x in window[-SPIKE_WINDOW:] if math.isfinite(x)]
    if len(recent) < 16:
        return False
    spread = statistics.pstdev(recent)
    return spread > 0 and loss > statistics.fmean(recent) + sigmas * spread
