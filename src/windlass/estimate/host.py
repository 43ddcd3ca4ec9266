"""The host memory that a job needs, for its batch script. Only a model of `transformers` needs
torch here."""

from __future__ import annotations

import math

from windlass.errors import UserError
from windlass.estimate.layout import layout_of
from windlass.estimate.memory import memory
from windlass.estimate.optimum import recipe_vocab
from windlass.model.size import CountedSizes, checkpoint_bytes
from windlass.recipe import ModelSettings, Recipe

GPU_RANK_GB, CPU_RANK_GB = 8, 3  # Python, torch, the driver's maps, token shards, and a margin
LARGE_VOCAB = 2**18  # assumed if the embedding's rows depend on data that are not prepared


def host_memory_gb(recipe: Recipe, world: int, per_host: int, on_cpu: bool) -> int:
    """The host memory in GB that `per_host` of `world` ranks need; 0 if the model's size cannot be
    read here.

    It is a base for each rank, the plan's host memory (all of the training on a CPU, the offloaded
    part on a GPU), and twice the host's part of a checkpoint, for the copy of a save and for
    loading.
    """
    network: ModelSettings | CountedSizes = recipe.model
    vocab = recipe_vocab(recipe) or LARGE_VOCAB
    if recipe.model.kind == "hf":
        try:
            from windlass.model.build import read_sizes  # needs torch

            network = read_sizes(recipe, 0)
        except (ImportError, UserError):
            return 0
    if isinstance(network, CountedSizes):
        on_disk = network.checkpoint_bytes()
    else:
        on_disk = checkpoint_bytes(network, vocab)
    layout = layout_of(recipe, world, "cpu" if on_cpu else "cuda")
    peak = memory(network, vocab, layout, recipe.optim.kind)
    in_use = peak.host + (peak.total if on_cpu else 0)
    part = min(1.0, per_host / layout.shard)
    base = CPU_RANK_GB if on_cpu else GPU_RANK_GB
    return math.ceil(per_host * (base + in_use / 1e9) + 2 * part * on_disk / 1e9)
