import csv
import html
import io
import math
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.reports.text import compact, csv_text, duration, escape, fixed, markdown_cell, markdown_table, show


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (4.7323456, "loss", "4.7323"), (0.00123456, "loss", "0.00123"), (1.234e-9, "loss", "1.23e-09"), (0.0, "loss", "0"),
        (1234.56, "rate", "1,234.6"), (5.234, "rate", "5.23"), (819200, "count", "819,200"), (0.8254, "share", "82.5 %"),
        (math.nan, "loss", "NaN"), (math.inf, "loss", "∞"), (-math.inf, "loss", "−∞"), (None, "loss", "–"), ("", "", "–"),
        (True, "", "yes"), ([0.9, 0.95], "", "0.9, 0.95"), ([], "", "none"), (3e-4, "", "0.0003"), (1e15, "rate", "1e+15"),
        (31.7, "duration", "31.7 s"), ("words", "loss", "words"), (1764.2, "mb", "1,764"), (3.14159, "mb", "3.1"), (1969.5, "amount", "1,969.5"), (2.0, "amount", "2"), (0.20309, "amount", "0.203"),
    ],
)  # fmt: skip
def test_show(value, kind, text):
    assert show(value, kind) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.0 s"),
        (59.94, "59.9 s"),
        (250, "4 min 10 s"),
        (3599.7, "1 h 00 min"),
        (11_100, "3 h 05 min"),
        (187_000, "2 d 04 h"),
    ],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_compact():
    assert [compact(v) for v in (812, 9999, 12_345, 599_910_400, 1.2e9, None)] == [
        "812", "9,999", "12.3 k", "600 M", "1.2 B", "–",
    ]  # fmt: skip


@given(st.floats(min_value=1e-12, max_value=1e11), st.integers(0, 4))
def test_fixed_is_right_to_its_last_digit(value, decimals):
    text = fixed(value, decimals).replace(",", "")
    assert float(text) == pytest.approx(value, rel=0.051, abs=0.51 * 10.0**-decimals if value >= 0.1 else 0)


class Texts(HTMLParser):
    def __init__(self):
        super().__init__()
        self.texts, self.tags = [], []

    def handle_data(self, data):
        self.texts.append(data)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


@given(st.text())
def test_escaped_text_stays_text_in_elements_and_attributes(text):
    parser = Texts()
    parser.feed(f'<p title="{escape(text)}">{escape(text)}</p>')
    parser.close()
    assert [tag for tag, _ in parser.tags] == ["p"]
    shown = html.unescape(escape(text))
    assert "".join(parser.texts) == parser.tags[0][1]["title"] == shown
    assert len(shown) == len(text)


def test_control_characters_are_shown_and_not_passed_on():
    assert escape("a\x1b[31m\x00\n\tb\x85") == "a\ufffd[31m\ufffd\n\tb\ufffd"


def test_markdown_cells_hold_pipes_and_tags():
    assert markdown_cell("a|b\n<script> `x` *y*") == "a\\|b &lt;script&gt; \\`x\\` \\*y\\*"
    assert markdown_table(["A", "B"], [["1", "2"]], [1]) == "| A | B |\n| --- | ---: |\n| 1 | 2 |\n"


@given(
    st.lists(
        st.tuples(st.floats(allow_nan=False), st.text(alphabet=st.characters(exclude_characters="\r\x00"))), min_size=1
    )
)
def test_csv_reads_back_exactly(rows):
    found = list(csv.reader(io.StringIO(csv_text(["x", "y"], rows), newline="")))
    assert found[0] == ["x", "y"]
    assert [(float(x), y) for x, y in found[1:]] == rows
