"""The step on CUDA: the host does not wait for the device between two logs, and batches come from
pinned memory onto the right device.
"""

from typing import Any

import numpy as np
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


class Numbers:
    def __len__(self):
        return 100

    def read(self, indices):
        tokens = np.repeat(indices[:, None], 8, axis=1)
        return tokens, tokens.copy()


@pytest.mark.usefixtures("cuda")
def test_batches_arrive_on_the_device_in_order():
    import torch

    from windlass.data.loader import Loader
    from windlass.recipe import plan_batch

    device, plan = torch.device("cuda", torch.cuda.device_count() - 1), plan_batch(8, 4, 1, 512)
    with (
        Loader(Numbers(), plan, 0, 5, device=device) as loader,
        Loader(Numbers(), plan, 0, 5) as on_cpu,
    ):
        for _ in range(40):
            here, there = next(loader), next(on_cpu)
            for a, b in zip(here.micro, there.micro, strict=True):
                assert a.batch.tokens.device == a.batch.labels.device == device
                assert a.batch.tokens.cpu().equal(b.batch.tokens)
                assert a.batch.labels.cpu().equal(b.batch.labels)
        assert all(
            m.batch.tokens.is_pinned() and m.batch.labels.is_pinned()
            for m in loader._read(41).micro
        )
    if torch.cuda.device_count() > 1:
        assert torch.cuda.memory_allocated(0) == 0
