"""The model of a training: the recipe's or the user's, divided among the ranks, with its first
weights; its precision, and whether it compiles."""

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
from torch import nn

from windlass import hub
from windlass.checkpoint.format import Checkpoint
from windlass.checkpoint.state_dict import named_state
from windlass.data.batch import Samples, masks_documents
from windlass.data.open import Data
from windlass.errors import UserError, first_line
from windlass.estimate.rank import compiles
from windlass.interop.init_from import load_initial
from windlass.model import hf_files
from windlass.model.attention import Documents, takes_documents
from windlass.model.build import build_model, own_module, sizes_of
from windlass.model.gpt import initialise
from windlass.model.hf import HfModel, use_liger
from windlass.model.modes import evaluating, keeping_modes, scalar_loss, set_training
from windlass.model.quantised import lower_trained
from windlass.model.sharding import unwrap
from windlass.model.size import flops_per_token
from windlass.optim.build import count_groups, make_groups
from windlass.parallel.parallelize import autocast, parallelize, resolve_precision, varying_shapes
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.recipe.settings import IGNORE_INDEX
from windlass.training.bad_steps import ran_out_of_memory


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

        `module`: the user's. `run`: of a resume, with the origin of a model of `transformers`.
        """
        self.recipe, self.ranks, self.is_own = recipe, ranks, module is not None
        if module is None:
            m = recipe.model
            if m.kind == "hf" and run is None and not (m.from_scratch or m.init_from):
                hub.directory(m.name, m.revision, weights=True)  # `build_model` looks at the files
            model = build_model(recipe, data.vocab, run=run)
            if m.kernels == "liger":
                use_liger(model, ranks.device, stack)
        else:
            model = open_own(module, recipe, stack)
        named_state(model)  # raises for a tensor that a checkpoint cannot hold
        tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
        rows = int(getattr(model, "vocab", tables[0] if len(tables) == 1 else data.vocab))
        if data.vocab > rows:
            problem = f"{rows:,} token embeddings for {data.vocab:,} tokens of the data"
            raise UserError(f"model.vocab: {problem}; write 0 (automatic) or at least {data.vocab}")
        self.model, self.sizes = model, sizes_of(model)
        self.groups = count_groups(make_groups(model, recipe.optim))
        # FLOPs of a token, forward and backward, without frozen gradients; None: unknown
        self.flops_per_token: float | None = None
        self.origin = dict[str, Any]()  # for `environment.json`
        is_hf = isinstance(model, HfModel)
        if self.is_own:
            self.origin = {"own_model": type(model.model if is_hf else model).__name__}
        elif is_hf or recipe.model.freeze:
            self.flops_per_token = self.sizes.flops_per_token()
        else:
            # A token sees its own document, or its own item in a padded row.
            within = masks_documents(data.train) or recipe.data.ragged_
            attended = getattr(data.train, "attended", None) if within else None
            self.flops_per_token = flops_per_token(recipe.model, self.sizes.vocab, attended)
        if is_hf and not self.is_own:
            self.origin = {"model": hf_files.describe_origin(model)}
        self.initial: Checkpoint | None = None  # of `model.init_from`
        # `train.precision` and `train.compile`, with `auto` resolved
        self.precision = resolve_precision(recipe.train.precision, ranks.device)
        if recipe.train.master == "bf16" and self.precision != "bf16":
            problem = f'train.master = "bf16" needs bf16 arithmetic, not {self.precision}'
            raise UserError(f'{problem}: write train.precision="bf16", or train.master="fp32"')
        self.compiled, self.warnings = bool(recipe.train.compile), list[str]()
        if recipe.train.compile == "auto":  # a user's module compiles only by `true`
            wanted = not self.is_own and compiles(recipe, ranks.device.type, steps)
            missing = ranks.decide("compile", missing_tools) if wanted else ""
            self.compiled = wanted and not missing
            if missing:
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


def missing_tools() -> str:
    """What torch's compiler for GPUs lacks on this machine; empty if nothing."""
    if not any(map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))):
        return "Triton needs a C compiler, as gcc"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Triton needs Python.h, from python3-dev or the like"
    return ""


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
    passes = [
        (tokens, labels),
        (tokens[:1], labels[:1]),
        (tokens[1:], labels[1:].where(first, IGNORE_INDEX)),
        (tokens[1:], labels[1:].where(~first, IGNORE_INDEX)),
    ]
    try:
        with trial(model, recipe, ranks.device):
            whole, *parts = [float(scalar_loss(unwrap(model)(*given))) for given in passes]
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
    network, problem, losses = unwrap(model), "", []
    if not takes_documents(network):
        problem = "your model's forward takes no `documents`"
    else:
        places = torch.arange(8, device=ranks.device).unsqueeze(0)
        is_second = places >= 4
        documents = Documents((torch.arange(8) >= 4).long().unsqueeze(0), places % 4)
        labels = torch.where(is_second, places, IGNORE_INDEX)
        try:
            for first in (places, places + 1):  # other tokens in the first document
                with trial(model, recipe, ranks.device):
                    tokens = torch.where(is_second, places, first)
                    losses.append(network(tokens, labels, documents=documents))
            if not torch.equal(*losses):
                problem = "the model's attention does not keep the documents of a row apart"
        except TypeError as error:
            problem = f"the model takes no positions ({first_line(error)})"
    if problem and recipe.data.packing == "best-fit":
        raise UserError(f'data.packing = "best-fit": {problem}: leave it out')
    if problem:
        advice = "write data.document_mask=false for whole rows"
        raise UserError(f"data.document_mask: {problem}: {advice}")
