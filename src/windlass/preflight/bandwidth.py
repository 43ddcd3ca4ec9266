"""Matrix products on each device, and collectives by size: medians of repeated, synchronised
calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from windlass.preflight.findings import bus_bandwidth

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
SECONDS, MOST_CALLS = 1.0, 20  # for one collective and size, after the calls that warm it up
CPU_SIZES, GPU_SIZES = (2**16, 2**20, 2**24), (2**20, 2**25, 2**29)
GATE_SIZE = 2**32  # where a bandwidth is asked for: published rates of a machine are those of 4 GiB
BUFFERS = 3  # of the message's size, that `collectives` and the backend hold


def matrix_products(device: torch.device) -> dict[str, float]:
    """TFLOP/s of square matrix products by precision: fp32 and, on a GPU, bf16 where it has it,
    else fp16."""
    on_gpu = device.type == "cuda"
    half = (
        torch.bfloat16
        if on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        else torch.float16
    )
    rates = {}
    for dtype in (torch.float32, half) if on_gpu else (torch.float32,):
        size = 8192 if on_gpu else 1024
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = _median_seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds / 1e12
    return rates


def collectives(
    device: torch.device,
    group: dist.ProcessGroup,
    sizes: tuple[int, ...],
    show: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Time every collective of `group` at every size in bytes; every rank of the group calls this.

    Returns rows with `collective`, `size`, `seconds` (median), `algbw` and `busbw` in GB/s.
    """
    world = dist.get_world_size(group)
    rows = []
    for size in sizes:
        count = max(1, size // 4 // world) * world  # float32
        whole, part = torch.ones(count, device=device), torch.ones(count // world, device=device)
        other = torch.empty_like(whole)
        calls = _calls(group, whole, part, other)
        for name in COLLECTIVES:
            show(f"{name} {size:,} bytes")
            seconds = _median_seconds(calls[name], device, group)
            algorithm, bus = bus_bandwidth(name, 4 * count, seconds, world)
            rows.append(
                {
                    "collective": name,
                    "size": 4 * count,
                    "seconds": seconds,
                    "algbw": algorithm,
                    "busbw": bus,
                }
            )
    return rows


def _calls(
    group: dist.ProcessGroup, whole: torch.Tensor, part: torch.Tensor, other: torch.Tensor
) -> dict[str, Callable[[], object]]:
    """Each collective on these buffers: `whole` and `other` of the full size, `part` one rank's
    share of it."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    to, source = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    # torch 2.13 renamed these two, and warns of the old names
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def send_recv() -> None:
        pair = [
            dist.P2POp(dist.isend, whole, to, group),
            dist.P2POp(dist.irecv, other, source, group),
        ]
        for work in dist.batch_isend_irecv(pair):
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_gather": lambda: gather(whole, part, group=group),
        "reduce_scatter": lambda: scatter(part, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send_recv": send_recv,
    }


def _median_seconds(
    call: Callable[[], object], device: torch.device, group: dist.ProcessGroup | None = None
) -> float:
    def timed() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    first = max(timed(), timed())  # warms up
    number = max(3, min(MOST_CALLS, int(SECONDS / max(first, 1e-6))))
    if group is not None:  # the ranks must make equally many calls
        agreed = torch.tensor([number], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        number = int(agreed.item())
    return statistics.median(timed() for _ in range(number))
