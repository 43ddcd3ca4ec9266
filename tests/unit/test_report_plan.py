"""The plan in a run's report: on the page and in report.md, from the run's own directory alone."""

from __future__ import annotations

import json
import shutil
from html.parser import HTMLParser

import pytest
from report_fixtures import NASTY, build_run
from test_estimate_plan import write_run

from windlass.estimate.of_run import plan_of_run
from windlass.model.size import HfSizes
from windlass.recipe import ModelSettings, Recipe
from windlass.reports import write_report
from windlass.reports.page import page
from windlass.reports.plan_section import FOLDED, plan_html, plan_markdown
from windlass.reports.view import view
from windlass.run import Run


class Texts(HTMLParser):
    """Every element's own text, and the tags that were opened."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "done")


def test_the_plan_of_a_run_is_the_recipes_own(done):
    made = plan_of_run(done)
    assert made["model"]["parameters"] == 820_480 and made["length"]["steps"] == 100 and made["length"]["done"] == 0
    assert made["time"]["basis"] == "measured" and made["time"]["train_seconds"] == pytest.approx(10.0)
    assert {m["what"]: m["last"] for m in made["milestones"]}["evaluation"] == 100
    assert made["predicted_and_measured"]["runtime_s"]["measured"] > 0
    assert made["device"]["usable_bytes"] is None  # what this machine has says nothing of the run's


def test_the_page_shows_parameters_memory_time_and_milestones(done):
    parsed = Texts(plan_html([view(done)]))
    text = " ".join(parsed.texts)
    for word in ("820,480 parameters", "Feed-forward", "Predicted beside measured", "memory of a rank, MB", "single",
                 "selective", "time from start to end, s", "Milestones", "evaluation", "from start to end"):  # fmt: skip
        assert word.lower() in text.lower(), word
    assert "?" not in parsed.texts and "--memory" not in text and "Recommended" not in text
    assert parsed.tags.count("details") == len([t for t in FOLDED.values() if t in text])  # all of them folded away
    assert '<a href="#plan">Plan</a>' in page([view(done)])
    assert not plan_html([view(done)] * 2) and not plan_markdown([view(done)] * 2)


def test_the_same_run_gives_the_same_bytes_wherever_it_lies(done, tmp_path):
    written = [write_report([Run(done.path)], tmp_path / name, plots=False) for name in ("one", "two")]
    assert written[0].page.read_bytes() == written[1].page.read_bytes()
    assert written[0].markdown.read_bytes() == written[1].markdown.read_bytes()
    markdown = written[0].markdown.read_text(encoding="utf-8")
    assert "## Plan" in markdown and "| single | none |" in markdown and "time from start to end" in markdown
    moved = tmp_path / "elsewhere" / "done"
    shutil.copytree(done.path, moved)
    assert plan_html([view(Run(moved))]) == plan_html([view(done)])


def test_what_a_ledger_says_is_text_and_nothing_else(tmp_path):
    run = write_run(tmp_path / "run")
    text = run.metrics_path.read_text(encoding="utf-8").replace('"device": "CPU"', f'"device": {json.dumps(NASTY)}', 1)
    run.metrics_path.write_text(text, encoding="utf-8")
    made = plan_html([view(run)])
    assert "&lt;/script&gt;" in made and "<script" not in made and "<b>&amp;" not in made and "\x1b" not in made
    assert "<script" not in "".join(plan_markdown([view(run)]))


def test_a_model_of_the_users_own_has_no_memory(tmp_path):
    run = build_run(tmp_path / "run", steps=50)  # says 813,568 parameters, which no quickstart has
    made = plan_of_run(run)
    assert "memory" not in made and "model" not in made and "none that the recipe describes" in made["note"]
    assert "none that the recipe describes" in plan_html([view(run)])


def test_where_no_plan_can_be_made_a_note_says_so(tmp_path):
    run = write_run(tmp_path / "run")
    lines = run.metrics_path.read_text(encoding="utf-8").splitlines()
    broken = json.loads(lines[0]) | {"world": 3}  # the batch cannot be dealt to three
    run.metrics_path.write_text("\n".join([json.dumps(broken), *lines[1:]]) + "\n", encoding="utf-8")
    assert "not divisible by world size 3" in page([view(run)])
    odd = json.loads(lines[0]) | {"steps": "many"}
    run.metrics_path.write_text("\n".join([json.dumps(odd), *lines[1:]]) + "\n", encoding="utf-8")
    assert "The plan could not be made" in plan_html([view(run)])
    assert "The plan could not be made" in "".join(plan_markdown([view(run)]))
    run.metrics_path.write_text("", encoding="utf-8")
    assert plan_html([view(run)]) == ""


def test_a_run_of_transformers_knows_its_sizes_finished_or_not(tmp_path):
    run = write_run(tmp_path / "run")
    model = {"kind": "hf", "name": "bigscience/bloom-560m", "context": 128}
    tree = run.recipe.model_dump(mode="json") | {"model": model}
    run.recipe_path.write_text(Recipe.model_validate(tree).toml(), encoding="utf-8")
    assert "reads them from the model" in plan_html([view(Run(run.path))])
    sizes = HfSizes(
        ModelSettings(layers=2, width=64, heads=4, context=128), 512, {"embedding": 400_000, "attention": 420_480}, 820_480,
        210_240, 210_240, 210_240, 420_480, 420_480, 128, 400_000, counted_flops=5e6,
    )  # fmt: skip
    with run.metrics_path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "summary", "step": 100, "model_sizes": sizes.as_dict()}) + "\n")
    of_summary = plan_of_run(Run(run.path))
    lines = [json.loads(line) for line in run.metrics_path.read_text(encoding="utf-8").splitlines()[:-1]]
    for line in lines:
        if line["kind"] == "event" and "world" in line:
            line["model_sizes"] = sizes.as_dict()
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    made = plan_of_run(Run(run.path))  # the run is not finished: its start wrote the sizes down
    assert made["memory"] == of_summary["memory"]
    assert made["model"]["parameters"] == 820_480 and made["memory"] and made["flops"]["per_token_counted"] == 5e6
    assert made["predicted_and_measured"]["memory_mb"]["predicted"] > 0
