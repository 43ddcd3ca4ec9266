"""What a run and its data take on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.estimate.milestones import CHECKPOINT, Milestone
from windlass.model.size import checkpoint_bytes

if TYPE_CHECKING:
    from windlass.recipe import Horizon, Recipe


def token_bytes(vocab: int) -> int:
    """Bytes of a token in a shard: uint16 where all ids fit into it, else uint32."""
    return 2 if vocab <= 2**16 else 4


def disk(recipe: Recipe, vocab: int, world: int, horizon: Horizon, found: list[Milestone]) -> dict[str, Any]:
    """Sizes in bytes: a checkpoint, each rank's part, all that are kept, and a shard of tokens.

    Kept are the newest `keep_last`, perhaps the best, and those that `keep_every` keeps for good.
    """
    size = checkpoint_bytes(recipe.model, vocab, recipe.optim.kind)
    settings = recipe.checkpoint
    saves = [m.step for m in found if m.what == CHECKPOINT]
    older = saves[: -settings.keep_last]
    for_good = sum(horizon.due(settings.keep_every, step) for step in older)
    kept = min(len(saves), settings.keep_last) + for_good + (settings.keep_best and len(older) > for_good)
    shard = recipe.data.shard_tokens * token_bytes(vocab)
    return {
        "checkpoint_bytes": size,
        "rank_bytes": -(-size // world),
        "kept": kept,
        "kept_bytes": kept * size,
        "peak_bytes": (kept + 1) * size,
        "token_bytes": token_bytes(vocab),
        "shard_bytes": shard,
        "tokens_bytes": recipe.data.max_tokens * token_bytes(vocab) or None,
    }
