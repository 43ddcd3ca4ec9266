"""A loss or gradient that is not finite: stop or skip, counted step by step."""

import json
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from small_runs import recipe_of

from helpers import each_step, refused
from windlass import train
from windlass.checkpoint.format import open_checkpoint
from windlass.errors import RunFailed
from windlass.parallel import parallelize
from windlass.run import Run
from windlass.training import network, state, trainer
from windlass.training.state import SCALE_START

NAN = float("nan")  # a factor of the weights


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
    monkeypatch.setattr(trainer, "check_is_deferred", lambda *_: True)
    recipe = recipe_of(corpus, tmp_path / "run", **{"telemetry.every": 100, "eval.every": 0})
    with refused("step 5:", "loss not finite", error=RunFailed):
        train(recipe, callbacks=[spoil(4, NAN)])
    assert [p.name for p in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_skips_are_counted_and_many_in_a_row_stop(corpus, tmp_path, spoil):
    more = {"train.on_nonfinite": "skip", "train.max_skips": 3, "checkpoint.every": 1}
    with refused("3 updates in a row", "train.max_skips", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **more), callbacks=[spoil(7, NAN)])
    run = Run(tmp_path / "run")
    assert events(run, "skipped", "in_a_row") == [(8, 1), (9, 2), (10, 3)]
    assert not events(run, "save_failed", "reason")
    saved = json.loads((run.checkpoints_dir / "step-00000008" / "state.json").read_text())
    assert saved["updates_skipped"] == 1


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
    precisions = [saved[f"step-{n:08d}"].manifest.meta["precision"] for n in (6, 7, 12)]
    assert precisions == [before, after, before]
    assert saved["step-00000007"].counters["loss_scale"] == (scale or 0)
    scales = {line["step"]: line.get("loss_scale") for line in run.lines("train")}
    assert scales[7] == scale and scales[8] == (SCALE_START if before == "fp16" else None)
    shown = run.log_path.read_text().splitlines()
    notes = [line for line in shown if "warning" in line and "train.precision" in line]
    assert [(before in note, after in note) for note in notes] == [(True, True)] * 2
