"""Every number is declared once, and everything that shows numbers selects from there."""

import io
import json
import math

import pytest

from windlass.run import Run, decode, read_lines
from windlass.telemetry import measures
from windlass.telemetry.console import Console
from windlass.telemetry.ledger import Ledger
from windlass.telemetry.measures import Measure
from windlass.telemetry.trackers import point


def test_a_new_number_of_a_step_is_one_declaration(tmp_path, monkeypatch):
    new = Measure(
        "entropy", "Entropy", tracker="train/entropy", terminal=lambda x: f"H {x:.1f}", legend="H"
    )
    monkeypatch.setitem(measures.TRAIN, "entropy", new)
    ledger = Ledger(tmp_path / "metrics.jsonl")
    line = ledger.write("train", 1, loss=2.0, entropy=5.25, step_ms=1.0)
    ledger.close()
    shown = io.StringIO()
    console = Console(10, stream=shown)
    console.step(line)
    assert "loss 2.0000" in shown.getvalue() and "H 5.2" in shown.getvalue()
    assert point(next(read_lines(tmp_path / "metrics.jsonl"))).scalars["train/entropy"] == 5.25


@pytest.mark.parametrize(
    ("name", "score", "place"),
    [
        *(("loss", True, False), ("acc", True, False), ("own_measure", True, False)),
        *(("perplexity", False, False), ("runtime_s", False, False), ("tokens", False, False)),
        *(("step", False, True), ("items_hash", False, True)),
    ],
)
def test_scores_are_told_from_speeds_counts_and_places(name, score, place):
    assert (measures.is_score(name), measures.is_place(name)) == (score, place)


def test_every_score_has_a_direction():
    scores = [m for m in measures.EVAL.values() if m.role in ("score", "derived")]
    assert scores and all(m.better for m in scores)


def test_the_ledger_gives_numbers_for_the_words_that_json_has_for_non_finite_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    ledger = Ledger(path)
    ledger.write("train", 1, loss=math.nan, grad_norm=math.inf)
    ledger.write("sample", 1, text="NaN")
    ledger.close()
    assert '"NaN"' in path.read_text()
    train, sample = Run(tmp_path).ledger()
    assert math.isnan(train["loss"]) and train["grad_norm"] == math.inf
    assert sample["text"] == "NaN"
    assert decode(json.loads('{"kind": "eval", "loss": "-Infinity"}'))["loss"] == -math.inf
