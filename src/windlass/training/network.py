"""The model of a training: built, or the user's; checked, divided, with its first weights."""

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
from windlass.model.build import build_model, keeping_modes, own_module, set_training, sizes_of
from windlass.model.documents import takes_documents
from windlass.model.frozen import hold_trained
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel, use_liger
from windlass.model.loss import Objective
from windlass.model.size import CountedSizes, flops_per_token
from windlass.optim.build import count_groups, make_groups
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import parallelize, resolve_precision, unwrap
from windlass.recipe import Horizon, Recipe
from windlass.training.checks import check_documents, check_loss_is_a_sum, check_weights, tie_groups


class Network:
    """The model of a training: the recipe's, without values for its weights, or the user's."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: Ranks,
        data: Data,
        horizon: Horizon,
        stack: ExitStack,
        module: nn.Module | None,
        run: Path | None,
    ):
        """Raises UserError if the model cannot be saved, or lacks a row for some token.

        `module`: the user's. `run`: may hold the configuration of a model of `transformers`.
        """
        self.recipe, self.ranks, self.own = recipe, ranks, module is not None
        if module is not None:
            stack.enter_context(keeping_modes(module))
            set_training(module)
            model = own_module(module, recipe.model.context)
            if recipe.train.master == "bf16":
                hold_trained(model)
        else:
            model = build_model(recipe, data.vocab, run=run)
            if recipe.model.kernels == "liger":
                use_liger(model, ranks.device, stack)
        named_state(model)  # raises for a tensor that a checkpoint cannot hold
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        rows = int(getattr(model, "vocab", tables[0] if len(tables) == 1 else data.vocab))
        if data.vocab > rows:
            problem = f"{rows:,} token embeddings for {data.vocab:,} tokens of the data"
            raise UserError(f"model.vocab: {problem}; write 0 (automatic) or at least {data.vocab}")
        self.model, self.sizes = model, sizes_of(model)
        self.groups = count_groups(make_groups(model, recipe.optim))
        self.origin = dict[str, Any]()  # for `environment.json`
        if self.own:
            wrapped = isinstance(model, HfModel)
            name = type(model.model if wrapped else model).__name__
            self.origin = {"own_model": name, "wrapped": wrapped}
        elif isinstance(model, HfModel):
            self.origin = {"model": hf_files.describe_origin(model)}
        # Forward and backward; None: unknown
        self.flops_per_token = None if self.own else count_flops(recipe, self.sizes, data)
        # `train.precision` and `train.compile`, with `auto` resolved
        self.precision = resolve_precision(recipe.train.precision, ranks.device)
        if recipe.train.master == "bf16" and self.precision != "bf16":
            problem = f"needs bf16 arithmetic, and it is {self.precision} on this device"
            advice = 'write train.precision="bf16", or train.master="fp32"'
            raise UserError(f'train.master = "bf16" {problem}: {advice}')
        self.compiled, self.warnings = bool(recipe.train.compile), list[str]()
        if recipe.train.compile == "auto":  # a user's module compiles only by `true`
            self.compiled = not self.own and compiles(recipe, ranks.device.type, horizon.steps)
        if self.compiled and recipe.train.compile == "auto":
            device, capability = ranks.device, torch.cuda.get_device_capability
            if missing := ranks.decide("compile", lambda: missing_tools(capability(device))):
                self.compiled = False
                self.warnings = [f"train.compile is off, so the training is slower: {missing}"]

    def facts(self, data: Data, micro_batch: int) -> dict[str, Any]:
        """The meta data of this start's checkpoints."""
        return {
            "recipe": self.recipe.config_hash,
            "data": data.fingerprint,
            "vocab": data.vocab,
            "micro_batch": micro_batch,
            "precision": self.precision,
            "compiles": self.compiled,
            "optimizer": self.recipe.optimizer_state,
            "average": self.recipe.train.average.kind,
        }

    def divide(self, data: Data, run: Path, *, from_checkpoint: bool) -> nn.Module:
        """The model on its device, divided among the ranks; with its first weights, unless they
        come `from_checkpoint`."""
        recipe, ranks = self.recipe.replace({"train.compile": self.compiled}), self.ranks
        ties, fp64 = tie_groups(self.model), self.precision == "fp64"
        master = torch.bfloat16 if recipe.train.master == "bf16" else torch.float32
        objective = Objective(recipe.train.z_loss, recipe.train.label_smoothing)
        modules = list(self.model.modules())
        owners = [m for m in modules if isinstance(getattr(m, "objective", None), Objective)]
        for owner in owners:
            owner.objective = objective  # type: ignore[assignment]
        if any(objective) and not owners:
            key = "train.z_loss" if objective.z else "train.label_smoothing"
            problem = "your own module computes its loss itself"
            raise UserError(f"{key}: {problem}: add the term there, and write {key}=0")
        model = parallelize(self.model.double() if fp64 else self.model, ranks, recipe)
        network = unwrap(model)
        if recipe.train.startup_checks:
            check_weights(network, ties, torch.float64 if fp64 else master, ranks)
        if isinstance(network, HfModel) and not self.own:
            ranks.decide("origin", partial(hf_files.save_origin, network, run))
        if from_checkpoint:
            return model
        if self.own and recipe.train.startup_checks:
            check_loss_is_a_sum(model, data.train, ranks, recipe)
        elif not self.own and recipe.model.init_from:
            load_initial(network, recipe, ranks)
        elif not self.own:
            initialise(network, recipe.run.seed, ranks.mesh.loss_group)
        masked = masks_documents(data.train) and takes_documents(network)
        if masked or recipe.data.document_mask is True or recipe.data.packing == "best-fit":
            check_documents(model, ranks, recipe)
        return model


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


def count_flops(recipe: Recipe, sizes: CountedSizes, data: Data) -> float:
    """FLOPs of a token, forward and backward: 6N and attention, without frozen gradients."""
    if recipe.model.kind == "hf" or recipe.model.freeze:
        return sizes.flops_per_token()
    attended = getattr(data.train, "attended", None) if masks_documents(data.train) else None
    return flops_per_token(recipe.model, sizes.vocab, attended)
