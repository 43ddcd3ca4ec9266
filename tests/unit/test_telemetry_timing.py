import time

import pytest

from windlass.telemetry import timing
from windlass.telemetry.devices import measure_cpu_peak
from windlass.telemetry.timing import Goodput, StepTimer, mfu, peak_flops


class FakeDevice:
    """A device with its own time line: work is queued at once and done later, as on a GPU."""

    def __init__(self):
        self.queued_ms, self.done_ms, self.waits, self.marks = 0.0, 0.0, 0, 0

    def mark(self):
        self.marks += 1
        return [self.queued_ms]

    def done(self, mark):
        return mark[0] <= self.done_ms

    def ms(self, first, second):
        assert self.done(first) and self.done(second), "asked for a time that the device has not reached"
        return second[0] - first[0]

    def free(self, mark):
        self.marks -= 1

    def wait(self, mark):
        self.waits += 1
        self.done_ms = max(self.done_ms, mark[0])


def step(timer, device, forward, backward, micro=1):
    for _ in range(micro):
        with timer.phase("forward"):
            device.queued_ms += forward
        with timer.phase("backward"):
            device.queued_ms += backward
    with timer.phase("optimizer"):
        device.queued_ms += 1


def test_phases_of_the_devices_own_time_a_step_each():
    device = FakeDevice()
    timer = StepTimer("cuda", clock=device)
    for _ in range(4):
        step(timer, device, 3, 5, micro=2)
        device.queued_ms += 2  # between the phases
    found = timer.read()
    assert found == {"step_ms": 19, "forward_ms": 6, "backward_ms": 10, "optimizer_ms": 1}
    step(timer, device, 30, 50)
    assert timer.read() == {"step_ms": 81, "forward_ms": 30, "backward_ms": 50, "optimizer_ms": 1}
    assert timer.read() == {}


def test_nothing_waits_for_the_device_between_two_logs():
    device = FakeDevice()
    timer = StepTimer("cuda", clock=device)
    for _ in range(300):
        step(timer, device, 1, 1)
    assert device.waits == 0
    assert timer.read()["step_ms"] == 3
    assert device.waits > 0
    assert device.marks == 1, "events are given back, but for the beginning of the next interval"


def test_marks_that_the_device_has_passed_are_given_back_before_the_log():
    device = FakeDevice()
    timer = StepTimer("cuda", clock=device)
    for _ in range(2000):
        step(timer, device, 1, 1)
        device.done_ms = device.queued_ms
    assert device.waits == 0 and device.marks < 600
    assert timer.read()["forward_ms"] == 1


def test_an_evaluation_is_outside_of_the_steps():
    device = FakeDevice()
    timer = StepTimer("cuda", clock=device)
    step(timer, device, 3, 5)
    with timer.outside():
        device.queued_ms += 1000
    step(timer, device, 3, 5)
    assert timer.read()["step_ms"] == 9


def test_waiting_for_data_is_host_time_and_counts_in_the_goodput(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(timing.time, "perf_counter_ns", lambda: int(now[0] * 1e9))
    goodput = Goodput(before=0)
    goodput.enter("train")
    timer = StepTimer("cpu", goodput)
    with timer.phase("data"):
        now[0] += 0.25
    with timer.phase("optimizer"):
        now[0] += 1
    assert timer.read() == {"step_ms": 1250, "data_ms": 250, "optimizer_ms": 1000}
    assert goodput.seconds() == {"data": 0.25, "train": 1.0}


def test_a_phase_that_raises_is_still_closed():
    timer = StepTimer("cpu")
    with pytest.raises(ZeroDivisionError), timer.phase("forward"):
        raise ZeroDivisionError
    with timer.phase("optimizer"):
        pass
    assert set(timer.read()) == {"step_ms", "forward_ms", "optimizer_ms"}
    with pytest.raises(AssertionError), timer.phase("forward"), timer.phase("backward"):
        pass


def test_the_parts_of_the_goodput_sum_to_the_whole():
    begin = time.perf_counter()
    goodput = Goodput(before=3.0)
    heard = []
    goodput.listen(heard.append)
    goodput.enter("train")
    for _ in range(50):
        with goodput.phase("data"):
            pass
    with goodput.phase("eval"), goodput.phase("save"):
        pass
    with pytest.raises(ValueError), goodput.phase("sample"):
        raise ValueError
    seconds = goodput.seconds()
    whole = time.perf_counter() - begin + 3.0
    assert sum(seconds.values()) == pytest.approx(whole, abs=0.01)
    assert seconds["startup"] >= 3.0
    assert heard[:3] == ["startup", "train", "data"] and heard[-4:] == ["eval", "train", "sample", "train"]


def test_the_clock_of_the_goodput_starts_with_the_process():
    assert Goodput().seconds()["startup"] == pytest.approx(timing.process_age(), abs=0.5)


def test_mfu_by_the_numbers_of_a_known_run():
    # 124M at context 1,024: 855 MFLOP a token; 150,000 tokens/s on an A100
    assert mfu(150_000, 855e6, peak_flops("NVIDIA A100-SXM4-40GB", "bf16"), 1) == pytest.approx(0.411, abs=1e-3)
    assert mfu(8 * 150_000, 855e6, 312e12, 8) == pytest.approx(0.411, abs=1e-3)
    assert mfu(150_000, 855e6, None, 1) is None


@pytest.mark.parametrize(
    ("name", "precision", "tflops"),
    [
        ("NVIDIA A100-SXM4-80GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA H100 80GB HBM3", "bf16", 989),
        ("NVIDIA H100 PCIe", "bf16", 756),
        ("NVIDIA H200", "fp16", 989),
        ("NVIDIA L40S", "bf16", 362),
        ("NVIDIA L40", "bf16", 181),
        ("NVIDIA L4", "bf16", 121),
        ("NVIDIA A10", "bf16", 125),
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla T4", "fp16", 65),
        ("NVIDIA GeForce RTX 4090", "bf16", 165.2),
        ("NVIDIA GH200 480GB", "bf16", 989),
        ("NVIDIA B200", "bf16", 2250),
    ],
)
def test_peaks_of_real_names(name, precision, tflops):
    assert peak_flops(name, precision) == tflops * 1e12


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16"),
        ("Tesla V100-SXM2-32GB", "bf16"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16"),
        ("NVIDIA A1000", "bf16"),
        ("Intel Xeon", "fp32"),
        ("NVIDIA H200", "fp64"),
        ("", "bf16"),
    ],
)
def test_what_is_not_known_is_not_guessed(name, precision):
    assert peak_flops(name, precision) is None


def test_tf32_has_a_peak_of_its_own():
    assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32", tf32=True) == 156e12


def test_the_measured_peak_of_a_cpu_is_that_of_a_product():
    assert 1e8 < measure_cpu_peak(size=128, seconds=0.02) < 1e15
