"""A tiny BLOOM with random weights learns real SQuAD questions: on 1, 2 and 4 ranks alike, and by
heart.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import hf_fixtures
from forked import launch
from helpers import command, curve
from windlass.evaluation.squad import score
from windlass.recipe import Recipe
from windlass.run import Run

pytestmark = pytest.mark.dist
PLACES = ["Orly", "Brest", "Cork", "Vigo", "Bari", "Kiel"]
PEOPLE = ["Ann Hale", "Otto Roth", "Ines Vidal", "Paul Crane", "Mia Lund", "Jan Bakker"]
DDP = {"parallel__strategy": "ddp"}
UNSORTED = {"parallel__strategy": "full_shard", "data__length_buckets": False}


@pytest.fixture(scope="module")
def lesson(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions each on six paragraphs, as a file; a BLOOM of two blocks and a tokenizer
    trained on them.
    """
    folder, paragraphs, texts = tmp_path_factory.mktemp("lesson"), [], []
    for i, (place, person) in enumerate(zip(PLACES, PEOPLE, strict=True)):
        year = str(1801 + 17 * i)
        context = f"The harbour of {place}{' on the northern coast' * (i % 2)} was built in {year} by {person}."
        who, when = f"Who built the harbour of {place}?", f"When was the harbour of {place} built?"
        asked, qas = {who: person, when: year}, []
        for number, (question, text) in enumerate(asked.items()):
            answers = [{"text": text, "answer_start": context.index(text)}]
            qas.append({"id": f"{place}-{number}", "question": question, "answers": answers})
        paragraphs.append({"context": context, "qas": qas})
        texts += [context, *asked]
    tree = {"data": [{"title": "few", "paragraphs": paragraphs}]}
    (folder / "few.json").write_text(json.dumps(tree))
    # Windlass does not train on a question that the validation data has.
    other = (
        json.dumps(tree).replace("Who built", "Who then built").replace("When was", "When then was")
    )
    (folder / "other.json").write_text(other)
    hf_fixtures.save("bloom", folder / "bloom", hidden_size=64, n_layer=2)
    hf_fixtures.save_tokenizer(texts, folder / "bloom")
    return folder


def recipe(lesson: Path, name: str, **changes: Any) -> Recipe:
    few = f"squad:{lesson / 'few.json'}"
    tree = {
        "preset": "lesson",
        "model": {"kind": "hf", "name": str(lesson / "bloom"), "context": 192},
        "data": {"format": "squad", "source": few, "dir": str(lesson / "data")},
        "train": {"steps": 4, "global_batch": 12, "micro_batch": 3},
        "optim": {"lr": 3e-3, "weight_decay": 0.0, "schedule": {"kind": "constant", "warmup": 0}},
        "eval": {"every": "4 epochs", "suites": ["loss", "squad"]},
        "checkpoint": {"every": 0},
        "telemetry": {"every": 1},
        "run": {"dir": str(lesson / name)},
    }
    tree["data"]["eval_source"] = f"squad:{lesson / 'other.json'}"
    tree["eval"]["squad_file"] = str(lesson / "few.json")
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    return Recipe.model_validate(tree).replace(changes)


def trained(wanted: Recipe, world: int) -> Run:
    """The run, trained once, by forked ranks: the libraries are imported here."""
    import peft  # noqa: F401
    import transformers.models.bloom.modeling_bloom  # noqa: F401

    if not (run := Run(wanted.run_dir)).exists:
        path = wanted.run_dir.with_suffix(".toml")
        path.write_text(wanted.toml(), encoding="utf-8")
        assert launch(command("train", path), world) == 0
    return run


@pytest.fixture(scope="module")
def alone(lesson: Path) -> Run:
    return trained(recipe(lesson, "alone", data__length_buckets=False), 1)


def test_work_is_counted_in_tokens_without_padding_and_those_in_the_loss_apart(lesson, alone):
    facts = alone.lines("event")[0]["data"]["train"]
    last, summary = alone.lines("train")[-1], alone.lines("summary")[-1]
    epochs = last["samples"] / 12
    assert last["tokens"] == epochs * facts["tokens"]
    assert last["label_tokens"] == epochs * facts["label_tokens"]
    assert last["label_tokens"] < last["tokens"]
    assert last["padded_tokens_per_s"] > last["tokens_per_s"]
    assert (summary["tokens"], summary["label_tokens"]) == (last["tokens"], last["label_tokens"])
    log = alone.log_path.read_text()
    assert f"12 questions, {facts['tokens']:,} tokens, {facts['label_tokens']:,} of them" in log


@pytest.mark.parametrize(
    ("world", "changes"),
    [
        (2, DDP),
        (2, {"parallel__strategy": "full_shard", "parallel__activation_checkpointing": "full"}),
        pytest.param(2, {"parallel__strategy": "shard_grad_op"}, marks=pytest.mark.full),
        pytest.param(4, {"parallel__strategy": "hybrid_shard"}, marks=pytest.mark.full),
        pytest.param(2, UNSORTED, marks=pytest.mark.full),
    ],
)
def test_every_strategy_has_the_losses_of_one_process(lesson, alone, world, changes):
    run = trained(recipe(lesson, "-".join(map(str, [world, *changes.values()])), **changes), world)
    curves = [curve(one, "loss", "grad_norm") for one in (run, alone)]
    assert len(curves[0]) == 4
    for (_, loss, norm), (_, *expected) in zip(*curves, strict=True):
        assert loss == pytest.approx(expected[0], rel=1e-5)
        assert norm == pytest.approx(expected[1], rel=1e-4)
    for line, expected in zip(run.lines("eval"), alone.lines("eval"), strict=True):
        keys = ("suite", "step", "tokens", "items", "exact_match", "f1")
        assert [line.get(k) for k in keys] == [expected.get(k) for k in keys]
        assert line.get("loss", 0.0) == pytest.approx(expected.get("loss", 0.0), rel=1e-4)


@pytest.mark.full
def test_the_questions_are_learned_by_heart(lesson):
    settings = {"train__steps": 60, "train__micro_batch": 12, "telemetry__every": 10}
    run = trained(recipe(lesson, "heart", eval__every=15, **settings), 1)
    scores = {line["step"]: line["f1"] for line in run.lines("eval", suite="squad")}
    losses = {line["step"]: line["loss"] for line in run.lines("eval", suite="loss")}
    assert scores[0] < 10 and scores[60] > 90 and losses[60] < 0.1 < losses[0]
    assert run.lines("eval", suite="squad")[-1]["exact_match"] > 90


def test_the_answers_of_each_evaluation_are_kept(lesson):
    """In the official form, once each on two ranks."""
    tree = json.loads((lesson / "few.json").read_text())
    questions = [q for part in tree["data"][0]["paragraphs"] for q in part["qas"]]
    references = {q["id"]: [a["text"] for a in q["answers"]] for q in questions}
    run = trained(recipe(lesson, "2-ddp", **DDP), 2)
    names = [f"squad-predictions-step-{step:08d}.json" for step in (0, 4)]
    assert sorted(p.name for p in (run.path / "eval").iterdir()) == names
    for name, line in zip(names, run.lines("eval", suite="squad"), strict=True):
        predictions = json.loads((run.path / "eval" / name).read_text(encoding="utf-8"))
        assert list(predictions) == list(references)
        result = score(predictions, references)
        assert (result["exact_match"], result["f1"]) == (line["exact_match"], line["f1"])
