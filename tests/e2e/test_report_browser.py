"""The report's page in a real headless browser: from disk, without a network, no error, charts drawn, controls at work."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from report_fixtures import NASTY, build_run, build_study

from windlass.reports import report
from windlass.reports.charts import smoothed

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


def installed() -> str | None:
    named = os.environ.get("WINDLASS_TEST_BROWSER")
    return named or next((path for name in NAMES if (path := shutil.which(name))), None)


@pytest.fixture(scope="module")
def browser():
    path = installed()
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed, and WINDLASS_TEST_BROWSER names none")
    api = pytest.importorskip("playwright.sync_api", reason="the Python package playwright is not installed")
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield started
        started.close()


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    one = build_run(folder / "one", f"run.notes={json.dumps(NASTY)}", killed_at=263)
    other = build_run(folder / "other", lr=1e-2, steps=300, ranks=1)
    bad = build_run(folder / "bad", steps=60, ranks=1, device="cpu", finished=False)
    with bad.metrics_path.open("a") as file:
        file.write(
            json.dumps({"kind": "train", "step": 70, "time": "2026-03-01T09:02:00Z", "attempt": 0, "loss": "NaN"})
            + "\n"
        )
    empty = build_run(folder / "empty", steps=20)
    empty.metrics_path.unlink()
    many = build_run(folder / "many", ranks=12, steps=40)
    pages = {
        name: report(runs, folder / "report" / name, plots=False).page
        for name, runs in {"one": [one], "two": [one, other], "bad": [bad], "empty": [empty], "many": [many]}.items()
    }
    study = build_study(folder / "study", rates=(1e-2, 1e-3, 1e-4))
    return pages | {"study": report(study, folder / "report" / "study", plots=False).page}


class Opened:
    """A page, with everything it complained about and everything it asked for."""

    def __init__(self, browser, path, width=1400, theme="light"):
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=theme)
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
            assert self.complaints == []
            assert [url.split(":")[0] for url in self.asked] == ["file"]

    def svg(self, chart, attribute):
        return self.page.get_attribute(f'figure[data-chart="{chart}"] svg', attribute)

    def data(self, chart, place=0):
        """Steps and values of a series as the page holds them."""
        data = json.loads(self.page.text_content("#data"))
        series = next(one for one in data["charts"] if one["id"] == chart)["series"][place]
        return data["axes"][series["at"]]["step"], series["y"]

    def domain(self, chart="loss"):
        return [float(x) for x in self.svg(chart, "data-domain").split()]

    def curves(self, chart, kind=".curve"):
        return self.page.eval_on_selector_all(
            f'figure[data-chart="{chart}"] svg {kind}', "nodes => nodes.map(n => n.getAttribute('d') || n.tagName)"
        )

    def drag(self, chart, start, stop):
        box = self.page.locator(f'figure[data-chart="{chart}"] .plot').bounding_box()
        y = box["y"] + box["height"] / 2
        self.page.mouse.move(box["x"] + start * box["width"], y)
        self.page.mouse.down()
        self.page.mouse.move(box["x"] + stop * box["width"], y, steps=4)
        self.page.mouse.up()


def heights(path):
    return [float(point.split()[1]) for point in path.replace("M", "").split("L")]


@pytest.mark.parametrize("name", ["one", "two", "bad", "empty", "many", "study"])
@pytest.mark.parametrize(("width", "theme"), [(1400, "light"), (400, "dark")])
def test_every_page_opens_without_a_complaint_and_fits_its_window(browser, reports, name, width, theme):
    with Opened(browser, reports[name], width, theme) as opened:
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
        figures = opened.page.eval_on_selector_all("figure", "nodes => nodes.map(n => n.dataset.chart)")
        for chart in figures:
            assert opened.curves(chart), chart
            assert not [path for path in opened.curves(chart) if "NaN" in path or "undefined" in path]
        assert (len(figures) == 0) == (name == "empty")
        assert opened.page.title() in ("one", "one, other", "bad", "empty", "many", "study")


def test_hostile_texts_are_shown_and_not_run(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        assert opened.page.title() == "one"
        assert "</script><script>document.title=" in opened.page.inner_text(".notes")
        assert "</script><script>" in opened.page.inner_text("article:not([hidden]) pre")
        assert opened.page.locator("script").count() == 2


def test_the_loss_is_drawn_where_the_numbers_are(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        train = opened.curves("loss")[0]
        assert train.count("L") == 39
        assert opened.page.locator('figure[data-chart="loss"] circle.dot').count() == 9
        points = [tuple(map(float, p.split())) for p in train.replace("M", "").split("L")]
        low, high, bottom, top = opened.domain()
        assert (low, high) == (0, 400)
        steps, losses = opened.data("loss")
        assert steps == list(range(10, 401, 10))
        # a line through the first two points says how pixels become values; all others must lie on it
        (x0, y0), (x1, y1) = points[0], points[-1]
        for (x, y), step, loss in zip(points, steps, losses, strict=True):
            assert x == pytest.approx(x0 + (x1 - x0) * (step - 10) / 390, abs=0.2)
            share = (loss - losses[0]) / (losses[-1] - losses[0])
            assert y == pytest.approx(y0 + (y1 - y0) * share, abs=0.3)
        assert bottom < min(losses) < max(losses) < top


def test_linear_and_logarithmic(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        before = opened.curves("loss")[0]
        opened.page.click("text=Log loss")
        assert opened.svg("loss", "data-y") == "log"
        assert opened.svg("grad_norm", "data-y") == "linear"
        assert opened.curves("loss")[0] != before
        opened.page.click("text=Log x-axis")
        assert opened.svg("loss", "data-x") == opened.svg("grad_norm", "data-x") == "log"
        assert opened.domain()[0] > 0
        opened.page.click("text=Log loss")
        opened.page.click("text=Log x-axis")
        assert opened.curves("loss")[0] == before


def test_steps_tokens_and_time(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        opened.page.click("[data-axis=tokens]")
        assert opened.domain()[1] == 819_200
        assert "tokens" in opened.page.text_content('figure[data-chart="lr"] svg')
        opened.page.click("[data-axis=hours]")
        assert 0.05 < opened.domain()[1] < 0.07
        assert "minutes of training" in opened.page.text_content('figure[data-chart="loss"] svg')
        assert opened.page.get_attribute("[data-axis=hours]", "aria-pressed") == "true"
        opened.page.click("[data-axis=step]")
        assert opened.domain()[:2] == [0, 400]


def test_smoothing(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        assert opened.page.text_content("#smoothing-value") == "off"
        raw = opened.curves("loss")[0]
        opened.page.fill("#smoothing", "0.9")
        assert opened.page.text_content("#smoothing-value") == "0.90"
        faint = opened.curves("loss", ".curve.faint")
        assert faint == [raw]
        smooth = opened.curves("loss")[1]
        assert smooth != raw
        data = opened.data("loss")[1]
        before, after = heights(raw), heights(smooth)
        slope = (before[-1] - before[0]) / (data[-1] - data[0])
        expected = before[0] + slope * (smoothed(np.array(data), 0.9) - data[0])
        assert after == pytest.approx(list(expected), abs=0.3)
        assert opened.curves("lr", ".faint") == []
        opened.page.fill("#smoothing", "0")
        assert opened.curves("loss")[0] == raw


def test_leaving_out_the_first_steps(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        top = opened.domain()[3]
        opened.page.fill("#skip", "100")
        assert opened.domain()[0] == 100
        assert opened.domain()[3] < top - 2
        assert opened.domain("grad_norm")[0] == 100
        opened.page.fill("#skip", "0")
        assert opened.domain()[0] == 0


def test_zoom_by_dragging_in_all_charts_and_back(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        opened.drag("loss", 0.5, 0.8)
        low, high = opened.domain()[:2]
        assert 180 < low < 220
        assert 300 < high < 330
        assert opened.domain("mfu")[:2] == pytest.approx([low, high])
        opened.page.click("#reset")
        assert opened.domain()[:2] == [0, 400]
        opened.drag("lr", 0.5, 0.8)
        opened.page.dblclick('figure[data-chart="loss"] .plot')
        assert opened.domain()[:2] == [0, 400]


def test_the_read_out_says_what_lies_under_the_pointer(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        box = opened.page.locator('figure[data-chart="loss"] .plot').bounding_box()
        opened.page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 100)
        text = opened.page.inner_text(".tip")
        assert text.startswith("step ")
        step = int(text.split()[1])
        steps, losses = opened.data("loss")
        assert float(text.split("training")[1].split()[0]) == pytest.approx(losses[steps.index(step)], rel=1e-3)
        assert opened.page.get_attribute('figure[data-chart="mfu"] g.cross', "visibility") == "visible"
        opened.page.focus('figure[data-chart="lr"] .plot')
        opened.page.keyboard.press("ArrowRight")
        assert opened.page.inner_text(".tip").startswith("step ")
        opened.page.mouse.move(2, 2)


def test_the_restart_is_marked_and_a_bad_step_too(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        assert opened.page.locator('figure[data-chart="loss"] line.restart').count() == 1
        assert "one: resumed at step 200" in opened.page.text_content('figure[data-chart="loss"] line.restart title')
    with Opened(browser, reports["bad"]) as opened:
        assert opened.page.locator('figure[data-chart="loss"] path.bad').count() == 1


def test_light_and_dark_by_preference_and_by_hand(browser, reports):
    paper = "getComputedStyle(document.body).backgroundColor"
    with Opened(browser, reports["one"], theme="light") as opened:
        light = opened.page.evaluate(paper)
        opened.page.click("#theme")
        dark = opened.page.evaluate(paper)
        assert dark != light
        opened.page.click("#theme")
        assert opened.page.evaluate(paper) == light
    with Opened(browser, reports["one"], theme="dark") as opened:
        assert opened.page.evaluate(paper) == dark


def test_runs_are_hidden_shown_and_singled_out(browser, reports):
    with Opened(browser, reports["two"]) as opened:
        assert len(opened.curves("loss")) == 2
        opened.page.click(".chip >> nth=0")
        assert len(opened.curves("loss")) == 1
        assert opened.page.get_attribute(".chip >> nth=0", "aria-pressed") == "false"
        assert opened.domain()[1] == 300
        opened.page.click("#show-all")
        assert len(opened.curves("loss")) == 2
        opened.page.dblclick(".chip >> nth=0")
        assert opened.page.locator('.chip[aria-pressed="true"]').all_inner_texts() == ["one"]


def test_samples_by_step_tables_that_sort_and_settings_that_are_found(browser, reports):
    with Opened(browser, reports["two"]) as opened:
        page = opened.page
        assert page.inner_text("#sample-at") == "step 400"
        page.evaluate("s = document.querySelector('#sample-step'); s.value = 0; s.dispatchEvent(new Event('input'))")
        assert page.inner_text("#sample-at") == "step 0"
        assert "def step_0(self)" in page.inner_text("article:not([hidden]) pre")
        page.select_option("#sample-run", "1")
        assert page.inner_text("#sample-at") == "step 300"
        first = "table.sortable tbody tr:first-child th"
        assert page.inner_text(first) == "one"
        page.click("table.sortable th button >> text=Final training loss")
        falling = page.inner_text(first)
        page.click("table.sortable th button >> text=Final training loss")
        assert {falling, page.inner_text(first)} == {"one", "other"}
        page.fill("#filter", "learning rate nothing such")
        assert page.locator("#settings tbody tr:not([hidden])").count() == 0
        page.fill("#filter", "optim.lr")
        assert page.locator("#settings tbody tr:not([hidden]) th").all_inner_texts() == ["optim.lr"]


def test_a_study_draws_the_loss_against_what_was_swept(browser, reports):
    with Opened(browser, reports["study"]) as opened:
        assert (opened.svg("loss-against-lr", "data-x"), opened.svg("loss-against-kind", "data-x")) == ("log", "linear")
        figure = 'figure[data-chart="loss-against-lr"] svg text'
        texts = opened.page.eval_on_selector_all(figure, "nodes => nodes.map(n => n.textContent.trim())")
        assert {"0.0001", "0.001", "0.01"} <= set(texts)
        opened.page.click("[data-axis=tokens]")
        assert opened.svg("loss-against-lr", "data-x") == "log" and opened.domain("loss")[1] == 200 * 2048


def test_no_label_of_an_axis_is_cut_off(browser, reports):
    outside = """nodes => nodes.filter(n => { const [t, s] = [n, n.ownerSVGElement].map(x => x.getBoundingClientRect());
        return t.left < s.left - 0.5 || t.right > s.right + 0.5; }).map(n => n.textContent)"""
    for name in ("one", "two", "study"):
        with Opened(browser, reports[name], 400) as opened:
            assert opened.page.eval_on_selector_all("figure svg .axes text", outside) == []
            for control in ("[data-toggle=logX]", "[data-axis=tokens]", "[data-axis=hours]"):
                opened.page.click(control)
                assert opened.page.eval_on_selector_all("figure svg .axes text", outside) == [], control


def test_a_narrow_window_redraws(browser, reports):
    with Opened(browser, reports["one"]) as opened:
        opened.page.set_viewport_size({"width": 500, "height": 800})
        opened.page.wait_for_function("document.querySelector('figure[data-chart=loss] svg').clientWidth < 500")
        assert float(opened.svg("loss", "width")) < 500
        assert opened.page.evaluate("document.documentElement.scrollWidth") <= 500
