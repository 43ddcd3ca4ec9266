"""A study's directory: what is written down is what counts."""

import json
import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest

from helpers import refused, write_ledger
from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.study.results import BITS, common_measure, diverged
from windlass.study.study import Study
from windlass.study.sweep import Halving, train_command

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]


@pytest.fixture
def study(tmp_path):
    return Study.create(Recipe.load("quickstart"), AXES, tmp_path / "study")


def test_given_again_it_is_opened(study):
    recipe = Recipe.load("quickstart")
    for axes in (
        ["optim.lr=0.01,0.001", "run.seed=1,2"],
        {"optim.lr": [1e-2, 1e-3], "run.seed": [1, 2]},
    ):
        assert Study.create(recipe, axes, study.path).cells == study.cells
    assert Study.open(study.path) == study


def test_axes_of_numpy_and_values_with_commas_are_stored_as_they_are(tmp_path):
    axes = {
        "optim.lr": np.array([1e-2, 1e-3]),
        "data.source": ["a,b.txt"],
        "optim.betas": [(0.9, 0.95)],
    }
    study = Study.create(Recipe.load("quickstart"), axes, tmp_path / "study")
    stored = [cell.assignment for cell in Study.open(study.path).cells]
    assert stored == [
        {"optim.lr": lr, "data.source": "a,b.txt", "optim.betas": [0.9, 0.95]}
        for lr in (1e-2, 1e-3)
    ]
    assert [cell.assignment for cell in study.cells] == stored
    listed = [{"optim.lr": np.float64(1e-2)}, {"optim.lr": np.float64(1e-3)}]
    assert [
        type(c.assignment["optim.lr"])
        for c in Study.create(study.recipe, listed, tmp_path / "own").cells
    ] == [float] * 2


def test_the_command_of_a_cell_trains_into_its_directory(tmp_path):
    source = 'C:\\new "text", it\'s.txt'
    study = Study.create(
        Recipe.load("quickstart"), {"data.source": [source]}, tmp_path / 'my "study", it\'s \\n [1]'
    )
    words = train_command(study, study.cells[0])
    trained = Recipe.load(words[4], words[5:])
    assert trained.run_dir == study.run_of(study.cells[0]).path
    assert trained.data.source == source


def finish(study, *losses, **fields):
    for cell, loss in zip(study.cells, losses, strict=False):
        line = {
            "kind": "eval",
            "step": 9,
            "suite": "loss",
            "loss": loss,
            "tokens": 640,
            "samples": 10,
        } | fields
        write_ledger(study.run_of(cell), line, {"kind": "event", "event": "finished", "step": 9})


def test_a_study_grows_by_more_values_and_by_another_axis(study):
    finish(study, 3.0, 2.0, 2.5, 2.6)
    recipe, before = Recipe.load("quickstart"), {cell.key: cell.directory for cell in study.cells}
    more = Study.create(recipe, ["optim.lr=1e-3,3e-3", "run.seed=1"], study.path)
    assert [c.label for c in more.cells[4:]] == ["lr=0.003 seed=1"]
    assert "1 new cell " in more.notes[0]
    width = recipe.model.width
    wide = Study.create(
        recipe, [f"model.width={width},64", "optim.lr=1e-2", "run.seed=2"], study.path
    )
    assert [c.assignment["model.width"] for c in wide.cells] == [width] * 5 + [64]
    assert {c.key: c.directory for c in wide.cells[:4]} == before
    assert [r.state for r in wide.results()] == ["finished"] * 4 + ["waiting"] * 2
    stored = json.loads((study.path / "study.json").read_text())
    assert stored["axes"] == {
        "optim.lr": [1e-2, 1e-3, 3e-3],
        "run.seed": [1, 2],
        "model.width": [width, 64],
    }
    again = Study.create(Study.open(study.path).recipe, [], study.path)
    assert again == wide == Study.open(study.path) and again.notes == []


def test_a_study_that_grows_has_the_same_seeds_everywhere(study):
    recipe = Recipe.load("quickstart")
    grown = Study.create(recipe, ["optim.lr=3e-3"], study.path)
    assert [c.label for c in grown.cells[4:]] == ["lr=0.003 seed=1", "lr=0.003 seed=2"]
    grown = Study.create(recipe, ["run.seed=5"], study.path)
    assert [c.label for c in grown.cells[6:]] == [
        "lr=0.01 seed=5",
        "lr=0.001 seed=5",
        "lr=0.003 seed=5",
    ]
    assert [len(group.results) for group in grown.groups()] == [
        3,
        3,
        3,
    ] and grown.winners().remark == ""
    plain = Study.create(recipe, ["optim.lr=1e-2,1e-3"], study.path.parent / "plain")
    plain = Study.create(recipe, ["run.seed=5,6"], plain.path)
    own = recipe.run.seed
    assert [sorted(r.cell.assignment["run.seed"] for r in g.results) for g in plain.groups()] == [
        [5, 6, own]
    ] * 2


