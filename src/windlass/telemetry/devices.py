"""Utilisation and memory of each rank, sampled by a background thread: never in the step, never a collective."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from windlass.telemetry.ledger import encode, now, open_lines

MB = 1e6


class Probe(Protocol):
    """Reads one device; every number is absent where it cannot be had."""

    about: dict[str, Any]
    """What the device is, written once a start."""

    def read(self) -> dict[str, float]:
        """The device's state now, or since the last call."""
        ...


class HostProbe:
    """This process and its machine through psutil.

    `util_pct` is the process's CPU time as a share of the cores it may use (its threads), as a GPU's utilisation is of the
    GPU; `machine_pct` that of all cores by everybody; `rss_mb` the resident memory.
    """

    def __init__(self, cores: int = 0):
        import psutil

        self._process, self._machine = psutil.Process(), psutil.cpu_times
        self.cores = cores or _threads()
        self.about = {"device": "cpu", "cores": self.cores}
        self._before = self._read()

    def _read(self) -> tuple[float, float, float, float]:
        own, all_ = self._process.cpu_times(), self._machine()
        idle = all_.idle + getattr(all_, "iowait", 0.0)
        # guest time is counted in user time already
        whole = sum(all_) - getattr(all_, "guest", 0.0) - getattr(all_, "guest_nice", 0.0)
        return time.perf_counter(), own.user + own.system, whole - idle, whole

    def read(self) -> dict[str, float]:
        """Shares since the last call, and the memory now."""
        before, self._before = self._before, self._read()
        wall, own, busy, whole = (new - old for new, old in zip(self._before, before, strict=True))
        found = {"rss_mb": round(self._process.memory_info().rss / MB, 2)}
        if wall > 0:
            found["util_pct"] = round(100 * own / wall / self.cores, 2)
        if whole > 0:
            found["machine_pct"] = round(100 * busy / whole, 2)
        return found


class CudaProbe:
    """A GPU: NVML for what the device does, found by the device's UUID, and torch for what the allocator holds.

    `CUDA_VISIBLE_DEVICES` renumbers torch's devices but not NVML's, so an index would name another GPU. Where NVML is
    missing, its numbers are absent.
    """

    def __init__(self, index: int):
        import torch

        self.index = index
        properties = torch.cuda.get_device_properties(index)
        self.uuid = str(getattr(properties, "uuid", ""))
        self.about = {"device": properties.name, "uuid": self.uuid, "memory_mb": round(properties.total_memory / MB)}
        self._nvml, self._handle = _nvml_handle(self.uuid)
        self._broken: set[str] = set()

    def read(self) -> dict[str, float]:
        """Utilisation, memory used, power, temperature; allocated and reserved memory, and the peaks of both."""
        return self._device() | self._allocator()

    def _device(self) -> dict[str, float]:
        if self._handle is None:
            return {}
        nvml, handle = self._nvml, self._handle
        wanted = {
            "util_pct": lambda: float(nvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            "mem_used_mb": lambda: round(nvml.nvmlDeviceGetMemoryInfo(handle).used / MB, 1),
            "power_w": lambda: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, 1),
            "temperature_c": lambda: float(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        }
        found = {}
        for name, ask in wanted.items():
            if name in self._broken:
                continue
            try:
                found[name] = ask()
            except nvml.NVMLError:
                self._broken.add(name)  # not on this device; asking again costs time and gives nothing
        return found

    def _allocator(self) -> dict[str, float]:
        from torch.cuda.memory import memory_stats_as_nested_dict

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


def _nvml_handle(uuid: str) -> tuple[Any, Any]:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no driver, no library: a machine without NVML, whatever it raises
        return None, None
    names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
    for name in names:
        with contextlib.suppress(pynvml.NVMLError):
            return pynvml, pynvml.nvmlDeviceGetHandleByUUID(name)
    return None, None


def _threads() -> int:
    torch = sys.modules.get("torch")
    if torch is not None:
        return int(torch.get_num_threads())
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class DeviceSampler:
    """A daemon thread that samples this rank's device into `<directory>/rank-00000.jsonl`.

    Each line says in which phase of the run most of its interval lay, so that an evaluation does not look like an idle
    device. Whatever goes wrong is kept in `trouble` and ends the sampling, never the run.

    Args:
        directory: `Run.devices_dir`.
        rank: This rank; it names the file.
        world: Number of ranks.
        device: `cpu` or `cuda:<index>`, as text or as a `torch.device`.
        every: Seconds between two samples.
        attempt: As in the ledger.
        probe: Reads the device; None: what fits `device`.
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
        probe: Probe | None = None,
    ):
        self.path = Path(directory) / f"rank-{rank:05d}.jsonl"
        self.rank, self.world, self.device, self.every, self.attempt = rank, world, str(device), every, attempt
        self.trouble: str | None = None
        self.cpu_seconds = 0.0
        self._probe = probe
        self._switches: deque[tuple[float, str]] = deque()
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
            since = time.perf_counter()
            stopped = False
            while not stopped:
                stopped = self._stop.wait(self.every)
                until = time.perf_counter()
                self._write(file, {"phase": self._main_phase(since, until)} | probe.read())
                since = until
                self.cpu_seconds = time.thread_time()
        except Exception as error:  # a sampler must never end a run, whatever a driver or a disk does
            self.trouble = f"rank {self.rank}: utilisation and memory are no longer sampled ({error})"
        finally:
            if file >= 0:
                os.close(file)

    def _write(self, file: int, fields: dict[str, Any]) -> None:
        line = {"time": now(), "rank": self.rank, "attempt": self.attempt} | fields
        os.write(file, encode(line).encode() + b"\n")

    def _main_phase(self, since: float, until: float) -> str:
        """The phase that took most of the interval."""
        spent: dict[str, float] = {}
        at = since
        while self._switches and self._switches[0][0] <= until:
            when, name = self._switches.popleft()
            spent[self._phase] = spent.get(self._phase, 0.0) + max(when - at, 0.0)
            at, self._phase = max(when, at), name
        spent[self._phase] = spent.get(self._phase, 0.0) + until - at
        return max(spent, key=lambda name: spent[name])


def _probe(device: str) -> Probe:
    if not device.startswith("cuda"):
        return HostProbe()
    import torch

    _, _, index = device.partition(":")
    return CudaProbe(int(index) if index else torch.cuda.current_device())
