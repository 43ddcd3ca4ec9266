"""Utilisation and memory of each rank's device: sampled by a background thread, summed up at the run's end.

The thread takes part in no step and no collective. Unusual: a GPU is looked up in NVML by its UUID, because
`CUDA_VISIBLE_DEVICES` renumbers torch's devices and not NVML's; and each sample says which phase of the run (train,
eval, save …) took most of its interval, so that an evaluation does not look like an idle device. MB are 10^6 bytes.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.run import Run, read_lines
from windlass.telemetry.ledger import encode, now, open_lines

MB = 1e6


class HostProbe:
    """This process through psutil.

    `util_pct` is the process's CPU time as a share of the cores it may use (its threads), as a GPU's utilisation is of
    the GPU; `rss_mb` the resident memory.
    """

    def __init__(self, cores: int = 0):
        import psutil

        torch = sys.modules.get("torch")
        self.cores = cores or (torch.get_num_threads() if torch else os.cpu_count() or 1)
        self.about = {"device": "cpu", "cores": self.cores}
        self._process = psutil.Process()
        self._before = self._times()

    def _times(self) -> tuple[float, float]:
        """Seconds so far: of the wall clock, of this process on all cores."""
        own = self._process.cpu_times()
        return time.perf_counter(), own.user + own.system

    def read(self) -> dict[str, float]:
        """The share since the last call, and the memory now."""
        before, self._before = self._before, self._times()
        wall, own = (new - old for new, old in zip(self._before, before, strict=True))
        sample = {"rss_mb": round(self._process.memory_info().rss / MB, 2)}
        if wall > 0:
            sample["util_pct"] = round(100 * own / wall / self.cores, 2)
        return sample


class CudaProbe:
    """A GPU: NVML for what the device does (its numbers are absent where NVML is), torch for what the allocator
    holds."""

    def __init__(self, index: int):
        import torch

        self.index = index
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", ""))
        self.about = {"device": properties.name, "uuid": uuid, "memory_mb": round(properties.total_memory / MB)}
        self._handle: Any = None
        self._unsupported: set[str] = set()
        with contextlib.suppress(Exception):  # no driver, no library: a machine without NVML, whatever it raises
            import pynvml

            self._nvml = pynvml
            pynvml.nvmlInit()
            for name in [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]:
                with contextlib.suppress(pynvml.NVMLError):
                    self._handle = pynvml.nvmlDeviceGetHandleByUUID(name)
                    break

    def read(self) -> dict[str, float]:
        """Utilisation, memory used, power, temperature; allocated and reserved memory, and the peaks of both."""
        return self._device() | self._allocator()

    def _device(self) -> dict[str, float]:
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        queries = {
            "util_pct": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "mem_used_mb": lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).used / MB, 1),
            "power_w": lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1),
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }
        sample = {}
        for name, query in queries.items():
            if name in self._unsupported:
                continue
            try:
                sample[name] = query()
            except nvml.NVMLError:
                self._unsupported.add(name)  # not on this device; asking again costs time and gives nothing
        return sample

    def _allocator(self) -> dict[str, float]:
        from torch.cuda.memory import memory_stats_as_nested_dict  # as fast as it gets: no flattening of 80 counters

        stats = memory_stats_as_nested_dict(self.index)
        if not stats:
            return {}
        allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
        return {
            "mem_alloc_mb": round(allocated["current"] / MB, 1),
            "mem_reserved_mb": round(reserved["current"] / MB, 1),
            "peak_alloc_mb": round(allocated["peak"] / MB, 1),
            "peak_reserved_mb": round(reserved["peak"] / MB, 1),
        }


class DeviceSampler:
    """A daemon thread that samples this rank's device into `<directory>/rank-00000.jsonl`.

    Whatever goes wrong is kept in `warning` and ends the sampling, never the run.

    Args:
        directory: `Run.devices_dir`.
        rank: This rank; it names the file.
        world: Number of ranks.
        device: `cpu` or `cuda:<index>`, as text or as a `torch.device`.
        every: Seconds between two samples.
        attempt: As in the ledger.
        probe: Reads the device: `about`, written once a start, and `read()`; None: what fits `device`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int = 0,
        world: int = 1,
        device: Any = "cpu",
        every: float = 1.0,
        attempt: int = 0,
        probe: Any = None,
    ):
        self.path = Path(directory) / f"rank-{rank:05d}.jsonl"
        self.rank, self.world, self.device, self.every, self.attempt = rank, world, str(device), every, attempt
        self.warning: str | None = None
        self.cpu_seconds = 0.0
        """What the thread itself has used."""
        self._probe = probe
        self._switches: deque[tuple[float, str]] = deque()  # time and name of each new phase
        self._phase = "startup"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="windlass-devices", daemon=True)

    def start(self) -> DeviceSampler:
        """Begin to sample."""
        self._thread.start()
        return self

    def phase(self, name: str) -> None:
        """From now on the device does `name`: train, eval, save, … Waiting for data belongs to training."""
        self._switches.append((time.perf_counter(), "train" if name == "data" else name))

    def stop(self, timeout: float = 2.0) -> None:
        """Take a last sample and end the thread; a second call does nothing."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout)

    def _run(self) -> None:
        file = -1
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file, torn = open_lines(self.path)
            os.write(file, torn)
            probe = self._probe or _probe(self.device)
            self._write(file, {"kind": "start", "world": self.world, "every": self.every} | probe.about)
            since, stopped = time.perf_counter(), False
            while not stopped:
                stopped = self._stop.wait(self.every)
                until = time.perf_counter()
                self._write(file, {"phase": self._main_phase(since, until)} | probe.read())
                since = until
                self.cpu_seconds = time.thread_time()
        except Exception as error:  # a sampler must never end a run, whatever a driver or a disk does
            self.warning = f"rank {self.rank}: utilisation and memory are no longer sampled ({error})"
        finally:
            if file >= 0:
                os.close(file)

    def _write(self, file: int, fields: dict[str, Any]) -> None:
        line = {"time": now(), "rank": self.rank, "attempt": self.attempt} | fields
        os.write(file, encode(line).encode() + b"\n")

    def _main_phase(self, since: float, until: float) -> str:
        """The phase that took most of the interval."""
        seconds: dict[str, float] = {}
        at = since
        while self._switches and self._switches[0][0] <= until:
            when, name = self._switches.popleft()
            seconds[self._phase] = seconds.get(self._phase, 0.0) + max(when - at, 0.0)
            at, self._phase = max(when, at), name
        seconds[self._phase] = seconds.get(self._phase, 0.0) + until - at
        return max(seconds, key=lambda name: seconds[name])


def _probe(device: str) -> HostProbe | CudaProbe:
    if not device.startswith("cuda"):
        return HostProbe()
    import torch

    _, _, index = device.partition(":")
    return CudaProbe(int(index) if index else torch.cuda.current_device())


def measure_cpu_peak(size: int = 1024, seconds: float = 1.0) -> float:
    """`telemetry.cpu_peak`: FLOP/s of the best of many fp32 products of two `size` x `size` matrices."""
    import torch

    left, right, out = torch.ones(size, size), torch.ones(size, size), torch.empty(size, size)
    best, end = float("inf"), time.perf_counter() + seconds
    with torch.no_grad():
        torch.mm(left, right, out=out)  # the first call allocates and starts threads
        while True:
            begin = time.perf_counter()
            torch.mm(left, right, out=out)
            best = min(best, time.perf_counter() - begin)
            if time.perf_counter() > end:
                return 2 * size**3 / best


# --- the summary -----------------------------------------------------------------------------------------------------

MAX_BYTES = 24_000_000
"""So much of the ranks' files is parsed for the summary: of ten days on 64 GPUs, 8 GB, every so many-th minute."""

