"""Peak arithmetic of devices: the makers' published numbers, and a CPU's by measurement. Imports no torch by itself."""

from __future__ import annotations

import time

from windlass.telemetry.peak_table import peak_flops

__all__ = ["measure_cpu_peak", "peak_flops"]


def measure_cpu_peak(size: int = 1024, seconds: float = 1.0) -> float:
    """FLOP/s of the best of many fp32 matrix products on this process's CPU threads, for `telemetry.cpu_peak`.

    Args:
        size: Rows and columns of the square matrices.
        seconds: How long to measure.
    """
    import torch

    left, right = torch.ones(size, size), torch.ones(size, size)
    out = torch.empty(size, size)
    best, end = float("inf"), time.perf_counter() + seconds
    with torch.no_grad():
        torch.mm(left, right, out=out)  # the first call allocates and starts threads
        while True:
            begin = time.perf_counter()
            torch.mm(left, right, out=out)
            best = min(best, time.perf_counter() - begin)
            if time.perf_counter() > end:
                return 2 * size**3 / best
