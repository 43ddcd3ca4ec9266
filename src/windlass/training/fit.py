"""`train.fit`: the fastest layout that fits, chosen on rank 0 before the training."""

from __future__ import annotations

from dataclasses import replace

import torch

from windlass.data.prepare import prepare
from windlass.errors import UserError, plural
from windlass.estimate.devices import this_device
from windlass.estimate.optimum import recipe_vocab
from windlass.estimate.search import Machine, Settings, fit
from windlass.estimate.text import pasted
from windlass.parallel.dist import init_store
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import resolve_precision
from windlass.recipe import Recipe
from windlass.training.start import decide_on_rank_0


def fitted(recipe: Recipe, custom: bool) -> Recipe:
    """The recipe with the layout for the ranks of this start; every rank calls it.

    `custom`: the user gave a model or data of their own. UserError if no layout fits.
    """
    if custom:
        raise UserError("train.fit: it plans a recipe's own model and data, and you give others")
    env, on_cpu = detect_env(), recipe.parallel.device == "cpu" or not torch.cuda.is_available()
    with init_store(env, recipe) as ranks:
        vocab = recipe_vocab(recipe) or prepare(recipe, ranks).tokenizer.vocab
        device = this_device(ranks.env.local_world, cpu=on_cpu)
        every = ranks.all_gather_object("memory", device.memory_bytes)
        device = replace(device, memory_bytes=min(every))
        precision = resolve_precision(recipe.train.precision, torch.device(device.kind))
        machine = Machine(device, env.world, precision, ranks.env.local_world)

        def decide() -> Settings:
            row = fit(recipe, vocab, machine)
            used, usable = row.memory.total / 1e9, (device.usable_bytes or 0) / 1e9
            size = f"{used:.3g} of {usable:.3g} GB on each of {plural(env.world, 'rank')}"
            print(f"train.fit: {pasted(row.settings)} (predicted: {size})", flush=True)
            return row.settings

        settings = decide_on_rank_0(ranks, "fit", decide)
    return recipe.replace(settings, {"train.fit": False})
