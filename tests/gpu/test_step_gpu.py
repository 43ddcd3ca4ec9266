"""The step on CUDA: the host does not wait for the device between two logs."""

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
        ("train.precision=fp16", "train.average=0.999"),
        ("train.precision=bf16", "parallel.strategy=full_shard", "train.average=0.9"),
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
