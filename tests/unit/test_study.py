"""A study's directory: what is written down is what counts."""

import math
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context

import numpy as np
import pytest
from report_fixtures import rows_of

from helpers import refused, write_ledger
from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.reports.answers import good
from windlass.reports.study import StudyView, cell_table
from windlass.study import study as studies
from windlass.study.comparable import common_measure
from windlass.study.numbers import BITS
from windlass.study.process import train_command
from windlass.study.runner import create_sweep
from windlass.study.study import Study

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]
QUICKSTART = Recipe.load("quickstart")
FINISHED = {"kind": "event", "event": "finished", "step": 9}


@pytest.fixture
def create(tmp_path):
    """Create the study of a grid, or add the grid's cells to it."""

    def make(axes, *settings):
        return Study.create(Recipe.load("quickstart", settings), axes, tmp_path / "study")

    return make


@pytest.fixture
def study(create):
    return create(AXES)


def labels(cells):
    return [cell.label for cell in cells]


def test_axes_are_stored_as_they_are_and_open_the_study_again(study, create, tmp_path):
    mapping = {"optim.lr": [1e-2, 1e-3], "run.seed": [1, 2]}
    for axes in (["optim.lr=0.01,0.001", "run.seed=1,2"], mapping):
        assert create(axes).cells == study.cells
    assert Study.open(study.path) == study
    rest = {"data.source": "a,b.txt", "optim.betas": [0.9, 0.95]}
    axes = {"optim.lr": np.array([1e-2, 1e-3])} | {key: [value] for key, value in rest.items()}
    other = Study.create(QUICKSTART, axes, tmp_path / "other")
    for cells in (other.cells, Study.open(other.path).cells):
        assert [cell.assignment for cell in cells] == [{"optim.lr": x} | rest for x in (1e-2, 1e-3)]
    listed = Study.create(QUICKSTART, [{"optim.lr": np.float64(1e-2)}], tmp_path / "own")
    assert type(listed.cells[0].assignment["optim.lr"]) is float


def test_the_command_of_a_cell_trains_into_its_directory(tmp_path):
    source, path = 'C:\\new "text", it\'s.txt', tmp_path / 'my "study", it\'s \\n [1]'
    study = Study.create(QUICKSTART, {"data.source": [source]}, path)
    words = train_command(study, study.cells[0])
    source_words = words[words.index("train") + 1 :]
    trained = Recipe.load(source_words[0], source_words[1:])
    assert trained.run_dir == study.run_of(study.cells[0]).path
    assert trained.data.source == source


def finish(study, *losses, **fields):
    for cell, loss in zip(study.cells, losses, strict=False):
        line = {"kind": "eval", "step": 9, "suite": "loss", "loss": loss, "tokens": 640}
        write_ledger(study.run_of(cell), line | {"samples": 10} | fields, FINISHED)


def test_a_study_grows_by_more_values_and_by_another_axis(study, create):
    finish(study, 3.0, 2.0, 2.5, 2.6)
    before = {cell.key: cell.directory for cell in study.cells}
    more = create(["optim.lr=1e-3,3e-3", "run.seed=1"])
    assert labels(more.cells[4:]) == ["lr=0.003 seed=1"]
    width = QUICKSTART.model.width
    wide = create([f"model.width={width},64", "optim.lr=1e-2", "run.seed=2"])
    assert [c.assignment["model.width"] for c in wide.cells] == [width] * 5 + [64]
    assert {c.key: c.directory for c in wide.cells[:4]} == before
    assert [r.state for r in wide.results()] == ["finished"] * 4 + ["waiting"] * 2
    assert wide.values["model.width"] == [width, 64]
    again = Study.create(Study.open(study.path).recipe, [], study.path)
    assert again == wide == Study.open(study.path)


def test_the_best_run_and_a_table_of_the_cells(study, tmp_path):
    with refused(str(study.path), "no cell has finished", "to_pandas()"):
        study.best()
    finish(study, 3.0, 2.0, 2.6, 2.7)
    assert study.best().path == study.run_of(study.cells[1]).path
    table = study.to_pandas()
    assert list(table["best_loss"]) == [3.0, 2.0, 2.6, 2.7]
    assert set(table["state"]) == {"finished"} and table.index.name == "cell"
    with refused("no best cell", "seed"):
        Study.create(QUICKSTART, ["run.seed=1,2"], tmp_path / "seeds").best()


def test_one_seed_is_not_ranked_before_medians(study, create):
    finish(create(["optim.lr=3e-3", "run.seed=1"]), 3.0, 2.0, 2.6, 2.7, 1.0)
    ((best,), _) = Study.open(study.path).winners()
    assert (best.label, best.median) == ("lr=0.01", 2.5)


