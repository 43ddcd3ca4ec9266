"""Show the progress of long work on stderr: a bar of `rich` in a terminal, else a line at times."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 10.0


class Progress:
    """Close it to remove the bar."""

    def __init__(self, name: str = "data") -> None:
        self._name = name
        self._bar: Any = None
        self._next_line = time.monotonic() + LINE_SECONDS

    def note(self, text: str) -> None:
        # `rich` redirects stderr, so the line stands above the bar
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)

    def update(self, stage: str, fraction: float, tokens: int = 0) -> None:
        """Show a stage, the fraction of it that is done (0: unknown), and the tokens written."""
        text = f"{stage}, {tokens:,} tokens" if tokens else stage
        if sys.stderr.isatty():
            if self._bar is None:
                from rich import console, progress

                terminal = console.Console(stderr=True)
                self._bar = progress.Progress(console=terminal, transient=True)
                self._bar.start()
                self._bar.add_task(text)
            total = 1.0 if fraction else None
            self._bar.update(0, description=text, total=total, completed=fraction)
        elif time.monotonic() >= self._next_line:
            self.note(f"{text}, {fraction:.0%}" if fraction else text)
            self._next_line = time.monotonic() + LINE_SECONDS

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
