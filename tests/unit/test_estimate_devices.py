"""Devices by the names that people write and that drivers report."""

from __future__ import annotations

import pytest

from windlass.errors import UserError
from windlass.estimate.devices import GIB, device_names, find_device
from windlass.telemetry.timing import peak_flops


@pytest.mark.parametrize(
    ("name", "gib", "tflops"),
    [
        ("NVIDIA A100 80GB PCIe", 80, 312),
        ("NVIDIA A100-PCIE-40GB", 40, 312),
        ("NVIDIA A100-SXM4-80GB", 80, 312),
        ("NVIDIA H200", 141, 989),
        ("NVIDIA H200 NVL", 141, 835),
        ("NVIDIA H100 80GB HBM3", 80, 989),
        ("NVIDIA H100 PCIe", 80, 756),
        ("NVIDIA H100 NVL", 94, 835),
        ("NVIDIA L4", 24, 121),
        ("NVIDIA L40S", 48, 362),
        ("Tesla T4", 16, 65),
        ("Tesla V100-PCIE-16GB", 16, 112),
        ("NVIDIA GeForce RTX 3090", 24, 71),
        ("NVIDIA B200", 180, 2250),
        ("AMD Instinct MI300X", 192, 1307.4),
    ],
)
def test_a_driver_s_name_is_known(name, gib, tflops):
    device = find_device(name)
    assert device.name == name and device.memory_bytes == gib * GIB
    assert peak_flops(device.name, "fp16") == pytest.approx(tflops * 1e12)


@pytest.mark.parametrize(
    ("name", "some"),
    [
        ("A100", ["A100-80GB", "A100-40GB"]),
        ("v100", ["V100-16GB", "V100-32GB"]),
        ("RTX", ["RTX-4090"]),
        ("GH200", ["GH200-96GB"]),
    ],
)
def test_a_name_that_several_have_is_not_guessed(name, some):
    with pytest.raises(UserError) as error:
        find_device(name)
    assert all(variant in str(error.value) for variant in some)


def test_every_short_name_finds_its_own_row():
    assert len({find_device(name).name for name in device_names()}) == len(device_names())
    for exact in ("H100", "H200", "L4", "L40", "A10", "T4"):
        assert find_device(exact).memory_bytes
