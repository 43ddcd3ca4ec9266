"""Sharding strategies: the sizes of the mesh's dimensions, and the tensors that ranks divide. Other
modules ask for the properties of a strategy, not for its name."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

from windlass.errors import UserError

# the dimensions of the mesh, outermost first: ranks next to each other differ in `tp`
DIMENSIONS = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# the settings of data parallelism alone, for a recipe that is read for another purpose
NO_LAYOUT = {"parallel.tensor": 1, "parallel.context": 1, "parallel.pipeline": 1}


@dataclass(frozen=True)
class Sizes:
    """Ranks along each dimension of the mesh, in the order of `DIMENSIONS`."""

    pp: int = 1  # pipeline stages
    dp_replicate: int = 1  # replicas of the parameters
    dp_shard: int = 1  # ranks among which the optimizer state or the parameters are divided
    cp: int = 1  # parts of each sequence
    tp: int = 1  # parts of each matrix

    @property
    def world(self) -> int:
        return math.prod(astuple(self))

    @property
    def data_world(self) -> int:
        """Ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def layout(self) -> str:
        """The ranks of one copy of the model, as `tp 2 · pp 2`; empty for data ranks alone."""
        sizes = {"tp": self.tp, "cp": self.cp, "pp": self.pp}
        return " · ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)

    def data_rank(self, rank: int) -> int:
        """The slice of the data that a rank reads; the ranks of `pp`, `cp` and `tp` share one."""
        return rank // (self.cp * self.tp) % self.data_world

    def coordinates(self, rank: int) -> dict[str, int]:
        places = dict[str, int]()
        for name in reversed(DIMENSIONS):
            rank, places[name] = divmod(rank, getattr(self, name))
        return {name: places[name] for name in DIMENSIONS}

    def place(self, rank: int) -> str:
        """The coordinates for messages, as `pp 1, dp 0, tp 1`; empty for data ranks alone."""
        if self.pp * self.cp * self.tp == 1:
            return ""
        at = self.coordinates(rank) | {"dp": self.data_rank(rank)}
        sizes = {"pp": self.pp, "dp": self.data_world, "cp": self.cp, "tp": self.tp}
        return ", ".join(f"{name} {at[name]}" for name, size in sizes.items() if size > 1)


@dataclass(frozen=True)
class Strategy:
    """What the ranks of `dp_shard` divide among themselves."""

    name: str
    distributed: bool = True  # the ranks form a process group
    shards_optimizer: bool = False  # the optimizer state
    shards_parameters: bool = False  # parameters and gradients as well, with FSDP2
    keeps_gathered: bool = False  # gathered parameters stay until the step's last backward pass
    reduces_each: bool = False  # FSDP2 reduces the gradients of each micro-batch
    grouped: bool = False  # sharding groups of `parallel.shard_size` ranks, replicas of each other

    def sizes(self, world: int, shard_size: int = 0, ranks_of_host: int = 0) -> Sizes:
        """How the strategy arranges `world` ranks that read different samples.

        A sharding group has `shard_size` ranks if that is set, else the ranks of a host
        (`ranks_of_host`, 0 if there is only one host), else about half of all. UserError if
        `shard_size` does not divide the ranks.
        """
        if not self.shards_optimizer:
            return Sizes(dp_replicate=world)
        if not self.grouped:
            return Sizes(dp_shard=world)
        if shard_size and world % shard_size:
            problem = f"parallel.shard_size = {shard_size} does not divide the {world} ranks"
            raise UserError(f"{problem}: write a size that does")
        if not shard_size and ranks_of_host and world % ranks_of_host == 0:
            shard_size = ranks_of_host
        half = max(1, world // 2)
        shard_size = shard_size or max(d for d in range(1, half + 1) if world % d == 0)
        return Sizes(dp_replicate=world // shard_size, dp_shard=shard_size)


_FSDP2 = {"shards_optimizer": True, "shards_parameters": True}
STRATEGIES = {
    strategy.name: strategy
    for strategy in (
        Strategy("single", distributed=False),
        Strategy("ddp"),
        Strategy("shard_optim", shards_optimizer=True),
        Strategy("shard_grad_op", **_FSDP2, keeps_gathered=True),
        Strategy("full_shard", **_FSDP2, reduces_each=True),
        Strategy("hybrid_shard", **_FSDP2, reduces_each=True, grouped=True),
    )
}
