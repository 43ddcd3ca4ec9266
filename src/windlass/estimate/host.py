"""How much of a host's memory a job needs, for its batch script. No torch, but for a model of `transformers`."""

from __future__ import annotations

import math

from windlass.errors import UserError
from windlass.estimate.memory import layout_of, memory
from windlass.estimate.optimum import recipe_vocab
from windlass.model.size import CountedSizes, checkpoint_bytes
from windlass.recipe import ModelSettings, Recipe

GPU_RANK_GB, CPU_RANK_GB = (
    8,
    3,
)  # Python, torch, the driver's maps, tokens that are prepared, and some air
LARGE_VOCAB = 2**18  # taken where only the prepared data says how many rows the embedding has


def host_memory_gb(recipe: Recipe, world: int, per_host: int, on_cpu: bool) -> int:
    """GB that `per_host` ranks of `world` need of their host's memory; 0 if the model's size cannot be read here.

    Each rank needs a base, and what the plan puts into the host's memory: on a CPU all of the training, on a GPU what is
    offloaded. Twice the host's part of a checkpoint is added, for the copy that a save makes and for loading.
    """
    network: ModelSettings | CountedSizes = recipe.model
    vocab = recipe_vocab(recipe) or LARGE_VOCAB
    if recipe.model.kind == "hf":
        try:
            from windlass.model.build import read_sizes  # needs torch

            network = read_sizes(recipe, 0)
        except (ImportError, UserError):
            return 0
    on_disk = (
        network.checkpoint_bytes()
        if isinstance(network, CountedSizes)
        else checkpoint_bytes(network, vocab)
    )
    layout = layout_of(recipe, world, "cpu" if on_cpu else "cuda")
    peak = memory(network, vocab, layout, recipe.optim.kind)
    in_use = peak.host + (peak.total if on_cpu else 0)
    part = min(1.0, per_host / layout.shard)
    base = CPU_RANK_GB if on_cpu else GPU_RANK_GB
    return math.ceil(per_host * (base + in_use / 1e9) + 2 * part * on_disk / 1e9)
