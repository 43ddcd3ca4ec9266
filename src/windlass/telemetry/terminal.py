"""Text and tables for a terminal of any width and encoding; other outputs get them whole."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

WIDE = 1000  # columns of an output that is not a terminal, so nothing wraps
NARROWEST = 13  # columns that text is wrapped in
NEW_LINE = "\r\x1b[K\x1b[?25h"  # erases the line (with ^C or a live line) and shows the cursor
# Control characters, characters that turn the direction of writing, and surrogates.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: Any) -> str:
    r"""Text with control characters as escapes (`\x1b`), so that no generated text steers a
    terminal."""
    text = str(text).replace("\r\n", "\n")
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class SafeStream:
    """A standard stream that writes `?` for a character that its encoding lacks. `gone`: its reader
    (`head`, a terminal) went away, which does not end the verb."""

    buffer = None  # click would write UTF-8 to it, even if the stream has another encoding

    def __init__(self, stream: IO[str], trims: bool = False):
        self._stream, self.gone, self._trims = stream, False, trims
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._surviving():
            self._stream.write(re.sub(" +$", "", text, flags=re.MULTILINE) if self._trims else text)
        return len(text)

    def flush(self) -> None:
        with self._surviving():
            self._stream.flush()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:  # EIO: the terminal was closed
            if error.errno not in (errno.EPIPE, errno.EIO):
                raise
            self.gone = True
            # the interpreter flushes the buffer at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())


def size(stream: IO[str] | None) -> os.terminal_size:
    """Columns and lines of the terminal, if a stream writes to one; else WIDE."""
    if stream is None or not stream.isatty():
        return os.terminal_size((WIDE, WIDE))
    return shutil.get_terminal_size()


def wrap(text: str, width: int, indent: str = "    ") -> str:
    """Text in lines of `width` columns, with `indent` before the further lines of each line.

    A wider word, such as a path, stays whole for copying.
    """
    whole: Any = {"break_long_words": False, "break_on_hyphens": False}
    lines = [textwrap.fill(x, width, subsequent_indent=indent, **whole) for x in text.split("\n")]
    return "\n".join(lines)


def message(text: str, stream: IO[str]) -> str:
    """A message as a stream's terminal gets it, with whole words; other streams get it as it is."""
    return wrap(text, size(stream).columns) if stream.isatty() else text


def rich_console(stream: IO[str]) -> Console:
    """A console of `rich` that prints text as it is, as wide as the stream's terminal."""
    from rich.console import Console

    width, height = size(stream)
    file: Any = stream if stream.isatty() else SafeStream(stream, trims=True)
    plain: Any = {"highlight": False, "markup": False, "emoji": False}
    # In a notebook `rich` would show each text as an output of its own, and FORCE_COLOR, which is
    # set there, would make any stream a terminal that can draw a table again.
    plain |= {"force_jupyter": False, "force_interactive": None if stream.isatty() else False}
    return Console(file=file, width=width, height=height, **plain)


def pairs(
    rows: Iterable[tuple[str | Text, str | Text]], indent: str = "", style: str = ""
) -> Table:
    """A column of names (in `style`) and a column of wrapped values."""
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    grid.add_column(style=style, no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text.assemble(indent, name), Text.assemble(value))
    return grid


def print_table(head: Sequence[str], rows: Sequence[Sequence[str | Text]], **options: Any) -> None:
    console = rich_console(sys.stdout)
    console.print(table(head, rows, console.width, **options))


def table(
    head: Sequence[str],
    rows: Sequence[Sequence[str | Text]],
    width: int,
    text: Collection[str] = (),
    title: str = "",
    keys: int = 1,
    notes: Sequence[str] = (),
) -> Group:
    """A table no wider than `width`, without empty columns; it never cuts a number.

    The columns of `text` wrap. If the numbers are wider, the last columns follow under the others,
    behind the first `keys` columns again.
    """
    from rich.cells import cell_len
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    longest = {i: max((cell_len(str(row[i])) for row in rows), default=0) for i in range(len(head))}
    columns = [i for i in longest if longest[i]]
    natural = sum(2 + max(longest[i], len(head[i])) for i in columns) - 2
    least, headings = dict[int, int](), dict(enumerate(head))
    wraps = {i for i in columns if head[i] in text and longest[i] > NARROWEST}
    for i in columns:
        if i in wraps:
            least[i] = NARROWEST
        else:
            least[i] = max([longest[i], *map(len, head[i].split())])
            headings[i] = head[i] if natural <= width else textwrap.fill(head[i], least[i])
    gap = 2 if sum(least.values()) + 2 * len(columns) - 2 <= width else 1
    blocks = [columns[:keys]]
    for i in columns[keys:]:
        if len(blocks[-1]) > keys and sum(least[k] + gap for k in blocks[-1]) + least[i] > width:
            blocks.append(columns[:keys])
        blocks[-1].append(i)
    drawn: list[Any] = [Text(title, "bold")] if title else []
    for block in blocks if columns else ():
        part = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="bold")
        for i in block:
            justify: Any = "left" if head[i] in text else "right"
            part.add_column(headings[i], justify=justify, no_wrap=i not in wraps, overflow="fold")
        for row in rows:
            part.add_row(*(row[k] for k in block))
        drawn += [part] if block is blocks[0] else ["", part]
    return Group(*drawn, *(wrap(printable(note), width) for note in notes))
