"""`train.compile = "auto"`, resolved for a run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from windlass.estimate.rank import compiles
from windlass.parallel.dist import Ranks
from windlass.recipe import Horizon, Recipe
from windlass.training.start import decide_on_rank_0


def resolve_compile(
    recipe: Recipe, ranks: Ranks, horizon: Horizon, custom: bool, notes: list[str]
) -> bool:
    """Whether a run compiles; adds a warning to `notes` if this machine cannot.

    A user's `custom` module compiles only by `train.compile = true`. Rank 0 decides for all.
    """
    if recipe.train.compile != "auto":
        return recipe.train.compile
    if custom or not compiles(recipe, ranks.device.type, horizon.steps):
        return False

    def decide() -> bool:
        if missing := missing_tools(torch.cuda.get_device_capability(ranks.device)):
            notes.append(f"train.compile is off, so the training is slower: {missing}")
        return not missing

    return decide_on_rank_0(ranks, "compile", decide)


def missing_tools(capability: tuple[int, int]) -> str:
    """What torch's compiler for GPUs lacks on this machine; empty if nothing."""
    if capability < (7, 0):
        return "Triton needs a GPU of compute capability 7.0 or more"
    if importlib.util.find_spec("triton") is None:
        return "the package triton is missing"
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        return "Triton needs a C compiler, as gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python.h, from python3-dev or the like"
    return ""
