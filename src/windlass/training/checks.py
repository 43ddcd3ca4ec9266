"""Check at a start what would fail later or go unseen: directories that a host does not see, the
prompt of samples, a user's loss that is not a sum, documents of a row that see each other."""

from __future__ import annotations

import math
import os
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from windlass.data.samples import Samples
from windlass.data.shards import Index
from windlass.errors import UserError, first_line
from windlass.model.attention import Documents, takes_documents
from windlass.model.build import evaluating, scalar
from windlass.parallel.parallelize import autocast, unwrap, varying_shapes
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.recipe.settings import IGNORE_INDEX
from windlass.training.evaluator import can_sample
from windlass.training.memory import ran_out_of_memory


def check_shared(ranks: Ranks, run: Path, data: Sequence[Path]) -> None:
    """Raise UserError if a host does not see the run directory of rank 0, or its `data`.

    Rank 0 creates a file in the run directory and beside missing data. Prepared data may be
    read-only, or a copy on each host's disk, so the hosts compare the hashes of its files.
    """
    shards_here = list[list[str]]()
    for index in map(Index.load, data):
        shards = [shard.identity for shard in index.shards] if index else []
        shards_here.append([index.tokenizer.fingerprint, *shards] if index else [])
    places = {"run.dir": run.absolute()}
    if data:
        places["data.dir"] = data[0].parent.absolute()

    def create() -> dict[str, str]:
        marks = {}
        for key, place in places.items():
            if key == "data.dir" and all(shards_here):
                continue
            parent = next(path for path in (place, *place.parents) if path.is_dir())
            # A new name, which is in no cache of NFS
            descriptor, marks[key] = tempfile.mkstemp(prefix=".windlass-", dir=parent)
            os.close(descriptor)
        return marks

    marks = ranks.decide("shared", create)
    prepared = ranks.broadcast_object("prepared", shards_here)
    missing = [key for key, mark in marks.items() if not Path(mark).exists()]
    if any(shards and shards != here for shards, here in zip(prepared, shards_here, strict=True)):
        missing.append("data.dir")
    hosts = ranks.all_gather_object("shared", [socket.gethostname(), missing])
    if ranks.main:
        for mark in marks.values():
            Path(mark).unlink(missing_ok=True)
    ranks.broadcast_object("removed")  # nobody continues while the files exist
    for key, place in places.items():
        blind = {f"{host} (rank {rank})" for rank, (host, keys) in enumerate(hosts) if key in keys}
        if blind:
            raise UserError(
                f"{key}: {place} of {hosts[0][0]} (rank 0) is not seen by "
                f"{', '.join(sorted(blind))}: put it on a file system that all hosts share "
                f"({key}=PATH)"
            )


def check_prompt(recipe: Recipe, model: nn.Module, tokenizer: Any) -> None:
    """Raise UserError if the tokenizer, perhaps the user's, cannot read `eval.prompt`."""
    settings = recipe.eval
    if settings.sample_every and settings.prompt and can_sample(model, tokenizer):
        try:
            tokenizer.prompt(settings.prompt)
        except UserError as error:
            problem = f"eval.prompt = {settings.prompt!r}: {error}"
            raise UserError(f"{problem}; write another, or eval.sample_every=0") from None


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
    if problem := mixed_documents(model, ranks, recipe):
        if recipe.data.packing == "best-fit":
            raise UserError(f'data.packing = "best-fit": {problem}: leave it out')
        advice = "write data.document_mask=false for whole rows"
        raise UserError(f"data.document_mask: {problem}: {advice}")


def mixed_documents(model: nn.Module, ranks: Ranks, recipe: Recipe) -> str:
    """Why a model cannot keep two documents of a row apart; empty if it can."""
    network = unwrap(model)
    if not takes_documents(network):
        return "your model's forward takes no `documents`"
    places = torch.arange(8, device=ranks.device).unsqueeze(0)
    is_second = places >= 4
    documents = Documents((torch.arange(8) >= 4).long().unsqueeze(0), places % 4)
    labels = torch.where(is_second, places, IGNORE_INDEX)
    losses = []
    try:
        for first in (places, places + 1):  # other tokens in the first document
            with trial(model, recipe, ranks.device):
                tokens = torch.where(is_second, places, first)
                losses.append(network(tokens, labels, documents=documents))
    except TypeError as error:
        return f"the model takes no positions ({first_line(error)})"
    apart = torch.equal(*losses)
    return "" if apart else "the model's attention does not keep the documents of a row apart"
