"""A loss or gradient that is not finite, a loss spike: stop, skip or rewind, counted step by step."""

import json
import os
import signal
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_runs import corpus, curve, recipe_of, stopped

import forked
from helpers import each_step, refused
from windlass import train
from windlass.checkpoint.format import Checkpoint, open_checkpoint
from windlass.errors import RunFailed
from windlass.parallel import parallelize
from windlass.recipe import Recipe
from windlass.run import Run, read_lines
from windlass.training import network, setup, state, trainer
from windlass.training.state import SCALE_START

__all__ = ["corpus"]

NAN, JUMP = float("nan"), -40.0  # factors of the weights: with the second the loss jumps up
REWIND = {"train.on_nonfinite": "rewind"}
SPIKES = {"train.steps": 60, "train.spike_sigmas": 50.0}


@pytest.fixture
def spoil():
    """A callback that multiplies the weights after a step, once or each time."""

    def after(step: int, factor: float, once: bool = True):
        done: list[int] = []

        def multiply(now: Any) -> None:
            if now.step == step and not (once and done):
                done.append(now.step)
                with torch.no_grad():
                    for parameter in now.model.parameters():
                        parameter.mul_(factor)

        return each_step(multiply)

    return after


def events(run: Run, event: str, field: str) -> list[tuple]:
    return [(e["step"], e[field]) for e in run.events if e["event"] == event]


def test_a_nonfinite_step_stops_the_run_with_step_and_rank(corpus, tmp_path, spoil):
    recipe, run = recipe_of(corpus, tmp_path / "run"), Run(tmp_path / "run")
    words = ("step 8:", "loss not finite on rank 0", "optim.lr", "train.on_nonfinite")
    with refused(*words, error=RunFailed):
        train(recipe, callbacks=[spoil(7, NAN)])
    assert run.state == "failed"
    assert ["step 8" in reason for _, reason in events(run, "failed", "reason")] == [True]
    assert train(recipe).state == "finished", "the last checkpoint is from before"


def test_bad_step_that_is_only_seen_later_is_in_no_checkpoint(corpus, tmp_path, spoil, monkeypatch):
    """As on CUDA, forced here: between logs the update is called off on the device, and a save
    looks before it saves.
    """
    monkeypatch.setattr(setup, "check_is_deferred", lambda *_: True)
    recipe = recipe_of(corpus, tmp_path / "run", **{"telemetry.every": 100, "eval.every": 0})
    with refused("step 5:", "loss not finite", error=RunFailed):
        train(recipe, callbacks=[spoil(4, NAN)])
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_rewind_goes_back_and_leaves_the_samples_out(corpus, tmp_path, spoil):
    recipe = recipe_of(corpus, tmp_path / "run", **REWIND)
    run = train(recipe, callbacks=[spoil(7, NAN)])
    assert events(run, "rewound", "left_out") == [(6, [48, 64])]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))
    saved = json.loads((run.checkpoints_dir / "step-00000012" / "state.json").read_text())
    assert saved["skipped"] == [[48, 64]] and run.summary["attempts"] == 2


def test_a_rewind_that_does_not_help_ends(corpus, tmp_path, spoil):
    recipe = recipe_of(corpus, tmp_path / "run", **REWIND, **{"train.steps": 5})
    words = ("returned to step 3 3 times", "checkpoint.resume=STEP", "optim.lr")
    with refused(*words, error=RunFailed):
        train(recipe, callbacks=[spoil(4, NAN, once=False)])


def test_skips_are_counted_and_many_in_a_row_stop(corpus, tmp_path, spoil):
    """A value that is not finite does not measure spikes and does not prevent a save."""
    more = {"train.on_spike": "skip", "train.on_nonfinite": "skip"}
    more |= {"train.max_skips": 3, "checkpoint.every": 1}
    with refused("3 updates in a row", "train.max_skips", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **more), callbacks=[spoil(7, NAN)])
    run = Run(tmp_path / "run")
    assert events(run, "skipped", "in_a_row") == [(8, 1), (9, 2), (10, 3)]
    assert not events(run, "save_failed", "reason")
    saved = json.loads((run.checkpoints_dir / "step-00000008" / "state.json").read_text())
    assert len(saved["spike_window"]) == 7 and saved["updates_skipped"] == 1


def test_a_loss_spike_stops_the_run_or_rewinds_it(corpus, tmp_path, spoil):
    more = SPIKES | {"train.on_spike": "stop", "telemetry.every": 7}
    recipe = recipe_of(corpus, tmp_path / "run", **more)
    with refused("step 32:", "spike", "train.on_spike", error=RunFailed):
        train(recipe, callbacks=[spoil(31, JUMP)])
    place = f"run.dir='{tmp_path / 'back'}'"
    back = recipe.replace("train.on_spike=rewind", "train.steps=40", place)
    run = train(back, callbacks=[spoil(31, JUMP)])
    assert [step for step, _ in events(run, "rewound", "reason")] == [30]


def test_spikes_that_do_not_end_end_the_run(corpus, tmp_path, spoil):
    """A skipped spike leaves the weights and does not measure the next one, or all would be
    skipped.
    """
    more = SPIKES | {"train.on_spike": "skip", "train.max_skips": 4}
    with refused("4 updates in a row", "train.spike_sigmas", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **more), callbacks=[spoil(31, JUMP)])
    spikes = [(32, 1), (33, 2), (34, 3), (35, 4)]
    assert events(Run(tmp_path / "run"), "spike", "in_a_row") == spikes


def test_fp16_trains_on_a_cpu(corpus, tmp_path):
    lines = train(recipe_of(corpus, tmp_path / "run", **{"train.precision": "fp16"})).lines("train")
    assert lines[-1]["loss"] < lines[0]["loss"] and lines[-1]["loss_scale"] >= 1


