"""A table of raw values, written five ways: Markdown, LaTeX, CSV, the terminal, the page."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.reports.text import latex_cell, markdown_cell, show
from windlass.variables import scrub

if TYPE_CHECKING:
    from rich.console import Group


class Column(NamedTuple):
    """A column: its name in CSV, its heading, and the kind of number (see `text.show`)."""

    name: str
    heading: str = ""  # empty: the name
    kind: str = ""
    short: str = ""  # the heading in the terminal; empty: the heading
    shown: bool = True  # to people; other columns are in the CSV alone
    in_csv: bool = True


class Cell(NamedTuple):
    """A value for a reader, and the raw value, by which the page sorts."""

    text: str
    value: Any


@dataclass(frozen=True)
class Table:
    """Rows of raw values under columns, with a title and the sentences that follow the table."""

    name: str  # of its files
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]
    title: str = ""
    notes: Sequence[str] = ()
    kinds: Sequence[str] = ()  # of the numbers in each row, if the rows are of different kinds

    @property
    def shown(self) -> list[int]:
        """The places of the columns that people see."""
        return [i for i, column in enumerate(self.columns) if column.shown]

    @property
    def headings(self) -> list[str]:
        return [self.columns[i].heading or self.columns[i].name for i in self.shown]

    @property
    def numeric(self) -> list[int]:
        """The shown columns that hold numbers alone, which are set flush right."""
        cells = [[row[i] for row in self.rows if row[i] is not None] for i in self.shown]
        return [
            place
            for place, column in enumerate(cells)
            if column and all(type(cell) in (int, float) for cell in column)
        ]

    def cells(self) -> list[list[Cell]]:
        """The shown cells of each row."""
        return [
            [
                Cell(show(row[i], self.kinds[n] if self.kinds else self.columns[i].kind), row[i])
                for i in self.shown
            ]
            for n, row in enumerate(self.rows)
        ]

    def texts(self) -> list[list[str]]:
        return [[cell.text for cell in row] for row in self.cells()]

    def only(self, rows: Iterable[Sequence[Any]]) -> Table:
        """The table with some of its rows."""
        return replace(self, rows=list(rows))

    def markdown(self) -> str:
        lines = [" | ".join(map(markdown_cell, row)) for row in (self.headings, *self.texts())]
        rules = ("---:" if i in self.numeric else "---" for i in range(len(self.headings)))
        lines.insert(1, " | ".join(rules))
        return "".join(f"| {line} |\n" for line in lines)

    def latex(self) -> str:
        """A LaTeX table that needs the package `booktabs`."""
        lines = [" & ".join(map(latex_cell, row)) for row in (self.headings, *self.texts())]
        places = "".join("r" if i in self.numeric else "l" for i in range(len(self.headings)))
        body = "".join(f"{line} \\\\\n" for line in lines[1:])
        return (
            f"\\begin{{tabular}}{{{places}}}\n\\toprule\n{lines[0]} \\\\\n\\midrule\n"
            f"{body}\\bottomrule\n\\end{{tabular}}\n"
        )

    def csv(self) -> str:
        """All columns with Unix line ends; floats in full precision, an empty cell for None."""
        places = [i for i, column in enumerate(self.columns) if column.in_csv]
        lines = [[self.columns[i].name for i in places]]
        lines += [[_plain(row[i]) for i in places] for row in self.rows]
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows(lines)
        return out.getvalue()

    def terminal(self, width: int, title: str = "") -> Group:
        """The table for a terminal of that width; `title` stands above it."""
        from windlass.telemetry.terminal import table

        heads = [
            self.columns[i].short or head for i, head in zip(self.shown, self.headings, strict=True)
        ]
        text = [head for i, head in enumerate(heads) if i not in self.numeric]
        return table(heads, self.texts(), width, text=text, title=title)

    def print(self, title: str = "") -> None:
        """Print the table as wide as the terminal."""
        from windlass.telemetry.terminal import rich_console

        console = rich_console(sys.stdout)
        console.print(self.terminal(console.width, title))


def _plain(value: Any) -> Any:
    """A value as CSV has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, (list, tuple)):
        return " ".join(str(_plain(v)) for v in value)
    return scrub(value)


def stacked(name: str, keys: Sequence[str], parts: Mapping[tuple[str, ...], Table]) -> Table:
    """Tables under each other, with columns `keys` in front: they say where each row is from."""
    columns = {column.name: column for table in parts.values() for column in table.columns}
    rows = []
    for key, table in parts.items():
        own = [column.name for column in table.columns]
        rows += [(*key, *map(dict(zip(own, row, strict=True)).get, columns)) for row in table.rows]
    return Table(name, [*map(Column, keys), *columns.values()], rows)
