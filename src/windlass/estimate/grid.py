"""Memory of a rank for every strategy, world, precision, activation checkpointing and offload: the whole grid at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.estimate.devices import low_precision
from windlass.estimate.memory import SHARDED, Layout, memory, shard_size

if TYPE_CHECKING:
    from windlass.estimate.plan import Setting

CHECKPOINTING = ("none", "selective", "full")
STRATEGIES = ("single", "ddp", "shard_grad_op", "hybrid_shard", "full_shard")
PARTS = ("parameters", "gradients", "moments", "activations", "logits", "buffers")


def worlds_of(setting: Setting) -> list[int]:
    """The plan's own number of ranks, 1 to 8, and twice its own, as far as a step's sequences can be dealt to them."""
    found = []
    for world in sorted({1, 2, 4, 8, setting.world, 2 * setting.world}):
        try:
            setting.recipe.batch(world, setting.device.kind)
        except UserError:
            continue
        found.append(world)
    return found


def precisions_of(setting: Setting) -> list[str]:
    """The plan's own precision, fp32, and the low one of the device."""
    return list(dict.fromkeys([setting.precision, "fp32", low_precision(setting.device) or "bf16"]))


def layouts(setting: Setting) -> list[Layout]:
    """The layouts of the grid, with the micro-batch that the recipe has on each world; the cheapest in time first."""
    recipe, kind = setting.recipe, setting.device.kind
    found = []
    for world in worlds_of(setting):
        batch = recipe.batch(world, kind)
        for precision in precisions_of(setting):
            for offload in (False, True):
                for checkpointing in CHECKPOINTING:
                    for strategy in _strategies(world):
                        if offload and (strategy not in SHARDED or kind != "cuda"):
                            continue
                        shard = shard_size(strategy, world, _wish(setting, strategy, world))
                        sizes = (batch.micro_batch, batch.accumulation)
                        found.append(Layout(strategy, world, shard, precision, checkpointing, offload, *sizes, kind))
    return found


def _strategies(world: int) -> list[str]:
    if world == 1:
        return ["single"]
    return [s for s in STRATEGIES if s != "single" and (world > 3 or s != "hybrid_shard")]


def _wish(setting: Setting, strategy: str, world: int) -> int:
    wish = setting.recipe.parallel.shard_size
    return wish if strategy == "hybrid_shard" and wish and world % wish == 0 else 0


def memory_grid(setting: Setting) -> list[dict[str, Any]]:
    """A row for each layout: the layout, bytes by part, `total_bytes`, `host_bytes`, and whether it `fits`."""
    network, room = setting.network, setting.device.usable_bytes
    assert network is not None
    vocab, optimizer, table = setting.vocab, setting.recipe.optim.kind, []
    for layout in layouts(setting):
        taken = memory(network, vocab, layout, optimizer)
        here = room
        if room is not None and layout.device == "cpu":
            here = room * setting.world // layout.world  # ranks on a CPU share its memory
        table.append(
            vars(layout)
            | {f"{part}_bytes": getattr(taken, part) for part in PARTS}
            | {"total_bytes": taken.total, "host_bytes": taken.host}
            | {"fits": None if here is None else taken.total <= here}
        )
    return table
