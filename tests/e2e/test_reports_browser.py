"""The report's page in a real headless browser: from disk, without a network, no error, charts
drawn, controls at work, usable with the keyboard and a screen reader.
"""

import json
import os
import re
import shutil
import sys
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from report_fixtures import NASTY, add_lines, build_run, build_study

from windlass.reports.write import report

FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync"


@pytest.fixture(scope="module")
def browser():
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    path = os.environ.get("WINDLASS_TEST_BROWSER") or next(
        filter(None, map(shutil.which, names)), ""
    )
    if not path:
        pytest.skip(f"no browser: install one of {', '.join(names)}, or set WINDLASS_TEST_BROWSER")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield started
        started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    one = build_run(folder / "one", f"run.notes={json.dumps(NASTY)}", killed_at=263)
    other = build_run(folder / "other", lr=1e-2, steps=300, ranks=1)
    bad = build_run(folder / "bad", steps=60, ranks=1, device="cpu", finished=False)
    add_lines(bad, {"kind": "train", "step": 70, "loss": "NaN"})
    empty = build_run(folder / "empty", steps=20)
    empty.metrics_path.unlink()
    sources = {"one": one, "two": [one, other], "bad": bad, "empty": empty}
    sources["study"] = build_study(folder / "study")
    pages = folder / "report"
    return {name: report(runs, pages / name, plots=False).page for name, runs in sources.items()}


class Opened:
    """A page, with everything it complained about and everything it asked for."""

    def __init__(self, browser, path, width=1400, theme="light"):
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, color_scheme=theme)
        self.page = self.context.new_page()
        self.complaints, self.asked = [], []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready]", state="attached", timeout=10_000)

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        self.context.close()
        if kind is None:
            assert self.complaints == [] and [url.split(":")[0] for url in self.asked] == ["file"]

    def svg(self, chart, attribute):
        return self.page.get_attribute(f'figure[data-chart="{chart}"] .plot svg', attribute)

    def data(self, chart):
        """Steps and values of the first series as the page holds them."""
        data = json.loads(self.page.text_content("#data"))
        series = next(one for one in data["charts"] if one["id"] == chart)["series"][0]
        return data["points"][series["at"]]["step"], series["y"]

    def domain(self, chart="loss"):
        return [float(x) for x in self.svg(chart, "data-domain").split()]

    def curves(self, chart, kind=".curve"):
        drawn = "nodes => nodes.map(n => n.getAttribute('d') || n.tagName)"
        selector = f'figure[data-chart="{chart}"] .plot svg {kind}'
        return self.page.eval_on_selector_all(selector, drawn)

    def drag(self, chart, start, stop):
        plot = self.page.locator(f'figure[data-chart="{chart}"] .plot')
        plot.scroll_into_view_if_needed()
        box = plot.bounding_box()
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + start * box["width"], y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + stop * box["width"], y, steps=4)
        self.page.mouse.up()


