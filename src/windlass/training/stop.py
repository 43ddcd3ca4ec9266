"""Signals that ask a training to stop. Before the first step nothing can be lost, so a signal ends
the process with exit code 75. Later it sets a flag, which the ranks exchange in each step, so all
of them save the same step."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from windlass import processes
from windlass.errors import INTERRUPTED, STOPPED, before_training, interrupted_twice
from windlass.launch import rank_status
from windlass.telemetry.terminal import NEW_LINE, size, wrap

if TYPE_CHECKING:
    from windlass.training.state import TrainState

# People, SLURM and PBS send the first four; the kernel sends SIGHUP when a terminal closes.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


def event_of(signal_name: str) -> str:
    """The event of a stop by a signal: `stopped` by a person's Ctrl-C, else `preempted`."""
    return "stopped" if signal_name == "SIGINT" else "preempted"


class StopSignals:
    """Catches the stop signals while its context is open; in another thread than the main one
    Python allows no handlers, and nothing is ever requested."""

    def __init__(self) -> None:
        self.requested, self.received_at = False, 0.0  # of the first signal on this rank
        self.name = ""  # of that signal
        self._held = False  # whether a signal only sets the flag: from the first step on
        self._state: TrainState | None = None
        self._before_exit: Callable[[str], object] | None = None
        self._catching = processes.catch_signals(STOP_SIGNALS, self._handle)

    def __enter__(self) -> StopSignals:
        self._catching.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._catching.__exit__(None, None, None)

    def follow(self, state: TrainState, before_exit: Callable[[str], object]) -> None:
        """`before_exit` receives the name of a signal that ends the process."""
        self._state, self._before_exit = state, before_exit

    def hold(self) -> None:
        """From now on the first signal only sets a flag."""
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
        # No clean-up, which could wait for other ranks. The line goes to the descriptor, because
        # the signal may have interrupted a write to sys.stderr.
        with contextlib.suppress(Exception):
            text = f"windlass: {message}\n"
            if os.isatty(2):
                text = NEW_LINE + wrap(text, size(sys.__stderr__).columns)
            os.write(2, text.encode())
            if name and self._before_exit:
                self._before_exit(name)
        rank_status.report_code(code)
        os._exit(code)
