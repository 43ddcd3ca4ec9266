"""A study in a terminal: its table, redrawn while a sweep works, and at the end the winner."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.study.study import Study

WIDE = 110
"""Columns of a terminal from which the table shows device-hours too."""


class Screen:
    """The study's table, redrawn in a terminal; elsewhere a line whenever a cell's state changes."""

    def __init__(self, *, errors: bool = False) -> None:
        """With `errors` everything goes to stderr: stdout is for JSON alone."""
        from rich.console import Console

        self.errors = errors
        self.console = Console(stderr=errors)
        if not self.console.is_terminal:  # a file has no width, so that no number need be cut
            self.console = Console(stderr=errors, width=140)
        self.live: Any = None
        self.study: Study | None = None
        self.states: dict[str, str] = {}
        self.drawn = 0.0

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            from rich.live import Live

            self.live = Live(console=self.console, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            if self.study:  # what is on the screen may be a second old
                self.live.update(table(self.study, self.console.width), refresh=True)
            self.live.stop()

    def say(self, text: str) -> None:
        """Print a line for the user."""
        if self.live:
            self.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=sys.stderr if self.errors else sys.stdout, flush=True)

    def show(self, study: Study) -> None:
        """Called often; draws about once a second."""
        self.study = study
        if self.live:
            if time.monotonic() - self.drawn > 1 or self.drawn == 0:
                self.live.update(table(study, self.console.width), refresh=True)
                self.drawn = time.monotonic()
            return
        for number, result in enumerate(study.results(), 1):
            key, state = result.cell.key, result.state
            if self.states.get(key) != state and (state != "waiting" or key in self.states):
                self.states[key] = state
                reason = f" ({result.reason})" if result.reason else ""
                self.say(f"[{number}/{len(study.cells)}] {result.cell.label}: {state}{reason}")

    def end(self, study: Study, world: int) -> None:
        """The final table, medians over seeds, and the command that trains the winner."""
        if not self.live:
            self.console.print(table(study, self.console.width))
        groups, best = study.groups(), study.winner()
        for group in groups:
            if group.seeds and group.median is not None:
                low, high = min(group.scores), max(group.scores)
                self.say(f"{group.label}: median {group.median:.4f}, {low:.4f} to {high:.4f} over {group.seeds}")
        if best:
            command, remark = study.winner_command(best.assignment, world)
            name = "validation loss" if study.measure == "loss" else study.measure
            self.say(
                f"best: {best.label} ({name} {best.median:.4f}{f', median of {best.seeds}' if best.seeds else ''})"
            )
            self.say("\n".join(f"  {line}" for line in (command, remark) if line))
        self.say(f"report: windlass report {study.path}")


def table(study: Study, width: int = WIDE) -> Table:
    """The study as a table for a terminal of so many columns."""
    from rich.table import Table

    wide = width >= WIDE
    best = "best" if study.measure == "loss" else f"best {study.measure}"
    names = ["state", "step", "loss", "val loss", best, "tokens/s", *(["device-h"] if wide else []), "reason"]
    drawn = Table(title=str(study.path), title_justify="left")
    for name in [*(key.rsplit(".", 1)[-1] for key in study.keys), *names]:
        drawn.add_column(name, justify="left" if name in ("state", "reason") else "right", no_wrap=name == "state")
    for r in study.results():
        settings = [f"{v:g}" if isinstance(v, float) else str(v) for v in r.cell.assignment.values()]
        step = f"{r.step}/{r.steps or '?'}" if r.step or r.steps else ""
        numbers = ["" if v is None else f"{v:.4f}" for v in (r.loss, r.eval_loss, r.score)]
        speed = f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else ""
        hours = ["" if r.device_hours is None else f"{r.device_hours:.3g}"] if wide else []
        drawn.add_row(*settings, r.state, step, *numbers, speed, *hours, r.reason)
    return drawn
