"""Memory of devices by name, for plans of a device that is not on this machine."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass

from windlass.errors import UserError, argument
from windlass.processes import nvml_handle, visible_gpus

GIB = 2**30
USABLE = 0.9
"""The part of a device's memory that a plan fills; driver and fragmentation take the rest."""
HANDLES = 2  # of cuBLAS: one for the forward pass's thread, one for the backward pass's
WORKSPACE = 8 * 4096 * 1024
"""Bytes per cuBLAS handle by CUBLAS_WORKSPACE_CONFIG=:4096:8, which `import windlass` sets."""


@dataclass(frozen=True)
class Device:
    """A kind of device."""

    name: str  # as torch and NVML report it; the key of the table of peaks
    kind: str  # `cuda` or `cpu`
    memory_bytes: int | None  # None: unknown

    @property
    def usable_bytes(self) -> int | None:
        """The bytes that a plan may fill."""
        return None if self.memory_bytes is None else int(self.memory_bytes * USABLE)

    @property
    def workspace_bytes(self) -> int:
        """The bytes that torch allocates for cuBLAS."""
        return HANDLES * WORKSPACE if self.kind == "cuda" else 0


TABLE = (  # short name, the driver's name, GiB by the datasheet
    ("B200", "NVIDIA B200", 180),
    ("GH200-96GB", "NVIDIA GH200 480GB", 96),
    ("H200", "NVIDIA H200", 141),
    ("H200-NVL", "NVIDIA H200 NVL", 141),
    ("H100", "NVIDIA H100 80GB HBM3", 80),
    ("H100-PCIe", "NVIDIA H100 PCIe", 80),
    ("H100-NVL", "NVIDIA H100 NVL", 94),
    ("A100-80GB", "NVIDIA A100-SXM4-80GB", 80),
    ("A100-40GB", "NVIDIA A100-SXM4-40GB", 40),
    ("A100-PCIe-80GB", "NVIDIA A100 80GB PCIe", 80),
    ("A100-PCIe-40GB", "NVIDIA A100-PCIE-40GB", 40),
    ("A40", "NVIDIA A40", 48),
    ("A30", "NVIDIA A30", 24),
    ("A10", "NVIDIA A10", 24),
    ("A6000", "NVIDIA RTX A6000", 48),
    ("L40S", "NVIDIA L40S", 48),
    ("L40", "NVIDIA L40", 48),
    ("L4", "NVIDIA L4", 24),
    ("V100-32GB", "Tesla V100-SXM2-32GB", 32),
    ("V100-16GB", "Tesla V100-SXM2-16GB", 16),
    ("V100-PCIe-32GB", "Tesla V100-PCIE-32GB", 32),
    ("V100-PCIe-16GB", "Tesla V100-PCIE-16GB", 16),
    ("T4", "Tesla T4", 16),
    ("RTX-5090", "NVIDIA GeForce RTX 5090", 32),
    ("RTX-4090", "NVIDIA GeForce RTX 4090", 24),
    ("RTX-3090", "NVIDIA GeForce RTX 3090", 24),
    ("MI300X", "AMD Instinct MI300X", 192),
)


def find_device(name: str, memory_bytes: int | None = None) -> Device:
    """The device of a name such as `A100-80GB`, `h100` or `NVIDIA A100-SXM4-80GB`.

    A name that is not in the table gives a device with `memory_bytes`, or with unknown memory.
    Raises UserError for an ambiguous one, as `A100`.
    """
    if name.lower() == "cpu":
        return Device("CPU", "cpu", memory_bytes)
    wanted = _plain(name)
    for short, full, gib in TABLE:
        if wanted in (_plain(short), _plain(full), _plain(full.split(" ", 1)[1])):
            return Device(full, "cuda", memory_bytes or gib * GIB)
    if variants := [short for short, _, _ in TABLE if wanted and _plain(short).startswith(wanted)]:
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
            return Device(name if isinstance(name, str) else name.decode(), "cuda", memory_bytes)
    import psutil

    return Device("CPU", "cpu", memory_bytes or psutil.virtual_memory().total // ranks)


def _plain(name: str) -> str:
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub("^(nvidia)?(tesla)?(geforce)?", "", letters)
