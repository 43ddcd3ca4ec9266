"""What can stop a training: signals, a non-finite step, a loss spike.

Signals only set a flag; the loop polls it and all ranks agree, so that all stop after the same step. Before the first step,
while each rank works for itself, what one rank was sent is told to all (`Together`).
"""

from __future__ import annotations

import _thread
import contextlib
import math
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar

from windlass.errors import Stopped, before_training

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)
)
"""Those that schedulers and people send to ask a job to end: SLURM's and PBS's warnings are SIGTERM or SIGUSR1/2."""

TELL_SECONDS = 0.1
"""How often, before the first step, a rank looks whether it or another one was signalled."""
NUDGE_SECONDS = 0.02
"""How long a stop waits that came while a thread was being started."""
SPIKE_WINDOW = 128
"""Logged losses that a spike is measured against."""


class Signals:
    """Turns the stop signals into a flag while the context is open; a second SIGINT exits at once.

    Outside the main thread (a notebook's worker, a server) no handler can be set, and the flag stays down.
    """

    _carried: ClassVar[int | None] = None

    def __init__(self) -> None:
        self.received: int | None = None
        self.received_at: float | None = None
        self.heard: int | None = None
        """A signal that another rank received."""
        self._before: dict[int, Any] = {}
        self._at_once = self._nudged = False

    def carry(self) -> None:
        """Leave a signal that came to the next `Signals`: a rank that is still alone may not stop before it met the others."""
        Signals._carried = self.received

    def __enter__(self) -> Signals:
        if Signals._carried is not None:
            self.received, self.received_at = Signals._carried, time.monotonic()
            Signals._carried = None
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._nudged and number == signal.SIGTERM:  # by `hear`, and nobody's signal
            self._nudged = False
            if self._at_once:
                self._stop_soon(frame)
            return
        if self.received is not None and number == signal.SIGINT:
            os._exit(130)
        if self.received is None:
            self.received, self.received_at = number, self.received_at or time.monotonic()
        if self._at_once:
            self._stop_soon(frame)

    def _stop_soon(self, frame: FrameType | None) -> None:
        """Raise Stopped, but not in the middle of starting a thread, which would leave it half started: then a moment later."""
        while frame is not None:
            if frame.f_code is threading.Thread.start.__code__:
                _thread.start_new_thread(self._nudge_later, ())
                return
            frame = frame.f_back
        self._stop()

    def _nudge_later(self) -> None:
        time.sleep(NUDGE_SECONDS)
        self._nudge()

    def _nudge(self) -> None:
        if self._at_once and self._before:
            self._nudged = True
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)

    def hear(self, number: int) -> None:
        """Another rank received `number`: as if this one had (called by a thread; a main thread that sleeps is woken)."""
        self.heard, self.received_at = number, self.received_at or time.monotonic()
        self._nudge()

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
        raise Stopped(before_training(self.name))

    @property
    def asked(self) -> bool:
        """Whether a stop was asked for."""
        return self.number != 0

    @property
    def number(self) -> int:
        """The signal, received here or heard of; 0: none."""
        return self.received or self.heard or 0

    @property
    def name(self) -> str:
        """The signal's name; where another rank received it in training, it is not known here."""
        return signal.Signals(self.number).name if self.number else "a stop signal on another rank"

    def seconds_since(self) -> float:
        """Seconds since the first signal on this rank; 0 where there was none."""
        return time.monotonic() - self.received_at if self.received_at is not None else 0.0


class Together:
    """All ranks stop together before the first step, where each is on its own: opening data, reading a checkpoint.

    A thread tells the others of this rank's signal, and this rank of theirs, through the store; so all know of it within a
    moment, whatever they are doing. Each then comes to the next `agree`, where all go on or all raise Stopped: no rank
    leaves while another one still counts on it. A context manager; for a process of its own there is nobody to tell.
    """

    def __init__(self, signals: Signals, ranks: Ranks):
        self.signals, self.ranks = signals, ranks
        self._over = threading.Event()
        self._store = ranks.store.clone() if ranks.store is not None and ranks.world > 1 else None

    def __enter__(self) -> Together:
        if self._store is not None:
            threading.Thread(target=self._tell, name="windlass-signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """The first step begins: from now on the loop's own agreement counts."""
        self._over.set()

    def poll(self) -> None:
        """Raise Stopped where any rank was signalled; called between pieces of long work inside `stage`."""
        if self.signals.asked:
            raise Stopped(before_training(self.signals.name))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Work of each rank for itself, which `Stopped` may cut short; at its end all ranks agree."""
        with contextlib.suppress(Stopped):
            yield
        self.agree(name)

    def agree(self, name: str) -> None:
        """Wait for all ranks; where one of them was signalled, all raise Stopped."""
        number = max(self.ranks.all_gather_object(f"signal-{name}", self.signals.number))
        if number:
            raise Stopped(before_training(signal.Signals(number).name))

    def _tell(self) -> None:
        assert self._store is not None
        with contextlib.suppress(Exception):  # the store is gone: so is rank 0, and that is found elsewhere
            while not self._over.wait(TELL_SECONDS):
                if self.signals.received:
                    self._store.set("signal", str(self.signals.received))
                    return
                if self._store.check(["signal"]):
                    self.signals.hear(int(self._store.get("signal")))
                    return


def is_spike(window: list[float], loss: float, sigmas: float) -> bool:
    """Whether `loss` lies `sigmas` standard deviations above the mean of the last logged losses.

    At least 16 losses are needed to speak of a spread; before that nothing is a spike.
    """
    recent = [x for x in window[-SPIKE_WINDOW:] if math.isfinite(x)]
    if len(recent) < 16:
        return False
    spread = statistics.pstdev(recent)
    return spread > 0 and loss > statistics.fmean(recent) + sigmas * spread
