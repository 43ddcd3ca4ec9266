"""Timing without waiting, and the sampler; these tests need the device for themselves."""

import json
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("psutil")

from windlass.telemetry.devices import DeviceSampler  # noqa: E402
from windlass.telemetry.timing import StepTimer  # noqa: E402

pytestmark = pytest.mark.gpu

PRODUCTS = {"forward": 100, "backward": 200, "optimizer": 10, "outside": 300}


def work(products: int) -> None:
    matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(products):
        matrix @ matrix


@pytest.mark.usefixtures("cuda")
def test_phases_are_device_time_and_nothing_waits_before_the_log(monkeypatch):
    work(10)
    torch.cuda.synchronize()
    timer = StepTimer("cuda")
    timer.read()

    def waited(*_):
        raise AssertionError("waited for the device between two logs")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda.Event, "synchronize", waited)
        patch.setattr(torch.cuda, "synchronize", waited)
        for _ in range(3):
            for phase, products in PRODUCTS.items():
                with timer.phase(phase):
                    work(products)
    ms = timer.read()
    assert 1.5 < ms["backward_ms"] / ms["forward_ms"] < 2.5
    parts = ms["forward_ms"] + ms["backward_ms"] + ms["optimizer_ms"]
    assert ms["step_ms"] == pytest.approx(parts, rel=0.2)


@pytest.mark.usefixtures("cuda")
def test_the_sampler_sees_a_busy_device(tmp_path):
    sampler = DeviceSampler(tmp_path, device="cuda:0")
    end = time.monotonic() + 3
    while time.monotonic() < end:
        work(50)
        torch.cuda.synchronize()
    sampler.stop()
    lines = [json.loads(line) for line in sampler.path.read_text().splitlines()]
    assert sampler.warning is None
    assert max((line["util_pct"] for line in lines if "util_pct" in line), default=100) > 50


def test_times_tokens_and_mfu_are_those_of_the_clock(recipe, device, computes):
    from windlass import Callback, train
    from windlass.estimate.devices import peak_flops

    clock = {}

    class AtStep(Callback):
        def on_step(self, now: Any) -> None:
            assert now.loss > 0 or not computes  # waits for the device
            clock[now.step] = time.perf_counter()

    settings = ("train.steps=40", "telemetry.every=10", "train.deterministic=false")
    run = train(recipe("run", *settings), callbacks=[AtStep()])
    lines = [line for line in run.lines("train") if line["step"] > 1]
    tokens_per_step = run.recipe.train.global_batch * run.recipe.model.context
    measured = sum(line["step_ms"] * 10 for line in lines if line["step"] > 10) / 1e3
    assert measured == pytest.approx(clock[40] - clock[10], rel=0.1)
    for line in lines:
        rate = tokens_per_step * 1e3 / line["step_ms"]
        assert line["tokens_per_s"] == pytest.approx(rate, rel=1e-6)
        parts = sum(line[f"{phase}_ms"] for phase in ("forward", "backward", "optimizer"))
        assert 0.5 * line["step_ms"] < parts < 1.02 * line["step_ms"]
    if device == "cuda":
        peak = peak_flops(torch.cuda.get_device_name(), "bf16")
        assert all(0 < line["mfu"] < 1 if peak else line.get("mfu") is None for line in lines)
        total = torch.cuda.get_device_properties(0).total_memory
        assert 0 < run.summary["peak_mem_mb"] * 1e6 < total
