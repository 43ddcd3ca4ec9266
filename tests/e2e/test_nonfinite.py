"""A loss or gradient that is not finite, a loss spike: stop, skip or rewind, counted step by step."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from small_runs import corpus, recipe_of, stopped, trainers

from helpers import refused
from windlass import train
from windlass.errors import RunFailed
from windlass.run import Run
from windlass.training import setup

__all__ = ["corpus", "trainers"]

NAN, JUMP = float("nan"), -40.0  # factors of the weights: with the second the loss jumps up
SPIKES = {"train.steps": 60, "train.spike_sigmas": 50.0}


@pytest.fixture
def spoil(trainers):
    """A callback that multiplies the weights after a step, once or each time."""

    def after(step: int, factor: float, once: bool = True):
        done: list[int] = []

        def on_step(now: Any) -> None:
            if now.step == step and not (once and done):
                done.append(now.step)
                with torch.no_grad():
                    for parameter in trainers[-1].model.parameters():
                        parameter.mul_(factor)

        return on_step

    return after


def events(run: Run, event: str, field: str) -> list[tuple]:
    return [(e["step"], e[field]) for e in run.events if e["event"] == event]


def test_a_nonfinite_step_stops_the_run_with_step_and_rank(corpus, tmp_path, spoil):
    recipe, run = recipe_of(corpus, tmp_path / "run"), Run(tmp_path / "run")
    with refused("step 8:", "loss not finite on rank 0", "optim.lr", "train.on_nonfinite", error=RunFailed):
        train(recipe, on_step=spoil(7, NAN))
    assert run.state == "failed" and ["step 8" in reason for _, reason in events(run, "failed", "reason")] == [True]
    assert train(recipe).state == "finished", "the last checkpoint is from before"


def test_a_bad_step_that_is_only_seen_later_is_in_no_checkpoint(corpus, tmp_path, spoil, monkeypatch):
    """As on CUDA, forced here: between logs the update is called off on the device, and a save looks before it saves."""
    monkeypatch.setattr(setup, "check_is_deferred", lambda *_: True)
    with refused("step 5:", "loss not finite", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **{"telemetry.every": 100, "eval.every": 0}), on_step=spoil(4, NAN))
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_rewind_goes_back_and_leaves_the_samples_out(corpus, tmp_path, spoil):
    run = train(recipe_of(corpus, tmp_path / "run", **{"train.on_nonfinite": "rewind"}), on_step=spoil(7, NAN))
    assert events(run, "rewound", "left_out") == [(6, [48, 64])]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))
    saved = json.loads((run.checkpoints_dir / "step-00000012" / "state.json").read_text())
    assert saved["skipped"] == [[48, 64]] and run.summary["attempts"] == 2


def test_a_rewind_that_does_not_help_ends(corpus, tmp_path, spoil):
    recipe = recipe_of(corpus, tmp_path / "run", **{"train.on_nonfinite": "rewind", "train.steps": 5})
    with refused("returned to step 3 3 times", "checkpoint.resume=STEP", "optim.lr", error=RunFailed):
        train(recipe, on_step=spoil(4, NAN, once=False))


def test_a_rewind_before_the_first_save_of_a_lineage_goes_back_to_its_start(corpus, tmp_path, spoil):
    """The newest commit in the directory is one of the lineage that was left."""
    more = {"checkpoint.keep_last": 10, "train.on_nonfinite": "rewind"}
    recipe, steps = recipe_of(corpus, tmp_path / "run", **more), []
    stopped(recipe, 9)
    spoil_4 = spoil(4, NAN)
    back = recipe.replace("checkpoint.resume='3'")
    run = train(back, on_step=lambda now: (steps.append(now.step), spoil_4(now)))
    assert [step for step, _ in events(run, "rewound", "reason")] == [3]
    assert steps == [4, *range(4, 13)]


def test_skips_are_counted_and_many_in_a_row_stop(corpus, tmp_path, spoil):
    """What is not finite is no measure of spikes, and hinders no save."""
    more = {"train.on_spike": "skip", "train.on_nonfinite": "skip", "train.max_skips": 3, "checkpoint.every": 1}
    with refused("3 updates in a row", "train.max_skips", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **more), on_step=spoil(7, NAN))
    run = Run(tmp_path / "run")
    assert events(run, "skipped", "in_a_row") == [(8, 1), (9, 2), (10, 3)] and not events(run, "save_failed", "reason")
    saved = json.loads((run.checkpoints_dir / "step-00000008" / "state.json").read_text())
    assert len(saved["spike_window"]) == 7 and saved["updates_skipped"] == 1


def test_a_loss_spike_stops_the_run_or_rewinds_it(corpus, tmp_path, spoil):
    recipe = recipe_of(corpus, tmp_path / "run", **SPIKES | {"train.on_spike": "stop", "telemetry.every": 7})
    with refused("step 32:", "spike", "train.on_spike", error=RunFailed):
        train(recipe, on_step=spoil(31, JUMP))
    back = recipe.replace("train.on_spike=rewind", "train.steps=40", f"run.dir='{tmp_path / 'back'}'")
    assert [step for step, _ in events(train(back, on_step=spoil(31, JUMP)), "rewound", "reason")] == [30]


def test_spikes_that_do_not_end_end_the_run(corpus, tmp_path, spoil):
    """A skipped spike leaves the weights as they are and is no measure for the next one: it would be skipped for ever."""
    more = SPIKES | {"train.on_spike": "skip", "train.max_skips": 4}
    with refused("4 updates in a row", "train.spike_sigmas", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **more), on_step=spoil(31, JUMP))
    assert events(Run(tmp_path / "run"), "spike", "in_a_row") == [(32, 1), (33, 2), (34, 3), (35, 4)]


def test_fp16_trains_on_a_cpu(corpus, tmp_path):
    lines = train(recipe_of(corpus, tmp_path / "run", **{"train.precision": "fp16"})).lines("train")
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["loss_scale"] >= 1
