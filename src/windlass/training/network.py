"""The model of a training: the recipe's or the user's, divided among the ranks, with its first
weights; its precision, and whether it compiles."""

from __future__ import annotations

import os
import shutil
import sysconfig
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from windlass.checkpoint.format import Checkpoint
from windlass.checkpoint.state_dict import named_state
from windlass.data.open import Data
from windlass.data.samples import masks_documents
from windlass.errors import UserError
from windlass.estimate.layout import compiles
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.attention import takes_documents
from windlass.model.build import build_model, keeping_modes, own_module, set_training, sizes_of
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel, use_liger
from windlass.model.quantised import lower_trained
from windlass.model.size import CountedSizes, flops_per_token
from windlass.optim.build import count_groups, make_groups
from windlass.parallel.parallelize import parallelize, unwrap
from windlass.parallel.precision import resolve_precision
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.training.checks import check_documents, check_loss_is_a_sum


class Network:
    """The model of a training: first whole and, if it is the recipe's, without values; after
    `divide` on the ranks, and after `fill` with its first weights."""

    def __init__(
        self,
        recipe: Recipe,
        ranks: Ranks,
        data: Data,
        steps: int,
        stack: ExitStack,
        module: nn.Module | None,
        run: Path | None,
    ):
        """Raises UserError if the model cannot be saved, or lacks a row for some token.

        `module`: the user's. `run`: may hold the configuration of a model of `transformers`.
        """
        self.recipe, self.ranks, self.is_own = recipe, ranks, module is not None
        if module is None:
            model = build_model(recipe, data.vocab, run=run)
            if recipe.model.kernels == "liger":
                use_liger(model, ranks.device, stack)
        else:
            model = open_own(module, recipe, stack)
        named_state(model)  # raises for a tensor that a checkpoint cannot hold
        check_vocabulary(model, data.vocab)
        self.model, self.sizes = model, sizes_of(model)
        self.groups = count_groups(make_groups(model, recipe.optim))
        # FLOPs of a token, forward and backward; None: unknown
        self.flops_per_token = None if self.is_own else count_flops(recipe, self.sizes, data)
        self.initial: Checkpoint | None = None  # of `model.init_from`
        self.origin = dict[str, Any]()  # for `environment.json`
        is_hf = isinstance(model, HfModel)
        if self.is_own:
            self.origin = {"own_model": type(model.model if is_hf else model).__name__}
        elif is_hf:
            self.origin = {"model": hf_files.describe_origin(model)}
        # `train.precision` and `train.compile`, with `auto` resolved
        self.precision = resolve_precision(recipe.train.precision, ranks.device)
        if recipe.train.master == "bf16" and self.precision != "bf16":
            raise UserError(
                f'train.master = "bf16" needs bf16 arithmetic, and it is {self.precision} on this '
                'device: write train.precision="bf16", or train.master="fp32"'
            )
        self.compiled, self.warnings = bool(recipe.train.compile), list[str]()
        if recipe.train.compile == "auto":  # a user's module compiles only by `true`
            self.compiled = not self.is_own and compiles(recipe, ranks.device.type, steps)
            if self.compiled and (missing := ranks.decide("compile", missing_tools)):
                self.compiled = False
                self.warnings = [f"train.compile is off, so the training is slower: {missing}"]

    def divide(self, run: Path) -> nn.Module:
        """The model on its device, divided among the ranks, and wrapped; without values."""
        if self.precision == "fp64":
            self.model.double()
        recipe = self.recipe.replace({"train.compile": self.compiled})
        model = parallelize(self.model, self.ranks, recipe)
        network = unwrap(model)
        if isinstance(network, HfModel) and not self.is_own:
            self.ranks.decide("origin", partial(hf_files.save_origin, network, run))
        return model

    def fill(self, model: nn.Module, data: Data) -> None:
        """Give the divided model its first weights: the user's, of `model.init_from`, of the files
        of a model of `transformers`, or drawn from the seed. Then try it on a few tokens."""
        recipe, ranks, network = self.recipe, self.ranks, unwrap(model)
        if self.is_own and recipe.train.startup_checks:
            check_loss_is_a_sum(model, data.train, ranks, recipe)
        elif not self.is_own and recipe.model.init_from:
            self.initial = load_initial(network, recipe, ranks)
        elif not self.is_own:
            initialise(network, recipe.run.seed)
        masked = masks_documents(data.train) and takes_documents(network)
        if masked or recipe.data.document_mask is True or recipe.data.packing == "best-fit":
            check_documents(model, ranks, recipe)


def open_own(module: nn.Module, recipe: Recipe, stack: ExitStack) -> nn.Module:
    """A user's module in training mode until `stack` ends, with weights that can be trained."""
    stack.enter_context(keeping_modes(module))
    set_training(module)
    model = own_module(module, recipe.model.context)
    low = [n for n, p in model.named_parameters() if p.requires_grad and p.itemsize < 4]
    if recipe.train.master == "bf16":
        lower_trained(model)
    elif low:
        advice = 'give model.float(), or write train.master="bf16"'
        raise UserError(f"your model's {low[0]} has less than 32 bits: {advice}")
    return model


def check_vocabulary(model: nn.Module, vocab: int) -> None:
    """Raise UserError if the model's embedding, as far as known, lacks rows for the data."""
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    rows = int(getattr(model, "vocab", tables[0] if len(tables) == 1 else vocab))
    if vocab > rows:
        problem = f"{rows:,} token embeddings for {vocab:,} tokens of the data"
        raise UserError(f"model.vocab: {problem}; write 0 (automatic) or at least {vocab}")


def count_flops(recipe: Recipe, sizes: CountedSizes, data: Data) -> float:
    """FLOPs of a token, forward and backward: 6N and attention, without frozen gradients."""
    if recipe.model.kind == "hf" or recipe.model.freeze:
        return sizes.flops_per_token()
    attended = getattr(data.train, "attended", None) if masks_documents(data.train) else None
    return flops_per_token(recipe.model, sizes.vocab, attended)


def missing_tools() -> str:
    """What torch's compiler for GPUs lacks on this machine; empty if nothing."""
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        return "Triton needs a C compiler, as gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python.h, from python3-dev or the like"
    return ""