@pytest.fixture
def opened(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        yield opened


def points(path):
    return [tuple(map(float, point.split())) for point in path.replace("M", "").split("L")]


@pytest.mark.parametrize(
    ("name", "width", "theme"),
    [
        *((name, 390, "dark") for name in ("one", "two", "bad", "empty", "study")),
        *((name, 1280, "light") for name in ("one", "study")),
    ],
)
def test_every_page_opens_without_a_complaint_and_fits_its_window(
    browser, reports, name, width, theme
):
    outside = """nodes => nodes.filter(n => { const [t, s] = [n, n.ownerSVGElement].map(x => x.getBoundingClientRect());
        return t.left < s.left - 0.5 || t.right > s.right + 0.5; }).map(n => n.textContent)"""
    with Opened(browser, reports[name], width, theme) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        ids = "nodes => nodes.map(n => n.dataset.chart)"
        figures = opened.page.eval_on_selector_all("figure", ids)
        assert (len(figures) == 0) == (name == "empty")
        for chart in figures:
            curves = opened.curves(chart)
            assert curves and not [d for d in curves if "NaN" in d or "undefined" in d], chart
        controls = ("[data-toggle=logX]", "[data-axis=tokens]", "[data-axis=hours]")
        for control in controls if figures else ():
            cut_off = opened.page.eval_on_selector_all("figure svg .axes text", outside)
            assert cut_off == []
            opened.page.click(control)
        end = opened.page.locator(".answers").bounding_box()  # on the first screen
        assert end["y"] + end["height"] < (800 if width == 1280 else 844)
        assert opened.page.title() == ("2 runs" if name == "two" else name)
        if name == "bad":
            assert opened.page.locator('figure[data-chart="loss"] path.bad').count() == 1


def test_the_loss_is_drawn_where_the_numbers_are(opened):
    drawn, (steps, losses) = points(opened.curves("loss")[0]), opened.data("loss")
    assert steps == list(range(10, 401, 10))
    validation = opened.page.get_attribute('figure[data-chart="loss"] .plot svg .dot', "d")
    assert validation.count("M") == 9
    low, high, bottom, top = opened.domain()
    assert (low, high) == (0, 400) and bottom < min(losses) < max(losses) < top
    # a line through the first and last point gives the scale; all others must lie on it
    (x0, y0), (x1, y1) = drawn[0], drawn[-1]
    for (x, y), step, loss in zip(drawn, steps, losses, strict=True):
        assert x == pytest.approx(x0 + (x1 - x0) * (step - 10) / 390, abs=0.2)
        share = (loss - losses[0]) / (losses[-1] - losses[0])
        assert y == pytest.approx(y0 + (y1 - y0) * share, abs=0.3)


def test_axes(opened):
    before = opened.curves("loss")[0]
    opened.page.click("text=Log loss")
    assert (opened.svg("loss", "data-y"), opened.svg("grad_norm", "data-y")) == ("log", "linear")
    assert opened.curves("loss")[0] != before
    opened.page.click("text=Log x-axis")
    assert opened.svg("loss", "data-x") == opened.svg("grad_norm", "data-x") == "log"
    assert opened.domain()[0] > 0
    opened.page.click("text=Log loss")
    opened.page.click("text=Log x-axis")
    assert opened.curves("loss")[0] == before
    opened.page.click("[data-axis=tokens]")
    assert opened.domain()[1] == 819_200
    assert "tokens" in opened.page.text_content('figure[data-chart="lr"] .plot svg')
    opened.page.click("[data-axis=hours]")
    assert 0.05 < opened.domain()[1] < 0.07
    assert "minutes of training" in opened.page.text_content('figure[data-chart="loss"] .plot svg')
    opened.page.click("[data-axis=step]")
    top = opened.domain()[3]
    opened.page.fill("#skip", "100")
    assert opened.domain()[0] == opened.domain("grad_norm")[0] == 100
    assert opened.domain()[3] < top - 2


def test_the_page_smooths_curves(opened):
    assert opened.page.text_content("#smoothing-value") == "off"
    raw = opened.curves("loss")[0]
    opened.page.fill("#smoothing", "0.9")
    assert opened.curves("loss", ".curve.faint") == [raw] and opened.curves("lr", ".faint") == []
    values = opened.data("loss")[1]
    before, after = ([y for _, y in points(path)] for path in (raw, opened.curves("loss")[1]))
    slope = (before[-1] - before[0]) / (values[-1] - values[0])
    weights = 0.9 ** abs(np.subtract.outer(np.arange(len(values)), np.arange(len(values))))
    expected = before[0] + slope * (weights @ values / weights.sum(axis=1) - values[0])
    assert after == pytest.approx(list(expected), abs=0.3)


def test_the_pointer(opened):
    opened.drag("loss", 0.5, 0.8)
    low, high = opened.domain()[:2]
    assert 180 < low < 220 and 300 < high < 330
    assert opened.domain("mfu")[:2] == pytest.approx([low, high])
    opened.page.click("#reset")
    assert opened.domain()[:2] == [0, 400]
    box = opened.page.locator('figure[data-chart="loss"] .plot').bounding_box()
    opened.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 100)
    text, (steps, losses) = opened.page.inner_text(".tip"), opened.data("loss")
    expected = losses[steps.index(int(text.split()[1]))]
    assert float(text.split("training")[1].split()[0]) == pytest.approx(expected, rel=1e-3)
    assert opened.page.get_attribute('figure[data-chart="mfu"] g.cross', "visibility") == "visible"
    title = opened.page.text_content('figure[data-chart="loss"] line.restart title')
    assert "one: resumed at step 200" in title


