"""What ends a run early or bends its way: non-finite steps, signals, extensions, branches."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_resume import corpus, curve, settings

from helpers import best_step, kept
from windlass.errors import RunFailed, Stopped, UserError
from windlass.optim.schedule import factor
from windlass.recipe import Horizon, Recipe
from windlass.run import Run
from windlass.training import train
from windlass.training.session import Session
from windlass.training.step import Step

__all__ = ["corpus"]


@pytest.fixture
def opened(monkeypatch) -> list[Session]:
    """The sessions that were opened, the newest last."""
    found: list[Session] = []
    original = Session.open
    monkeypatch.setattr(Session, "open", lambda self, *a: (found.append(self), original(self, *a))[1])
    return found


@pytest.fixture
def poison(opened):
    """A callback that makes the weights not finite after a step, once."""

    def after(step: int):
        fired = []

        def on_step(done: int, _: object) -> None:
            if done == step and not fired:
                fired.append(done)
                with torch.no_grad():
                    next(iter(opened[-1].model.parameters())).fill_(float("nan"))

        return on_step

    return after


def test_a_nonfinite_step_stops_the_run_with_step_and_rank(corpus, tmp_path, poison):
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run"))
    with pytest.raises(RunFailed, match=r"step 8: loss not finite on rank 0 .*update was not made"):
        train(recipe, on_step=poison(7))
    run = Run(tmp_path / "run")
    assert run.state == "failed"
    assert "step 8" in next(e for e in run.events if e["event"] == "failed")["reason"]
    assert train(recipe).state == "finished", "the last checkpoint is from before"


def test_a_bad_step_that_is_only_seen_later_is_in_no_checkpoint(corpus, tmp_path, poison, monkeypatch):
    """As on CUDA, forced here: between logs the update is called off on the device, and a save looks before it saves."""
    monkeypatch.setattr("windlass.training.session.Step", lambda *a: Step(*a, deferred=True))
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **{"telemetry.every": 100, "eval.every": 0}))
    with pytest.raises(RunFailed, match="step 5: loss not finite"):
        train(recipe, on_step=poison(4))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_rewind_goes_back_and_leaves_the_samples_out(corpus, tmp_path, poison):
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **{"train.on_nonfinite": "rewind"}))
    run = train(recipe, on_step=poison(7))
    back = [e for e in run.events if e["event"] == "rewound"]
    assert [(e["step"], e["left_out"]) for e in back] == [(6, [48, 64])]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))
    counters = json.loads((run.checkpoints_dir / "step-00000012" / "state.json").read_text())
    assert counters["skipped"] == [[48, 64]]
    assert run.summary["attempts"] == 2


def test_a_rewind_that_does_not_help_ends(corpus, tmp_path, opened):
    recipe = Recipe.load(
        "quickstart", settings(corpus, tmp_path / "run", **{"train.on_nonfinite": "rewind", "train.steps": 5})
    )

    def on_step(done, _):
        if done == 4:
            with torch.no_grad():
                next(iter(opened[-1].model.parameters())).fill_(float("nan"))

    with pytest.raises(RunFailed, match="went back to step 3 3 times"):
        train(recipe, on_step=on_step)


def test_skips_are_counted_and_many_in_a_row_stop(corpus, tmp_path, poison):
    overrides = settings(corpus, tmp_path / "run", **{"train.on_nonfinite": "skip", "train.max_skips": 3})
    with pytest.raises(RunFailed, match="3 updates in a row were skipped"):
        train(Recipe.load("quickstart", overrides), on_step=poison(7))
    skipped = [e for e in Run(tmp_path / "run").events if e["event"] == "skipped"]
    assert [(e["step"], e["in_a_row"]) for e in skipped] == [(8, 1), (9, 2), (10, 3)]


@pytest.mark.parametrize("policy", ["skip", "rewind", "stop"])
def test_a_loss_spike_has_a_policy(corpus, tmp_path, opened, policy):
    more = {"train.on_spike": policy, "train.steps": 40, "telemetry.every": 7, "train.spike_sigmas": 50.0}
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **more))

    def on_step(done, _):
        if done == 31 and not any(e.get("event") in ("spike", "rewound") for e in Run(tmp_path / "run").events):
            with torch.no_grad():
                for parameter in opened[-1].model.parameters():
                    parameter.mul_(-40.0)

    if policy == "stop":
        with pytest.raises(RunFailed, match=r"step 32: the loss .* is a spike"):
            train(recipe, on_step=on_step)
        return
    events = [(e["event"], e["step"]) for e in train(recipe, on_step=on_step).events]
    assert ("rewound", 30) in events if policy == "rewind" else ("spike", 32) in events


def test_spikes_that_do_not_end_end_the_run(corpus, tmp_path, opened):
    """A skipped spike is no measure for the next one, so a loss that stays up would be skipped for ever."""
    more = {"train.on_spike": "skip", "train.steps": 60, "train.spike_sigmas": 50.0, "train.max_skips": 4}

    def on_step(done, _):
        if done == 31:
            with torch.no_grad():
                for parameter in opened[-1].model.parameters():
                    parameter.mul_(-40.0)

    with pytest.raises(RunFailed, match="the 4th in a row"):
        train(Recipe.load("quickstart", settings(corpus, tmp_path / "run", **more)), on_step=on_step)
    spikes = [(e["step"], e["in_a_row"]) for e in Run(tmp_path / "run").events if e["event"] == "spike"]
    assert spikes == [(32, 1), (33, 2), (34, 3), (35, 4)]


def test_a_loss_that_is_not_finite_is_no_measure_of_spikes_and_hinders_no_save(corpus, tmp_path, poison):
    more = {"train.on_spike": "skip", "train.on_nonfinite": "skip", "train.max_skips": 3, "checkpoint.every": 1}
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **more))
    with pytest.raises(RunFailed, match="3 updates in a row were skipped"):
        train(recipe, on_step=poison(7))
    run = Run(tmp_path / "run")
    assert not [e for e in run.events if e["event"] == "save_failed"]
    counters = json.loads((run.checkpoints_dir / "step-00000008" / "state.json").read_text())
    assert len(counters["spike_window"]) == 7 and counters["updates_skipped"] == 1


def test_fp16_trains_on_a_cpu(corpus, tmp_path):
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **{"train.precision": "fp16"}))
    lines = train(recipe).lines("train")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["loss_scale"] >= 1


@pytest.mark.dist
@pytest.mark.parametrize(("world", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGUSR1)])
def test_a_signal_saves_the_same_step_on_every_rank_and_exits_75(corpus, tmp_path, world, number):
    overrides = settings(
        corpus, tmp_path / "run", **{"train.steps": 100_000, "checkpoint.every": 100_000, "eval.every": 0}
    )
    command = [sys.executable, "-m", "windlass", "train", "quickstart", *overrides, "--world", str(world)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    run = Run(tmp_path / "run")
    deadline = time.monotonic() + 120
    while len(run.lines("train")) < 3 and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(number)
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 75, said
    assert run.state == "preempted"
    last = run.lines("train")[-1]["step"]
    assert [p.name for p in sorted(run.checkpoints_dir.glob("step-*"))] == [f"step-{last:08d}"]
    assert "the same command goes on from there" in said
    assert "Traceback" not in said


def test_an_extended_wsd_run_goes_back_to_its_plateau(corpus, tmp_path):
    short = settings(corpus, tmp_path / "run", **{"optim.schedule.decay": 4, "checkpoint.keep_last": 20})
    recipe = Recipe.load("quickstart", short)
    train(recipe)
    longer = train(recipe, extend_to=20)
    assert longer.state == "finished"
    resumed = [e for e in longer.events if e.get("extended_from")]
    assert [(e["step"], e["extended_from"]) for e in resumed] == [(6, 12)], "the decay began at step 8"
    horizon, schedule = Horizon(20, 44, 8), recipe.optim.schedule
    rates = [line["lr"] for line in longer.lines("train")]
    assert rates == [recipe.optim.lr * factor(schedule, horizon, step) for step in range(20)]
    whole = train(recipe.with_overrides("train.steps=20", f"run.dir='{tmp_path / 'whole'}'"))
    assert curve(longer.path) == curve(whole.path), "as if the run had been made that long"
    with pytest.raises(UserError, match="another recipe"):
        train(recipe)
    assert train(recipe, extend_to=20).state == "finished", "the same command again finds the run finished"


def test_a_decay_branches_from_the_plateau(corpus, tmp_path):
    flat = settings(corpus, tmp_path / "flat", **{"optim.schedule.kind": "constant"})
    train(Recipe.load("quickstart", flat))
    branch = settings(corpus, tmp_path / "branch", **{"train.steps": 9, "optim.schedule.decay": 3})
    run = train(Recipe.load("quickstart", branch), branch_from=f"{tmp_path / 'flat'}@6")
    assert next(e["event"] for e in run.events) == "branched"
    assert [line["step"] for line in run.lines("train")] == [7, 8, 9]
    assert [round(line["lr"] / 3e-3, 4) for line in run.lines("train")] == [1.0, 0.6667, 0.3333]
    assert run.lines("train")[0]["loss"] == Run(tmp_path / "flat").lines("train")[6]["loss"]
    for bad, says in (
        (f"{tmp_path / 'flat'}@5", "no checkpoint of step 5"),
        ("nowhere@3", "no run directory"),
        ("x", "RUN@STEP"),
    ):
        with pytest.raises(UserError, match=says):
            train(Recipe.load("quickstart", [*branch, f"run.dir='{tmp_path / 'other'}'"]), branch_from=bad)
    with pytest.raises(UserError, match="keeps model, data, seed and batch"):
        other = Recipe.load("quickstart", [*branch, f"run.dir='{tmp_path / 'other'}'", "model.width=32"])
        train(other, branch_from=f"{tmp_path / 'flat'}@6")


def test_the_best_checkpoint_outlives_the_last_ones(corpus, tmp_path):
    overrides = settings(
        corpus, tmp_path / "run", **{"checkpoint.keep_last": 1, "eval.every": 1, "checkpoint.every": 1}
    )
    run = train(Recipe.load("quickstart", overrides))
    losses = {line["step"]: line["loss"] for line in run.lines("eval") if line["step"] > 0}
    best = min(losses, key=lambda step: losses[step])
    assert best_step(run) == best and set(kept(run)) == {best, 12}
    assert run.summary["best_step"] == best


def test_a_secret_in_the_environment_appears_in_no_artefact(corpus, tmp_path):
    canary = "canary-5f1d3a0c77"
    overrides = settings(corpus, tmp_path / "run", **{"train.steps": 2})
    environment = {**os.environ, "WANDB_API_KEY": canary, "HF_TOKEN": canary, "MY_SECRET_KEY": canary}
    subprocess.run(
        [sys.executable, "-m", "windlass", "train", "quickstart", *overrides],
        check=True,
        env=environment,
        capture_output=True,
    )
    files = [p for p in (tmp_path / "run").rglob("*") if p.is_file()]
    assert len(files) > 5
    assert [p for p in files if canary.encode() in p.read_bytes()] == []


def test_a_full_directory_that_is_no_run_is_left_alone(corpus, tmp_path):
    (tmp_path / "mine").mkdir()
    Path(tmp_path / "mine" / "thesis.tex").write_text("ten days of work")
    with pytest.raises(UserError, match="not empty"):
        train(Recipe.load("quickstart", settings(corpus, tmp_path / "mine")))
    with pytest.raises(Stopped):
        train(Recipe.load("quickstart", settings(corpus, tmp_path / "other")), stop_at=1)
