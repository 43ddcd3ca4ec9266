"""The model of a training: built or the user's own, checked, divided among the ranks, with its first
weights.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.checkpoint.state_dict import named_state
from windlass.data.open import Data
from windlass.data.samples import masks_documents
from windlass.errors import UserError
from windlass.estimate.rank import compiles
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.build import build_model, keeping_modes, own_module, set_training
from windlass.model.documents import takes_documents
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel
from windlass.model.loss import Objective
from windlass.parallel.architecture import code_for
from windlass.parallel.dist import Ranks, use_deterministic
from windlass.parallel.parallelize import parallelize, unwrap
from windlass.recipe import Horizon, Recipe
from windlass.training.checks import (
    check_documents,
    check_loss_is_a_sum,
    check_weights,
    tie_groups,
)
from windlass.training.directory import RunDirectory, decide_on_rank_0
from windlass.training.start import StartPlan


def build_network(
    plan: StartPlan, data: Data, module: nn.Module | None, stack: ExitStack
) -> nn.Module:
    """The user's `module`, which keeps its weights, or the recipe's model on the meta device.

    Raises UserError if it cannot be saved, or has no row for some token of the data.
    """
    recipe = plan.recipe
    if module is not None:
        stack.enter_context(keeping_modes(module))
        set_training(module)
        model = own_module(module, recipe.model.context)
    else:
        model = build_model(recipe, data.vocab, run=None if plan.fresh else plan.run.path)
    named_state(model)  # raises for a tensor that a checkpoint cannot hold
    if data.vocab > (rows := embedding_rows(model, data.vocab)):
        problem = f"{rows:,} token embeddings for {data.vocab:,} tokens of the data"
        raise UserError(f"model.vocab: {problem}; set 0 or more")
    return model


def embedding_rows(model: nn.Module, default: int) -> int:
    """The vocabulary of a model: its `vocab`, or the rows of its only embedding; else `default`."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    return int(getattr(model, "vocab", tables[0] if len(tables) == 1 else default))


def check_device(device: torch.device) -> None:
    """Raise UserError if this build of torch has no kernels for the GPU."""
    if device.type != "cuda":
        return
    about, cuda = torch.cuda.get_device_properties(device), torch.version.cuda or ""
    capability, compiled = (about.major, about.minor), torch.cuda.get_arch_list()
    text, wheel = code_for(about.name, capability, compiled, torch.__version__, cuda)
    if wheel and cuda:
        raise UserError(f"{text}: {wheel}")


def resolve_compile(
    recipe: Recipe, ranks: Ranks, horizon: Horizon, own: bool, warnings: list[str]
) -> bool:
    """`train.compile`, with `auto` resolved; adds a warning if this machine cannot compile.

    A user's `own` module compiles only by `train.compile = true`. Rank 0 decides for all.
    """
    if recipe.train.compile != "auto":
        return recipe.train.compile
    if own or not compiles(recipe, ranks.device.type, horizon.steps):
        return False

    def decide() -> bool:
        if missing := missing_tools(torch.cuda.get_device_capability(ranks.device)):
            warnings.append(f"train.compile is off, so the training is slower: {missing}")
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


def prepare_network(
    model: nn.Module,
    *,
    own: bool,
    directory: RunDirectory,
    ranks: Ranks,
    data: Data,
    compiled: bool,
) -> nn.Module:
    """Divide the model among the ranks, with its first weights unless a checkpoint has them.

    Raises UserError or RunFailed for mistakes that would stay silent.
    """
    recipe = directory.plan.recipe.replace({"train.compile": compiled})
    first, ties = directory.checkpoint is None, tie_groups(model)
    use_deterministic(recipe.train.deterministic)
    set_objective(model, recipe)
    fp64 = recipe.train.precision == "fp64"
    model = parallelize(model.double() if fp64 else model, ranks, recipe)
    network, check = unwrap(model), recipe.train.startup_checks
    if check:
        check_weights(network, ties, torch.float64 if fp64 else torch.float32, ranks)
    if isinstance(network, HfModel) and not own:
        save = partial(hf_files.save_origin, network, directory.run.path)
        decide_on_rank_0(ranks, "origin", save)
    if first and own and check:
        check_loss_is_a_sum(model, data.train, ranks, recipe)
    if first and not own:
        if recipe.model.init_from:
            load_initial(network, recipe, ranks)
        else:
            initialise(network, recipe.run.seed, ranks.mesh.loss_group)
    masked = masks_documents(data.train) and takes_documents(network)
    wanted = recipe.data.document_mask is True or recipe.data.packing == "best-fit"
    if first and (masked or wanted):
        check_documents(model, ranks, recipe)
    return model


def set_objective(model: nn.Module, recipe: Recipe) -> None:
    """Give the objective to the module that computes the loss; UserError if it is the user's."""
    objective = Objective(recipe.train.z_loss, recipe.train.label_smoothing)
    owners = [m for m in model.modules() if isinstance(getattr(m, "objective", None), Objective)]
    for owner in owners:
        owner.objective = objective  # type: ignore[assignment]
    if any(objective) and not owners:
        key = "train.z_loss" if objective.z else "train.label_smoothing"
        problem = "your own module computes its loss itself"
        raise UserError(f"{key}: {problem}: add the term there, and write {key}=0")


def describe_origin(model: nn.Module, own: bool) -> dict[str, Any]:
    """The model's origin for `environment.json`: a user's class, or files of `transformers`."""
    if own:
        wrapped = isinstance(model, HfModel)
        name = type(model.model if wrapped else model).__name__
        return {"own_model": name, "wrapped": wrapped}
    return {"model": hf_files.describe_origin(model)} if isinstance(model, HfModel) else {}
