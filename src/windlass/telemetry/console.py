"""What a run says: a header, a legend, a live bar in a terminal and plain lines elsewhere, and all of it in log.txt."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from windlass.telemetry.ledger import Line, now

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.progress import Progress

LEGEND = (
    ("loss", "mean over the step's tokens, nats"),
    ("lr", "learning rate"),
    ("norm", "gradient norm before clipping"),
    ("tok/s", "tokens a second, padding not counted"),
    ("mfu", "share of the device's peak arithmetic"),
    ("mem", "memory of this rank"),
    ("eta", "time left"),
)


@dataclass(frozen=True)
class Header:
    """What a run shows of itself at the start."""

    run: str
    """Directory of the run."""
    recipe: str
    """Name of the recipe."""
    config_hash: str
    """Hash of its semantic settings."""
    device: str
    """The ranks' device, by name."""
    world: int
    """Number of ranks."""
    strategy: str
    """Sharding strategy."""
    precision: str
    """Arithmetic."""
    parameters: int
    """Trained parameters."""
    steps: int
    """Steps of the whole run."""
    tokens_per_step: int
    """Tokens in one step, padding counted."""
    first_step: int = 0
    """Steps that were done when this start began."""
    seconds: float | None = None
    """Estimate of the time to the end, where there is one."""

    def lines(self) -> list[str]:
        """The header as text."""
        tokens = self.steps * self.tokens_per_step
        ranks = f"{self.world} rank{'s' * (self.world != 1)} x {self.device}, {self.strategy}, {self.precision}"
        resumed = f", resumed after step {self.first_step:,}" if self.first_step else ""
        eta = f", about {duration(self.seconds)}" if self.seconds is not None else ""
        return [
            f"run     {self.run}",
            f"recipe  {self.recipe} ({self.config_hash})",
            f"ranks   {ranks}",
            f"model   {self.parameters:,} parameters",
            f"work    {self.steps:,} steps x {self.tokens_per_step:,} tokens = {short(tokens)} tokens{resumed}{eta}",
        ]