def test_one_seed_is_not_ranked_before_medians(study):
    more = Study.create(Recipe.load("quickstart"), ["optim.lr=3e-3", "run.seed=1"], study.path)
    finish(more, 3.0, 2.0, 2.6, 2.7, 1.0)
    winners, remark = more.winners()
    assert [group.label for group in winners] == ["lr=0.01"] and winners[0].median == 2.5
    assert "lr=0.003" in remark and "run.seed=1,2" in remark


def test_another_recipe_makes_other_cells_and_says_so_but_not_what_changes_no_result(study):
    shorter = Study.create(Recipe.load("quickstart", ["train.steps=7"]), AXES[:1], study.path)
    steps = Recipe.load("quickstart").train.steps
    assert [c.recipe.train.steps for c in shorter.cells] == [steps] * 4 + [7] * 4
    assert [c.assignment["run.seed"] for c in shorter.cells[4:]] == [1, 2] * 2
    assert any(
        "train.steps = 7" in note and f"train.steps = {steps}" in note for note in shorter.notes
    )
    for setting in ("eval.every=7", "telemetry.every=3", "parallel.device=cpu"):
        grown = Study.create(Recipe.load("quickstart", [setting]), AXES, study.path)
        key, _, value = setting.partition("=")
        assert [cell.key for cell in grown.cells] == [cell.key for cell in shorter.cells]
        assert str(grown.recipe.flat()[key]) == value
        assert any(note.startswith(key) for note in grown.notes)
    with refused("preset = quickstart", "c4-30m", "path=DIR"):
        Study.create(Recipe.load("c4-30m"), AXES, study.path)
    with refused("optim.lr=1e-2,1e-3"):
        Study.create(Recipe.load("quickstart"), [], study.path / "nothing")


def test_a_strategy_that_is_the_recipes_own_is_the_cell_that_is_there(study):
    strategies = Study.create(
        Recipe.load("quickstart"), ["parallel.strategy=auto,ddp", *AXES], study.path
    )
    assert len(strategies.cells) == 8 and strategies.cells[:4] != study.cells
    assert [c.key for c in strategies.cells[:4]] == [c.key for c in study.cells]
    assert all(c.assignment["parallel.strategy"] == "ddp" for c in strategies.cells[4:])


@pytest.mark.parametrize(
    ("axes", "best", "word"),
    [
        (["model.width=32,64"], [], "model.width"),
        (["parallel.world=1,2"], [], "parallel.world"),
        (["run.seed=1,2"], [], "seed"),
        (["optim.lr=1e-2,1e-3"], ["lr=0.001"], ""),
        (
            ["optim.lr=1e-2,1e-3", "model.width=32,64"],
            ["lr=0.001 width=32", "lr=0.01 width=64"],
            "",
        ),
    ],
)
def test_the_best_is_named_where_a_lower_loss_decides(tmp_path, axes, best, word):
    """Of sizes and of numbers of ranks there is none; with a learning rate beside them each has its
    own.
    """
    study = Study.create(Recipe.load("quickstart"), axes, tmp_path / "study")
    finish(study, 4.0, 2.5, 3.0, 3.5)
    winners, remark = study.winners()
    assert ([group.label for group in winners], word in remark) == (best, True)


def test_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    """By hand: 4.0 nats at 4 bytes a token are fewer bits than 2.0 nats at one."""
    axes = ["data.tokenizer=byte,gpt2"]
    study = Study.create(Recipe.load("quickstart", ["model.vocab=0"]), axes, tmp_path / "study")
    assert study.measure == BITS
    for cell, loss, tokens in zip(study.cells, (2.0, 4.0), (2560, 640), strict=True):
        data = {"val": {"text": "00c0ffee"}}
        write_ledger(
            study.run_of(cell), {"kind": "event", "event": "started", "step": 0, "data": data}
        )
        finish(
            replace(study, cells=[cell]),
            loss,
            tokens=tokens,
            bits_per_byte=loss * tokens / 2560 / math.log(2),
        )
    winners, remark = study.winners()
    assert winners[0].assignment == {"data.tokenizer": "gpt2"} and "bytes" in remark
    assert winners[0].median == pytest.approx(4.0 / 4 / math.log(2))
    measured = [result.validation for result in study.results()]
    assert [one.bytes for one in measured] == pytest.approx([2560, 2560])
    assert common_measure([measured[0], measured[1]._replace(bytes=None)])[0] == ""
    for other, word in (
        ({"text": "bad"}, "00c0ffee, bad"),
        ({"text": ""}, "unknown"),
        ({"bytes": 9e3}, "eval.batches"),
    ):
        measure, remark = common_measure([measured[0], measured[1]._replace(**other)])
        assert measure == "" and word in remark and "no best" in remark
    assert common_measure([measured[0], measured[0]._replace(text="bad")])[0] == ""
    same, other = measured[0]._replace(tokens=320), measured[0]._replace(data={"data.source": "b"})
    assert common_measure([measured[0]] * 2) == ("loss", "")
    assert common_measure([measured[0], None])[0] == "loss"
    for one, word in ((same, "eval.batches"), (other, "data.source")):
        measure, remark = common_measure([measured[0], one])
        assert measure == "" and word in remark and "no best" in remark


