"""Who computes what: the ranks as a mesh with named dimensions, and the groups that follow from it.

The dimensions and their order are in `recipe.strategies.DIMENSIONS`, as in torchtitan's
`ParallelDims`. A dimension of size 1 has no process group, because creating one takes a round over
all ranks.
"""

from __future__ import annotations

from dataclasses import astuple
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from windlass.recipe.strategies import DIMENSIONS, Sizes, Strategy

LOSS_DIMENSIONS = ("dp_replicate", "dp_shard", "cp")
"""Ranks that differ in these see different tokens: their losses and counts add up to the step's."""


class Mesh:
    """One rank's place in the mesh. Without `connect` there are no groups, and every sum is local.

    Attributes:
        sizes: ranks along each dimension.
        data_rank, data_world: which slice of the samples this rank reads, out of how many.
        counts_rows: whether numbers from whole rows count in a sum over `loss_ranks`, where the
            ranks of `cp` have the same rows.
        devices: the dimensions in use as torch's DeviceMesh; None if no rank shares work.
        all_ranks: a gloo group of every rank, for flags; None if there is one rank.
        loss_ranks: a gloo group of the ranks whose losses and token counts add up, for numbers on
            the host: a collective on it never touches the device's stream.
        loss_group: the same ranks on the backend of the device.
        replicas: the ranks that hold equal plain parameters; None if FSDP2 shards them.
    """

    def __init__(self, sizes: Sizes, rank: int):
        self.sizes = sizes
        self.data_rank, self.data_world = sizes.data_rank(rank), sizes.data_world
        self.counts_rows = rank // sizes.tp % sizes.cp == 0
        self.devices: DeviceMesh | None = None
        self.replicas: DeviceMesh | None = None
        self.all_ranks: dist.ProcessGroup | None = None
        self.loss_ranks: dist.ProcessGroup | None = None
        self.loss_group: dist.ProcessGroup | None = None

    def connect(self, strategy: Strategy, device_type: str, timeout: timedelta) -> None:
        """Create the groups; every rank calls it, after the process group of all ranks exists.

        `dp_shard` is a dimension of `devices` even with one rank if the strategy shards anything.
        """
        if self.sizes.world > 1:
            self.all_ranks = self.loss_ranks = dist.new_group(backend="gloo", timeout=timeout)
            self.loss_group = dist.group.WORLD
        used = {
            name: size
            for name, size in zip(DIMENSIONS, astuple(self.sizes), strict=True)
            if size > 1 or (name == "dp_shard" and strategy.shards_optimizer)
        }
        if used:
            shape, names = tuple(used.values()), tuple(used)
            self.devices = init_device_mesh(device_type, shape, mesh_dim_names=names)
        if not strategy.shards_parameters:
            self.replicas = self.part("dp_replicate", "dp_shard")
        rows = self.loss_rows()
        if len(rows) > 1:
            self.loss_ranks, self.loss_group = (
                dist.new_subgroups_by_enumeration(rows, timeout=timeout, backend=backend)[0]
                for backend in ("gloo", None)
            )

    def loss_rows(self) -> list[list[int]]:
        """The ranks of every group over which losses add up; each rank is in one of them."""
        ranks = np.arange(self.sizes.world).reshape(astuple(self.sizes))
        outer = [i for i, name in enumerate(DIMENSIONS) if name not in LOSS_DIMENSIONS]
        ranks = np.moveaxis(ranks, outer, range(len(outer)))
        rows: list[list[int]] = ranks.reshape(-1, self.data_world * self.sizes.cp).tolist()
        return rows

    def part(self, *names: str) -> DeviceMesh | None:
        """The mesh of some dimensions; None if none of them is in use."""
        in_use = (self.devices.mesh_dim_names or ()) if self.devices is not None else ()
        names = tuple(name for name in names if name in in_use)
        return self.devices[names] if self.devices is not None and names else None

    def groups(self) -> list[dist.ProcessGroup]:
        """Every process group of this rank."""
        groups = [dist.group.WORLD, self.all_ranks, self.loss_ranks, self.loss_group]
        groups += self.devices.get_all_groups() if self.devices is not None else []
        return list({id(group): group for group in groups if group is not None}.values())


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of several ranks that hold different pieces of a tensor."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    assert not any(p.is_partial() for p in tensor.placements), tensor.placements
    dimensions = [d for d, p in enumerate(tensor.placements) if not p.is_replicate()]
    return tuple(mesh.get_group(d) for d in dimensions if mesh.size(d) > 1)