def test_a_study_has_one_recipe_but_for_what_changes_no_result(study, create):
    grown = create(AXES, "eval.every=7", "parallel.device=cpu")
    assert [cell.key for cell in grown.cells] == [cell.key for cell in study.cells]
    assert (grown.recipe.eval.every, grown.recipe.parallel.device) == (7, "cpu")
    for axes in (AXES, []):
        with refused("train.steps = ", "not 7", "axis", "path=DIR"):
            create(axes, "train.steps=7")
    with refused("preset", "path=DIR"):
        Study.create(Recipe.load("c4-30m"), AXES, study.path)
    with refused("optim.lr=1e-2,1e-3"):
        Study.create(QUICKSTART, [], study.path / "nothing")


def test_the_ranks_of_a_cell_are_stored(study):
    two = Study.create(QUICKSTART, AXES, study.path, world=2)
    again = Study.create(QUICKSTART, AXES, study.path)
    assert two == again == Study.open(study.path) and again.world == 2
    assert again.ranks_of(again.cells[0]) == 2
    assert again.winner_command({}).endswith("--world 2")
    preset = study.path.with_name("preset")
    assert create_sweep("c4-29m-grid", path=preset, world=4).world == 4
    assert create_sweep("c4-29m-grid", path=preset).world == 4, "the preset has 2"
    own = Study.create(QUICKSTART, ["parallel.world=1,4"], study.path.with_name("own"), world=2)
    assert [own.ranks_of(cell) for cell in own.cells] == [1, 4]


def test_a_job_has_the_ranks_of_its_study(tmp_path, call):
    stored = Study.create(QUICKSTART, ["run.seed=1,2"], tmp_path / "stored", world=2)
    axis = Study.create(QUICKSTART, ["run.seed=1,2", "parallel.world=2"], tmp_path / "axis")
    words, scripts = ["--scheduler", "slurm", "--gpus-per-node", "4", "--dry-run"], list[str]()
    for study in (stored, axis):
        script, _ = call("submit", study.path, *words)
        scripts.append(script.replace(study.path.name, "NAME"))
        for option in ("--nodes", "--per-host"):  # the study has both
            assert f"{option} 2" in call("submit", study.path, *words, option, "2", code=2)[1]
    assert scripts[0] == scripts[1] and "--launch" not in scripts[0]


def test_a_study_stays_of_its_kind(study, tmp_path):
    with refused(str(study.path), "a sweep", "path=DIR"):
        Study.create(QUICKSTART, ["optim.lr=5e-4"], study.path, kind="ladder")
    ladder = Study.create(QUICKSTART, AXES, tmp_path / "ladder", kind="ladder")
    assert Study.create(QUICKSTART, (), ladder.path).kind == "ladder"


def test_a_strategy_that_is_the_recipes_own_is_the_cell_that_is_there(study, create):
    strategies = create(["parallel.strategy=auto,ddp", *AXES])
    assert len(strategies.cells) == 8 and strategies.cells[:4] != study.cells
    assert [c.key for c in strategies.cells[:4]] == [c.key for c in study.cells]
    assert all(c.assignment["parallel.strategy"] == "ddp" for c in strategies.cells[4:])


@pytest.mark.parametrize(
    ("axes", "best", "word"),
    [
        ("model.width=32,64", [], "model.width"),
        ("parallel.world=1,2", [], "parallel.world"),
        ("run.seed=1,2", [], "seed"),
        ("optim.lr=1e-2,1e-3", ["lr=0.001"], ""),
        ("optim.lr+train.global_batch=1e-2+8,1e-3+16", [], "optim.lr has the train.global_"),
        ("optim.lr=1e-2,1e-3 model.width=32,64", ["lr=0.01 width=64", "lr=0.001 width=32"], ""),
    ],
)
def test_the_best_is_named_where_a_lower_loss_decides(create, axes, best, word):
    study = create(axes.split())
    finish(study, 4.0, 2.5, 3.0, 3.5)
    winners, remark = study.winners()
    assert (labels(winners), word in remark) == (best, True)


def test_tokenizers_are_compared_in_bits_per_byte(create):
    """By hand: 4.0 nats at 4 bytes a token are fewer bits than 2.0 nats at one."""
    study = create(["data.tokenizer=byte,gpt2"], "model.vocab=0")
    assert study.measure == BITS
    for cell, loss, tokens in zip(study.cells, (2.0, 4.0), (2560, 640), strict=True):
        started = {"kind": "event", "event": "started", "data": {"val": {"text": "00c0ffee"}}}
        write_ledger(study.run_of(cell), started)
        bits = loss * tokens / 2560 / math.log(2)
        finish(replace(study, cells=[cell]), loss, tokens=tokens, bits_per_byte=bits)
    winners, remark = study.winners()
    assert winners[0].assignment == {"data.tokenizer": "gpt2"} and "bytes" in remark
    assert winners[0].median == pytest.approx(4.0 / 4 / math.log(2))
    first, second = (result.validation for result in study.results())
    assert [first.bytes, second.bytes] == pytest.approx([2560, 2560])
    assert common_measure([first, first, None]) == ("loss", "")
    for other, word in (
        (second._replace(bytes=None), "bits per byte"),
        (second._replace(text=""), "hash"),
        (second._replace(bytes=9e3), "eval.batches"),
        (first._replace(text="bad"), "00c0ffee, bad"),
        (first._replace(tokens=320), "eval.batches"),
        (first._replace(data={"data.source": "b"}), "data.source"),
    ):
        measure, remark = common_measure([first, other])
        assert measure == "" and word in remark and "no best" in remark


