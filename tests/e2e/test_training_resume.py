"""Killed and resumed is as if nothing had happened: bit for bit with equal ranks, to rounding with
others.
"""

import numpy as np
import pytest
from small_runs import OPTIONS, curve, evaluations, recipe_of, settings, start, stopped, untouched

from forked import launch
from helpers import command, refused
from windlass import train
from windlass.ledger import STARTS, last_start, read_lines
from windlass.optim.schedule import lr_multiplier
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run

TENSOR, CONTEXT = {"parallel.tensor": 2}, {"parallel.context": 2}
full = pytest.mark.full
CASES = [
    ("single", 1, 4, {}),
    pytest.param("ddp", 2, 2, {}, marks=full),
    ("full_shard", 2, 2, {}),
    ("auto", 2, 2, TENSOR),
    pytest.param("shard_optim", 2, 2, {}, marks=full),
    pytest.param("shard_grad_op", 2, 4, {}, marks=full),
    pytest.param("hybrid_shard", 4, 2, {}, marks=full),
    pytest.param("full_shard", 4, 1, {}, marks=full),
    pytest.param("full_shard", 4, 2, TENSOR, marks=full),
    pytest.param("shard_optim", 4, 2, CONTEXT, marks=full),
]


@pytest.mark.dist
@pytest.mark.parametrize(("strategy", "world", "micro", "layout"), CASES)
def test_killed_and_resumed_is_bit_for_bit_the_same(
    corpus, tmp_path, strategy, world, micro, layout
):
    """With dropout, accumulation, options of the schedule, and epochs' edges
    before and after the kill.
    """
    whole, broken, more = Run(tmp_path / "whole"), Run(tmp_path / "broken"), OPTIONS | layout
    assert start(world, settings(corpus, whole.path, strategy, micro, **more)) == 0
    overrides = settings(corpus, broken.path, strategy, micro, **more)
    assert start(world, overrides, kill_after=8) == 1
    assert broken.state in ("failed", "running")
    assert start(world, overrides) == 0
    resumed = [e for e in broken.events if e["event"] == "resumed"]
    assert [e["attempt"] for e in resumed] == [1] and 3 <= resumed[0]["step"] <= 6
    assert curve(broken) == curve(whole) and len(curve(whole)) == 12
    assert evaluations(broken) == evaluations(whole)
    assert broken.state == whole.state == "finished"
    lines, schedule = broken.lines("train"), broken.recipe.optim.schedule
    assert [line["samples"] for line in lines] == [8 * step for step in range(1, 13)]
    assert [line["tokens"] for line in lines] == [8 * 16 * step for step in range(1, 13)]
    horizon = broken.recipe.horizon(12, last_start(broken.ledger())["samples_per_epoch"])
    multipliers = [lr_multiplier(schedule, horizon, step) for step in range(12)]
    assert [line["lr"] for line in lines] == [broken.recipe.optim.lr * m for m in multipliers]


@pytest.mark.dist
@pytest.mark.full
def test_a_killed_pipeline_is_resumed_by_other_pipelines_and_by_one_process(corpus, tmp_path):
    """With dropout: a block's masks do not depend on the rank that computes it."""
    whole, broken = Run(tmp_path / "whole"), Run(tmp_path / "broken")
    # Without a save of the best, which may or may not have ended at the kill.
    model = {"model.layers": 4, "eval.sample_every": 4, "checkpoint.keep_best": "false"}
    assert start(1, settings(corpus, whole.path, micro=2, **model)) == 0
    pipeline = model | {"parallel.pipeline": 2}
    first = settings(corpus, broken.path, "ddp", 2, **pipeline)
    assert start(2, first, kill_after=5) == 1
    second = settings(corpus, broken.path, "full_shard", 2, **pipeline)
    assert start(4, second, kill_after=9) == 1
    assert start(1, settings(corpus, broken.path, micro=2, **model, **NO_LAYOUT)) == 0
    assert [e["step"] for e in broken.events if e["event"] == "resumed"] == [3, 6]
    for read in (curve, evaluations):
        np.testing.assert_allclose(read(broken), read(whole), rtol=1e-5)
    texts = [[line["text"] for line in run.lines("sample")] for run in (whole, broken)]
    assert texts[0] == texts[1] and len(texts[0]) == 3


