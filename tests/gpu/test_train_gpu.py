"""Whole trainings on CUDA: the memory that `plan` says, resume bit for bit, ZeRO-1, and updates that the device calls off."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SMALL = (
    "model.layers=4", "model.heads=4", "model.width=256", "model.context=256", "train.global_batch=32", "train.steps=12",
    "eval.every=0", "eval.sample_every=0", "checkpoint.every=4", "telemetry.every=1", "telemetry.sample_seconds=0.2",
    "train.deterministic=true", "optim.schedule.warmup=2",
)  # fmt: skip


def recipe(folder: Path, name: str, *more: str):
    from windlass.recipe import Recipe

    where = (f"run.dir='{folder / name}'", f"data.dir='{folder / 'data'}'")
    return Recipe.load("quickstart", [*SMALL, *where, *more])


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_memory_is_what_the_plan_says(tmp_path, precision, recompute, dropout):
    """Within 10 % of the allocator's peak, which is nothing but steps here."""
    from windlass import plan, train

    torch.cuda.reset_peak_memory_stats()
    settings = [f"train.precision={precision}", f"parallel.activation_checkpointing={recompute}"]
    run = train(recipe(tmp_path, "run", *settings, f"model.dropout={dropout}", "checkpoint.every=1000"))
    predicted = next(row.memory for row in plan(run).memory if row.chosen)
    assert predicted.total == pytest.approx(run.summary["peak_mem_mb"] * 1e6, rel=0.1), predicted


def curve(run) -> list[tuple]:
    return [tuple(line[k] for k in ("step", "loss", "grad_norm", "lr", "tokens")) for line in run.lines("train")]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_resume_is_bit_exact(tmp_path, monkeypatch, precision):
    from windlass import train

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    settings = (f"train.precision={precision}", "model.dropout=0.1")
    whole = train(recipe(tmp_path, "whole", *settings))
    train(recipe(tmp_path, "parts", *settings), stop_at=5)
    assert curve(train(recipe(tmp_path, "parts", *settings))) == curve(whole)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_sharded_optimizer_state_changes_no_bit(tmp_path, monkeypatch, kind):
    """`shard_optim` against `ddp` under NCCL: on one rank in this process, and on two where there are two devices."""
    from windlass import train
    from windlass.launch.local import launch
    from windlass.run import Run

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    for world in range(1, 1 + min(2, torch.cuda.device_count())):
        curves = []
        for strategy in ("ddp", "shard_optim"):
            name, settings = f"{strategy}-{world}", (f"parallel.strategy={strategy}", f"optim.kind={kind}")
            if world == 1:
                curves.append(curve(train(recipe(tmp_path, name, *settings))))
                continue
            where = (f"run.dir={tmp_path / name}", f"data.dir={tmp_path / 'data'}")
            command = [sys.executable, "-m", "windlass", "train", "quickstart", *SMALL, *where, *settings]
            assert launch(command, world) == 0
            curves.append(curve(Run(tmp_path / name)))
        # Muon shares the matrices out over the ranks otherwise, but each is orthogonalised whole.
        assert curves[0] == curves[1] and len(curves[0]) == 12


def test_a_bad_step_is_called_off_on_the_device_and_seen_at_the_next_log(tmp_path, monkeypatch):
    from windlass import train
    from windlass.errors import RunFailed
    from windlass.training import setup

    made, set_up = [], setup.set_up
    monkeypatch.setattr(setup, "set_up", lambda *a: (made.append(set_up(*a)), made[-1])[1])
    kept = {}

    def on_step(now: Any) -> None:
        parameters = list(made[0].model.parameters())
        if now.step == 5:  # the data of one weight, so that the gradient of the next step is not finite
            kept["others"] = [p.detach().clone() for p in parameters[1:]]
            with torch.no_grad():
                parameters[0].fill_(float("nan"))

    with pytest.raises(RunFailed) as error:
        train(recipe(tmp_path, "run", "telemetry.every=4", "checkpoint.every=1000"), on_step=on_step)
    assert "step 6: loss not finite on rank 0" in str(error.value)
    after = list(made[0].model.parameters())[1:]
    # no update was made after the bad one
    assert all(torch.equal(a, b) for a, b in zip(after, kept["others"], strict=True))