@pytest.mark.parametrize(
    ("before", "after", "scale"), [("bf16", "fp16", SCALE_START), ("fp16", "fp32", None)]
)
def test_a_resume_in_another_precision_is_noted_and_scales_from_the_start(
    corpus, tmp_path, monkeypatch, before, after, scale
):
    """As `train.precision = "auto"` on other hardware."""
    # so that the scale of a checkpoint differs from the first one
    monkeypatch.setattr(state, "SCALE_GROWS_AFTER", 4)
    more = {"eval.every": 0, "checkpoint.every": 1, "checkpoint.keep_last": 20}
    recipe, run = recipe_of(corpus, tmp_path / "run", **more), Run(tmp_path / "run")
    for steps, precision in ((6, before), (7, after), (12, before)):
        for module in (network, parallelize):
            monkeypatch.setattr(module, "resolve_precision", Mock(return_value=precision))
        train(recipe, stop_at=steps)
    saved = {path.name: open_checkpoint(path) for path in run.checkpoints_dir.glob("step-*")}
    assert [saved[f"step-{n:08d}"].meta["precision"] for n in (6, 7, 12)] == [before, after, before]
    assert saved["step-00000007"].counters["loss_scale"] == (scale or 0)
    scales = {line["step"]: line.get("loss_scale") for line in run.lines("train")}
    assert scales[7] == scale and scales[8] == (SCALE_START if before == "fp16" else None)
    shown = run.log_path.read_text().splitlines()
    notes = [line for line in shown if "warning" in line and "train.precision" in line]
    assert [(before in note, after in note) for note in notes] == [(True, True)] * 2


def killed(recipe: Recipe, rewinds: int, spoil: Any) -> int:
    """The exit code of a training that kills itself right after that many rewinds, before its next
    save.
    """

    def train_and_die() -> None:
        again = trainer.Trainer.open_loader

        def open_loader(own: trainer.Trainer) -> Any:
            if len(own.state.skipped) == rewinds:
                os.kill(os.getpid(), signal.SIGKILL)
            return again(own)

        trainer.Trainer.open_loader = open_loader
        train(recipe, callbacks=[spoil(7, NAN, once=False)])

    return forked.run([train_and_die]).returncode


def test_a_rewind_outlives_a_kill(corpus, tmp_path, spoil):
    recipe = recipe_of(corpus, tmp_path / "run", **REWIND)
    assert killed(recipe, 1, spoil) == -signal.SIGKILL
    run = train(recipe)
    saved = json.loads((run.checkpoints_dir / "step-00000012" / "state.json").read_text())
    assert saved["skipped"] == [[48, 64]], "samples of the steps 7 and 8"
    whole = train(recipe.replace(f"run.dir='{tmp_path / 'whole'}'"), callbacks=[spoil(7, NAN)])
    assert curve(run) == curve(whole)


@pytest.mark.dist
def test_every_rank_verifies_its_share_before_a_rewind(corpus, tmp_path, spoil):
    more = REWIND | {"eval.every": 0, "checkpoint.background": "false"}
    recipe = recipe_of(corpus, tmp_path / "run", **more)

    def rank() -> None:
        number, verify = int(os.environ["RANK"]), Checkpoint.verify
        calls, done = list[list[int]](), list[int]()

        def record(self, rank=0, world=1):
            calls.append([self.step, rank, world])
            return verify(self, rank, world)

        def damage(now: Any) -> None:
            if now.step == 7 and not done:
                done.append(7)
                calls.clear()
                if number == 0:
                    folder = recipe.run_dir / "checkpoints" / "step-00000006"
                    file = max(folder.glob("*.safetensors"))
                    file.write_bytes(file.read_bytes()[:-1] + b"x")

        Checkpoint.verify = record
        train(recipe, callbacks=[each_step(damage), spoil(7, NAN)])
        (recipe.run_dir / f"calls-{number}").write_text(json.dumps(calls))

    assert forked.launch([rank], 2) == 0
    run = Run(tmp_path / "run")
    for rank in (0, 1):
        calls = json.loads((run.path / f"calls-{rank}").read_text())
        assert calls == [[step, rank, 2] for step in (6, 3)]
    assert [step for step, _ in events(run, "rewound", "reason")] == [3]
    assert [line["step"] for line in run.lines("train")] == list(range(1, 13))


NAN, JUMP = float("nan"), -40.0  # factors of the weights: with the second the loss jumps up


NAN, JUMP = float("nan"), -40.0  # factors of the weights: with the second the loss jumps up


def test_rewind_before_first_save_of_lineage_goes_back_to_its_start(corpus, tmp_path, spoil):
    """The newest commit in the directory is one of the lineage that was left."""
    recipe, steps = (
        recipe_of(corpus, tmp_path / "run", **REWIND, **{"checkpoint.keep_last": 10}),
        [],
    )
    stopped(recipe, 9)
    back = recipe.replace("checkpoint.resume='3'")
    callbacks = [each_step(lambda now: steps.append(now.step)), spoil(4, NAN)]
    run = train(back, callbacks=callbacks)
    assert [step for step, _ in events(run, "rewound", "reason")] == [3]
    assert steps == [4, *range(4, 13)]


def test_rewinds_to_one_checkpoint_are_counted_over_kills(corpus, tmp_path, spoil):
    recipe = recipe_of(corpus, tmp_path / "run", **REWIND)
    for count in (1, 2, 3):
        assert killed(recipe, count, spoil) == -signal.SIGKILL
    with refused("returned to step 6 3 times", error=RunFailed):
        train(recipe, callbacks=[spoil(7, NAN, once=False)])
    lines = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert len([line for line in lines if line.get("event") == "rewound"]) == 3
