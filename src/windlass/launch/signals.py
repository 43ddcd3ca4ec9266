"""Signals as a launcher wants them: noted in the handler, acted on in the loop, and waking it."""

from __future__ import annotations

import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

FORWARDED = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP")


class Signals:
    """The signals that came since the last look; a child's end wakes the wait, too."""

    def __init__(self, wake: socket.socket | None):
        self._wake, self._came = wake, list[int]()
        self.interrupts, self.asked = 0, False

    def note(self, number: int, _: object = None) -> None:
        """The handler: only takes note."""
        if number != signal.SIGCHLD:
            self._came.append(number)

    def wait(self, seconds: float) -> Iterator[int]:
        """Sleep until a signal comes or a child ends, at most so long; then the signals to pass on."""
        if self._wake is None:
            time.sleep(min(seconds, 0.05))
        elif not self._came and select.select([self._wake], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                self._wake.recv(4096)
        while self._came:
            number = self._came.pop(0)
            self.interrupts += number == signal.SIGINT
            self.asked = self.asked or number != getattr(signal, "SIGTSTP", None)
            yield number


@contextlib.contextmanager
def caught_signals() -> Iterator[Signals]:
    """Catch the signals that are passed on, and put back what was there; outside the main thread there is nothing to catch."""
    if threading.current_thread() is not threading.main_thread():
        yield Signals(None)
        return
    wake, end = socket.socketpair()
    wake.setblocking(False)
    end.setblocking(False)
    signals = Signals(wake)
    numbers = [getattr(signal, name) for name in (*FORWARDED, "SIGTSTP", "SIGCHLD") if hasattr(signal, name)]
    old = {number: signal.getsignal(number) for number in numbers}
    old_wake = signal.set_wakeup_fd(end.fileno(), warn_on_full_buffer=False)
    try:
        for number in numbers:
            if old[number] != signal.SIG_IGN or number == signal.SIGCHLD:  # nohup's choice stands
                signal.signal(number, signals.note)
        yield signals
    finally:
        signal.set_wakeup_fd(old_wake)
        for number, handler in old.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        wake.close()
        end.close()
