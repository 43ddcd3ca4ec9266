"""Every strategy on CUDA: FSDP2, ZeRO-1 and offload on one rank over NCCL, and two ranks that share
a GPU over gloo.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import curve

pytestmark = pytest.mark.gpu

OFFLOAD = ("parallel.strategy=full_shard", "parallel.offload=true")


STRATEGIES = ("ddp", "shard_optim", "full_shard", "shard_grad_op", "hybrid_shard")
ROUNDING = {"fp64": (1e-8, 1e-8), "fp32": (1e-3, 1e-2), "bf16": (3e-2, 1e-1), "fp16": (3e-2, 1e-1)}
"""How far losses and gradient norms of 8 steps may differ: AdamW's first steps magnify rounding."""


def close(run: Any, expected: Any, precision: str) -> None:
    curves = [curve(x, "loss", "grad_norm") for x in (run, expected)]
    assert [len(x) for x in curves] == [8, 8]
    for (_, *mine), (_, *other) in zip(*curves, strict=True):
        for a, b, rel in zip(mine, other, ROUNDING[precision], strict=True):
            assert a == pytest.approx(b, rel=rel)


@pytest.mark.parametrize(("kind", "precision"), [("adamw", "fp64"), ("muon", "fp32")])
def test_each_strategy_on_one_rank_trains_as_a_single_process(recipe, kind, precision):
    from windlass import train

    settings = (f"train.precision={precision}", f"optim.kind={kind}")
    single = train(recipe("single", *settings))
    for strategy in STRATEGIES:
        run = train(recipe(strategy, *settings, f"parallel.strategy={strategy}"))
        close(run, single, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_offloaded_parameters_train_as_those_on_the_device(recipe, precision):
    from windlass import train

    settings = (f"train.precision={precision}", "train.micro_batch=4")
    on_device = train(recipe("device", *settings, "parallel.strategy=full_shard"))
    offloaded = train(recipe("offload", *settings, *OFFLOAD))
    close(offloaded, on_device, precision)


def test_an_offloaded_run_resumes_bit_for_bit(recipe: Callable[..., Any]) -> None:
    from windlass import train

    whole = train(recipe("whole", *OFFLOAD))
    train(recipe("parts", *OFFLOAD), stop_at=3)
    assert curve(train(recipe("parts", *OFFLOAD))) == curve(whole)


LAYOUTS = [*(f"strategy={name}" for name in STRATEGIES[:3]), "tensor=2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_ranks_on_one_device_train_as_one(recipe, words, layout, monkeypatch):
    """Over gloo: two processes on the first device, each with half of the samples or matrices.

    Context and pipeline parallelism need two devices: gloo does not exchange or send CUDA tensors.
    """
    from windlass import train
    from windlass.launch.local import launch
    from windlass.run import Run

    settings = ("train.precision=fp64", "train.micro_batch=2")
    alone = train(recipe("alone", *settings))
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", first)
    more = words("two", *settings, f"parallel.{layout}")
    script = str(Path(__file__).with_name("over_gloo.py"))
    assert launch([sys.executable, script, "train", *more], 2) == 0
    run = Run(recipe("two").run_dir)
    assert [start["world"] for start in run.events if start["event"] == "started"] == [2]
    close(run, alone, "fp64")
