"""`train.compile = "auto"`, resolved for a run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import torch

from windlass.data.open import Data
from windlass.estimate.devices import find_device
from windlass.estimate.search import Machine
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import resolve_precision
from windlass.recipe import Horizon
from windlass.training.start import StartPlan, decide_on_rank_0


def resolve_compile(
    plan: StartPlan, ranks: Ranks, data: Data, horizon: Horizon, custom: bool, notes: list[str]
) -> bool:
    """Whether a run compiles; adds a warning to `notes` if this machine cannot.

    A user's `custom` module compiles only by `train.compile = true`. Rank 0 decides for all.
    """
    recipe = plan.recipe
    if recipe.train.compile != "auto":
        return recipe.train.compile
    if custom or ranks.device.type != "cuda":
        return False

    def decide() -> bool:
        device = find_device(torch.cuda.get_device_name(ranks.device))
        precision = resolve_precision(recipe.train.precision, ranks.device)
        machine = Machine(device, ranks.world, precision, ranks.env.local_world)
        if not machine.compiles(recipe, data.vocab, horizon.steps):
            return False
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