def test_an_untrained_model_does_not_win(create):
    study = create(["optim.lr=1e-2,1e-3"])
    for cell in study.cells:
        line = {"kind": "eval", "suite": "loss", "tokens": 640, "samples": 10}
        write_ledger(study.run_of(cell), line | {"step": 0, "loss": 2.0})
        (study.run_of(cell).path / "recipe.toml").write_text(cell.recipe.toml())
    finish(study, 2.8, 2.1)
    assert labels(study.winners().groups) == ["lr=0.001"]
    scores = [(r.numbers.score, r.numbers.best_loss) for r in study.results()]
    assert scores == [(2.8, 2.8), (2.1, 2.1)]
    seen = StudyView(study.path)
    assert [row["score"] for row in rows_of(cell_table(seen))] == [2.8, 2.1]
    assert [view.values["best_eval_loss"] for view in seen.views] == [2.8, 2.1]
    assert good(seen.views[0]).remark == "Lower before training: 2.0000"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("recipe.toml", "layers = 4", "layers = 3"),
        ("study.json", '"assignment"', '"assigned"'),
        ("study.json", "{", "["),
    ],
)
def test_a_study_with_other_cells_or_damage_is_one_error(study, name, before, after):
    (study.path / name).write_text((study.path / name).read_text().replace(before, after))
    with pytest.raises(UserError, match=name):
        Study.open(study.path)


def fail(path, number):
    study = Study.open(path)
    study.set_failure(study.cells[number], f"by task {number}")


def test_failures_written_at_the_same_time_are_all_kept(create):
    study = create(["run.seed=1:16:lin:16"])
    with ProcessPoolExecutor(4, mp_context=get_context("fork")) as pool:
        list(pool.map(fail, [study.path] * 16, range(16)))
    expected = [("failed", f"by task {n}") for n in range(16)]
    assert [(r.state, r.reason) for r in study.results()] == expected


def test_an_interruption_is_shown_but_leaves_the_cell_open(study):
    cell = study.cells[0]
    run = study.run_of(cell)

    def state(event="", attempt=0, step=0):
        if event:
            line = {"kind": "event", "step": step, "attempt": attempt, "event": event}
            write_ledger(run, line | {"reason": "r"})
        result = study.result(cell)
        return result.state, result.reason

    assert state() == ("waiting", "")
    write_ledger(run)
    run.heartbeat_path.touch()
    assert state("started") == ("running", "")
    run.heartbeat_path.unlink()
    assert state("failed", 0, 9) == ("failed", "r")
    assert state("resumed", 1, 5)[0] == "interrupted"  # killed after it was tried again
    assert state("finished", 1, 9) == ("finished", "")


def test_a_run_that_ends_while_it_is_read_is_not_interrupted(study, monkeypatch):
    run = study.run_of(study.cells[0])
    write_ledger(run, {"kind": "event", "event": "started", "step": 0})
    run.heartbeat_path.touch()
    real = studies.read_numbers

    def read(*words):
        numbers = real(*words)
        run.heartbeat_path.unlink()
        write_ledger(run, FINISHED)
        return numbers

    monkeypatch.setattr(studies, "read_numbers", read)
    assert study.result(study.cells[0]).state == "running"
    monkeypatch.setattr(studies, "read_numbers", real)
    assert study.result(study.cells[0]).state == "finished"


@pytest.mark.parametrize(("lower", "winner"), [([], 1), (["f1"], 0)])
def test_the_winner_goes_by_the_measure_of_checkpoint_best(tmp_path, lower, winner):
    recipe = Recipe.load("gpt-squad", ["checkpoint.best=squad.f1"])
    study = Study.create(recipe, ["optim.lr=1e-2,1e-3,1e-4"], tmp_path / "f1")
    for cell, loss, f1 in zip(study.cells, (1.0, 3.0, 2.0), (20.0, 80.0, 40.0), strict=True):
        line = {"kind": "eval", "step": 9}
        own = line | {"suite": "squad", "f1": f1, "lower": lower}
        write_ledger(study.run_of(cell), line | {"suite": "loss", "loss": loss}, own, FINISHED)
    best = study.winners().groups[0]
    assert best.assignment == study.cells[winner].assignment
    assert best.median == [20.0, 80.0][winner]
    assert study.results()[1].numbers.best_loss == 3.0
