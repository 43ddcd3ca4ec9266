import math

import numpy as np
import pytest
from report_fixtures import build_run

from windlass.reports.terminal import loss_curve, plot, sparkline
from windlass.reports.view import view


def test_a_sparkline_rises_with_its_values():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, math.nan, 1]) == "▁ ▁"
    assert sparkline([math.nan]) == ""
    assert len(sparkline(range(1000), width=20)) == 20


def dots(text, gutter):
    """The places of all dots of a braille plot: (column, row), counted from the top left."""
    found = set()
    bits = {
        0x01: (0, 0),
        0x02: (0, 1),
        0x04: (0, 2),
        0x40: (0, 3),
        0x08: (1, 0),
        0x10: (1, 1),
        0x20: (1, 2),
        0x80: (1, 3),
    }
    for row, line in enumerate(text.splitlines()[:-2]):
        for column, character in enumerate(line[gutter:]):
            code = ord(character) - 0x2800
            if 0 < code < 256:
                found |= {(2 * column + x, 4 * row + y) for bit, (x, y) in bits.items() if code & bit}
    return found


def test_a_straight_line_is_drawn_from_corner_to_corner():
    x = np.linspace(0, 1, 500)
    none = (np.array([]), np.array([]))
    text = plot(x, x, none, 30, 6, "steps")
    gutter = text.splitlines()[0].index("┤") + 1
    columns = len(text.splitlines()[-2].strip()) - 1
    found = dots(text, gutter)
    assert {c for c, _ in found} == set(range(2 * columns))
    for column, row in found:
        assert row == pytest.approx((1 - column / (2 * columns - 1)) * 23, abs=1.5)
    assert max(map(len, text.splitlines())) <= 30


def test_marks_and_labels():
    x, y = np.array([0.0, 100.0]), np.array([4.0, 2.0])
    text = plot(x, y, (np.array([100.0]), np.array([3.0])), 40, 5, "steps")
    lines = text.splitlines()
    assert lines[0].startswith(" 4.00 ┤")
    assert lines[4].startswith(" 2.00 ┤")
    assert lines[2].endswith("o")
    assert lines[-1].endswith("100 steps")


@pytest.mark.parametrize(("x", "y"), [([1.0], [2.0]), ([1.0, 2.0], [3.0, 3.0]), ([1.0, 2.0], [math.nan, math.inf])])
def test_degenerate_curves_do_not_fail(x, y):
    text = plot(np.array(x), np.array(y), (np.array([]), np.array([])), 40, 8, "steps")
    assert (text == "") == (not np.isfinite(y).any())


def test_the_curve_of_a_run(tmp_path):
    run = build_run(tmp_path / "run", killed_at=263)
    text = loss_curve(run, width=72)
    assert "training" in text
    assert "o validation" in text
    assert max(map(len, text.splitlines())) <= 72
    assert "400 steps" in text
    run.metrics_path.unlink()
    assert loss_curve(run) == ""
    assert view(run).step == 0
