"""Start-up checks: they stop a run before its first step for mistakes that would stay silent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import numpy as np
import torch
from torch import Tensor, nn

from windlass.data.samples import Samples
from windlass.errors import RunFailed, UserError, first_line
from windlass.model.build import evaluating, scalar
from windlass.model.documents import Documents, takes_documents
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import autocast, unwrap, varying_shapes
from windlass.recipe import Recipe
from windlass.recipe.settings import IGNORE_INDEX
from windlass.training.nonfinite import ran_out_of_memory

LOOKED_AT, MOST_READ = 64, 4096  # samples that are read for labels at once, and at most


def check_weights(
    network: nn.Module, tied_before: list[list[str]], wanted: torch.dtype, ranks: Ranks
) -> None:
    """Check type and ties of the weights that will be trained; RunFailed on every rank."""
    # With fewer bits a weight would lose small updates, unless the optimizer rounds for it.
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    wrong = [name for name, parameter in trained if parameter.dtype != wanted]
    problems = [f"master weights are not {wanted}: {name}" for name in wrong[:1]]
    untied = [" and ".join(names) for names in tied_before if names not in tie_groups(network)]
    problems += [f"{names} were tied in the model, and no longer are" for names in untied]
    gathered = dict.fromkeys(chain(*ranks.all_gather_object("startup checks", problems)))
    if gathered:
        head = "the start-up checks failed (train.startup_checks):"
        raise RunFailed("\n".join([head, *gathered]))


def tie_groups(model: nn.Module) -> list[list[str]]:
    """The names of each tied weight."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


@contextmanager
def trial(model: nn.Module, recipe: Recipe, device: torch.device) -> Iterator[None]:
    """The context of a check's pass, whose shapes must not reach the training's graphs."""
    with torch.no_grad(), evaluating(model), varying_shapes(), autocast(recipe, device):
        yield


def check_loss_is_a_sum(model: nn.Module, samples: Samples, ranks: Ranks, recipe: Recipe) -> None:
    """Raise UserError if a user's module does not return the sum of the loss over unmasked labels.

    The loss of two samples equals the loss of one sample, plus the losses of both halves of the
    labels of the other; a mean over tokens or over samples does not.
    """
    chosen = np.arange(min(2, len(samples)))
    for start in range(0, min(MOST_READ, len(samples)), LOOKED_AT):  # the first that have labels
        indices = np.arange(start, min(start + LOOKED_AT, len(samples)))
        counts = (np.asarray(samples.read(indices)[1]) != IGNORE_INDEX).sum(1)
        if counts.any():
            chosen = indices[np.argsort(counts)[-2:]]
            break
    # A single sample twice; the second has the most labels.
    two = (np.array(part, dtype=np.int64) for part in samples.read(chosen[[0, -1]])[:2])
    tokens, labels = (torch.from_numpy(part).to(ranks.device) for part in two)  # [2, T]
    order = (labels[1:] != IGNORE_INDEX).cumsum(1)  # numbers the labels of the second sample
    first = order <= order[:, -1:] // 2
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
            key, advice = (
                'data.packing = "best-fit"',
                'leave it out, or write "documents" for texts',
            )
        raise UserError(f"{key}: {problem}: {advice}")


def check_first_loss(loss: float, rows: int, fresh: bool) -> str:
    """A warning if the loss of step 1 is far from guessing among `rows` tokens; else empty."""
    chance = math.log(max(2, rows))
    likely = loss < 1.5 * chance + 1 and (loss > 0.5 * chance or not fresh)
    if likely or loss == 0 or not math.isfinite(loss):  # 0: every label of the step was masked
        return ""
    causes = "the tokenizer may not be the model's (data.tokenizer), or its weights were not loaded"
    if fresh and loss > chance:
        causes = "look at model.init_std and model.logit_cap, or the labels"
    elif fresh:
        causes = "labels may be in the input"
    guess = f"guessing among {rows:,} tokens gives {chance:.4g}"
    return f"the first loss is {loss:.4g}, and {guess}: {causes}"