MEANS = {
    "cuda": {"util_pct": "gpu_util_pct", "mem_alloc_mb": "mem_alloc_mb", "mem_reserved_mb": "mem_reserved_mb"},
    "cpu": {"util_pct": "cpu_util_pct", "rss_mb": "rss_mb"},
}
PEAKS = {"cuda": "peak_alloc_mb", "cpu": "rss_mb"}


def summarise_devices(run: Run) -> dict[str, Any]:
    """Utilisation and memory while training, over all ranks and `by_rank`, for the `summary` line.

    On GPUs `avg_gpu_util_pct`, `std_gpu_util_pct`, `avg_mem_alloc_mb`, `avg_mem_reserved_mb` and `peak_mem_mb` (the
    allocator's peak on the fullest rank); on CPUs `avg_cpu_util_pct`, `std_cpu_util_pct`, `avg_rss_mb` and
    `peak_mem_mb` (the largest resident memory). Means are over the samples of the phase `train`, a peak is one in
    any phase. Starts with another number of ranks than the last are left out.
    """
    worlds, world = {}, None
    for line in read_lines(run.metrics_path):
        world = line.get("world", world)
        worlds[line.get("attempt", 0)] = world
    files = sorted(run.devices_dir.glob("rank-*.jsonl"))
    by_rank, together = {}, []
    for path in files:
        samples = [
            x for x in _samples(path, MAX_BYTES // len(files)) if worlds.get(x.get("attempt", 0), world) == world
        ]
        if samples:
            by_rank[f"rank_{int(path.stem.removeprefix('rank-'))}"] = _statistics(samples)
            together += samples
    return _statistics(together) | {"by_rank": by_rank} if together else {}


def _statistics(samples: list[dict[str, Any]]) -> dict[str, float]:
    kind = "cuda" if any("mem_alloc_mb" in sample for sample in samples) else "cpu"
    stats: dict[str, float] = {}
    for field, name in MEANS[kind].items():
        values = [float(x[field]) for x in samples if x["phase"] == "train" and field in x]
        if not values:
            continue
        mean = math.fsum(values) / len(values)
        stats[f"avg_{name}"] = round(mean, 3)
        if field == "util_pct":
            stats[f"std_{name}"] = round(math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values)), 3)
    peaks = [float(x[PEAKS[kind]]) for x in samples if PEAKS[kind] in x]
    return stats | ({"peak_mem_mb": max(peaks)} if peaks else {})


def _samples(path: Path, max_bytes: int) -> Iterator[dict[str, Any]]:
    """A rank's samples; of a larger file every so many-th minute of them, and the last one, which has the run's
    peak."""
    every, text = path.stat().st_size // max_bytes + 1, b""
    with open(path, "rb") as file:
        for number, text in enumerate(file):
            if number // 60 % every == 0:
                yield from _parse(text)
    if every > 1:
        yield from _parse(text)


def _parse(text: bytes) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(ValueError):  # torn by a kill
        line = json.loads(text)
        if isinstance(line, dict) and "phase" in line:  # not the head of a start
            yield line
