"""What a long preparation shows: a bar in a terminal, a line now and then elsewhere, nothing where it is over at once."""

from __future__ import annotations

import sys
import time
from typing import Any, Protocol, TextIO

QUIET_SECONDS = 1.0
LINE_SECONDS = 10.0


class Progress(Protocol):
    """Is told how far the work is."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def update(self, what: str, fraction: float | None, tokens: int) -> None:
        """So far: the stage, its share that is done (None where nobody knows), and tokens written."""

    def close(self) -> None:
        """The end, good or bad."""


class Silent:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def update(self, what: str, fraction: float | None, tokens: int) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Lines:
    """Plain lines, at most one in ten seconds; for log files and pipes."""

    def __init__(self, out: TextIO | None = None):
        self._out = out or sys.stderr
        self._next = time.monotonic() + QUIET_SECONDS
        self._first: tuple[float, int] | None = None

    def note(self, text: str) -> None:
        """A line."""
        print(f"data: {text}", file=self._out, flush=True)

    def update(self, what: str, fraction: float | None, tokens: int) -> None:
        """A line, if it is time for one."""
        now = time.monotonic()
        begin, had = self._first = self._first or (now, tokens)
        if now >= self._next:
            parts = [] if fraction is None else [f"{fraction:.0%}"]
            if tokens:
                parts.append(f"{tokens:,} tokens")
            if tokens > had and now > begin:  # what an earlier go did is not this one's speed
                parts.append(f"{(tokens - had) / (now - begin) / 1e6:.2f} M tokens/s")
            self.note(f"{what}: {', '.join(parts)}")
            self._next = now + LINE_SECONDS

    def close(self) -> None:
        """Nothing is open."""


class Bar:
    """A progress bar of `rich`, from the second on in which the work is not over yet."""

    def __init__(self) -> None:
        self._begin = time.monotonic() + QUIET_SECONDS
        self._bar: Any = None
        self._task: Any = None
        self._what = ""

    def note(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is None:
            print(f"data: {text}", file=sys.stderr, flush=True)
        else:
            self._bar.console.print(f"data: {text}", markup=False, highlight=False)

    def update(self, what: str, fraction: float | None, tokens: int) -> None:
        """Move the bar."""
        if self._bar is None:
            if time.monotonic() < self._begin:
                return
            self._open()
        if what != self._what:
            self._bar.reset(self._task, description=what)
            self._what = what
        total = None if fraction is None else 1.0
        self._bar.update(
            self._task, total=total, completed=fraction or 0.0, tokens=f"{tokens:,} tokens" if tokens else ""
        )

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[tokens]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task("", total=None, tokens="")

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def console() -> Progress:
    """A bar where stderr is a terminal, plain lines elsewhere."""
    return Bar() if sys.stderr.isatty() else Lines()
