"""The speed of matrix products and of collectives: medians of repeated, synchronised calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from windlass.estimate.work import Collective

SECONDS, MOST_CALLS = 1.0, 20  # for each collective and size, after the warm-up
BUFFERS = 3  # of the message's size, that `collectives` and the backend hold


def matrix_products(device: torch.device) -> dict[str, float]:
    """TFLOP/s of square matrix products: fp32 and, on a GPU, bf16 (fp16 if it has no bf16)."""
    dtypes, size = [torch.float32], 1024
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        dtypes, size = [*dtypes, torch.bfloat16 if has_bf16 else torch.float16], 8192
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
        seconds = _median_seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / seconds / 1e12
    return rates


def memory_bandwidth(device: torch.device) -> float:
    """GB/s read and written by a copy that is larger than the caches."""
    source = torch.ones(2**28 if device.type == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    seconds = _median_seconds(lambda: target.copy_(source), device)
    return 2 * source.nbytes / seconds / 1e9


def collectives(
    device: torch.device,
    group: dist.ProcessGroup,
    sizes: tuple[int, ...],
    show: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Time every collective at every size in bytes; every rank of `group` calls this.

    Returns rows with `collective`, `size` (as `Collective` has it), `seconds` (median), `algbw` and
    `busbw` in GB/s.
    """
    world = dist.get_world_size(group)
    rows = []
    for size in sizes:
        count = max(1, size // 4 // world) * world  # float32
        for name, call in _calls(device, group, count).items():
            show(f"{name} {size:,} bytes")
            seconds = _median_seconds(call, device, group)
            bus_bytes = Collective(name, 4 * count, 1, world).bus_bytes
            row = {"collective": name, "size": 4 * count, "seconds": seconds}
            speeds = {"algbw": 4 * count / seconds / 1e9, "busbw": bus_bytes / seconds / 1e9}
            rows.append(row | speeds)
    return rows


def _calls(
    device: torch.device, group: dist.ProcessGroup, count: int
) -> dict[str, Callable[[], object]]:
    """The collectives by name, on buffers of `count` numbers."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    whole, part = torch.ones(count, device=device), torch.ones(count // world, device=device)
    other = torch.empty_like(whole)
    to, source = (dist.get_global_rank(group, (rank + step) % world) for step in (1, -1))
    # torch 2.13 renamed these two, and warns about the old names
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

    def send_recv() -> None:
        send = dist.P2POp(dist.isend, whole, to, group)
        receive = dist.P2POp(dist.irecv, other, source, group)
        for work in dist.batch_isend_irecv([send, receive]):
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
    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def timed() -> float:
        start = now()
        call()
        return now() - start

    first = max(timed(), timed())  # warms up
    number = max(3, min(MOST_CALLS, int(SECONDS / max(first, 1e-6))))
    if group is not None:  # the ranks must make the same number of calls
        agreed = torch.tensor([number], device=device)
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        number = int(agreed.item())
    return statistics.median(timed() for _ in range(number))
