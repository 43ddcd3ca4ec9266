"""The best model by a suite's measure: kept, found again after a stop, and gone on from."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from small_runs import corpus, curve, settings

from helpers import best_step
from windlass import train
from windlass.checkpoint.load import find, list_checkpoints
from windlass.errors import Stopped
from windlass.recipe import Recipe
from windlass.run import Run

__all__ = ["corpus"]
MEASURE = "hellaswag.acc_per_token"


@pytest.fixture(scope="module")
def by_accuracy(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """Overrides: HellaSwag items of made-up words, so that the accuracy goes up and down while the loss falls."""
    draw = random.Random(3)
    words = (corpus / "text.txt").read_text().split()
    items = [
        {"ctx": draw.choice(words), "endings": [draw.choice(words) for _ in range(4)], "label": draw.randrange(4)}
        for _ in range(24)
    ]
    file = tmp_path_factory.mktemp("items") / "items.jsonl"
    file.write_text("\n".join(map(json.dumps, items)))
    return {
        "eval.every": 1, "eval.suites": '["loss","hellaswag"]', "eval.hellaswag_file": f"'{file}'", "optim.lr": 3e-2,
        "checkpoint.every": 3, "checkpoint.keep_last": 1, "checkpoint.best": f"'{MEASURE}'",
    }  # fmt: skip


def accuracies(run: Run) -> dict[int, float]:
    return {line["step"]: line["acc_per_token"] for line in run.lines("eval", suite="hellaswag")}


def lowest_loss(run: Run) -> int:
    losses = {line["step"]: line["loss"] for line in run.lines("eval", suite="loss") if line["step"]}
    return min(losses, key=lambda step: losses[step])


@pytest.fixture(scope="module")
def whole(corpus: Path, by_accuracy: dict[str, object], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(Recipe.load("quickstart", settings(corpus, tmp_path_factory.mktemp("whole") / "run", **by_accuracy)))


def test_the_first_step_with_the_highest_accuracy_is_kept_and_named(whole: Run) -> None:
    found = accuracies(whole)
    best = max(found, key=lambda step: found[step])
    assert 1 < best < 11 and best % 3 and best != lowest_loss(whole), "else this would show nothing"
    listed = list_checkpoints(whole.path)
    assert best_step(whole) == best and listed.measure == MEASURE
    assert {c.step: c.scores[MEASURE] for c in listed.checkpoints} == {s: found[s] for s in (best, 12)}
    assert find(f"{whole.path}@best").step == best
    summary = whole.summary
    assert (summary["best_measure"], summary["best_score"], summary["best_step"]) == (MEASURE, found[best], best)
    assert summary["best_eval_loss"] == min(line["loss"] for line in whole.lines("eval", suite="loss"))


def test_the_commands_know_of_it(whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from windlass.cli.checkpoints import checkpoints
    from windlass.cli.eval import evaluate

    checkpoints(whole.path, verify=False, json_=False)
    header, *rows = capsys.readouterr().out.splitlines()
    best = best_step(whole)
    assert MEASURE in header
    assert f"{accuracies(whole)[best]:.4f}" in rows[0] and "best" in rows[0]
    assert evaluate(f"{whole.path}@best", [], suite="loss", world="", out=tmp_path, as_json=True) == 0
    shown = json.loads(capsys.readouterr().out)
    losses = {line["step"]: line["loss"] for line in whole.lines("eval", suite="loss")}
    assert shown["step"] == best and shown["results"]["loss"]["loss"] == pytest.approx(losses[best], rel=1e-5)


def test_a_stop_changes_nothing_of_it(corpus: Path, by_accuracy: dict[str, object], whole: Run, tmp_path: Path) -> None:
    best = best_step(whole)
    for stop in (best - 1, best, best + 1):
        recipe = Recipe.load("quickstart", settings(corpus, tmp_path / f"stop-{stop}", **by_accuracy))
        with pytest.raises(Stopped):
            train(recipe, stop_at=stop)
        run = train(recipe)
        assert accuracies(run) == accuracies(whole)
        assert best_step(run) == best
        assert [run.summary[k] for k in ("best_score", "best_step")] == [
            whole.summary[k] for k in ("best_score", "best_step")
        ]


def test_it_goes_on_from_the_best_and_by_another_measure(
    corpus: Path, by_accuracy: dict[str, object], whole: Run, tmp_path: Path
) -> None:
    overrides = settings(
        corpus, tmp_path / "run", **(by_accuracy | {"checkpoint.keep_last": 20, "checkpoint.every": 1})
    )
    recipe = Recipe.load("quickstart", overrides)
    with pytest.raises(Stopped):
        train(recipe, stop_at=11)
    found = accuracies(Run(tmp_path / "run"))
    best = max(found, key=lambda step: found[step])
    for changed, step in (([], best), (["checkpoint.best=loss"], lowest_loss(Run(tmp_path / "run")))):
        copy = tmp_path / f"copy-{step}"
        shutil.copytree(tmp_path / "run", copy)
        run = train(recipe.with_overrides(f"run.dir='{copy}'", "checkpoint.resume=best", *changed))
        assert [e["step"] for e in run.events if e["event"] == "resumed"] == [step]
        assert curve(run.path) == curve(whole.path)


def test_a_longer_run_keeps_the_best_of_its_first_part(
    corpus: Path, by_accuracy: dict[str, object], whole: Run, tmp_path: Path
) -> None:
    shutil.copytree(whole.path, tmp_path / "run")
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **by_accuracy))
    run = train(recipe, extend_to=14)
    found = accuracies(run)
    best = max(found, key=lambda step: found[step])
    assert set(found) == set(range(15)) and run.summary["best_step"] == best
    assert best_step(run) == best
