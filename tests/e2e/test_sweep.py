"""A sweep: killed on the way, gone on with, one cell failing, and a table that is computed from the ledgers."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time

import pytest
from small_runs import corpus, settings

from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.study.study import Study, diverged

__all__ = ["corpus"]

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]


def command(corpus, folder, *more: str, axes=AXES) -> list[str]:
    shared = [s for s in settings(corpus, folder / "none", **{"train.steps": 6}) if not s.startswith("run.dir")]
    flags = [part for s in shared for part in ("--set", s)]
    return [
        sys.executable,
        "-m",
        "windlass",
        "sweep",
        "quickstart",
        *axes,
        "--dir",
        str(folder / "study"),
        *flags,
        *more,
    ]


@pytest.mark.dist
def test_a_killed_sweep_goes_on_and_leaves_finished_cells_alone(corpus, tmp_path):
    process = subprocess.Popen(command(corpus, tmp_path), stdout=subprocess.PIPE, text=True, start_new_session=True)
    first = tmp_path / "study"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (first / "study.json").is_file() and any(r.state == "finished" for r in Study.open(first).runs()):
            break
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    study = Study.open(first)
    done = {r.path: r.metrics_path.read_bytes() for r in study.runs() if r.state == "finished"}
    assert done
    again = subprocess.run(command(corpus, tmp_path, "--json", "--workers", "2"), capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    assert all(Run(path).metrics_path.read_bytes() == before for path, before in done.items())
    table = [result.row() for result in study.results()]
    assert [(r["optim.lr"], r["run.seed"], r["state"], r["step"]) for r in table] == [
        (0.01, 1, "finished", 6), (0.01, 2, "finished", 6), (0.001, 1, "finished", 6), (0.001, 2, "finished", 6)
    ]  # fmt: skip
    for row in table:
        losses = [x["loss"] for x in Run(row["run"]).lines("eval")]
        assert (row["eval_loss"], row["best_loss"]) == (losses[-1], min(losses))
    groups = study.groups()
    assert [group.seeds for group in groups] == ["2 seeds"] * 2
    assert groups[0].median == pytest.approx((table[0]["best_loss"] + table[1]["best_loss"]) / 2)
    best = study.winner()
    assert best is not None
    assert best.median == min(group.median for group in groups)
    assert f"optim.lr={best.assignment['optim.lr']}" in again.stderr
    listed = json.loads(again.stdout)
    assert [r["best_loss"] for r in listed] == [r["best_loss"] for r in table]


@pytest.mark.full
@pytest.mark.dist
def test_killed_in_the_middle_of_cells_the_same_command_at_once_resumes_them(corpus, tmp_path):
    axes = ["optim.lr=1e-2,1e-3"]
    long = ["--workers", "2", "--set", "train.steps=150", "--set", "checkpoint.every=5", "--set", "eval.every=0"]
    process = subprocess.Popen(command(corpus, tmp_path, *long, axes=axes), start_new_session=True)
    folder = tmp_path / "study"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if len({p.parent for p in folder.glob("runs/*/checkpoints/step-*")}) == 2:
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    again = subprocess.run(command(corpus, tmp_path, *long, axes=axes), capture_output=True, text=True)
    assert again.returncode == 0, again.stdout + again.stderr
    study = Study.open(folder)
    for cell in study.cells:
        run = study.run_of(cell)
        assert [x["step"] for x in run.lines("train")] == list(range(1, 151))
        events = [e["event"] for e in run.events]
        assert "resumed" in events
        assert events[-1] == "finished"


@pytest.mark.dist
def test_a_failing_cell_stays_visible_with_its_reason_and_stops_nobody(corpus, tmp_path):
    axes = ["model.dropout=0.0,0.1", "train.spike_sigmas=1,2"]
    study = Study.create(Recipe.load("quickstart"), axes, tmp_path / "other")
    with pytest.raises(UserError, match="another study"):
        Study.create(Recipe.load("quickstart"), ["optim.lr=1,2"], tmp_path / "other")
    study.set_status(study.cells[1], "failed", "exit code 1: no luck")
    assert (study.results()[1].state, study.results()[1].reason) == ("failed", "exit code 1: no luck")
    assert (study.results()[0].state, study.results()[0].reason) == ("waiting", "")
    axes = ["train.global_batch+train.micro_batch=8+8,8+4,6+4", "run.seed=1"]
    with pytest.raises(UserError, match="does not divide"):
        Study.create(Recipe.load("quickstart"), axes, tmp_path / "bad")
    damaged = command(
        corpus, tmp_path, axes=[f"data.max_tokens+data.dir=4000000+{corpus / 'data'},10+{tmp_path / 'small'}"]
    )
    done = subprocess.run(damaged, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout
    states = [(r.state, r.reason) for r in Study.open(tmp_path / "study").results()]
    assert states[0] == ("finished", "")
    assert states[1][0] == "failed"
    assert "bad input" in states[1][1]
    assert "bad input" in done.stdout


@pytest.mark.parametrize(
    ("first", "last", "answer"),
    [(0.8, 1.1, False), (4.0, 5.0, False), (4.0, 5.1, True), (4.0, math.nan, True), (4.0, math.inf, True)],
)
def test_one_rule_for_divergence(first, last, answer):
    assert diverged(first, last) == answer


@pytest.mark.full
@pytest.mark.dist
def test_each_model_of_a_grid_trains_its_own_compute_optimal_steps(corpus, tmp_path):
    short = ["train.steps=compute-optimal", "train.tokens_per_parameter=0.5"]
    flags = [part for text in short for part in ("--set", text)]
    done = subprocess.run(command(corpus, tmp_path, *flags, axes=["model.layers=1,2"]), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    study = Study.open(tmp_path / "study")
    found = [result.steps for result in study.results()]
    started = [study.run_of(cell).lines("event", event="started")[0] for cell in study.cells]
    assert found == [int(event["parameters"] * 0.5 / (8 * 16)) for event in started]
    assert found[0] < found[1]
    assert [result.step for result in study.results()] == found


@pytest.mark.full
@pytest.mark.dist
def test_real_cells_are_stopped_when_they_diverge_and_when_they_are_left_behind(corpus, tmp_path):
    pytest.importorskip("optuna")
    axes = ["optim.lr=3e-3,1e3,1e-7"]
    more = [
        "--set",
        "train.steps=400",
        "--set",
        "eval.every=4",
        "--set",
        "checkpoint.every=0",
        "--set",
        "train.grad_clip=0",
    ]
    told = ["--stop-diverged", "--halving"]
    done = subprocess.run(command(corpus, tmp_path, *more, *told, axes=axes), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    study = Study.open(tmp_path / "study")
    first, *others = [(r.state, r.reason) for r in study.results()]
    assert first == ("finished", "")
    assert all(state in ("diverged", "pruned") and reason for state, reason in others)
    assert all(result.step < 400 for result in study.results()[1:])


@pytest.mark.full
@pytest.mark.dist
def test_strategies_and_worlds_are_axes(corpus, tmp_path):
    axes = ["parallel.strategy+parallel.world=single+1,ddp+2,full_shard+2"]
    done = subprocess.run(command(corpus, tmp_path, axes=axes), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    study = Study.open(tmp_path / "study")
    started = [study.run_of(cell).lines("event", event="started")[0] for cell in study.cells]
    assert [(e["strategy"], e["world"]) for e in started] == [("single", 1), ("ddp", 2), ("full_shard", 2)]
