"""All-gather and reduce-scatter for FSDP2 on a CPU mesh, out of the collectives that gloo is good at.

gloo makes a reduce-scatter out of an all-reduce of everything, and its all-gather copies more than it sends. Over loopback,
64 MB of float32, 2 ranks (4 ranks), on a busy machine: reduce-scatter 265 (527) ms, against 88 (142) ms for an all-to-all and
a local sum; all-gather 232 (334) ms, against 71 (109) ms for one broadcast from each rank. A whole step of the 10.7M model with
`full_shard` on 2 ranks takes 15 % less (one micro-batch of 16 x 256 or of 4 x 256 tokens), 5 % less with two micro-batches
(medians of 8 steps, in turns; `benchmarks/gloo.py`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def _allocate(self: object, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A buffer for FSDP2; nothing special about it."""
    return torch.empty(*size, dtype=dtype, device=device)


class AllGather:
    """Each rank broadcasts its part, all at the same time."""

    allocate = _allocate

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Parts of all ranks, in order, into `output_tensor`; done on return, whatever `async_op` says."""
        parts = output_tensor.view(torch.uint8).view(group.size(), -1)
        own = parts[group.rank()]
        if own.data_ptr() != input_tensor.data_ptr():
            own.copy_(input_tensor.view(torch.uint8))
        works = [dist.broadcast(part, group_src=i, group=group, async_op=True) for i, part in enumerate(parts)]
        for work in works:
            assert work is not None
            work.wait()


class ReduceScatter:
    """Each rank gets all values for its own part, and adds them up in the order of the ranks.

    The buffer for what comes in is reused: to get fresh memory from the system takes as long as to fill it.
    """

    allocate = _allocate

    def __init__(self) -> None:
        self._received = torch.empty(0)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """The sum over ranks of this rank's part into `output_tensor`; done on return, whatever `async_op` says."""
        assert op == dist.ReduceOp.SUM, op
        if self._received.numel() < input_tensor.numel() or self._received.dtype != input_tensor.dtype:
            self._received = torch.empty_like(input_tensor)
        received = self._received[: input_tensor.numel()]
        dist.all_to_all_single(received, input_tensor, group=group)
        torch.sum(received.view(group.size(), -1), dim=0, out=output_tensor)
