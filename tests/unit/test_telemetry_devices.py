import json
import sys
import time
from types import SimpleNamespace

import pytest

from helpers import wait_for, write_ledger
from windlass.run import Run
from windlass.telemetry import devices
from windlass.telemetry.devices import DeviceSampler, host_probe, summarise_devices


@pytest.fixture
def probe(monkeypatch):
    """The reads of a device's probe, of which the number `fails_at` fails."""
    probe = SimpleNamespace(reads=0, fails_at=0)

    def read():
        probe.reads += 1
        if probe.reads == probe.fails_at:
            raise OSError("the driver went away")
        return {"util_pct": 50.0}

    monkeypatch.setattr(devices, "host_probe", lambda: read)
    monkeypatch.setattr(devices, "SECONDS", 0.005)
    return probe


def test_a_file_a_rank_and_each_sample_with_the_phase_that_took_most_of_its_interval(
    tmp_path, probe
):
    spent = [
        {"startup": 4.0},
        {"startup": 5.0, "train": 0.4},
        {"startup": 5.0, "train": 0.8, "data": 0.5, "eval": 0.8},
    ]
    spent += [spent[2] | {"eval": 2.0}, spent[2] | {"eval": 2.1, "data": 9.0}]

    def phases():
        return spent.pop(0) if len(spent) > 1 else spent[0]

    sampler = DeviceSampler(tmp_path, rank=3, attempt=1, phases=phases)
    wait_for(lambda: probe.reads >= 4)
    sampler.stop()
    sampler.stop()
    lines = (tmp_path / "rank-00003.jsonl").read_text().splitlines()
    samples = list(map(json.loads, lines))
    assert {(x["rank"], x["attempt"], x["util_pct"]) for x in samples} == {(3, 1, 50.0)}
    assert [x["phase"] for x in samples[:4]] == ["startup", "train", "eval", "train"]


@pytest.mark.parametrize(("place", "why"), [(".", "driver went away"), ("file", "/file")])
def test_what_goes_wrong_ends_the_sampling_with_a_warning(tmp_path, probe, place, why):
    probe.fails_at = 2
    (tmp_path / "file").write_text("in the way")
    sampler = DeviceSampler(tmp_path / place, rank=1)
    wait_for(lambda: sampler.warning)
    sampler.stop()
    assert "rank 1" in sampler.warning and why in sampler.warning


def test_the_host_probe_sees_this_process_at_work():
    read, end = host_probe(), time.perf_counter() + 0.15
    while time.perf_counter() < end:
        sum(range(1000))
    busy = read()
    time.sleep(0.1)
    assert busy["util_pct"] > read()["util_pct"] >= 0
    assert 1 < busy["rss_mb"] < 1e6


def test_a_gpu_is_looked_up_by_its_uuid_not_its_index_and_its_peak_begins_with_the_run(monkeypatch):
    """With CUDA_VISIBLE_DEVICES=2, torch's device 0 is NVML's device 2."""
    import torch

    reset = []
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)

    properties = SimpleNamespace(uuid="cccc")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    allocated = {"current": 2_000_000, "peak": 5_000_000}
    reserved = {"current": 8_000_000, "peak": 9_000_000}
    nested = {"allocated_bytes": {"all": allocated}, "reserved_bytes": {"all": reserved}}
    monkeypatch.setattr(torch.cuda.memory, "memory_stats_as_nested_dict", lambda index: nested)
    handles = {"GPU-aaaa": (0, 0), "GPU-cccc": (97, 3_000_000)}
    # and no power: this device has no such sensor
    nvml = SimpleNamespace(
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=handles.__getitem__,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=handle[0]),
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=handle[1]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    allocator = {"mem_alloc_mb": 2.0, "mem_reserved_mb": 8.0, "peak_alloc_mb": 5.0}
    read = devices.cuda_probe(0)
    assert reset == [0]
    assert read() == {"util_pct": 97.0, "mem_used_mb": 3.0} | allocator
    handles.clear()
    assert devices.cuda_probe(0)() == allocator


def a_run(path, *attempts):
    """Attempts of (world, {rank: [(phase, fields)]})."""
    run = Run(path)
    run.devices_dir.mkdir(parents=True)
    for number, (world, ranks) in enumerate(attempts):
        start = {"kind": "event", "event": "started", "attempt": number, "world": world}
        write_ledger(run, start)
        for rank, samples in ranks.items():
            base = {"time": "", "rank": rank, "attempt": number}
            lines = [base | {"phase": phase} | fields for phase, fields in samples]
            with open(run.devices_dir / f"rank-{rank:05d}.jsonl", "a") as file:
                file.writelines(f'{json.dumps(line)}\n{{"torn": \n' for line in lines)
    return run


def gpu(phase, util, alloc, peak):
    fields = {"util_pct": util, "mem_alloc_mb": alloc, "mem_reserved_mb": 2 * alloc}
    return phase, fields | {"peak_alloc_mb": peak}


def test_means_over_training_and_peaks_over_all_ranks(tmp_path):
    first = [gpu("startup", 0, 0, 0), gpu("train", 90, 100, 150)]
    first += [gpu("eval", 1, 900, 950), gpu("train", 80, 110, 950)]
    second = [gpu("train", 70, 200, 250), gpu("save", 0, 1, 250)]
    assert summarise_devices(a_run(tmp_path / "run", (2, {0: first, 1: second}))) == {
        "avg_gpu_util_pct": 80,
        "avg_mem_alloc_mb": pytest.approx((100 + 110 + 200) / 3, abs=1e-3),
        "avg_mem_reserved_mb": pytest.approx(2 * (100 + 110 + 200) / 3, abs=1e-3),
        "peak_mem_mb": 950,
    }
    train, evaluation = {"util_pct": 90.0, "rss_mb": 300.0}, {"util_pct": 0.0, "rss_mb": 500.0}
    samples = [("train", train), ("eval", evaluation)]
    means = {"avg_cpu_util_pct": 90, "avg_rss_mb": 300, "peak_mem_mb": 500}
    assert summarise_devices(a_run(tmp_path / "cpu", (1, {0: samples}))) == means
    # starts with another world do not count
    wide = {rank: [gpu("train", 10, 10, 10)] for rank in range(4)}
    narrow = {0: [gpu("train", 90, 90, 90)]}
    means = summarise_devices(a_run(tmp_path / "wide", (4, wide), (1, narrow)))
    assert means["avg_gpu_util_pct"] == 90 == means["peak_mem_mb"]
