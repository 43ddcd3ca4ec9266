"""The step on CUDA: the host does not wait for the device between two logs; times, tokens/s and MFU
are right.
"""

import time
from typing import Any

import pytest

from helpers import curve

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "settings",
    [
        ("train.precision=fp32",),
        ("train.precision=bf16", "model.dropout=0.1", "train.micro_batch=4", "eval.every=20"),
        ("train.precision=fp16", "parallel.activation_checkpointing=full"),
        ("train.precision=bf16", "parallel.activation_checkpointing=selective", "optim.kind=muon"),
        ("train.precision=bf16", "parallel.strategy=ddp", "train.micro_batch=4"),
        ("train.precision=bf16", "parallel.strategy=full_shard"),
        ("train.precision=fp16", "train.average.kind=ema"),
        ("train.precision=bf16", "parallel.strategy=full_shard", "train.average.kind=tail"),
        ("train.precision=bf16", "train.compile=true", "train.deterministic=false"),
    ],
)
def test_the_host_never_waits_between_two_logs(recipe, device, settings):
    """Steps 4 to 8 of 10, of which 1 and 10 are logged: torch raises an error at whatever waits for
    the device.
    """
    import torch

    from windlass import Callback, train

    class AtStep(Callback):
        def on_step(self, now: Any) -> None:
            if device == "cuda" and now.step in (3, 8):
                torch.cuda.set_sync_debug_mode("error" if now.step == 3 else "default")

    run = train(
        recipe("run", "train.steps=10", "telemetry.every=100", *settings), callbacks=[AtStep()]
    )
    assert [step for step, *_ in curve(run)] == [1, 10]


def test_times_tokens_and_mfu_are_those_of_the_clock(recipe, device):
    from windlass import Callback, train
    from windlass.telemetry.timing import peak_flops

    clock = {}

    class AtStep(Callback):
        def on_step(self, now: Any) -> None:
            assert now.loss > 0  # waits for the device
            clock[now.step] = time.perf_counter()

    settings = ("train.steps=40", "telemetry.every=10", "train.deterministic=false")
    run = train(recipe("run", *settings), callbacks=[AtStep()])
    lines = [line for line in run.lines("train") if line["step"] > 1]
    tokens_per_step = run.recipe.train.global_batch * run.recipe.model.context
    measured = sum(line["step_ms"] * 10 for line in lines if line["step"] > 10) / 1e3
    assert measured == pytest.approx(clock[40] - clock[10], rel=0.1)
    for line in lines:
        assert line["tokens_per_s"] == pytest.approx(
            tokens_per_step * 1e3 / line["step_ms"], rel=1e-6
        )
        parts = sum(line[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer"))
        assert 0.5 * line["step_ms"] < parts < 1.02 * line["step_ms"]
    if device == "cuda":
        import torch

        peak = peak_flops(torch.cuda.get_device_name(), "bf16")
        assert all(0 < line["mfu"] < 1 if peak else line.get("mfu") is None for line in lines)
        assert (
            0 < run.summary["peak_mem_mb"] * 1e6 < torch.cuda.get_device_properties(0).total_memory
        )
