"""The one owner of batch arithmetic: how a global batch becomes micro-batches on ranks."""

from __future__ import annotations

from dataclasses import dataclass

TOKENS_PER_MICRO_BATCH = {"cpu": 4096, "cuda": 16384}


@dataclass(frozen=True)
class BatchPlan:
    """How the samples of one optimizer step are dealt out.

    Micro-batch *k* of a step is the contiguous slice `[k * micro_batch, (k + 1) * micro_batch)` of the step's samples;
    rank `r` of `world` takes the micro-batches `r, r + world, r + 2 * world, ...`.
    """

    global_batch: int
    micro_batch: int
    world: int
    context: int

    @property
    def accumulation(self) -> int:
        """Micro-batches that one rank works through in a step."""
        return self.global_batch // (self.micro_batch * self.world)

    @property
    def tokens_per_step(self) -> int:
        """Tokens in one optimizer step over all ranks, padding included."""
        return self.global_batch * self.context

    def micro_batches(self, rank: int) -> range:
        """The numbers of the micro-batches that `rank` works through, in order."""
        return range(rank, self.global_batch // self.micro_batch, self.world)


def plan_batch(global_batch: int, micro_batch: int, world: int, context: int, device: str = "cpu") -> BatchPlan:
    """Deal a global batch out to `world` ranks.

    `micro_batch = 0` takes the largest divisor of each rank's share that holds no more than about 4,096 tokens (CPU) or
    16,384 (GPU). Raises ValueError, with the nearest batch sizes that work, where the division leaves a rest.
    """
    if global_batch % world:
        below, above = global_batch // world * world, -(-global_batch // world) * world
        sizes = f"{below} or {above}" if below else f"{above}"
        raise ValueError(
            f"train.global_batch = {global_batch} sequences cannot be dealt evenly to {world} ranks; "
            f"write {sizes}, or use a number of ranks that divides it"
        )
    share = global_batch // world
    if micro_batch == 0:
        limit = max(1, TOKENS_PER_MICRO_BATCH[device] // context)
        micro_batch = max(d for d in range(1, share + 1) if share % d == 0 and d <= limit)
    if share % micro_batch:
        divisors = [d for d in range(1, share + 1) if share % d == 0]
        near = min(divisors, key=lambda d: abs(d - micro_batch))
        raise ValueError(
            f"train.micro_batch = {micro_batch} does not divide the {share} sequences that each of {world} ranks has in a "
            f"step (train.global_batch = {global_batch}); the nearest that does is {near}"
        )
    return BatchPlan(global_batch, micro_batch, world, context)
