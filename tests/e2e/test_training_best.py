"""The best model by a suite's measure: saved, the same after a stop, and resumed from."""

import json
import random
import shutil

import pytest
from small_runs import corpus, curve, recipe_of, stopped

from helpers import best_step, refused
from windlass import train
from windlass.checkpoint.choose import find_checkpoint, list_checkpoints
from windlass.reports.overview import overview
from windlass.reports.view import RunView
from windlass.run import Run
from windlass.training.start import resolve_start

__all__ = ["corpus"]
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
    expected["best_eval_loss"] = min(losses(whole).values())
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


def last_useful(scores: dict[int, float], patience: int) -> int:
    """The step of the evaluation after which `train.early_stop` ends a run; else its last one."""
    steps = sorted(scores)
    for i, step in enumerate(steps):
        best = max(steps[: i + 1], key=lambda step: scores[step])
        if i - steps.index(best) >= patience:
            return step
    return steps[-1]


def test_a_run_ends_early_by_any_measure_and_does_not_start_again(by_accuracy, whole, tmp_path):
    end = last_useful(accuracies(whole), 3)
    assert 3 < end < 11, "else this would show nothing"
    recipe = by_accuracy(tmp_path / "run", **{"train.early_stop": 3})
    run = stopped(recipe, end - 1)  # what was measured before counts after a stop, too
    run = train(recipe)
    assert curve(run) == curve(whole)[:end] and best_step(run) == highest(accuracies(run))
    ended = [e for e in run.events if e["event"] == "finished"]
    assert [(e["step"], e["early_stop"]) for e in ended] == [(end, 3)]
    assert MEASURE in ended[0]["reason"]
    assert (run.path / "checkpoints" / f"step-{end:08d}").is_dir()
    lines = run.metrics_path.read_bytes()
    assert train(recipe).metrics_path.read_bytes() == lines
    assert resolve_start(recipe).finished and "0, continues" in resolve_start(recipe).why_finished
    assert [(row.state, row.step) for row in overview(run.path)] == [("ended early", end)]
    assert RunView(run).values["ended_early"] == ended[0]["reason"]
    # it continues, as if it had never ended
    assert curve(train(recipe.replace("train.early_stop=0"))) == curve(whole)


def test_a_run_ends_early_if_no_evaluation_beats_the_one_before_training(corpus, tmp_path):
    values = {"eval.every": 2, "train.early_stop": 2, "optim.lr": 1e-30}
    run = train(recipe_of(corpus, tmp_path / "run", **values))
    lines = run.lines("eval")
    assert [x["step"] for x in lines] == [0, 2, 4] and len({x["loss"] for x in lines}) == 1
    with refused("train.early_stop", "eval.every"):
        recipe_of(corpus, tmp_path / "run", **values | {"eval.every": 0})


def test_a_longer_run_keeps_the_best_of_its_first_part(by_accuracy, whole, tmp_path):
    shutil.copytree(whole.path, tmp_path / "run")
    run = train(by_accuracy(tmp_path / "run"), extend_to=14)
    scores = accuracies(run)
    assert set(scores) == set(range(15))
    assert run.summary["best_step"] == highest(scores) == best_step(run)
