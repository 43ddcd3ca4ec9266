"""A loss or gradient that is not finite, a loss spike: stop, skip or rewind, counted step by step."""

from __future__ import annotations

import json

import pytest
import torch
from small_runs import corpus, recipe_of, says, trainers

from windlass import train
from windlass.errors import RunFailed, Stopped
from windlass.run import Run
from windlass.training import setup

__all__ = ["corpus", "trainers"]


@pytest.fixture
def poison(trainers):
    """A callback that makes the weights not finite after a step, once or each time."""

    def after(step: int, once: bool = True):
        fired = []

        def on_step(done: int, _: object) -> None:
            if done == step and not (once and fired):
                fired.append(done)
                with torch.no_grad():
                    next(iter(trainers[-1].model.parameters())).fill_(float("nan"))

        return on_step

    return after


@pytest.fixture
def spike(trainers):
    """A callback that makes the loss jump up after a step, once or each time."""

    def after(step: int, once: bool = True):
        fired = []

        def on_step(done: int, _: object) -> None:
            if done == step and not (once and fired):
                fired.append(done)
                with torch.no_grad():
                    for parameter in trainers[-1].model.parameters():
                        parameter.mul_(-40.0)

        return on_step

    return after


def test_a_nonfinite_step_stops_the_run_with_step_and_rank(corpus, tmp_path, poison):
    recipe = recipe_of(corpus, tmp_path / "run")
    with pytest.raises(RunFailed) as error:
        train(recipe, on_step=poison(7))
    assert says(error, "step 8:", "loss not finite on rank 0", "optim.lr", "train.on_nonfinite")
    run = Run(tmp_path / "run")
    assert run.state == "failed"
    assert ["step 8" in e["reason"] for e in run.events if e["event"] == "failed"] == [True]
    assert train(recipe).state == "finished", "the last checkpoint is from before"


def test_a_bad_step_that_is_only_seen_later_is_in_no_checkpoint(corpus, tmp_path, poison, monkeypatch):
    """As on CUDA, forced here: between logs the update is called off on the device, and a save looks before it saves."""
    monkeypatch.setattr(setup, "check_is_deferred", lambda *_: True)
    recipe = recipe_of(corpus, tmp_path / "run", **{"telemetry.every": 100, "eval.every": 0})
    with pytest.raises(RunFailed) as error:
        train(recipe, on_step=poison(4))
    assert says(error, "step 5:", "loss not finite")
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_rewind_goes_back_and_leaves_the_samples_out(corpus, tmp_path, poison):
    run = train(recipe_of(corpus, tmp_path / "run", **{"train.on_nonfinite": "rewind"}), on_step=poison(7))
    back = [e for e in run.events if e["event"] == "rewound"]
    assert [(e["step"], e["left_out"]) for e in back] == [(6, [48, 64])]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))
    counters = json.loads((run.checkpoints_dir / "step-00000012" / "state.json").read_text())
    assert counters["skipped"] == [[48, 64]]
    assert run.summary["attempts"] == 2


def test_a_rewind_that_does_not_help_ends(corpus, tmp_path, poison):
    recipe = recipe_of(corpus, tmp_path / "run", **{"train.on_nonfinite": "rewind", "train.steps": 5})
    with pytest.raises(RunFailed) as error:
        train(recipe, on_step=poison(4, once=False))
    assert says(error, "returned to step 3 3 times", "checkpoint.resume=STEP", "optim.lr")


def test_a_rewind_before_the_first_save_of_a_lineage_goes_back_to_its_start(corpus, tmp_path, poison):
    """The newest commit in the directory is one of the lineage that was left."""
    more = {"checkpoint.keep_last": 10, "train.on_nonfinite": "rewind"}
    recipe, seen = recipe_of(corpus, tmp_path / "run", **more), []
    with pytest.raises(Stopped):
        train(recipe, stop_at=9)
    spoil = poison(4)

    def on_step(step: int, result: object) -> None:
        seen.append(step)
        spoil(step, result)

    run = train(recipe.with_overrides("checkpoint.resume='3'"), on_step=on_step)
    assert [e["step"] for e in run.events if e["event"] == "rewound"] == [3]
    assert seen == [4, *range(4, 13)]


def test_skips_are_counted_and_many_in_a_row_stop(corpus, tmp_path, poison):
    recipe = recipe_of(corpus, tmp_path / "run", **{"train.on_nonfinite": "skip", "train.max_skips": 3})
    with pytest.raises(RunFailed) as error:
        train(recipe, on_step=poison(7))
    assert says(error, "3 updates in a row", "train.max_skips")
    skipped = [e for e in Run(tmp_path / "run").events if e["event"] == "skipped"]
    assert [(e["step"], e["in_a_row"]) for e in skipped] == [(8, 1), (9, 2), (10, 3)]


@pytest.mark.parametrize("policy", ["skip", "rewind", "stop"])
def test_a_loss_spike_has_a_policy(corpus, tmp_path, spike, policy):
    more = {"train.on_spike": policy, "train.steps": 40, "telemetry.every": 7, "train.spike_sigmas": 50.0}
    recipe = recipe_of(corpus, tmp_path / "run", **more)
    if policy == "stop":
        with pytest.raises(RunFailed) as error:
            train(recipe, on_step=spike(31))
        assert says(error, "step 32:", "spike", "train.on_spike")
        return
    try:
        train(recipe, on_step=spike(31))
    except RunFailed:  # a skipped spike leaves the weights as they are: the next one is a spike, too
        assert policy == "skip"
    events = [(e["event"], e["step"]) for e in Run(tmp_path / "run").events]
    assert ("rewound", 30) in events if policy == "rewind" else ("spike", 32) in events


def test_spikes_that_do_not_end_end_the_run(corpus, tmp_path, spike):
    """A skipped spike is no measure for the next one, so a loss that stays up would be skipped for ever."""
    more = {"train.on_spike": "skip", "train.steps": 60, "train.spike_sigmas": 50.0, "train.max_skips": 4}
    with pytest.raises(RunFailed) as error:
        train(recipe_of(corpus, tmp_path / "run", **more), on_step=spike(31))
    assert says(error, "4 updates in a row", "train.spike_sigmas")
    spikes = [(e["step"], e["in_a_row"]) for e in Run(tmp_path / "run").events if e["event"] == "spike"]
    assert spikes == [(32, 1), (33, 2), (34, 3), (35, 4)]


def test_a_loss_that_is_not_finite_is_no_measure_of_spikes_and_hinders_no_save(corpus, tmp_path, poison):
    more = {"train.on_spike": "skip", "train.on_nonfinite": "skip", "train.max_skips": 3, "checkpoint.every": 1}
    with pytest.raises(RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **more), on_step=poison(7))
    run = Run(tmp_path / "run")
    assert not [e for e in run.events if e["event"] == "save_failed"]
    counters = json.loads((run.checkpoints_dir / "step-00000008" / "state.json").read_text())
    assert len(counters["spike_window"]) == 7 and counters["updates_skipped"] == 1


def test_fp16_trains_on_a_cpu(corpus, tmp_path):
    lines = train(recipe_of(corpus, tmp_path / "run", **{"train.precision": "fp16"})).lines("train")
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert lines[-1]["loss_scale"] >= 1