def test_a_study_on_a_phone(browser, reports):
    """The first column of a wide table stays; each cell has its page; settings are not repeated."""
    with Opened(browser, reports["study"], 390) as opened:
        page, cell = opened.page, "#cells .sortable tbody tr:nth-child(2)"
        box = page.locator("#cells .scroll").first
        assert box.evaluate("x => x.scrollWidth > x.clientWidth + 100")
        before = page.locator(f"{cell} th").bounding_box()["x"]
        state = page.locator(f"{cell} td >> nth=1").bounding_box()["x"]
        box.evaluate("x => x.scrollLeft = 100")
        assert page.locator(f"{cell} td >> nth=1").bounding_box()["x"] == state - 100
        assert page.locator(f"{cell} th").bounding_box()["x"] == pytest.approx(before, abs=4)
        heads = page.locator("#settings thead >> nth=0").locator("th").all_inner_texts()
        assert heads == ["Setting", "Value"]
        link = page.get_attribute(f"{cell} a", "href")
    with Opened(browser, reports["study"].parent / unquote(link)) as opened:
        assert opened.page.inner_text("h1") == "lr=0.01 kind=cosine seed=2"


def test_runs_are_hidden_and_shown_samples_and_tables_follow_their_controls(browser, reports):
    with Opened(browser, reports["two"]) as opened:
        page = opened.page
        assert len(opened.curves("loss")) == 2
        page.click(".chip >> nth=0")
        assert len(opened.curves("loss")) == 1 and opened.domain()[1] == 300
        page.click("#show-all")
        assert len(opened.curves("loss")) == 2
        page.click("#samples summary >> text=one, step 0")
        assert "def step_0(self)" in page.inner_text("#samples details >> nth=0")
        for first in ("one", "other"):
            page.click("table.sortable th button >> text=Final training loss")
            assert page.inner_text("table.sortable tbody tr:first-child th") == first


def test_the_keyboard_reaches_everything_and_reads_a_chart(opened):
    page, (steps, losses) = opened.page, opened.data("loss")
    order, now = [], "document.activeElement"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate(f"{now} === document.body"):
            break  # past the last one
        order.append(page.evaluate(f"{now}.getAttribute('aria-label') || {now}.textContent"))
        assert page.evaluate(f"getComputedStyle({now}).outlineStyle") != "none"
    expected = ["Skip to the content", "Curves", "Settings", "Steps", "Log loss"]
    expected += ["Points of Loss", "Points of Learning rate"]
    assert [name for name in order if name in expected] == expected
    handle = page.locator('figure[data-chart="loss"] .handle')
    handle.focus()
    page.keyboard.press("Home")
    ends = [handle.get_attribute(f"aria-value{name}") for name in ("now", "max")]
    assert ends == ["0", "39"]
    for place, key in ((1, "ArrowRight"), (2, "ArrowRight"), (1, "ArrowLeft"), (39, "End")):
        page.keyboard.press(key)
        text = handle.get_attribute("aria-valuetext")
        assert text.startswith(f"step {steps[place]}, ")
        spoken = float(re.search(r"training ([\d.]+)", text)[1])
        assert spoken == pytest.approx(losses[place], rel=1e-3)
        assert page.inner_text(".tip").startswith(f"step {steps[place]}")
    opened.drag("loss", 0.5, 0.8)
    assert opened.domain()[0] > 100
    handle.focus()
    page.keyboard.press("Escape")
    assert opened.domain()[:2] == [0, 400]
    handle.blur()
    assert page.is_hidden(".tip")
    assert page.get_attribute('figure[data-chart="loss"] .plot svg', "aria-label") == "Loss"


@pytest.mark.parametrize("name", ["one", "two", "study"])
def test_axe_finds_nothing_in_the_page_of_a_run_of_runs_and_of_a_study(browser, reports, name):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    with Opened(browser, reports[name], 1280) as opened:
        # no colour depends on the width, and no layout on the theme
        themes = ("dark", "light") if name == "two" else ("light", "dark")
        for width, theme in zip((1280, 390), themes, strict=True):
            opened.page.set_viewport_size({"width": width, "height": 900})
            opened.page.emulate_media(color_scheme=theme)
            found = axe.run(opened.page).response
            for one in found["violations"]:
                pytest.fail(f"{one['help']}: {[node['html'][:200] for node in one['nodes']]}")
            assert "color-contrast" in {one["id"] for one in found["passes"]}
