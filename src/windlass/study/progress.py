"""The cells of a study in a terminal: a live table, or a line for each change of a state."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Any

from windlass.errors import by_text
from windlass.study.grid import short_names
from windlass.study.results import CellResult
from windlass.study.study import Study
from windlass.telemetry import terminal
from windlass.telemetry.measures import LOSS, show, title_of

if TYPE_CHECKING:
    from rich.console import Group


class Progress:
    """Shows cells on a stream, by default standard output; used as a context manager."""

    def __init__(self, stream: IO[str] | None = None):
        from rich.live import Live

        self.console = terminal.rich_console(stream or sys.stdout)
        self._live = Live(console=self.console, auto_refresh=False)
        self._states: dict[str, str] = {}  # by cell the state of its last line

    def __enter__(self) -> Progress:
        if self.console.is_interactive:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.console.is_interactive:
            self._live.__exit__(*error)

    def notify(self, text: str) -> None:
        if text:
            self.console.out(terminal.message(text, self.console.file))

    def show(self, study: Study, results: Sequence[CellResult] = ()) -> None:
        """Draw the table again, or print a line for each cell whose state changed."""
        results = results or study.results()
        if self.console.is_interactive:
            self.console.width = terminal.size(self.console.file).columns
            self._live.update(cells_table(study, results, self.console.width), refresh=True)
            return
        for number, result in enumerate(results, 1):
            if result.state != self._states.get(result.cell.key, "waiting"):
                self._states[result.cell.key] = result.state
                more = f" ({result.reason})" if result.reason else ""
                place = f"[{number}/{len(results)}]"
                self.console.out(f"{place} {result.cell.label}: {result.state}{more}")

    def show_end(self, study: Study) -> None:
        if not self.console.is_interactive:
            self.console.print(cells_table(study, study.results(), self.console.width))


def cells_table(study: Study, results: Sequence[CellResult], width: int) -> Group:
    best = "best" if study.measure == LOSS else f"best {title_of(study.measure)}"
    settings = short_names(study.keys).values()
    head = ["cell", *settings, "state", "step", "left", "loss", "val loss", best]
    head += ["tok/s", "device-h"]

    def text(value: Any, kind: str) -> str:
        return "" if value is None else show(value, kind)

    rows = []
    for number, result in enumerate(results, 1):
        numbers, steps = result.numbers, result.steps
        row = [str(number), *map(show, result.cell.assignment.values()), result.state]
        row.append(f"{numbers.step}/{steps or '?'}" if numbers.step or steps else "")
        row.append(text(result.left_s, "duration"))
        row += [text(x, "loss") for x in (numbers.loss, numbers.eval_loss, numbers.score)]
        row += [text(numbers.tokens_per_s, "short"), text(numbers.device_hours, "hours")]
        rows.append(row)
    notes = by_text((f"cell {n}", r.reason) for n, r in enumerate(results, 1) if r.reason)
    return terminal.table(head, rows, width, ("state",), title=str(study.path), notes=notes)
