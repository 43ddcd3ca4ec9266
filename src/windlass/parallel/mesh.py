"""Who computes what: the ranks as a mesh with named dimensions, and its groups."""

from __future__ import annotations

import functools
from dataclasses import astuple
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from windlass.model.sharding import cut_of, is_sharded
from windlass.recipe.strategies import DIMENSIONS, Sizes, Strategy


class Mesh:
    """One rank's place in the mesh. Without `connect` it lacks groups, and every sum is local.

    `cp` ranks hold equal parameters and sum gradients like data ranks, so torch's mesh counts them
    under `dp_shard` or `dp_replicate`. A group is None if it would have one rank.
    """

    def __init__(self, sizes: Sizes, rank: int):
        self.sizes = sizes
        self.at = sizes.coordinates(rank)
        self.data_rank, self.data_world = sizes.data_rank(rank), sizes.data_world
        self.counts_rows = self.at["cp"] == 0  # the ranks of `cp` have the same rows
        self.devices: DeviceMesh | None = None
        self.replicas: DeviceMesh | None = None  # with equal plain parameters; None with FSDP2
        self.all_ranks: dist.ProcessGroup | None = None  # over gloo, for numbers on the host
        self.tp: dist.ProcessGroup | None = None
        self.cp: dist.ProcessGroup | None = None
        self.pp: dist.ProcessGroup | None = None
        self.ends: dist.ProcessGroup | None = None  # both ends of `pp`, which share a tied table

    def connect(self, strategy: Strategy, device_type: str, timeout: timedelta) -> None:
        """Create the groups; every rank calls it, after the process group of all ranks exists."""
        sizes = self.sizes
        if sizes.world > 1:
            self.all_ranks = dist.new_group(backend="gloo", timeout=timeout)
        replicate, shard = sizes.dp_replicate, sizes.dp_shard * sizes.cp
        if not strategy.shards_parameters:
            both = replicate * shard
            replicate, shard = (1, both) if strategy.shards_optimizer else (both, 1)
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
        tensor, pipeline = self.part("tp"), self.part("pp")
        self.tp = tensor.get_group() if tensor else None
        self.pp = pipeline.get_group() if pipeline else None
        split: Any = functools.partial(dist.new_subgroups_by_enumeration, timeout=timeout)
        if sizes.cp > 1:
            self.cp = split(self.rows("cp"))[0]
        self.ends = self.pp
        if sizes.pp > 2:
            self.ends = split([[row[0], row[-1]] for row in self.rows("pp")])[0]

    def rows(self, name: str) -> list[list[int]]:
        """The ranks that differ only in one dimension: one row for each place in the others."""
        ranks = np.arange(self.sizes.world).reshape(astuple(self.sizes))
        rows = np.moveaxis(ranks, DIMENSIONS.index(name), -1)
        return rows.reshape(-1, getattr(self.sizes, name)).tolist()  # type: ignore[no-any-return]

    def part(self, *names: str) -> DeviceMesh | None:
        """The mesh of some dimensions; None if none of them is in use."""
        in_use = (self.devices.mesh_dim_names or ()) if self.devices is not None else ()
        names = tuple(name for name in names if name in in_use)
        return self.devices[names] if self.devices is not None and names else None

    def groups(self) -> list[dist.ProcessGroup]:
        groups = [dist.group.WORLD, self.all_ranks]
        groups += self.devices.get_all_groups() if self.devices is not None else []
        groups += [self.cp, self.ends]
        return list({id(group): group for group in groups if group is not None}.values())

    def cutting_groups(self, parameter: Tensor) -> tuple[dist.ProcessGroup, ...]:
        tp = (self.tp,) if self.tp is not None and cut_of(parameter) else ()
        if not is_sharded(parameter):
            return tp
        mesh = parameter.device_mesh
        assert not any(p.is_partial() for p in parameter.placements), parameter.placements
        dimensions = [d for d, p in enumerate(parameter.placements) if not p.is_replicate()]
        return (*(mesh.get_group(d) for d in dimensions if mesh.size(d) > 1), *tp)
