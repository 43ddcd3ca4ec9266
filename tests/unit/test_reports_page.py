import base64
import csv
import hashlib
import json
import math
import re
import struct
from html.parser import HTMLParser
from urllib.parse import unquote

import matplotlib
import pytest
from report_fixtures import NASTY, add_lines, build_run, build_study, edit, stamp

from windlass.reports.charts import charts
from windlass.reports.page import Contents, page
from windlass.reports.view import RunView, views
from windlass.reports.write import report


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

    def handle_endtag(self, tag):
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data):
        self.texts.setdefault(self._open[-1] if self._open else "", []).append(data)

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.fixture(scope="module")
def text(one):
    return page(Contents([one]))


def test_what_a_model_a_recipe_or_a_name_says_is_text_and_nothing_else(text, tmp_path, one):
    parsed = Page(text)
    assert [a.get("type", "script") for a in parsed.all("script")] == ["application/json", "script"]
    assert parsed.texts["title"] == ["one"] and parsed.all("b") == [{}] * len(parsed.all("b"))
    assert "</script><script>document.title=" in "".join(parsed.texts["pre"])
    assert NASTY.replace("\x1b", r"\x1b") in "".join(parsed.texts["p"]) and "\x1b" not in text
    other = RunView(build_run(tmp_path / "two", steps=50), label=f"two {NASTY}")
    parsed = Page(page(Contents([one, other])))
    assert len(parsed.all("script")) == 2
    assert json.loads("".join(parsed.texts["script"][:1]))["runs"][1]["label"] == f"two {NASTY}"


def test_the_page_asks_nobody_for_anything_and_allows_its_one_script_by_its_hash(text):
    """`tests/e2e/test_reports_browser.py` opens it."""
    parsed = Page(text)
    names = {name for _, attributes in parsed.tags for name in attributes}
    assert "src" not in names and not [name for name in names if name.startswith("on")]
    assert all(a["href"].startswith("#") for a in parsed.all("a")) and not parsed.all("link")
    [policy] = (a["content"] for a in parsed.all("meta") if "http-equiv" in a)
    script = text[text.rindex("<script>") + 8 : text.rindex("</script>")]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy.startswith(f"default-src 'none'; script-src 'sha256-{digest}'")
    assert "unsafe-inline" not in policy.split("style-src")[0]
    charts = {chart["id"] for chart in json.loads(parsed.texts["script"][0])["charts"]}
    assert charts == {figure["data-chart"] for figure in parsed.all("figure")}


@pytest.fixture(scope="module")
def written(one):
    return report(one.run, pdf=True)


def rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_report_has_a_page_tables_and_plots(written, one):
    names = ("results", "time", "evaluations-loss", "evaluations-hellaswag")
    files = {f"{name}.{kind}" for name in names for kind in ("csv", "tex")}
    assert {path.name for path in written.tables} == files
    plots = set("loss loss-late lr grad_norm throughput step_time mfu memory utilisation".split())
    assert plots <= set(written.plots)
    assert written.page == one.run.report_dir / "index.html" and written.page.stat().st_size
    links = re.findall(r"^!\[.*\((.*)\)$", written.markdown.read_text(), re.M)
    assert len(links) == len(written.plots)
    assert all((written.markdown.parent / link).is_file() for link in links)
    assert not list(written.page.parent.glob(".*")), "nothing is left of the atomic writes"
    for path in written.plots.values():  # of a size for paper, without date or author
        raw = path.read_bytes()
        width, height = struct.unpack(">II", raw[16:24])
        assert raw.startswith(b"\x89PNG") and width == 1280 and height >= 250 and len(raw) < 300_000
        assert not [kind for kind in (b"tEXt", b"iTXt", b"zTXt", b"tIME") if kind in raw]
        pdf = path.with_suffix(".pdf").read_bytes()
        assert pdf.startswith(b"%PDF") and b"CreationDate" not in pdf


def test_the_same_run_gives_the_same_bytes_whatever_the_users_style(written, one, tmp_path):
    def contents(made):
        files = (made.page, made.markdown, *made.tables, *made.plots.values())
        return {path.name: path.read_bytes() for path in files}

    style = {"figure.facecolor": "red", "lines.linewidth": 9, "savefig.dpi": 30}
    with matplotlib.rc_context(style):
        again = report(one.run.path, tmp_path / "elsewhere")
        assert not list((tmp_path / "elsewhere").glob("plots/*.pdf"))
        assert matplotlib.rcParams["lines.linewidth"] == 9
    assert contents(again) == contents(written)


