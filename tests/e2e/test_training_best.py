"""The best model by a suite's measure: saved, the same after a stop, and resumed from."""

import json
import random
import shutil

import pytest
from small_runs import curve, recipe_of, stopped

from helpers import best_step
from windlass import train
from windlass.checkpoint.choose import find_checkpoint
from windlass.checkpoint.listing import list_checkpoints
from windlass.run import Run

MEASURE = "hellaswag.acc_per_token"


@pytest.fixture(scope="module")
def by_accuracy(corpus, tmp_path_factory):
    """Makes a recipe with HellaSwag items of made-up words: the accuracy goes up and down while the
    loss falls.
    """
    draw, words, items = random.Random(9), (corpus / "text.txt").read_text().split(), []
    for _ in range(24):
        context, *endings = (draw.choice(words) for _ in range(5))
        items.append({"ctx": context, "endings": endings, "label": draw.randrange(4)})
    file = tmp_path_factory.mktemp("items") / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, items)))
    values = {
        "eval.every": 1,
        "eval.suites": '["loss","hellaswag"]',
        "eval.hellaswag_file": f"'{file}'",
        "optim.lr": 3e-2,
        "checkpoint.every": 3,
        "checkpoint.keep_last": 1,
        "checkpoint.best": f"'{MEASURE}'",
    }
    return lambda run, **more: recipe_of(corpus, run, **values | more)


def accuracies(run: Run) -> dict[int, float]:
    return {line["step"]: line["acc_per_token"] for line in run.lines("eval", suite="hellaswag")}


def losses(run: Run) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in run.lines("eval", suite="loss")}


def highest(scores: dict[int, float]) -> int:
    return max(scores, key=lambda step: scores[step])


@pytest.fixture(scope="module")
def whole(by_accuracy, tmp_path_factory) -> Run:
    return train(by_accuracy(tmp_path_factory.mktemp("whole") / "run"))


def test_the_first_step_with_the_highest_accuracy_is_saved_and_named(whole):
    scores = accuracies(whole)
    best = highest(scores)
    lowest_loss = highest({step: -loss for step, loss in losses(whole).items() if step})
    assert 1 < best < 11 and best % 3 and best != lowest_loss, "else this would show nothing"
    listed = list_checkpoints(whole.path)
    assert best_step(whole) == best and listed.measure == MEASURE
    listed_scores = {c["step"]: c["scores"][MEASURE] for c in listed.checkpoints}
    assert listed_scores == {step: scores[step] for step in (best, 12)}
    assert find_checkpoint(f"{whole.path}@best").step == best
    expected = {"best_measure": MEASURE, "best_score": scores[best], "best_step": best}
    expected["best_eval_loss"] = min(loss for step, loss in losses(whole).items() if step)
    assert whole.summary.items() >= expected.items()


def test_a_stop_changes_nothing_of_it(by_accuracy, whole, tmp_path):
    best = best_step(whole)
    for stop in (best - 1, best):
        recipe = by_accuracy(tmp_path / f"stop-{stop}")
        stopped(recipe, stop)
        run = train(recipe)
        assert accuracies(run) == accuracies(whole) and best_step(run) == best
        assert all(run.summary[key] == whole.summary[key] for key in ("best_score", "best_step"))


def test_it_resumes_from_the_best_and_by_another_measure(by_accuracy, whole, tmp_path):
    recipe = by_accuracy(tmp_path / "run", **{"checkpoint.keep_last": 20, "checkpoint.every": 1})
    run = stopped(recipe, 11)
    by_loss = highest({step: -loss for step, loss in losses(run).items() if step})
    for changed, step in (([], highest(accuracies(run))), (["checkpoint.best=loss"], by_loss)):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(run.path, copy)
        again = train(recipe.replace(f"run.dir='{copy}'", "checkpoint.resume=best", *changed))
        assert [e["step"] for e in again.events if e["event"] == "resumed"] == [step]
        assert curve(again) == curve(whole)


def test_a_longer_run_keeps_the_best_of_its_first_part(by_accuracy, whole, tmp_path):
    shutil.copytree(whole.path, tmp_path / "run")
    run = train(by_accuracy(tmp_path / "run"), extend_to=14)
    scores = accuracies(run)
    assert set(scores) == set(range(15))
    assert run.summary["best_step"] == highest(scores) == best_step(run)
