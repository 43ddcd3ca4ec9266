"""Who computes what: the ranks as a mesh with named dimensions, and the groups that follow from it.

The dimensions and their order are in `recipe.strategies.DIMENSIONS`, as in torchtitan's
`ParallelDims`. A dimension of size 1 gets no process group, because creating one takes a round over
all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import astuple
from datetime import timedelta

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.model.share import cut_of, is_sharded
from windlass.recipe.strategies import DIMENSIONS, Sizes, Strategy

LOSS_DIMENSIONS = ("dp_replicate", "dp_shard", "cp")
"""Ranks that differ in these see different tokens: their losses and counts add up to the step's."""


class Mesh:
    """One rank's place in the mesh. Without `connect` it lacks groups, and every sum is local.

    The ranks of `cp` hold equal parameters and add up their gradients, as data ranks do. So for
    torch they belong to `dp_shard`, or with replicated parameters to the one dimension of all
    replicas.

    Attributes:
        sizes: ranks along each dimension; `at`: this rank's coordinates.
        sequence: whether the ranks of `tp` divide the residual stream along time.
        data_rank, data_world: which slice of the samples this rank reads, out of how many.
        counts_rows: whether numbers from whole rows count in a sum over `loss_ranks`, where the
            ranks of `cp` have the same rows.
        devices: `pp`, `dp_replicate`, `dp_shard` and `tp`, if in use, as torch's DeviceMesh; None
            if no rank shares work.
        all_ranks: a gloo group of every rank, for flags; None if there is one rank.
        loss_ranks: a gloo group of the ranks whose losses and token counts add up, for numbers on
            the host: a collective on it never touches the device's stream.
        loss_group: the same ranks on the backend of the device.
        replicas: the ranks that hold equal plain parameters; None if FSDP2 shards them.
        tp, cp, pp: the groups of one dimension; None if it has one rank.
        ends: the first and last rank of `pp` if both hold the table of a tied head and this rank is
            one of them; from `connect_ends`.
    """

    def __init__(self, sizes: Sizes, rank: int, sequence: bool = False):
        self.sizes, self.at, self.sequence = sizes, sizes.coordinates(rank), sequence
        self.data_rank, self.data_world = sizes.data_rank(rank), sizes.data_world
        self.counts_rows = self.at["cp"] == 0
        self.devices: DeviceMesh | None = None
        self.replicas: DeviceMesh | None = None
        self.all_ranks: dist.ProcessGroup | None = None
        self.loss_ranks: dist.ProcessGroup | None = None
        self.loss_group: dist.ProcessGroup | None = None
        self.tp: dist.ProcessGroup | None = None
        self.cp: dist.ProcessGroup | None = None
        self.pp: dist.ProcessGroup | None = None
        self.ends: dist.ProcessGroup | None = None

    def connect(self, strategy: Strategy, device_type: str, timeout: timedelta) -> None:
        """Create the groups; every rank calls it, after the process group of all ranks exists.

        `dp_shard` is a dimension of `devices` even with one rank if the strategy shards anything.
        """
        sizes = self.sizes
        if sizes.world > 1:
            self.all_ranks = self.loss_ranks = dist.new_group(backend="gloo", timeout=timeout)
            self.loss_group = dist.group.WORLD
        replicate, shard = sizes.dp_replicate, sizes.dp_shard * sizes.cp
        if not strategy.shards_parameters:
            replicate, shard = (
                (1, replicate * shard) if strategy.shards_optimizer else (replicate * shard, 1)
            )
        wanted = {"pp": sizes.pp, "dp_replicate": replicate, "dp_shard": shard, "tp": sizes.tp}
        used = {
            name: size
            for name, size in wanted.items()
            if size > 1 or (name == "dp_shard" and strategy.shards_optimizer)
        }
        if used:
            shape, names = tuple(used.values()), tuple(used)
            self.devices = init_device_mesh(device_type, shape, mesh_dim_names=names)
        if not strategy.shards_parameters:
            self.replicas = self.part("dp_replicate", "dp_shard")
        self.tp, self.pp = (
            part.get_group() if (part := self.part(name)) else None for name in ("tp", "pp")
        )
        if sizes.cp > 1:
            self.cp = self._subgroup(("cp",), timeout, None)
        if sizes.data_world * sizes.cp < sizes.world:
            self.loss_ranks, self.loss_group = (
                self._subgroup(LOSS_DIMENSIONS, timeout, backend) for backend in ("gloo", None)
            )

    def connect_ends(self, timeout: timedelta) -> None:
        """Create the group of the first and last stage; every rank calls it."""
        pairs = [[row[0], row[-1]] for row in self.rows(("pp",))]
        two = self.sizes.pp == 2
        self.ends = self.pp if two else dist.new_subgroups_by_enumeration(pairs, timeout=timeout)[0]

    def _subgroup(
        self, names: Sequence[str], timeout: timedelta, backend: str | None
    ) -> dist.ProcessGroup:
        """This rank's group along some dimensions; every rank calls it."""
        rows = self.rows(names)
        group: dist.ProcessGroup = dist.new_subgroups_by_enumeration(
            rows, timeout=timeout, backend=backend
        )[0]
        return group

    def rows(self, names: Sequence[str]) -> list[list[int]]:
        """The ranks that differ only in some dimensions: one row for each place in the others."""
        ranks = np.arange(self.sizes.world).reshape(astuple(self.sizes))
        outer = [i for i, name in enumerate(DIMENSIONS) if name not in names]
        ranks = np.moveaxis(ranks, outer, range(len(outer)))
        count = math.prod(getattr(self.sizes, name) for name in names)
        rows: list[list[int]] = ranks.reshape(-1, count).tolist()
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
        groups += [self.cp, self.ends]
        return list({id(group): group for group in groups if group is not None}.values())

    def cutting_groups(self, parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        """The groups of several ranks that hold different pieces of a parameter."""
        tp = (self.tp,) if self.tp is not None and cut_of(parameter) else ()
        return (*shard_groups(parameter), *tp)


def shard_groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """The groups of several ranks that hold different pieces of a tensor."""
    if not is_sharded(tensor):
        return ()
    mesh = tensor.device_mesh
    assert not any(p.is_partial() for p in tensor.placements), tensor.placements
    dimensions = [d for d, p in enumerate(tensor.placements) if not p.is_replicate()]
    return tuple(mesh.get_group(d) for d in dimensions if mesh.size(d) > 1)
