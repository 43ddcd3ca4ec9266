"""Utilisation and memory of each rank's device, sampled by a background thread. Each sample has the
phase of the run (train, eval, save …) that took most of its interval. MB are 10^6 bytes.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windlass.ledger import encode, now, read_lines
from windlass.processes import nvml_handle
from windlass.run import Run

MB = 1e6
SECONDS = 1.0  # between two samples
# fields with a mean in the `summary` line, from which `measures.RUN` reads it
AVERAGED = ("mem_alloc_mb", "mem_reserved_mb", "mem_used_mb", "rss_mb", "util_pct")
LAST_SAMPLES = 20_000  # of each rank, for the summary; ten days on 64 GPUs have 8 GB of samples


def host_probe() -> Callable[[], dict[str, float]]:
    """A function that reads the resident memory of this process, and its CPU time since the last
    call in % of torch's threads."""
    import psutil
    import torch

    process, threads = psutil.Process(), torch.get_num_threads()
    process.cpu_percent()  # the first call measures from here

    def read() -> dict[str, float]:
        rss_mb = round(process.memory_info().rss / MB, 2)
        return {"rss_mb": rss_mb, "util_pct": round(process.cpu_percent() / threads, 2)}

    return read


def cuda_probe(index: int) -> Callable[[], dict[str, float]]:
    """A function that reads a GPU: NVML measures the device, if it is installed, and torch the
    allocator's memory."""
    import torch

    torch.cuda.reset_peak_memory_stats(index)  # of an earlier run in this process
    queries: dict[str, Callable[[], float]] = {}
    with contextlib.suppress(Exception):  # no driver, no library: a machine without NVML
        import pynvml as nvml

        nvml.nvmlInit()
        handle = nvml_handle(nvml, str(torch.cuda.get_device_properties(index).uuid))
        queries = {
            "util_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "mem_used_mb": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used / MB,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
        }

    def read() -> dict[str, float]:
        sample = {}
        for field, query in queries.items():
            with contextlib.suppress(Exception):  # the device has none, or the driver is busy
                sample[field] = round(float(query()), 1)
        # `memory_stats` would flatten 80 counters, which takes longer
        if stats := torch.cuda.memory.memory_stats_as_nested_dict(index):
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
            sample["mem_alloc_mb"] = round(allocated["current"] / MB, 1)
            sample["mem_reserved_mb"] = round(reserved["current"] / MB, 1)
            sample["peak_alloc_mb"] = round(allocated["peak"] / MB, 1)
        return sample

    return read


class DeviceSampler:
    """A daemon thread that samples this rank's device into `<directory>/rank-00000.jsonl`, from now
    to `stop`, every SECONDS.

    `phases` gives the process's seconds by phase. An error ends the sampling, never the run, and
    stands in `warning`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        device: Any = "cpu",
        attempt: int = 0,
        phases: Callable[[], dict[str, float]] = dict,
    ):
        self.path = directory / f"rank-{rank:05d}.jsonl"
        self.rank, self.device, self.attempt = rank, str(device), attempt
        self.warning: str | None = None
        self._phases, self._stop = phases, threading.Event()
        self._thread = threading.Thread(target=self._run, name="windlass-devices", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2.0)  # a driver that hangs does not hold up the end of the run

    def _run(self) -> None:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # A line is one write, so a kill tears the last one at most.
            with open(self.path, "ab", buffering=0) as file:
                file.write(b"\n" if file.tell() else b"")  # ends a torn line
                kind, _, index = self.device.partition(":")
                probe = cuda_probe(int(index or 0)) if kind == "cuda" else host_probe()
                before, stopped = self._phases(), False
                while not stopped:
                    stopped = self._stop.wait(SECONDS)
                    phases = self._phases()
                    spent = {name: phases[name] - before.get(name, 0.0) for name in phases}
                    # waiting for data belongs to training
                    spent["train"] = spent.get("train", 0.0) + spent.pop("data", 0.0)
                    phase = max(spent, key=lambda name: spent[name])
                    line = {"time": now(), "rank": self.rank, "attempt": self.attempt}
                    file.write(encode(line | {"phase": phase} | probe()).encode() + b"\n")
                    before = phases
        except Exception as error:  # of a driver or a disk
            problem = f"the sampling of utilisation and memory ended ({error})"
            self.warning = f"rank {self.rank}: {problem}"


def summarise_devices(run: Run) -> dict[str, float]:
    """Utilisation and memory over the last samples of all ranks, for the `summary` line.

    Means (`avg_gpu_util_pct`, `avg_rss_mb` …) are over the phase `train`. `peak_mem_mb` is the peak
    on the fullest rank, of the allocator or of the resident memory. Starts on other numbers of
    ranks do not count.
    """
    worlds = {x.get("attempt", 0): x["world"] for x in read_lines(run.metrics_path) if "world" in x}
    world = next(reversed(worlds.values()), None)
    samples = []
    for path in sorted(run.devices_dir.glob("rank-*.jsonl")):
        for text in path.read_bytes().splitlines()[-LAST_SAMPLES:]:
            with contextlib.suppress(ValueError):  # torn by a kill
                sample = json.loads(text)
                if worlds.get(sample["attempt"], world) == world:
                    samples.append(sample)
    on_gpu = any("peak_alloc_mb" in sample for sample in samples)
    summary: dict[str, float] = {}
    for field in AVERAGED:
        training = [float(x[field]) for x in samples if field in x and x["phase"] == "train"]
        name = f"{'gpu' if on_gpu else 'cpu'}_{field}" if field == "util_pct" else field
        if training:
            summary[f"avg_{name}"] = round(statistics.fmean(training), 3)
    peak = "peak_alloc_mb" if on_gpu else "rss_mb"
    peaks = [float(sample[peak]) for sample in samples if peak in sample]
    if peaks:
        summary["peak_mem_mb"] = max(peaks)
    return summary
