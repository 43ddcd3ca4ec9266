"""Tables and text for terminals: no line wider than the terminal, no number cut, and every stream
takes every character.
"""

import io
import os
import pty

import pytest
from rich.console import Console

from windlass.telemetry.terminal import SafeStream, message, printable, table

HEAD = ("run", "state", "step", "left", "val loss", "best", "tok/s", "reason", "spare")
ROWS = [
    line.split("|")
    for line in (
        "studies/quickstart-0123abcd/lr=0.001,seed=1|finished|4400/4400||2.7169|2.8539|13.65k||",
        "a|failed|20/4400|1h 05m|12.7174|2.8541|2.48k|exit code 1: no memory is left for it|",
    )
]
NUMBERS = [cell for row in ROWS for cell in row[2:7] if cell]


@pytest.mark.parametrize("width", [44, 60, 80, 120, 1000])
def test_a_table_fits_its_terminal_with_every_number_whole(width):
    out = io.StringIO()
    Console(file=out, width=width).print(table(HEAD, ROWS, width, text=("run", "state", "reason")))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    assert all(number in out.getvalue() for number in NUMBERS)
    assert "spare" not in out.getvalue(), "a column without values is left out"
    folded = "".join(line[:13].strip() if width < 120 else line for line in lines)
    assert "studies/quick" in folded and "0123abcd" in folded
    assert len(lines) == 3 if width >= 200 else len(lines) > 3
    assert sum(line.startswith("run") for line in lines) == {44: 3, 60: 2}.get(width, 1), (
        "the first column is repeated"
    )


def test_a_terminal_gets_a_message_with_whole_words(monkeypatch):
    text = "data.source: there is no file called /a/path/that/is/longer/than/the/terminal/is/wide; give another"
    assert message(text, io.StringIO()) == text
    monkeypatch.setenv("COLUMNS", "40")
    master, inner = pty.openpty()
    with open(inner, "w") as stream:
        lines = message(text, stream).splitlines()
    os.close(master)
    assert [word for line in lines for word in line.split()] == text.split()
    assert max(len(line) for line in lines if "/" not in line) <= 40


def test_controls_are_shown_and_lines_stay():
    assert (
        printable("a\x1b[2J\r\n\tb\rc\x07\u202e\ud800") == "a\\x1b[2J\n\tb\\rc\\x07\\u202e\\ud800"
    )
    assert printable("naïve 中文 🙂 \u3000") == "naïve 中文 🙂 \u3000"


def test_a_stream_survives_its_reader_and_its_encoding():
    reader, writer = os.pipe()
    with open(writer, "w", encoding="latin-1", buffering=1) as inner:
        stream = SafeStream(inner)
        print("é → ✓ ⠒│ 中", file=stream)
        assert os.read(reader, 100) == "é ? ? ?? ?\n".encode("latin-1")
        os.close(reader)
        print("lost", file=stream)
        print("lost, too", file=stream, flush=True)
        assert stream.gone
