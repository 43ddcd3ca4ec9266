import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from report_fixtures import NASTY, build_run, build_study

from windlass.reports.page import page
from windlass.reports.study import read_study
from windlass.reports.study_page import study_page
from windlass.reports.view import view, views


class Page(HTMLParser):
    """The page's elements, and the texts inside each kind of element."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts, self._open = [], {}, []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder):
    return view(build_run(folder / "one", f"run.notes={json.dumps(NASTY)}", killed_at=263))


@pytest.fixture(scope="module")
def text(one):
    return page([one])


def test_what_a_model_or_a_recipe_says_is_text_and_nothing_else(text):
    parsed = Page(text)
    assert [a.get("type", "script") for a in parsed.all("script")] == ["application/json", "script"]
    assert parsed.all("b") == [{}] * len(parsed.all("b"))
    assert parsed.texts["title"] == ["one"]
    samples = "".join(parsed.texts["pre"])
    assert "</script><script>document.title=" in samples
    assert NASTY.replace("\x1b", "\ufffd") in "".join(parsed.texts["p"])
    assert "\x1b" not in text


def test_a_hostile_name_is_text_everywhere(folder, one):
    other = view(build_run(folder / "two", steps=50), label=f"two {NASTY}")
    parsed = Page(page([one, other]))
    assert len(parsed.all("script")) == 2
    data = json.loads("".join(parsed.texts["script"][:1]))
    assert data["runs"][1]["label"] == f"two {NASTY}"


def test_the_page_asks_nobody_for_anything(text):
    parsed = Page(text)
    code = "".join(parsed.texts["script"] + parsed.texts["style"])
    assert set(re.findall(r"https?://[^\s\"'<>`]+", code)) == {"http://www.w3.org/2000/svg"}
    assert not parsed.all("link") + parsed.all("img") + parsed.all("iframe")
    assert not [a for _, attributes in parsed.tags for a in attributes if a.startswith("on") or a == "src"]
    assert all(a["href"].startswith("#") for a in parsed.all("a"))
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")


def test_the_policy_allows_the_one_script_by_its_hash(text):
    policy = next(a["content"] for a in Page(text).all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'")
    assert "unsafe-inline" not in policy.split("style-src")[0]


def test_the_same_run_gives_the_same_bytes(text, folder):
    from windlass.run import Run

    assert page([view(Run(folder / "one"))]) == text


def test_the_data_are_the_runs_numbers(text, one):
    data = json.loads(Page(text).texts["script"][0])
    run = data["runs"][0]
    assert run["train"]["loss"] == [pytest.approx(x, rel=1e-5) for x in one.train["loss"]]
    assert [s["step"] for s in run["seams"]] == [200]
    assert run["evals"]["loss"]["step"] == list(range(0, 401, 50))
    assert {"mem_alloc_mb", "mem_reserved_mb", "util_pct"} <= set(run["ranks"])
    assert {c["id"] for c in data["charts"]} == {a["data-chart"] for a in Page(text).all("figure")}


def test_a_run_without_steps_has_a_page(folder):
    run = build_run(folder / "empty", steps=50)
    run.metrics_path.unlink()
    parsed = Page(page([view(run)]))
    assert "No step has been logged yet." in parsed.texts["p"]


def test_many_runs_stand_in_rows_only(folder, one):
    parsed = Page(page([one] * 9))
    assert len([a for a in parsed.all("button") if a.get("class") == "chip"]) == 9
    assert "measures" not in [a.get("class") for a in parsed.all("table")]


def test_a_study_has_its_winner_its_sweeps_and_its_heat_map(folder):
    study = read_study(build_study(folder / "study"))
    text = study_page(study)
    parsed = Page(text)
    sections = [a.get("id") for a in parsed.all("section")]
    assert sections[:3] == ["winner", "swept", "cells"]
    assert "windlass train quickstart optim.lr=0.001 optim.schedule.kind=cosine" in parsed.texts["pre"]
    data = json.loads(parsed.texts["script"][0])
    sweep = next(c for c in data["charts"] if c["id"] == "sweep-0")["free"]
    assert sweep["log"] is True
    assert sweep["names"] == ["0.0001", "0.001", "0.01"]
    assert sweep["series"][0]["x"] == [0.0001, 0.001, 0.01]
    assert [r["tone"] for r in data["runs"]][:5] == [1, 1, 1, 1, 0.5]
    assert "heat" in [a.get("class") for a in parsed.all("table")]
    assert len([a for a in parsed.all("tr") if a.get("class") == "winner"]) == 2


def test_reports_import_no_torch(folder):
    code = (
        "import sys; import windlass.reports.write, windlass.reports.plots, windlass.reports.study_plots, windlass.cli.report;"
        "from windlass.reports import write_report; print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_views_come_in_the_order_given(folder, one):
    from windlass.run import Run

    build_run(folder / "first", steps=20)
    assert [v.label for v in views([Run(folder / "first"), Run(folder / "one")])] == ["first", "one"]
