"""What `windlass sweep` shows: the table, its last frame, the end."""

import io
import json

import pytest
from rich.console import Console

from helpers import write_ledger
from windlass.estimate.calendar import resolve_steps
from windlass.recipe import Recipe
from windlass.study.runner import Progress, cells_table
from windlass.study.study import Study


@pytest.fixture
def study(tmp_path):
    axes = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]
    return Study.create(Recipe.load("quickstart"), axes, tmp_path / "study")


def finish(study, number, loss):
    speed = {"tokens": 819_200, "step_ms": 9.0, "tokens_per_s": 123_456.7}
    write_ledger(
        study.run_of(study.cells[number]),
        {"kind": "event", "event": "started", "steps": 400, "world": 2},
        {"kind": "train", "step": 400, "loss": loss, **speed},
        {"kind": "eval", "step": 400, "suite": "loss", "loss": loss},
        {"kind": "summary", "step": 400, "device_hours": 0.01234},
        {"kind": "event", "step": 400, "event": "finished"},
    )


def drawn(study, width=110):
    out = io.StringIO()
    table = cells_table(study, study.results(), width)
    Console(file=out, width=width, highlight=False).print(table)
    return out.getvalue()


def test_the_table(study):
    finish(study, 0, 2.5)
    row = next(line for line in drawn(study).splitlines() if "finished" in line)
    assert row.split() == "1 0.01 1 finished 400/400 2.5000 2.5000 2.5000 123k 0.0123".split()


def test_a_cell_that_trains_shows_its_step_and_time_left(study):
    run = study.run_of(study.cells[0])
    line = {"kind": "train", "loss": 2.0, "step_ms": 9.0}
    lines = (line | {"step": step, "tokens": step} for step in (100, 200, 300))
    # a second between two lines
    write_ledger(run, {"kind": "event", "event": "started", "steps": 400}, *lines)
    run.heartbeat_path.touch()
    row = next(line for line in drawn(study).splitlines() if "running" in line)
    assert row.split()[3:6] == ["running", "300/400", "1.0s"]
    out = io.StringIO()
    with Progress(out) as progress:
        for _ in range(2):
            progress.show(study)
    assert out.getvalue() == "[1/4] lr=0.01 seed=1: running\n"


def test_the_steps_of_cells_that_have_not_begun(study, tmp_path):
    """Worked out cell by cell where the grid changes the model; 4,576 are those of c4-30m as it is."""
    assert f"0/{Recipe.load('quickstart').train.steps}" in drawn(study)
    base = Recipe.load("c4-30m")
    layers = base.model.layers
    optimal = Study.create(base, [f"model.layers={layers},{2 * layers}"], tmp_path / "optimal")
    steps = [result.steps for result in optimal.results()]
    assert steps == [4576, resolve_steps(base.replace(f"model.layers={2 * layers}"))]
    assert steps[1] > steps[0]
    unknown = Recipe.load("c4-30m", ["model.vocab=0", "data.tokenizer=char"])
    assert Study.create(unknown, ["run.seed=1,2"], tmp_path / "unknown").results()[0].steps is None


def test_the_end_names_the_command_that_trains_the_winner(tmp_path, call):
    axes, folder = ["optim.lr=1e-2,1e-3", "optim.betas=[0.9,0.95],[0.9,0.99]"], tmp_path / "study"
    study = Study.create(Recipe.load("quickstart", ["train.steps=10"]), axes, folder)
    for number in range(4):
        finish(study, number, 3.0 - number / 10)
    options = ["--set", "train.steps=10", "--dir", folder]
    words = ["sweep", "quickstart", *axes, *options]
    out, _ = call(*words)
    assert "\nbest: " in out
    winner = (
        f"windlass train {folder}/recipe.toml optim.lr=0.001 'optim.betas=[0.9, 0.99]' --world 2"
    )
    assert f"  {winner}\n" in out
    out, errors = call(*words, "--json")
    assert [row["best_loss"] for row in json.loads(out)] == [3.0, 2.9, 2.8, 2.7]
    assert winner in errors
