"""Shows a study while its cells train: a table in a terminal, else lines. No torch."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from windlass.errors import by_text
from windlass.study.grid import short_names
from windlass.study.results import CellResult
from windlass.study.study import Study
from windlass.telemetry import terminal
from windlass.telemetry.measures import duration, short, title_of
from windlass.telemetry.scores import LOSS

if TYPE_CHECKING:
    from rich.console import Group

EVERY_SECONDS = 30.0  # between two lines of a cell that trains, without a table


class Progress:
    """Shows cells on a stream, by default standard output; used as a context manager."""

    def __init__(self, stream: IO[str] | None = None):
        from rich.live import Live

        self.console = terminal.rich_console(stream or sys.stdout)
        self._live = Live(console=self.console, auto_refresh=False)
        self._lines: dict[str, tuple[str, float]] = {}  # by cell its last line's state and time

    def __enter__(self) -> Progress:
        if self.console.is_interactive:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.console.is_interactive:
            self._live.__exit__(*error)

    def notify(self, text: str) -> None:
        """Print a message for the user, if it is not empty."""
        if text:
            self.console.out(terminal.message(text, self.console.file))

    def show(self, study: Study, results: Sequence[CellResult] = ()) -> None:
        """Draw the table again, or print a line for each cell that changed or trains on.

        `results`: of the study, if they have just been read.
        """
        results = results or study.results()
        if self.console.is_interactive:
            self.console.width = terminal.size(self.console.file).columns
            self._live.update(cells_table(study, results, self.console.width), refresh=True)
        else:
            self._print_lines(results)

    def show_end(self, study: Study) -> None:
        """Print the final table; a terminal shows it already."""
        if not self.console.is_interactive:
            self.console.print(cells_table(study, study.results(), self.console.width))

    def _print_lines(self, results: Sequence[CellResult]) -> None:
        for number, result in enumerate(results, 1):
            before, when = self._lines.get(result.cell.key, ("waiting", 0.0))
            waited = time.monotonic() - when > EVERY_SECONDS
            trains = result.state == "running" and result.step and waited
            if result.state == before and not trains:
                continue
            self._lines[result.cell.key] = result.state, time.monotonic()
            more = f" ({result.reason})" if result.reason else ""
            if trains:
                left = "" if result.left_s is None else f", {duration(result.left_s)} left"
                more = f", step {result.step}/{result.steps}{left}"
            place = f"[{number}/{len(results)}]"
            self.console.out(f"{place} {result.cell.label}: {result.state}{more}")


def cells_table(study: Study, results: Sequence[CellResult], width: int) -> Group:
    """The cells as a table for a terminal of `width` columns."""
    best = "best" if study.measure == LOSS else f"best {title_of(study.measure)}"
    settings = short_names(study.keys).values()
    head = ["cell", *settings, "state", "step", "left", "loss", "val loss", best]
    head += ["tok/s", "device-h"]
    rows = [_row(number, result) for number, result in enumerate(results, 1)]
    notes = by_text((f"cell {n}", r.reason) for n, r in enumerate(results, 1) if r.reason)
    options: dict[str, Any] = {"text": ("state",), "title": str(study.path), "notes": notes}
    return terminal.table(head, rows, width, **options)


def _row(number: int, r: CellResult) -> list[str]:
    settings = [f"{v:g}" if isinstance(v, float) else str(v) for v in r.cell.assignment.values()]
    return [
        str(number),
        *settings,
        r.state,
        f"{r.step}/{r.steps or '?'}" if r.step or r.steps else "",
        "" if r.left_s is None else duration(r.left_s),
        *("" if v is None else f"{v:.4f}" for v in (r.loss, r.eval_loss, r.score)),
        "" if r.tokens_per_s is None else short(r.tokens_per_s),
        "" if r.device_hours is None else f"{r.device_hours:.3g}",
    ]
