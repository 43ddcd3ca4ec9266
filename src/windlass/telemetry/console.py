"""What a run shows: a header, a live bar in a terminal and plain lines elsewhere, and all of it in `log.txt`.

A terminal that goes away, or a full disk under the log, ends the output and never the run.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from windlass.run import Line
from windlass.telemetry.ledger import now

NUMBERS: dict[str, Callable[[Any], str]] = {  # fields of a `train` line that are shown, as far as it has them
    "loss": lambda x: f"loss {float(x):.4f}", "lr": lambda x: f"lr {x:.2e}", "grad_norm": lambda x: f"norm {float(x):.2f}",
    "tokens_per_s": lambda x: f"{short(x)} tok/s", "mfu": lambda x: f"mfu {100 * x:.1f}%",
    "mem_mb": lambda x: f"mem {x / 1e3:.2f} GB",
}  # fmt: skip
SCORES = ("loss", "perplexity", "acc", "acc_norm", "exact_match", "f1")  # fields of an `eval` line that are shown


class Console:
    """Shows a run of `steps` steps on the terminal and writes `log.txt`.

    In a terminal there is a live bar, and evaluations and saves are lines above it; elsewhere every logged step is a
    line. Ranks other than 0 show warnings alone. `stream`: by default the process's standard output.
    """

    def __init__(self, steps: int, rank: int = 0, log_path: Path | None = None, stream: TextIO | None = None):
        self.steps, self.rank = steps, rank
        self._stream: TextIO | None = stream or sys.stdout
        self._first: tuple[float, int] | None = None  # time and step of the first logged step
        self._drawn = 0.0
        self._live: Any = None  # rich.progress.Progress
        self._terminal: Any = None  # rich.console.Console
        self._log: TextIO | None = None
        if rank == 0 and log_path is not None:
            with contextlib.suppress(OSError):
                self._log = open(log_path, "a", encoding="utf-8", errors="replace")  # noqa: SIM115 - as long as the run
        if rank == 0 and (stream or sys.stdout).isatty() and os.environ.get("TERM") != "dumb":
            from rich.console import Console as RichConsole

            self._terminal = RichConsole(file=self._stream, highlight=False, soft_wrap=True)

    def header(
        self, *, run: str, recipe: str, config_hash: str, device: str, world: int, strategy: str, precision: str,
        parameters: int, tokens_per_step: int, data: Mapping[str, str], epochs: float, first_step: int = 0,
    ) -> None:  # fmt: skip
        """Show what is about to run; `first_step`: steps that were done before."""
        tokens = short(self.steps * tokens_per_step)
        resumed = f", resumed after step {first_step:,}" if first_step else ""
        self._print(f"run     {run}", style="bold")
        self._print(f"recipe  {recipe} ({config_hash})")
        self._print(f"ranks   {world} rank{'s' * (world != 1)} x {device}, {strategy}, {precision}")
        self._print(f"model   {parameters:,} parameters")
        texts = [data[key] for key in ("data", "training") if key in data]
        passes = f"{epochs:.2g}" if epochs < 10 else f"{epochs:,.0f}"
        self._print(
            f"data    {': '.join(texts)}; validation {data['validation']}; {data['tokenizer']}; {passes} epochs"
        )
        for key in ("lengths", "cut"):
            if key in data:
                self._print(f"{key:<8}{data[key]}", "yellow" if key == "cut" else "")
        self._print(f"work    {self.steps:,} steps x {tokens_per_step:,} tokens = {tokens} tokens{resumed}")
        if self._terminal is not None:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

            columns = MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}", markup=False)
            self._live = Progress(*columns, console=self._terminal, auto_refresh=False)
            self._live.add_task("", total=self.steps, completed=first_step)
            with self._while_terminal_is_there():
                self._live.start()

    def tick(self, step: int) -> None:
        """Move the bar, at most four times a second; for every step, at no cost where there is no bar."""
        if self._live is not None and time.monotonic() - self._drawn > 0.25:
            self._draw(completed=step)

    def step(self, line: Line) -> None:
        """A logged step: a `train` line of the ledger, with `mem_mb` where the memory is measured."""
        # the time left is by the time from the first logged step on, evaluations and saves in it: what came before
        # (imports, compiling, the evaluation at step 0) does not come again
        self._first = self._first or (time.monotonic(), line["step"])
        done = line["step"] - self._first[1]
        seconds_per_step = (time.monotonic() - self._first[0]) / done if done else line["step_ms"] / 1e3
        eta = duration((self.steps - line["step"]) * seconds_per_step)
        text = " | ".join([*(write(line[key]) for key, write in NUMBERS.items() if key in line), f"eta {eta}"])
        if self._live is not None:
            self._draw(completed=line["step"], description=text)
        self._print(f"step {line['step']}/{self.steps} | {text}", only_log=self._live is not None)

    def eval(self, line: Line) -> None:
        shown = [line.get("suite", "loss"), *(f"{key} {float(line[key]):.4f}" for key in SCORES if key in line)]
        shown += [f"{line['runtime_s']:.1f} s"] if "runtime_s" in line else []
        self._print(f"eval {line['step']}/{self.steps} | {' | '.join(shown)}", "green")

    def event(self, text: str, step: int | None = None) -> None:
        self._print(text if step is None else f"step {step}/{self.steps} | {text}", "cyan")

    def sample(self, text: str, step: int) -> None:
        self._print(f"sample {step}/{self.steps} |")
        for line in text.splitlines() or [""]:
            self._print(f"  | {line}", style="italic")

    def warning(self, text: str) -> None:
        """A warning; the only thing that ranks other than 0 show."""
        if self.rank == 0:
            self._print(f"warning: {text}", style="yellow")
            return
        with self._while_terminal_is_there():
            print(f"rank {self.rank}: warning: {text}", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._live is not None:
            with self._while_terminal_is_there():
                self._live.stop()  # takes the bar away
        if self._log is not None:
            with contextlib.suppress(OSError):
                self._log.close()

    def _print(self, text: str, style: str = "", only_log: bool = False) -> None:
        # control characters made visible, so that a generated text cannot steer the terminal
        text = "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
        if self._log is not None:
            with contextlib.suppress(OSError, ValueError):
                self._log.write(f"{now()} {text}\n")
                self._log.flush()
        if self.rank or only_log:
            return
        with self._while_terminal_is_there():
            if self._terminal is not None:
                self._terminal.print(text, style=style, markup=False, emoji=False)
            elif self._stream is not None:
                print(text, file=self._stream, flush=True)

    def _draw(self, **fields: Any) -> None:
        self._drawn = time.monotonic()
        with self._while_terminal_is_there():
            self._live.update(self._live.task_ids[0], **fields)
            self._live.refresh()

    @contextlib.contextmanager
    def _while_terminal_is_there(self) -> Iterator[None]:
        """A terminal that went away (its window closed, ssh gone) is not written to again."""
        try:
            yield
        except (OSError, ValueError):
            self._terminal = self._live = self._stream = None


def short(number: float) -> str:
    """A count in three or four digits: 950, 15.2k, 3.41M, 10.0B."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(number) >= 0.9995 * size:
            return f"{number / size:#.3g}".rstrip(".") + unit
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """A time in two units: 42s, 3m 05s, 2h 10m, 4d 03h."""
    whole = round(seconds)
    for size, unit, part, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{unit} {whole % size // part:02d}{smaller}"
    return f"{whole}s"
