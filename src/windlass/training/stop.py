"""Signals that ask a training to stop.

Before the first optimizer step nothing can be lost (data preparation and what a start writes bear a kill at any
moment), so a signal ends the process at once with exit code 75. From the first step on it only sets a flag. The loop
posts the flag with each step, every rank sees the largest one step later, and all save the same step and exit with 75.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

from windlass import processes
from windlass.errors import INTERRUPTED, STOPPED, before_training, interrupted_twice

# People, SLURM and PBS send the first four; the kernel sends SIGHUP when a terminal or an ssh connection is closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


class StopSignals:
    """Catches the stop signals while its context is open.

    Outside the main thread (a notebook's worker, a server) Python allows no handler, and nothing is ever requested.
    """

    def __init__(self) -> None:
        self.requested, self.received_at = (
            False,
            0.0,
        )  # whether and when this rank received the first signal
        self.name = "a stop signal on another rank"  # or that of the first signal here
        self.training = (
            False  # whether the first optimizer step has begun: from then on a signal is a flag
        )
        self.step: Callable[[], int] = lambda: 0  # steps completed
        self.before_exit: Callable[[str], object] = lambda name: (
            None
        )  # called with its name before it ends the process
        self._catching = processes.catch_signals(STOP_SIGNALS, self._handle)

    def __enter__(self) -> StopSignals:
        self._catching.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._catching.__exit__(None, None, None)

    def _handle(self, number: int) -> None:
        name = signal.Signals(number).name
        if not self.training and number == signal.SIGINT and hasattr(sys, "ps1"):
            raise KeyboardInterrupt  # a notebook or an interpreter is not to end with the run
        if not self.training:
            self._exit(STOPPED, before_training(name), name)
        if self.requested and number == signal.SIGINT:
            self._exit(INTERRUPTED, interrupted_twice(self.step()))
        if not self.requested:
            self.requested, self.name, self.received_at = True, name, time.monotonic()

    def _exit(self, code: int, message: str, name: str = "") -> None:
        # No clean-up, which could wait for other ranks. The signal may have interrupted a write to sys.stderr, so the line
        # goes to the descriptor; a live line has hidden the terminal's cursor: it is shown again.
        with contextlib.suppress(Exception):
            os.write(2, (("\x1b[?25h" if os.isatty(2) else "") + f"windlass: {message}\n").encode())
            if name:
                self.before_exit(name)
        processes.report_code(code)
        os._exit(code)

    def seconds_since(self) -> float:
        """Seconds since the first signal on this rank; 0 where there was none."""
        return time.monotonic() - self.received_at if self.requested else 0.0
