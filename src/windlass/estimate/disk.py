"""What a run and its data take on disk."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.estimate.milestones import CHECKPOINT, Milestone, milestones
from windlass.model.size import checkpoint_bytes

if TYPE_CHECKING:
    from windlass.recipe import Horizon, Recipe


def token_bytes(vocab: int) -> int:
    """Bytes of a token in a shard: uint16 where all ids fit into it, else uint32."""
    return 2 if vocab <= 2**16 else 4


def disk(
    recipe: Recipe, vocab: int, world: int, horizon: Horizon, found: list[Milestone], size: int | None = None
) -> dict[str, Any]:
    """Sizes in bytes: a checkpoint, each rank's part, all that are kept, and a shard of tokens.

    Kept are the newest `keep_last`, perhaps the best, and those that `keep_every` keeps for good.
    `size`: of a checkpoint, where the model is not our own GPT.
    """
    size = checkpoint_bytes(recipe.model, vocab, recipe.optim.kind) if size is None else size
    saves = _saves(found)
    kept = kept_checkpoints(recipe, horizon, saves)
    shard = recipe.data.shard_tokens * token_bytes(vocab)
    return {
        "checkpoint_bytes": size,
        "rank_bytes": -(-size // world),
        "kept": kept,
        "kept_bytes": kept * size,
        "peak_bytes": min(kept + 1, len(saves)) * size,
        "token_bytes": token_bytes(vocab),
        "shard_bytes": shard,
        "tokens_bytes": recipe.data.max_tokens * token_bytes(vocab) or None,
    }


def kept_checkpoints(recipe: Recipe, horizon: Horizon, saves: list[int]) -> int:
    """How many checkpoints lie there at once in the end, of those saved at the given steps; one more while one is written."""
    settings = recipe.checkpoint
    older = saves[: -settings.keep_last]
    for_good = sum(horizon.due(settings.keep_every, step) for step in older)
    return min(len(saves), settings.keep_last) + for_good + (settings.keep_best and len(older) > for_good)


def checkpoints_to_come(recipe: Recipe, horizon: Horizon, done: int, present: int) -> int:
    """For how many more checkpoints there must be room: those kept in the end and one more, if the run makes so many.

    Args:
        recipe: what is saved when, and kept.
        horizon: the run's length.
        done: steps done.
        present: checkpoints that lie there already.
    """
    saves = _saves(milestones(recipe, horizon))
    ahead = sum(step > done for step in saves)
    return min(ahead, max(1, kept_checkpoints(recipe, horizon, saves) + 1 - present))


def _saves(found: list[Milestone]) -> list[int]:
    return [m.step for m in found if m.what == CHECKPOINT]
