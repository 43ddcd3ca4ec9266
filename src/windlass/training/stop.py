"""Signals that ask a training to stop.

Before the first optimizer step nothing can be lost (data preparation and what a start writes bear a
kill at any moment), so a signal ends the process at once with exit code 75. From the first step on
it only sets a flag. The loop posts the flag with each step, every rank sees the largest one step
later, and all save the same step and exit with 75.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Protocol

from windlass import processes
from windlass.errors import INTERRUPTED, STOPPED, before_training, interrupted_twice

# People, SLURM and PBS send the first four; the kernel sends SIGHUP when a terminal or an ssh
# connection is closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class HasStep(Protocol):
    """What counts the completed steps."""

    step: int


class StopSignals:
    """Catches the stop signals while its context is open.

    Outside the main thread (a notebook's worker, a server) Python allows no handler, and nothing is
    ever requested.
    """

    def __init__(self) -> None:
        self.requested, self.received_at = False, 0.0  # of the first signal on this rank
        self.name = "a stop signal on another rank"  # or the name of the first signal here
        self._held = False  # whether a signal is only a flag: from the first optimizer step on
        self._state: HasStep | None = None
        self._before_exit: Callable[[str], object] | None = None
        self._catching = processes.catch_signals(STOP_SIGNALS, self._handle)

    def __enter__(self) -> StopSignals:
        self._catching.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._catching.__exit__(None, None, None)

    def follow(self, state: HasStep, before_exit: Callable[[str], object]) -> None:
        """Name the step of `state` in messages, and call `before_exit` with the signal's name
        before it ends the process."""
        self._state, self._before_exit = state, before_exit

    def hold(self) -> None:
        """From here on the first signal sets a flag only."""
        self._held = True

    def _handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self._held and number == signal.SIGINT and hasattr(sys, "ps1"):
            raise KeyboardInterrupt  # a notebook or an interpreter must not end with the run
        if not self._held:
            self._exit(STOPPED, before_training(name), name)
        if self.requested and number == signal.SIGINT:
            self._exit(INTERRUPTED, interrupted_twice(self._state.step if self._state else 0))
        if not self.requested:
            self.requested, self.name, self.received_at = True, name, time.monotonic()

    def _exit(self, code: int, message: str, name: str = "") -> None:
        # No clean-up, which could wait for other ranks. The signal may have interrupted a write to
        # sys.stderr, so the line goes to the descriptor; a live line has hidden the terminal's
        # cursor: it is shown again.
        with contextlib.suppress(Exception):
            os.write(2, (("\x1b[?25h" if os.isatty(2) else "") + f"windlass: {message}\n").encode())
            if name and self._before_exit:
                self._before_exit(name)
        processes.report_code(code)
        os._exit(code)

    def seconds_since(self) -> float:
        """Seconds since the first signal on this rank; 0 without a signal."""
        return time.monotonic() - self.received_at if self.requested else 0.0
