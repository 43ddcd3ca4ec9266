"""Every strategy on CUDA: FSDP2, ZeRO-1 and offload on one rank over NCCL, and two ranks that share a GPU over gloo."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import curve

pytestmark = pytest.mark.gpu

FSDP = ("full_shard", "shard_grad_op", "hybrid_shard")
OFFLOAD = ("parallel.strategy=full_shard", "parallel.offload=true")


def close(curves: list[tuple], expected: list[tuple], rel: float) -> None:
    """Step, loss and gradient norm of each step."""
    assert len(curves) == len(expected) == 8
    for mine, other in zip(curves, expected, strict=True):
        assert mine == pytest.approx(other, rel=rel)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_each_strategy_on_one_rank_trains_as_a_single_process(recipe: Callable[..., Any], kind: str) -> None:
    from windlass import train

    settings = ("train.precision=fp32", f"optim.kind={kind}")
    single = curve(train(recipe("single", *settings)), "loss", "grad_norm")
    for strategy in ("ddp", "shard_optim"):
        run = train(recipe(strategy, *settings, f"parallel.strategy={strategy}"))
        close(curve(run, "loss", "grad_norm"), single, 1e-5)
    for strategy in FSDP:
        run = train(recipe(strategy, *settings, f"parallel.strategy={strategy}"))
        close(curve(run, "loss", "grad_norm"), single, 1e-3 if kind == "muon" else 1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_offloaded_parameters_train_as_those_on_the_device(recipe: Callable[..., Any], precision: str) -> None:
    from windlass import train

    settings = (f"train.precision={precision}", "train.micro_batch=4")
    on_device = train(recipe("device", *settings, "parallel.strategy=full_shard"))
    offloaded = train(recipe("offload", *settings, *OFFLOAD))
    rel = 1e-4 if precision == "fp32" else 3e-2
    close(curve(offloaded, "loss", "grad_norm"), curve(on_device, "loss", "grad_norm"), rel)


def test_an_offloaded_run_resumes_bit_for_bit(recipe: Callable[..., Any]) -> None:
    from windlass import train

    whole = train(recipe("whole", *OFFLOAD))
    train(recipe("parts", *OFFLOAD), stop_at=3)
    assert curve(train(recipe("parts", *OFFLOAD))) == curve(whole)


@pytest.mark.parametrize("strategy", ["ddp", "shard_optim", "full_shard", "shard_grad_op"])
def test_two_ranks_on_one_device_train_as_one(
    recipe: Callable[..., Any], words: Callable[..., list[str]], strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over gloo: two processes, each with half of the samples, on the first device."""
    from windlass import train
    from windlass.launch.local import launch
    from windlass.run import Run

    settings = ("train.precision=fp32", "train.micro_batch=2")
    alone = curve(train(recipe("alone", *settings)), "loss", "grad_norm")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0])
    more = words("two", *settings, f"parallel.strategy={strategy}")
    assert launch([sys.executable, str(Path(__file__).parent / "over_gloo.py"), "train", *more], 2) == 0
    run = Run(recipe("two").run_dir)
    assert [start["world"] for start in run.events if start["event"] == "started"] == [2]
    close(curve(run, "loss", "grad_norm"), alone, 1e-4)
