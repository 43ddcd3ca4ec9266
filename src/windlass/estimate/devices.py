"""Devices by name, with their memory, links and peak speeds: the table `devices.toml`."""

from __future__ import annotations

import contextlib
import re
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from windlass.errors import UserError, argument
from windlass.processes import nvml_handle, visible_gpus

GIB = 2**30
NO_PEAK = "a CPU has no published peak"
USABLE = 0.9
"""The part of a device's memory that a plan fills.

The driver, NCCL's buffers and the allocator's fragmentation take the rest. Of 209 published runs
with the largest micro-batch that ran, none takes more than 0.88 (docs/evidence/plan.md)."""
CAREFUL = 0.8  # on ranks that cannot repeat a step in which memory ran out
WORKSPACES = 2 * 8 * 4096 * 1024
"""Bytes of cuBLAS for the threads of the forward and the backward pass, as `import windlass` sets
CUBLAS_WORKSPACE_CONFIG=:4096:8."""
PCIE = 32e9  # PCIe 4 x16, for devices that are not in the table
LOOPBACK, HOST_MEMORY = 1e9, 4e10  # bytes a second, assumed for CPU ranks of a host


@dataclass(frozen=True)
class Device:
    name: str  # as torch and NVML report it; the key of the table of peaks
    kind: str  # `cuda` or `cpu`
    memory_bytes: int | None  # None: unknown
    link: float = PCIE  # bytes a second to the other devices of a host, in one direction
    bandwidth: float | None = None  # bytes a second of its own memory; None: unknown

    @property
    def family(self) -> str:
        """The family of a listed device with NVLink, as published runs have it; else its name."""
        short = next((short for short, one in table().items() if one.name == self.name), self.name)
        return short if "PCIe" in short else re.sub(r"-\d+GB$", "", short)

    @property
    def usable_bytes(self) -> int | None:
        return None if self.memory_bytes is None else int(self.memory_bytes * USABLE)

    @property
    def workspace_bytes(self) -> int:
        return WORKSPACES if self.kind == "cuda" else 0


@cache
def device_table() -> dict[str, Any]:
    """`devices.toml`, which documents itself: chips with their boards, and the speeds reached."""
    return tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))


@cache
def table() -> dict[str, Device]:
    """The boards of the table of devices by their short names."""
    devices = {}
    for chip in device_table()["chip"]:
        for short, board in chip.get("boards", {}).items():
            link, bandwidth = board["link"] * 1e9, board["bandwidth"] * 1e9
            devices[short] = Device(board["name"], "cuda", int(board["gib"] * GIB), link, bandwidth)
    return devices


def peak_flops(name: str, precision: str, tf32: bool = False) -> float | None:
    """The highest FLOP/s by a driver's name; None: unknown. `tf32`: of fp32 products."""
    column = "tf32" if tf32 and precision == "fp32" else precision
    for chip in device_table()["chip"]:
        if re.search(chip["names"], name, re.IGNORECASE):
            tflops = chip.get("tflops", {})
            return tflops[column] * 1e12 if column in tflops else None
    return None


def find_device(name: str, memory_bytes: int | None = None) -> Device:
    """The device of a name such as `A100-80GB` or `h100`; UserError for an ambiguous one."""
    if name.lower() == "cpu":
        return Device("CPU", "cpu", memory_bytes, LOOPBACK, HOST_MEMORY)
    wanted = _plain(name)
    for short, device in table().items():
        if wanted in map(_plain, (short, device.name, device.name.split(" ", 1)[1])):
            return replace(device, memory_bytes=memory_bytes or device.memory_bytes)
    if variants := [short for short in table() if wanted and _plain(short).startswith(wanted)]:
        problem = f"{argument('device', name)} is ambiguous"
        raise UserError(f"{problem}; write one of {', '.join(variants)}")
    return Device(name, "cuda", memory_bytes)


def this_device(ranks: int = 1, memory_bytes: int | None = None, cpu: bool = False) -> Device:
    """This machine's first NVIDIA device, else (or with `cpu`) its CPU shared by `ranks`."""
    if not cpu:
        with contextlib.suppress(Exception):  # no driver, no device, or no answer from the driver
            import pynvml

            pynvml.nvmlInit()
            handle = nvml_handle(pynvml, visible_gpus()[0])
            name = pynvml.nvmlDeviceGetName(handle)
            memory_bytes = memory_bytes or int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
            listed = {device.name: device for device in table().values()}
            return replace(listed.get(name, Device(name, "cuda", 0)), memory_bytes=memory_bytes)
    import psutil

    return find_device("cpu", memory_bytes or psutil.virtual_memory().total // ranks)


def _plain(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub("^(nvidia)?(tesla)?(geforce)?", "", letters)