@pytest.mark.dist
@pytest.mark.parametrize(
    "moves",
    [
        [(2, "shard_optim", 4), (1, "full_shard", 7), (4, "ddp", 0)],
        pytest.param(
            [(2, "full_shard", 3), (2, "shard_optim", 5), (1, "single", 7), (4, "shard_optim", 0)],
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_checkpoint_is_resumed_by_other_ranks_and_under_other_strategies(corpus, tmp_path, moves):
    """The same samples and, to rounding, the same losses: with equal micro-batches, also the same
    dropout masks.
    """
    reference, run = tmp_path / "one", tmp_path / "moving"
    assert start(1, settings(corpus, reference, micro=1)) == 0
    for world, strategy, stop in moves:
        overrides = settings(corpus, run, strategy, micro=1)
        words = command("train", "quickstart", "--stop-at", str(stop), *overrides)
        assert launch(words, world) in (0, 75)
    for mine, whole in zip(curve(Run(run)), curve(Run(reference)), strict=True):
        _, loss, norm, *_ = whole
        assert mine[1:3] == (pytest.approx(loss, rel=2e-6), pytest.approx(norm, rel=2e-5))
        assert (mine[0], *mine[3:]) == (whole[0], *whole[3:])
    starts = [(e["step"], e["world"]) for e in Run(run).events if e["event"] in STARTS]
    stops = [0, *(stop for _, _, stop in moves[:-1])]
    assert starts == [(stop, world) for stop, (world, *_) in zip(stops, moves, strict=True)]


def test_a_resume_that_changes_the_dropout_masks_says_so_in_one_line(corpus, tmp_path, capsys):
    stopped(recipe_of(corpus, tmp_path / "run", micro=8, **{"model.dropout": 0.2}), 3)
    capsys.readouterr()
    train(recipe_of(corpus, tmp_path / "run", micro=4, **{"model.dropout": 0.2}))
    lines = [line for line in capsys.readouterr().out.splitlines() if "dropout" in line]
    assert len(lines) == 1
    assert all("train.micro_batch" in line and "8" in line and "4" in line for line in lines)


def test_another_recipe_is_refused_with_the_difference(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", **{"train.steps": 2})
    train(recipe)
    for change, words in (
        ("optim.lr=0.5", "optim.lr: 0.003 -> 0.5"),
        ("train.steps=4", "extend_to="),
    ):
        with refused(words, "fresh=True"):
            train(recipe.replace(change))
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    run = train(recipe.replace("telemetry.every=2"))
    # a finished run does not change
    assert run.state == "finished" and run.metrics_path.read_bytes() == before
    train(recipe.replace("optim.lr=0.5"), fresh=True)
    assert (tmp_path / "run.old-1" / "metrics.jsonl").is_file()


def test_a_source_that_changes_is_kept_by_a_resume_and_stops_a_new_run(corpus, tmp_path):
    text, places = (corpus / "text.txt").read_text(), {"source": "text.txt", "dir": "data"}
    (tmp_path / "text.txt").write_text(text)
    places = {f"data.{key}": f"'{tmp_path / name}'" for key, name in places.items()}
    recipe = recipe_of(corpus, tmp_path / "run", **places)
    stopped(recipe, 3)
    (tmp_path / "text.txt").write_text(text[::-1])
    with refused("the data is not what"):  # elsewhere it is prepared anew
        train(recipe.replace(f"data.dir='{tmp_path / 'data2'}'"))
    new = recipe.replace(f"run.dir='{tmp_path / 'new'}'")
    with refused("text.txt has changed", 'data.changed="keep"', 'data.changed="prepare"'):
        train(new)
    run = train(recipe)
    assert "text.txt has changed" in last_start(run.ledger())["data"]["changed"][0]
    assert "text.txt has changed" in run.log_path.read_text()
    same, fresh = train(new.replace("data.changed=keep")), tmp_path / "fresh"
    assert curve(same) == curve(run)
    assert curve(train(new.replace(f"run.dir='{fresh}'", "data.changed=prepare"))) != curve(same)
    with refused("the data is not what"):
        train(recipe, extend_to=16)


def test_resume_from_a_step(corpus, tmp_path):
    """What is not wanted is not loaded, and the run is the same from there on.

    `test_training_best.py` resumes from the best.
    """
    recipe = recipe_of(corpus, tmp_path / "run", **{"eval.every": 3, "checkpoint.keep_last": 10})
    stopped(recipe, 8)
    with refused("checkpoint of step 5", "3, 6, 8"):
        train(recipe.replace("checkpoint.resume='5'"))
    again, expected = train(recipe.replace("checkpoint.resume='3'")), curve(untouched(recipe))
    assert [e["step"] for e in again.events if e["event"] == "resumed"] == [3]
    assert curve(again) == expected
    # A finished run continues from an earlier step, too, and not from its end.
    for wanted, resumed in (("6", 6), ("12", None)):
        before = len(list(read_lines(again.metrics_path)))
        again = train(again.recipe.replace(f"checkpoint.resume='{wanted}'"))
        new = list(read_lines(again.metrics_path))[before:]
        resumes = [line["step"] for line in new if line.get("event") == "resumed"]
        assert resumes == ([resumed] if resumed else []), wanted
        assert again.state == "finished" and curve(again) == expected