def test_of_a_runs_evaluations_those_on_other_samples_do_not_count(study):
    lines = [
        {"kind": "eval", "step": s, "suite": "loss", "loss": x, "samples": n}
        for s, x, n in ((1, 1.0, 32), (2, 3.0, 64))
    ]
    write_ledger(study.run_of(study.cells[0]), *lines)
    assert (study.results()[0].score, study.results()[0].best_loss) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [("recipe.toml", "layers = 4", "layers = 3"), ("study.json", '"key"', '"other"')],
)
def test_a_study_with_other_cells_or_damage_is_one_error(study, name, before, after):
    (study.path / name).write_text((study.path / name).read_text().replace(before, after))
    with pytest.raises(UserError, match=name):
        Study.open(study.path)


def fail(path, number):
    study = Study.open(path)
    study.set_status(study.cells[number], "failed", f"by task {number}")


def test_statuses_written_at_the_same_time_are_all_kept(tmp_path):
    study = Study.create(Recipe.load("quickstart"), ["run.seed=1:16:lin:16"], tmp_path / "study")
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(fail, [study.path] * 16, range(16)))
    assert [(r.state, r.reason) for r in study.results()] == [
        ("failed", f"by task {n}") for n in range(16)
    ]


def test_an_interruption_is_shown_but_leaves_the_cell_open(study):
    cell = study.cells[0]
    run = study.run_of(cell)

    def state(event="", attempt=0, step=0):
        if event:
            write_ledger(
                run,
                {"kind": "event", "step": step, "attempt": attempt, "event": event, "reason": "r"},
            )
        result = study.result(cell)
        return result.state, result.reason

    study.set_status(cell, "interrupted", "killed by signal 9")
    assert state() == ("interrupted", "killed by signal 9")
    write_ledger(run)
    run.heartbeat_path.touch()
    assert state("started") == ("running", "")
    run.heartbeat_path.unlink()
    assert state("failed", 0, 9) == ("failed", "r")
    assert state("resumed", 1, 5)[0] == "interrupted"  # killed after it was tried again
    assert state("finished", 1, 9) == ("finished", "")


@pytest.mark.parametrize(
    ("first", "last", "answer"),
    [
        (0.8, 1.1, False),
        (4.0, 5.0, False),
        (4.0, 5.1, True),
        (4.0, math.nan, True),
        (4.0, math.inf, True),
    ],
)
def test_one_rule_for_divergence(first, last, answer):
    assert diverged(first, last) == answer


@pytest.mark.parametrize(("lower", "winner"), [([], 1), (["f1"], 0)])
def test_winner_and_halving_go_by_the_measure_of_checkpoint_best(tmp_path, lower, winner):
    """The best F1 wins, though its loss is the worst; a suite can declare that less is better."""
    pytest.importorskip("optuna")
    recipe = Recipe.load("gpt-squad", ["checkpoint.best=squad.f1"])
    study = Study.create(recipe, ["optim.lr=1e-2,1e-3,1e-4"], tmp_path / "f1")
    for number, (loss, f1) in enumerate([(1.0, 20.0), (3.0, 80.0), (2.0, 40.0)]):
        run, line = study.run_of(study.cells[number]), {"kind": "eval", "step": 9}
        own = {"suite": "squad", "f1": f1, "lower": lower}
        scores = line | {"suite": "loss", "loss": loss}, line | own
        write_ledger(run, *scores, {"kind": "event", "event": "finished", "step": 9})
    best = study.winners().groups[0]
    assert best.assignment == study.cells[winner].assignment
    assert best.median == [20.0, 80.0][winner]
    assert study.results()[1].best_loss == 3.0
    halving = Halving(study)
    pruned = [bool(halving.prune(result)) for result in study.results()]
    assert pruned == [False, bool(lower), True]


def test_speed_is_work_divided_by_time(study):
    """Windows of 1 step at 1,000 and of 9 at 100 tokens/s, 100 ms a step: 190 in all, not the mean
    of the rates.
    """
    lines = [
        {"kind": "train", "loss": 4.0, "step_ms": 100.0, "step": s, "tokens_per_s": v}
        for s, v in ((1, 5.0), (2, 1000.0), (11, 100.0))
    ]
    write_ledger(study.run_of(study.cells[0]), *lines)
    assert study.results()[0].tokens_per_s == pytest.approx(190)
