"""Timing without waiting, and the sampler, on a real CUDA device."""

import json
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("psutil")

from windlass.telemetry.devices import DeviceSampler  # noqa: E402
from windlass.telemetry.timing import StepTimer  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("cuda")]


def work(products: int) -> None:
    matrix = torch.ones(4096, 4096, device="cuda", dtype=torch.bfloat16)
    for _ in range(products):
        matrix @ matrix


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
            for phase, products in (
                ("forward", 100),
                ("backward", 200),
                ("optimizer", 10),
                ("outside", 300),
            ):
                with timer.phase(phase):
                    work(products)
    ms = timer.read()
    assert 1.5 < ms["backward_ms"] / ms["forward_ms"] < 2.5
    assert ms["step_ms"] == pytest.approx(
        ms["forward_ms"] + ms["backward_ms"] + ms["optimizer_ms"], rel=0.2
    )


def test_the_sampler_sees_a_busy_device(tmp_path):
    sampler = DeviceSampler(tmp_path, device="cuda:0", every=0.2)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        work(50)
        torch.cuda.synchronize()
    sampler.stop()
    lines = [json.loads(line) for line in sampler.path.read_text().splitlines()]
    assert sampler.warning is None and lines[0]["memory_mb"] > 1000
    assert max((line["util_pct"] for line in lines if "util_pct" in line), default=100) > 50
