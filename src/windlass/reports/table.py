"""A table of raw values, written five ways: Markdown, LaTeX, CSV, the terminal, the page.

People show reports, so all text passes through `scrub` before it enters a file.
"""

from __future__ import annotations

import csv
import html
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from windlass.telemetry.measures import show
from windlass.telemetry.terminal import printable, rich_console, table
from windlass.variables import scrub

if TYPE_CHECKING:
    from rich.console import Group


LATEX = str.maketrans(
    {c: f"\\{c}" for c in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        "–": "--",
        "−": "$-$",
        "∞": r"$\infty$",
        "·": r"$\cdot$",
        "…": r"\dots{}",
    }
)


class Column(NamedTuple):
    """A column: its name in CSV, its heading, and the kind of number (see `measures.show`)."""

    name: str
    heading: str = ""  # empty: the name
    kind: str = ""
    short: str = ""  # the heading in the terminal; empty: the heading
    shown: bool = True  # to people; other columns are in the CSV alone


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
        """The places of columns with numbers alone, which are flush right, among the shown ones."""
        columns = [[row[i] for row in self.rows if row[i] is not None] for i in self.shown]
        return [n for n, cells in enumerate(columns) if cells and numeric(cells)]

    def texts(self) -> list[list[str]]:
        """The shown cells of each row, for a reader."""
        kinds = self.kinds or [""] * len(self.rows)
        return [
            [show(row[i], kind or self.columns[i].kind) for i in self.shown]
            for kind, row in zip(kinds, self.rows, strict=True)
        ]

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
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(column.name for column in self.columns)
        writer.writerows(map(_plain, row) for row in self.rows)
        return out.getvalue()

    def terminal(self, width: int, title: str = "") -> Group:
        """The table for a terminal of that width; `title` stands above it."""
        shown = [self.columns[i] for i in self.shown]
        heads = [column.short or column.heading or column.name for column in shown]
        text = [head for place, head in enumerate(heads) if place not in self.numeric]
        return table(heads, self.texts(), width, text=text, title=title)

    def print(self) -> None:
        console = rich_console(sys.stdout)
        console.print(self.terminal(console.width))


def _plain(value: Any) -> Any:
    """A value as CSV has it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, (list, tuple)):
        return " ".join(str(_plain(part)) for part in value)
    return scrub(value)


def stacked(name: str, keys: Sequence[str], parts: Mapping[tuple[str, ...], Table]) -> Table:
    """Tables under each other, with columns `keys` in front: they say where each row is from."""
    columns = {column.name: column for table in parts.values() for column in table.columns}
    rows = []
    for key, part in parts.items():
        names = [column.name for column in part.columns]
        rows += [(*key, *map(dict(zip(names, row, strict=True)).get, columns)) for row in part.rows]
    return Table(name, [*map(Column, keys), *columns.values()], rows)


def markdown_cell(text: Any) -> str:
    """Text that is safe in a cell of a Markdown table."""
    cleaned = html.escape(" ".join(printable(scrub(str(text))).split()), quote=False)
    return "".join(f"\\{c}" if c in "|`*_[]\\" else c for c in cleaned)


def latex_cell(text: Any) -> str:
    """Text that is safe in a cell of a LaTeX table."""
    return " ".join(printable(scrub(str(text))).split()).translate(LATEX)


def numeric(values: Iterable[Any]) -> bool:
    return all(type(value) in (int, float) for value in values)


def slug(text: str) -> str:
    """A text as a part of a file's name."""
    return "".join(c if c.isalnum() and c.isascii() else "-" for c in text)
