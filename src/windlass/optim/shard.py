"""ZeRO-1: each rank holds the optimizer state of its rows of each parameter (`shard_optim`).

Every rank holds whole parameters and gradients, which DDP adds up. Rank r updates the r-th of
`world` equal pieces of each parameter's rows, cut as in FSDP2. Then the ranks gather the updated
rows. The update equals `ddp`'s bit for bit. `shard_optim` sends 3 bytes for every 2 of `ddp`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from windlass.model.sharding import rows_of_rank

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

GATHER_BYTES = 2**25
"""Parameters up to this size together are gathered in one message."""
LINE_BYTES = 64
"""Torch's fused AdamW on a CPU works in lines of this size and rounds a rest differently."""


def own_rows(tensor: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """This rank's view of a tensor that all ranks hold: its rows (`Shard(0)`), or all of it."""
    from torch.distributed.tensor import DTensor

    assert tensor.is_contiguous(), "rows of a tensor in column-major order"
    local = tensor.detach()
    if placement.is_shard():
        rows = rows_of_rank(tensor.shape[0], mesh.size(), mesh.get_local_rank())
        local = local[rows.start : rows.stop]
    layout: Any = {"shape": tensor.shape, "stride": tensor.stride(), "run_check": False}
    return DTensor.from_local(local, mesh, [placement], **layout)


def placement(p: Tensor, mesh: DeviceMesh, any_row: bool) -> Placement:
    """By rows; whole for a scalar and, without `any_row`, if the cut were inside a line."""
    from torch.distributed.tensor import Replicate, Shard

    if not p.dim():
        return Replicate()
    rank_bytes = len(rows_of_rank(p.shape[0], mesh.size(), 0)) * p[0].nbytes
    by_rows = any_row or rank_bytes % LINE_BYTES == 0 or mesh.size() == 1
    return Shard(0) if by_rows else Replicate()


class ShardedOptimizer(torch.optim.Optimizer):
    """An optimizer of this rank's rows: it takes their gradients and gathers the updated rows.
    `rows`: for each parameter the DTensor that the inner optimizer trains, the key of its state."""

    def __init__(
        self, rows: dict[nn.Parameter, Any], optimizer: torch.optim.Optimizer, mesh: DeviceMesh
    ):
        # No super().__init__(): the base class would create groups and state.
        self.rows, self.mesh, self.inner = rows, mesh, optimizer
        self.param_groups, self.state = optimizer.param_groups, optimizer.state
        self.defaults = optimizer.defaults
        # torch's names, as in MuonAdamW
        self._step_supports_amp_scaling = getattr(optimizer, "_step_supports_amp_scaling", False)
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self.buckets: list[list[nn.Parameter]] = []
        bucket_bytes, dtype = 0, None
        for p in (p for p, part in rows.items() if part.placements[0].is_shard()):
            if dtype != p.dtype or bucket_bytes + p.nbytes > GATHER_BYTES:
                self.buckets.append([])
                bucket_bytes = 0
            self.buckets[-1].append(p)
            bucket_bytes, dtype = bucket_bytes + p.nbytes, p.dtype

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for p, rows in self.rows.items():
            rows.grad = None if p.grad is None else own_rows(p.grad, self.mesh, rows.placements[0])
        if self._step_supports_amp_scaling:
            self.inner.found_inf = self.found_inf  # type: ignore[attr-defined]
            self.inner.grad_scale = self.grad_scale  # type: ignore[attr-defined]
        self.inner.step()
        world = self.mesh.size()
        # torch 2.13 renamed it.
        gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        for bucket in self.buckets if world > 1 else ():
            sizes = [len(rows_of_rank(p.shape[0], world, 0)) * p[0].numel() for p in bucket]
            sent = bucket[0].new_zeros(sum(sizes))
            for part, p in zip(sent.split(sizes), bucket, strict=True):
                local = self.rows[p].to_local()
                part[: local.numel()].copy_(local.reshape(-1))
            received = sent.new_empty(world, len(sent))
            gather(received.view(-1), sent, group=self.mesh.get_group())
            for part, p in zip(received.split(sizes, dim=1), bucket, strict=True):
                p.copy_(part.reshape(-1)[: p.numel()].view(p.shape))  # the gap is at the end

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p, rows in self.rows.items():
            p.grad = rows.grad = None
