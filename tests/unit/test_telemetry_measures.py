"""The list of all numbers that are shown: formats, roles and directions."""

import io

import pytest
from report_fixtures import build_run, edit

from windlass.reports.charts import charts
from windlass.reports.tables import results
from windlass.reports.view import RunView
from windlass.reports.write import report
from windlass.telemetry import measures
from windlass.telemetry.console import Console
from windlass.telemetry.exporter import point
from windlass.telemetry.measures import Measure


def test_every_format_is_known_and_charts_have_a_title_and_scores_a_direction():
    for measure in measures.TRAIN.values():
        assert not measure.console or measure.console.format(measures.Shown(1.5))
    for chart in (measures.by_chart(measures.TRAIN), measures.by_chart(measures.DEVICE)):
        assert all(parts[0].heading for parts in chart.values())
    scores = [m for m in measures.EVAL.values() if m.role in ("score", "derived")]
    assert scores and all(m.better for m in scores)


@pytest.mark.parametrize(
    ("measure", "role", "lower"),
    [
        ("loss", "score", True),
        ("loss.bits_per_byte", "score", True),
        ("loss.perplexity", "derived", True),
        ("squad.f1", "score", False),
        ("hellaswag.acc_norm", "score", False),
        ("squad.items", "count", False),
        ("loss.tokens", "place", True),
        ("lm-eval:wikitext.wikitext/word_perplexity", "score", True),
        ("own:mine.score", "score", False),
    ],
)
def test_the_role_and_the_better_direction_of_a_measure(measure, role, lower):
    suite, _, name = measure.partition(".")
    assert measures.of_eval(name or suite).role == role
    assert measures.lower_is_better(measure) == lower


def test_a_field_of_lm_eval_keeps_its_task_in_titles():
    measure = measures.of_eval("arc_easy/acc")
    assert (measure.title, measure.text) == ("Arc easy/acc", "arc easy/acc")
    assert (measure.name, measure.better, measure.kind) == ("arc_easy/acc", "higher", "loss")


def test_a_new_number_of_a_step_and_of_a_run_is_one_declaration_each(tmp_path, monkeypatch):
    new = Measure(
        *("entropy", "Entropy of the outputs", "score", "nats"),
        console="H {:.1f}",
        tracker="train",
        chart="entropy",
    )
    last = Measure("entropy", "Final entropy", source="train.entropy", principal=True)
    monkeypatch.setitem(measures.TRAIN, "entropy", new)
    monkeypatch.setitem(measures.RUN, "entropy", last)
    run = build_run(tmp_path / "run")
    edit(run, lambda line: line | {"entropy": 5.25} if line["kind"] == "train" else line)
    line = run.lines("train")[-1]
    shown = io.StringIO()
    Console(10, stream=shown).step(line)
    assert "H 5.2" in shown.getvalue()
    assert point(line).scalars["train/entropy"] == 5.25
    seen = RunView(run)
    assert ("entropy", "Final entropy", 5.25) in results(seen).rows
    (chart,) = [chart for chart in charts([seen]) if chart.id == "entropy"]
    assert (chart.title, chart.unit) == ("Entropy of the outputs", "nats")
    assert set(chart.series[0].y) == {5.25}
    page = report(run, plots=False).page.read_text("utf-8")
    assert "Final entropy" in page and "Entropy of the outputs" in page
