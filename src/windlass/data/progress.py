"""What a long preparation shows on stderr: a bar of `rich` in a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from typing import Any

LINE_SECONDS = 10.0


class Progress:
    """A bar that appears with the first update; to be closed."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._task: Any = None
        self._stage = ""
        self._next_line = time.monotonic() + LINE_SECONDS

    def note(self, text: str) -> None:
        """A line; above the bar, where there is one, since rich redirects stderr meanwhile."""
        print(f"data: {text}", file=sys.stderr, flush=True)

    def update(self, stage: str, fraction: float | None, tokens: int = 0) -> None:
        """So far: the stage, its share that is done (None where nobody knows), and tokens written."""
        counted = f"{tokens:,} tokens" if tokens else ""
        if not self._terminal:
            if time.monotonic() >= self._next_line:
                share = "" if fraction is None else f"{fraction:.0%}"
                self.note(f"{stage}: {', '.join(part for part in (share, counted) if part)}")
                self._next_line = time.monotonic() + LINE_SECONDS
            return
        if self._bar is None:
            from rich import progress
            from rich.console import Console

            columns = (
                progress.TextColumn("{task.description}"), progress.BarColumn(), progress.TaskProgressColumn(),
                progress.TextColumn("{task.fields[tokens]}"), progress.TimeRemainingColumn(),
            )  # fmt: skip
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("", total=None, tokens="")
        if stage != self._stage:
            self._bar.reset(self._task, description=stage)
            self._stage = stage
        total = None if fraction is None else 1.0
        self._bar.update(self._task, total=total, completed=fraction or 0.0, tokens=counted)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
