"""The output of a run: a header, a live line in a terminal, plain lines elsewhere, and `log.txt`. A
full disk ends the log, never the run."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

from windlass.ledger import Line, now
from windlass.telemetry import terminal
from windlass.telemetry.measures import EVAL, LOSS, TRAIN, Shown, of_source, show

LEGEND = (
    "dt, dtf, dtb: ms of a step, its forward and its backward pass; sps: samples/s; "
    "mtps: million tokens/s"
)
BAR = 20  # columns; a bar needs at least half of them
LASTS_SECONDS = 5.0  # the output names a phase of the start that takes longer
DRAW_SECONDS, LINE_SECONDS = 0.25, 10.0  # between two live lines; between two lines of progress


class Console:
    """Shows a run of `steps` steps on `stream` (standard output), and after `open_log` in a file.

    A terminal has a live line, with evaluations and saves as lines above it; other outputs get a
    line for each logged step. Ranks other than 0 show only warnings.
    """

    def __init__(self, steps: int, rank: int = 0, stream: TextIO | None = None):
        self.steps, self.rank = steps, rank
        # A terminal may go away. Python without a console has no standard output.
        output = stream or sys.stdout or open(os.devnull, "w")  # noqa: SIM115
        self._stream = cast(TextIO, terminal.SafeStream(output))
        self._first: tuple[float, int] | None = None  # time and step of the first logged step
        self._drawn = time.monotonic()
        self._step = 0
        self._doing = ""  # a long work between two steps
        self._numbers: list[str] = []  # of the last logged step
        self._live: Any = None  # rich.live.Live
        self._timer: threading.Timer | None = None  # see `begin`
        self._log: TextIO | None = None
        self._terminal: Any = None  # rich.console.Console
        dumb = os.environ.get("TERM") == "dumb"
        if rank == 0 and self._stream.isatty() and not dumb:
            self._terminal = terminal.rich_console(self._stream)

    def open_log(self, path: Path) -> None:
        if self.rank == 0:
            with contextlib.suppress(OSError):
                self._log = path.open("a", encoding="utf-8", errors="replace")

    def header(self, facts: Mapping[str, str], first_step: int = 0) -> None:
        """Show the run's facts by name; the live line begins at `first_step`."""
        self.done()
        width = max(8, 1 + max((len(name) for name, fact in facts.items() if fact), default=0))
        for name, fact in facts.items():
            for number, line in enumerate(fact.split("\n") if fact else ()):
                style = {"run": "bold", "cut": "yellow"}.get(name, "")
                self._print(f"{'' if number else name:<{width}}{line}", style, indent=" " * width)
        self._step, self._drawn = first_step, time.monotonic()
        legend = f"{'legend':<{width}}{LEGEND}"
        if self._terminal is None:
            self._print(legend)
            return
        self.log([legend])  # the live line lacks these numbers
        from rich.live import Live

        options: dict[str, Any] = {"auto_refresh": False, "transient": True}
        self._live = Live(get_renderable=self._line, console=self._terminal, **options)
        self._live.start(refresh=True)

    def begin(self, doing: str) -> None:
        """Begin a phase of the start; if it lasts, a line names it."""
        self.done()
        self._timer = threading.Timer(LASTS_SECONDS, self._print, [f"{doing} ..."])
        self._timer.daemon = True
        self._timer.start()

    def done(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def log(self, lines: Iterable[str]) -> None:
        """Write lines to the file only."""
        if self._log is not None:
            with contextlib.suppress(OSError, ValueError):
                self._log.writelines(f"{now()} {line}\n" for line in lines)
                self._log.flush()

    def tick(self, step: int) -> None:
        """Move the live line, at most four times a second; cheap enough for every step."""
        self._step = step
        if self._live is not None and time.monotonic() - self._drawn > DRAW_SECONDS:
            self._draw()

    def progress(self, doing: str, done: int, total: int) -> None:
        """Show how far a long work between two steps is, as `evaluating loss`; cheap."""
        self._doing = f"{doing} {done:,}/{total:,}"
        if time.monotonic() - self._drawn > (LINE_SECONDS if self._live is None else DRAW_SECONDS):
            self._draw()
            if self._live is None:
                self._print(f"at {self._step}/{self.steps} | {self._doing}")

    def step(self, line: Line) -> None:
        # The time left counts from the first logged step, with evaluations and saves, because
        # imports, compiling and the evaluation at step 0 do not come again.
        self._step = line["step"]
        self._first = self._first or (time.monotonic(), self._step)
        since, values = time.monotonic() - self._first[0], dict(line)
        if done := self._step - self._first[1]:
            values["left_s"] = (self.steps - self._step) * since / done
        if "tokens_per_s" in line:
            values["mtps"] = line["tokens_per_s"] / 1e6
        shown = [m for m in TRAIN.values() if m.console and m.name in values]
        texts = [m.console.format(Shown(values[m.name])) for m in shown]
        self._numbers = [text for m, text in zip(shown, texts, strict=True) if not m.log_only]
        whole = " | ".join([f"step {self._step}/{self.steps}", *texts])
        self._draw()
        if self._live is None:
            self._print(whole)
        else:
            self.log([whole])

    def eval(self, line: Line) -> None:
        self._doing = ""
        suite = line.get("suite", LOSS)
        parts = [] if suite == LOSS else [suite]
        declared = [*EVAL.values(), *filter(None, map(of_source, line))]
        for measure in declared:
            if measure.words and measure.name in line:
                parts.append(f"{measure.words} {show(float(line[measure.name]), measure.kind)}")
        if suite.startswith("own:"):
            names = (key for key, value in line.items() if isinstance(value, float))
            parts += [f"{key} {show(line[key], 'loss')}" for key in names if key not in EVAL]
        if "runtime_s" in line:
            parts.append(f"{line['runtime_s']:.1f} s")
        self._print(f"eval {line['step']}/{self.steps} | {' | '.join(parts)}", "green")

    def saved(self, path: Path, seconds: float, step: int) -> None:
        self._print(f"saved {step}/{self.steps} | {path} | {seconds:.2f} s", "cyan")

    def event(self, text: str, step: int | None = None) -> None:
        self._print(text if step is None else f"step {step}/{self.steps} | {text}", "cyan")

    def sample(self, text: str, step: int) -> None:
        self._doing = ""
        self._print(f"sample {step}/{self.steps} |")
        for line in terminal.printable(text).split("\n"):
            self._print(f"  | {line}", style="italic", indent="  | ")

    def warning(self, text: str, own: bool = False) -> None:
        """Show a warning; with `own` on any rank, because rank 0 does not have it."""
        self._print(f"warning: {text}", style="yellow")
        if own and self.rank:
            with contextlib.suppress(OSError):
                print(f"rank {self.rank}: warning: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        self.done()
        if self._live is not None:
            self._live.stop()  # takes the line away
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()

    def _print(self, text: str, style: str = "", indent: str = "    ") -> None:
        """Show a line and log it; a terminal wraps it, with `indent` before the further lines."""
        if self.rank:
            return
        text = terminal.printable(text)
        self.log([text])
        if self._terminal is None:
            print(text, file=self._stream, flush=True)
            return
        text = terminal.wrap(text, self._terminal.width, indent)
        self._terminal.print(text, style=style, soft_wrap=True)

    def _line(self) -> Any:
        from rich.progress_bar import ProgressBar
        from rich.table import Table

        text, width = f"step {self._step}/{self.steps}", self._terminal.width
        for part in (self._doing, *self._numbers):
            # the next drawing erases an echoed ^C, which must not wrap to another line
            if len(text) + 3 + len(part) > width - 2:
                break
            text += f" | {part}" if part else ""
        room = min(BAR, width - len(text) - 3)
        if room < BAR // 2:
            return text
        line = Table.grid(padding=(0, 1, 0, 0))
        line.add_row(text, ProgressBar(self.steps, self._step, width=room))
        return line

    def _draw(self) -> None:
        self._drawn = time.monotonic()
        if self._live is not None:
            self._terminal.width = terminal.size(self._stream).columns  # a window may change
            self._live.refresh()
