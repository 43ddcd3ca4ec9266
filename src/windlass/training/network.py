"""The model of a training: built, or the user's; checked, divided, with its first weights."""

from __future__ import annotations

import math
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from windlass.checkpoint.state_dict import named_state
from windlass.data.run_data import Data
from windlass.data.samples import Samples, masks_documents
from windlass.errors import UserError, first_line
from windlass.estimate.rank import compiles
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.build import (
    build_model,
    evaluating,
    keeping_modes,
    own_module,
    scalar,
    set_training,
    sizes_of,
)
from windlass.model.documents import Documents, takes_documents
from windlass.model.frozen import hold_trained
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel, use_liger
from windlass.model.size import CountedSizes, flops_per_token
from windlass.optim.build import count_groups, make_groups
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import (
    autocast,
    parallelize,
    resolve_precision,
    unwrap,
    varying_shapes,
)
from windlass.recipe import Horizon, Recipe
from windlass.recipe.settings import IGNORE_INDEX
from windlass.training.nonfinite import ran_out_of_memory


@contextmanager
def trial(model: nn.Module, recipe: Recipe, device: torch.device) -> Iterator[None]:
    """The context of a check's pass, whose shapes must not reach the training's graphs."""
    with torch.no_grad(), evaluating(model), varying_shapes(), autocast(recipe, device):
        yield


def check_loss_is_a_sum(model: nn.Module, samples: Samples, ranks: Ranks, recipe: Recipe) -> None:
    """Raise UserError if a user's module does not return the sum of the loss over unmasked labels.

    The loss of two samples equals the loss of one sample, plus the losses of both halves of the
    labels of the other; a mean over tokens or over samples does not. Masked labels become some
    label of the samples, so that every place has one.
    """
    two = (np.array(part, dtype=np.int64) for part in samples.read(np.arange(2) % len(samples))[:2])
    tokens, labels = (torch.from_numpy(part).to(ranks.device) for part in two)  # [2, T]
    if int(labels.max()) == IGNORE_INDEX:
        return
    labels = labels.where(labels != IGNORE_INDEX, labels.max())
    first = torch.arange(labels.shape[1], device=ranks.device) < labels.shape[1] // 2
    halves = [labels[1:].where(half, IGNORE_INDEX) for half in (first, ~first)]
    passes = [(tokens, labels), (tokens[:1], labels[:1]), *((tokens[1:], half) for half in halves)]
    try:
        with trial(model, recipe, ranks.device):
            whole, *parts = [float(scalar(unwrap(model)(*given))) for given in passes]
    except UserError:
        raise
    except Exception as error:
        if ran_out_of_memory(error):
            raise
        raise UserError(
            "forward(tokens, labels) of your model failed on two samples: "
            f"{type(error).__name__}: {first_line(error)}. It takes tokens and labels, int64 "
            "[B, T], and returns a scalar, the loss summed over labels that are not -100"
        ) from error
    # A part that is NaN is wrong, too: a mean over no labels.
    wrong = math.isfinite(whole) and not abs(sum(parts) - whole) <= 0.3 * abs(whole)
    if any(ranks.all_gather_object("sum of the loss", wrong)):
        raise UserError(
            f"your model's forward(tokens, labels) returns no sum: {whole:.4g} for two samples, "
            f"{parts[0]:.4g} for the first, {parts[1]:.4g} and {parts[2]:.4g} for the halves of "
            "the labels of the second. Return the loss summed over labels that are not -100 "
            '(reduction="sum"); train.startup_checks=false skips this check'
        )


def check_documents(model: nn.Module, ranks: Ranks, recipe: Recipe) -> None:
    """Raise UserError unless a document's loss is independent of the document before it in a row;
    all ranks call it."""
    network, problem = unwrap(model), ""
    places = torch.arange(8, device=ranks.device).unsqueeze(0)
    second, losses = places >= 4, list[Tensor]()
    documents = Documents((torch.arange(8) >= 4).long().unsqueeze(0), places % 4)
    try:
        for first in (places, places + 1) if takes_documents(network) else ():
            tokens = torch.where(second, places, first)
            labels = torch.where(second, places, IGNORE_INDEX)
            with trial(model, recipe, ranks.device):
                losses.append(network(tokens, labels, documents=documents))
    except TypeError as error:
        problem = f"the model takes no positions ({first_line(error)})"
    if not problem and not losses:
        problem = "your model's forward takes no `documents`"
    elif not problem and not torch.equal(*losses):
        problem = "the model's attention does not keep the documents of a row apart"
    if problem:
        key, advice = "data.document_mask", "write data.document_mask=false for whole rows"
        if recipe.data.packing == "best-fit":
            key, advice = 'data.packing = "best-fit"', "leave it out"
        raise UserError(f"{key}: {problem}: {advice}")


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
            low = [n for n, p in model.named_parameters() if p.requires_grad and p.itemsize < 4]
            if recipe.train.master == "bf16":
                hold_trained(model)
            elif low:
                advice = 'give model.float(), or write train.master="bf16"'
                raise UserError(f"your model's {low[0]} has less than 32 bits: {advice}")
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
            if self.compiled and (missing := ranks.decide("compile", missing_tools)):
                self.compiled = False
                self.warnings = [f"train.compile is off, so the training is slower: {missing}"]

    def facts(self, data: Data, micro_batch: int) -> dict[str, Any]:
        """The meta data of this start's checkpoints."""
        recipe = self.recipe
        facts = {"data": data.fingerprint, "vocab": data.vocab, "micro_batch": micro_batch}
        facts |= {"precision": self.precision, "compiles": self.compiled}
        return facts | {"optimizer": recipe.optimizer_state, "average": recipe.train.average}

    def divide(self, data: Data, run: Path, *, from_checkpoint: bool) -> nn.Module:
        """The model on its device, divided among the ranks; with its first weights, unless they
        come `from_checkpoint`."""
        recipe, ranks = self.recipe.replace({"train.compile": self.compiled}), self.ranks
        if self.precision == "fp64":
            self.model.double()
        model = parallelize(self.model, ranks, recipe)
        network = unwrap(model)
        if isinstance(network, HfModel) and not self.own:
            ranks.decide("origin", partial(hf_files.save_origin, network, run))
        if from_checkpoint:
            return model
        if self.own and recipe.train.startup_checks:
            check_loss_is_a_sum(model, data.train, ranks, recipe)
        elif not self.own and recipe.model.init_from:
            load_initial(network, recipe, ranks)
        elif not self.own:
            initialise(network, recipe.run.seed)
        masked = masks_documents(data.train) and takes_documents(network)
        if masked or recipe.data.document_mask is True or recipe.data.packing == "best-fit":
            check_documents(model, ranks, recipe)
        return model


def missing_tools() -> str:
    """What torch's compiler for GPUs lacks on this machine; empty if nothing."""
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
