"""`windlass plan` of every preset from the recipe alone, and of recipes whose data nobody knows yet."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from windlass.cli import main
from windlass.data.dataset import open_samples
from windlass.data.prepare import prepare
from windlass.estimate.known import known_facts
from windlass.model.size import count
from windlass.recipe import Recipe, presets

SHAKESPEARE = "shakespeare-char", "shakespeare-char-cpu", "shakespeare-char-fast"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def shown(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(["plan", *arguments])
    said = capsys.readouterr()
    assert end.value.code == 0, said.err
    return said.out


def as_json(capsys, *arguments):
    return json.loads(shown(capsys, *arguments, "--json"))


@pytest.mark.parametrize("name", sorted(presets()))
def test_a_plan_from_the_recipe_alone(capsys, name):
    made = as_json(capsys, name, "--device", "A100-80GB")
    assert made["length"]["steps"] > 0 and made["milestones"][-1]["what"] == "end"
    if Recipe.load(name).model.kind == "gpt":
        assert made["model"]["parameters"] == sum(made["model"]["parts"].values())
        assert made["memory"] and made["time"]["basis"] == "assumed" and made["disk"]["checkpoint_bytes"]
    out = shown(capsys, name, "--device", "A100-80GB")
    assert "…" not in out and max(len(line.rstrip()) for line in out.splitlines()) <= 80


@pytest.mark.parametrize("name", SHAKESPEARE)
def test_tiny_shakespeare_is_known_by_its_checksum(capsys, name):
    made = as_json(capsys, name, "--device", "A100-80GB")
    model = Recipe.load(name).model
    assert made["model"]["vocab"] == 65 and made["model"]["parameters"] == count(model, 65).total
    batch = Recipe.load(name).train.global_batch
    assert made["length"]["epochs"] == pytest.approx(made["length"]["steps"] * batch / (1_003_853 // model.context))
    assert "1,003,854 characters" in made["length"]["known_from"] and not made["length"]["data_is_prepared"]


def test_what_is_said_of_a_text_is_what_preparing_it_gives(tmp_path, monkeypatch):
    """The same arithmetic, on a text made up here and entered into the table."""
    import hashlib

    from windlass.estimate import known

    text = "".join(np.random.default_rng(0).choice(list("abcdefg \n"), 9_973))
    Path("input.txt").write_text(text, encoding="utf-8")
    digest = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setitem(known.TEXTS, digest, known.Text("made up", len(text), len(set(text))))
    recipe = Recipe.load("shakespeare-char-cpu", ["data.source=input.txt", f"data.sha256={digest}", "data.workers=1"])
    facts = known_facts(recipe)
    prepared = prepare(recipe)
    samples = open_samples(recipe, prepared)[0]
    assert facts.vocab == prepared.vocab and facts.samples_per_epoch == len(samples)
    assert facts.tokens_per_sample == samples.sample_tokens()


@pytest.mark.parametrize(
    "change", ["data.sha256=" + "0" * 64, "data.max_tokens=1000", "data.tokenizer=byte", "data.eval_source=x"]
)
def test_another_corpus_is_not_known(change):
    assert known_facts(Recipe.load("shakespeare-char-cpu", [change])).vocab is None


def test_squad_is_known_by_its_questions(capsys):
    made = as_json(capsys, "gpt-squad", "--device", "A100-80GB")
    assert made["length"]["steps"] == -(-5 * 87_599 // 4) and "87,599 questions at most" in made["length"]["known_from"]
    assert made["length"]["taken_as_full"]
    assert as_json(capsys, "bloom-560m-squad", "--device", "A100-80GB")["length"]["steps"] == 5 * 500 // 4
    assert known_facts(Recipe.load("gpt-squad", ["data.source=squad:mine.json"])).samples_per_epoch == 0


def own(*more):
    return ("shakespeare-char-cpu", "data.source=mine.txt", "data.sha256=''", *more)


def test_an_unknown_vocabulary_leaves_the_rest(capsys):
    made = as_json(capsys, *own(), "--device", "cpu")
    assert made["model"]["parameters"] is None and made["model"]["non_embedding"] == 787_584
    assert made["model"]["parameters_of_an_id"] == 128 and made["length"]["steps"] == 2000
    assert "memory" in made["unknown"] and "steps" not in made["unknown"] and "memory" not in made
    assert made["milestones"][-1]["first"] == 2000
    out = shown(capsys, *own(), "--device", "cpu")
    assert "unknown until the data is prepared" in out and "windlass prepare shakespeare-char-cpu" in out


def test_an_unknown_length_leaves_the_rest(capsys):
    arguments = ("quickstart", "train.steps=3 epochs", "--device", "A100-80GB")
    made = as_json(capsys, *arguments)
    assert made["model"]["parameters"] == 820_480 and made["length"]["steps"] is None and "milestones" not in made
    assert made["memory"] and made["recommendation"]["fits"] and "steps" in made["unknown"]
    assert made["time"]["seconds_per_step"] > 0 and "seconds" not in made["time"]
    out = " ".join(shown(capsys, *arguments).split())
    assert 'length unknown until the data is prepared: train.steps = "3 epochs"' in out and "ms a step" in out


def test_neither_is_known(capsys):
    made = as_json(capsys, *own("train.steps=compute-optimal"), "--device", "A100-80GB")
    assert {"vocabulary", "steps", "memory", "time to finish"} <= set(made["unknown"]) and "time" not in made


def test_a_measured_speed_gives_the_time_without_a_vocabulary(capsys, tmp_path):
    """Of a run of the same model; the speed of another one cannot be scaled without knowing what it is scaled by."""
    from test_estimate_plan import write_run

    run = write_run(tmp_path / "runs" / "one")
    with pytest.raises(SystemExit) as end:
        main(["plan", *own(), "--from", "runs/one", "--device", "cpu"])
    assert end.value.code == 2 and "name a run of the same model" in capsys.readouterr().err
    same = Recipe.load("shakespeare-char-cpu", ["data.source=mine.txt", "data.sha256=''"])
    (run.path / "recipe.toml").write_text(same.toml(), encoding="utf-8")
    made = as_json(capsys, *own(), "--from", "runs/one", "--device", "cpu")
    assert made["time"]["seconds"] > 0 and made["time"]["basis"] == "measured"