def test_an_extension_is_no_interruption_and_changed_settings_are_named(tmp_path):
    run = build_run(tmp_path / "longer", steps=100)
    began = {"kind": "event", "step": 100, "attempt": 1, "time": stamp(200)}
    resumed = began | {"event": "resumed", "steps": 120, "extended_from": 100}
    change = began | {"event": "settings_changed", "settings": {"eval.batches": [2, 4]}}
    train = began | {"step": 120, "time": stamp(220), "kind": "train", "loss": 2.0}
    add_lines(run, resumed, change, train, began | {"step": 120, "event": "finished"})
    seen = RunView(run)
    assert [restart.what for restart in seen.restarts] == ["resumed"]
    text = page(Contents([seen]))
    assert "finished 120 of 120 steps" in text and "extended from 100 to 120 steps" in text
    assert "eval.batches = 4 from here on, not 2" in text and "0 kills" in text


def test_runs_of_several_tokenizers_are_drawn_in_bits_per_byte_and_others_have_no_best(
    one, tmp_path
):
    """4 nats at 4 bytes a token are 1 / ln 2 bits per byte, and 2 nats at one are 2 / ln 2."""

    def measured(size):
        def change(line):  # on as many bytes of the same text
            if line.get("event") == "started":
                return line | {"data": {"val": {"text": "00c0ffee"}}}
            if "perplexity" not in line:
                return line
            bits = line["loss"] / size / math.log(2)
            return line | {"bits_per_byte": bits, "tokens": 4000 // size}

        return change

    runs = [
        build_run(tmp_path / "a", steps=100),
        build_run(tmp_path / "b", "data.tokenizer=gpt2", "model.vocab=0", steps=100),
    ]
    edit(runs[0], measured(1))
    edit(runs[1], measured(4))
    a, b = views(runs)
    loss = charts([a, b])[0]
    assert loss.unit == "bits per byte"
    assert loss.series[0].y == pytest.approx(a.train["loss"] / math.log(2))
    assert loss.series[2].y == pytest.approx(b.train["loss"] / 4 / math.log(2))
    text = page(Contents([a, b]))
    assert "Best bits per byte" in text and "The tokenizers differ" in text
    assert not re.search(r"Best validation loss \d", text)
    other = RunView(build_run(tmp_path / "c", "data.source=elsewhere", steps=100))
    text = page(Contents([a, other]))
    assert "no best run" in text and "data.source" in text
    assert not re.search(r"Best validation loss \d", text)


def test_a_study_is_written_with_its_cells_seeds_settings_and_pictures(study, tmp_path):
    made = report(study.study.path, tmp_path)
    folder = study.study.path.as_posix()
    command = f"windlass train {folder}/recipe.toml optim.lr=0.001 optim.schedule.kind=cosine"
    pictures = {"loss-against-lr", "loss-against-kind", "loss", "loss-late"}
    assert pictures <= set(made.plots)
    assert command in made.markdown.read_text()
    assert "cosine & 2.2" in (tmp_path / "seeds.tex").read_text()
    assert (tmp_path / "cells.tex").is_file()
    assert [row["state"] for row in rows(tmp_path / "cells.csv")].count("finished") == 10
    assert len(rows(tmp_path / "seeds.csv")) == 6
    assert "| Setting | Value |" in made.markdown.read_text(), "a column for all cells"
    assert "differ from the preset quickstart" in made.markdown.read_text()
    parsed = Page(made.page.read_text())
    assert [a.get("id") for a in parsed.all("section")][:3] == ["winner", "swept", "cells"]
    assert command in parsed.texts["pre"]
    data = json.loads(parsed.texts["script"][0])
    assert next(chart for chart in data["charts"] if chart["id"] == "loss-against-lr")["x"]["log"]
    assert len([a for a in parsed.all("tr") if a.get("class") == "winner"]) == 1
    links = [a["href"] for a in parsed.all("a") if a.get("href", "").startswith("cells/")]
    assert len(links) == len(study.views) == 11, "one has not begun"
    for link, view in zip(links, study.views, strict=True):
        assert f"<h1>{view.label}</h1>" in (tmp_path / unquote(link)).read_text()
    own = report(study.study, tmp_path / "own", plots=False)
    assert own.page.read_text() == made.page.read_text(), "of the object, not its directory"


def test_the_verb(one, tmp_path, call, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["report", "--no-plots", one.run.path]
    out, _ = call(*words, "--out", tmp_path)
    assert out == f"report: {tmp_path / 'index.html'}\n"
    study = build_study(tmp_path / "again", rates=(1e-3,), seeds=(1,))
    call(*words, study)
    assert "a comparison of runs" in (tmp_path / "report" / "index.html").read_text().lower()
    for cell in (study / "runs").iterdir():
        (cell / "recipe.toml").unlink()
    (tmp_path / "file").write_text("in the way")
    for sources, word in (
        ((tmp_path,), "recipe.toml"),
        ((study,), "sweep first"),
        ((one.run.path, "--out", "file/report"), "file/report"),
    ):
        assert word in call("report", "--no-plots", *sources, code=2)[1]