class Console:
    """Shows a run on the terminal and writes `log.txt`.

    In a terminal there is a live bar, and evaluations and saves are lines above it; elsewhere every logged step is a
    plain line. A terminal that goes away, or a full disk under the log, is ignored: the run goes on.

    Args:
        steps: Steps of the whole run.
        enabled: True on rank 0; the others only speak of trouble.
        log_path: The run's `log.txt`; None: no log.
        rank: This rank, said with trouble.
        stream: Where to show; by default the process's standard output.
    """

    def __init__(
        self,
        steps: int,
        enabled: bool = True,
        log_path: Path | None = None,
        rank: int = 0,
        stream: TextIO | None = None,
    ):
        self.steps, self.enabled, self.rank = steps, enabled, rank
        self._stream: TextIO | None = stream or sys.stdout
        self._seen: deque[tuple[float, int]] = deque(maxlen=20)
        self._drawn = 0.0
        self._live: Progress | None = None
        self._terminal: Terminal | None = None
        self._log: TextIO | None = None
        if enabled and log_path is not None:
            with contextlib.suppress(OSError):
                log_path.parent.mkdir(parents=True, exist_ok=True)
                self._log = open(log_path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 - lives as long as the run
        if enabled and (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console as RichConsole

            self._terminal = RichConsole(file=self._stream, highlight=False, soft_wrap=True)

    def header(self, header: Header) -> None:
        """Show what is about to run, and what the columns mean."""
        for line in header.lines():
            self._say(line, style="bold" if line.startswith("run ") else "")
        for word, meaning in LEGEND:
            self._say(f"  {word:<6} {meaning}", style="dim")
        if self._terminal is not None:
            self._live = _bar(self._terminal)
            self._live.add_task("train", total=self.steps, completed=header.first_step, text="", eta="")
            with self._harmless():
                self._live.start()

    def tick(self, step: int) -> None:
        """Move the bar, at most four times a second; costs nothing where there is none. For every step."""
        if self._live is not None and time.monotonic() - self._drawn > 0.25:
            self._draw(completed=step)

    def step(self, line: Line) -> None:
        """A logged step: a `train` line of the ledger, with `mem_mb` where it is known."""
        step = line["step"]
        self._seen.append((time.monotonic(), step))
        eta = self._eta(line)
        text = describe_step(line)
        full = f"step {step}/{self.steps} | {text} | eta {duration(eta)}"
        if self._live is not None:
            self._write_log(full)
            self._draw(completed=step, text=text, eta=duration(eta))
        else:
            self._say(full)

    def eval(self, line: Line) -> None:
        """An evaluation: an `eval` line of the ledger."""
        shown = [f"{key} {_number(line[key])}" for key in ("loss", "perplexity", *_SCORES) if key in line]
        if "runtime_s" in line:
            shown.append(f"{line['runtime_s']:.1f} s")
        suite = line.get("suite", "loss")
        self._say(f"eval {line['step']}/{self.steps} | {suite} | {' | '.join(shown)}", style="green")

    def event(self, text: str, step: int | None = None) -> None:
        """Something that happened: a save, a resume, the end."""
        self._say(text if step is None else f"step {step}/{self.steps} | {text}", style="cyan")

    def sample(self, text: str, step: int | None = None) -> None:
        """A generated text, set off from the rest."""
        at = "" if step is None else f" {step}/{self.steps}"
        self._say(f"sample{at} |")
        for line in text.splitlines() or [""]:
            self._say(f"  | {line}", style="italic")

    def warning(self, text: str) -> None:
        """A warning; the only thing that ranks other than 0 say."""
        if self.enabled:
            self._say(f"warning: {text}", style="yellow")
        else:
            with self._harmless():
                print(f"rank {self.rank}: warning: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away and close the log; a second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            with self._harmless():
                live.stop()
        log, self._log = self._log, None
        if log is not None:
            with contextlib.suppress(OSError):
                log.close()

    def _say(self, text: str, style: str = "") -> None:
        if not self.enabled:
            return
        self._write_log(text)
        with self._harmless():
            if self._terminal is not None:
                from rich.text import Text

                self._terminal.print(Text(printable(text), style=style))
            elif self._stream is not None:
                print(printable(text), file=self._stream, flush=True)

    def _write_log(self, text: str) -> None:
        if self._log is not None:
            with contextlib.suppress(OSError, ValueError):
                self._log.write(f"{now()} {printable(text)}\n")
                self._log.flush()

    def _draw(self, **fields: Any) -> None:
        self._drawn = time.monotonic()
        if self._live is not None:
            with self._harmless():
                self._live.update(self._live.task_ids[0], **fields)
                self._live.refresh()

    @contextlib.contextmanager
    def _harmless(self) -> Any:
        """A terminal that went away ends the showing, not the run."""
        try:
            yield
        except (OSError, ValueError):
            self._terminal = self._live = self._stream = None

    def _eta(self, line: Line) -> float | None:
        left = self.steps - line["step"]
        (first, step), (last, now_) = self._seen[0], self._seen[-1]
        if now_ > step:
            return left * (last - first) / (now_ - step)
        return left * line["step_ms"] / 1e3 if "step_ms" in line else None


_SCORES = ("acc", "acc_norm", "exact_match", "f1")


def _bar(terminal: Terminal) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    columns = (
        MofNCompleteColumn(),
        BarColumn(bar_width=20),
        TextColumn("{task.fields[text]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
        TextColumn("eta {task.fields[eta]}", style="cyan"),
    )
    return Progress(*columns, console=terminal, auto_refresh=False)


def describe_step(line: Line) -> str:
    """The numbers of a `train` line in a few words."""
    words = [f"loss {_number(line['loss'])}"] if "loss" in line else []
    if "lr" in line:
        words.append(f"lr {line['lr']:.2e}")
    if "grad_norm" in line:
        words.append(f"norm {_number(line['grad_norm'], 2)}")
    if "tokens_per_s" in line:
        words.append(f"{short(line['tokens_per_s'])} tok/s")
    if line.get("mfu") is not None:
        words.append(f"mfu {100 * line['mfu']:.1f}%")
    if "mem_mb" in line:
        words.append(f"mem {line['mem_mb'] / 1e3:.2f} GB")
    return " | ".join(words)


def _number(value: Any, digits: int = 4) -> str:
    return f"{float(value):.{digits}f}"


def short(number: float) -> str:
    """A count in three or four digits: 950, 15.2k, 3.41M, 10.0B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            scaled = number / size
            return (
                f"{scaled:.2f}{unit}"
                if scaled < 9.995
                else f"{scaled:.1f}{unit}"
                if scaled < 99.95
                else f"{scaled:.0f}{unit}"
            )
    return f"{number:.0f}"


def duration(seconds: float | None) -> str:
    """A time in two units: 42s, 3m 05s, 2h 10m, 4d 03h; `-` where it is not known."""
    if seconds is None:
        return "-"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    for (big, size), (small, part) in ((("m", 60), ("s", 1)), (("h", 3600), ("m", 60))):
        if whole < size * (60 if big == "m" else 24):
            return f"{whole // size}{big} {whole % size // part:02d}{small}"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def printable(text: str) -> str:
    """Text with control characters made visible, so that a generated text cannot steer the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
