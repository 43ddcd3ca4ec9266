"""Start-up checks, each of which can stop the run before its first step: mistakes that would
otherwise be silent."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.data.batch import Batch
from windlass.data.samples import Samples
from windlass.errors import RunFailed, UserError, first_line
from windlass.evaluation.source import evaluating
from windlass.parallel import collectives
from windlass.parallel.dist import Ranks
from windlass.parallel.mesh import shard_groups
from windlass.parallel.parallelize import unwrap
from windlass.recipe.settings import IGNORE_INDEX

HASH_WORDS = 2**20  # hashed at once: three temporary tensors of 8 MB, for a parameter of any size


def startup_checks(
    model: nn.Module, tied_before: list[list[str]], precision: str, ranks: Ranks
) -> None:
    """Master weights, ties, the gradient norm, replicas; raises RunFailed on every rank where one
    of them is wrong."""
    wanted = torch.float64 if precision == "fp64" else torch.float32
    # Held in fewer bits, a trained weight would lose small updates to rounding.
    wrong = [
        name
        for name, p in unwrap(model).named_parameters()
        if p.requires_grad and p.dtype != wanted
    ]
    problems = [f"master weights are not {wanted}: {name}" for name in wrong[:1]]
    untied = [" and ".join(names) for names in tied_before if names not in tie_groups(model)]
    problems += [f"{names} were tied in the model, and no longer are" for names in untied]
    problems += [*norm_probe(model, ranks), *replicas(model, ranks)]
    everywhere = [
        text for texts in ranks.all_gather_object("startup checks", problems) for text in texts
    ]
    if everywhere:
        raise RunFailed(
            "\n".join(
                ["the start-up checks failed (train.startup_checks):", *dict.fromkeys(everywhere)]
            )
        )


def tie_groups(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several: tied weights."""
    names: dict[int, list[str]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def norm_probe(model: nn.Module, ranks: Ranks) -> list[str]:
    """The distributed norm of gradients of a given norm: constants, different from parameter to
    parameter."""
    parameters, squares = [p for p in model.parameters() if p.requires_grad], 0.0
    for number, parameter in enumerate(
        parameters
    ):  # before the first step: there is no gradient yet
        value = 1.0 / (1 + number % 7)
        parameter.grad = torch.full_like(parameter, value)
        squares += value * value * parameter.numel()
    norm, expected = float(collectives.global_grad_norm(parameters, ranks)), math.sqrt(squares)
    for parameter in parameters:
        parameter.grad = None
    if abs(norm - expected) > 1e-4 * expected:
        return [
            f"the distributed gradient norm of a probe is {norm:.6g} and should be {expected:.6g}"
        ]
    return []


def replicas(model: nn.Module, ranks: Ranks) -> list[str]:
    """Parameters that differ in any bit between ranks that should hold the same ones."""
    # A parameter in as many pieces as there are ranks has no replica.
    pieces = {
        name: (parameter.to_local(), piece_of(parameter))
        if isinstance(parameter, DTensor)
        else (parameter, "whole")
        for name, parameter in unwrap(model).named_parameters()
        if math.prod(group.size() for group in shard_groups(parameter)) < ranks.world
    }
    if not pieces:
        return []
    own = {name: [piece, fingerprint(local)] for name, (local, piece) in pieces.items()}
    first: dict[
        tuple[str, str], tuple[int, int]
    ] = {}  # the first rank that holds a piece; its hash
    differing: dict[tuple[int, int], list[str]] = {}  # names, by the two ranks
    for rank, other in enumerate(ranks.all_gather_object("replicas", own)):
        for name, (piece, value) in other.items():
            first_rank, expected = first.setdefault((name, piece), (rank, value))
            if value != expected:
                differing.setdefault((first_rank, rank), []).append(name)
    return [
        f"ranks {a} and {b} hold different values of {', '.join(names[:4])}"
        for (a, b), names in differing.items()
    ]


def piece_of(parameter: DTensor) -> str:
    """The piece that this rank holds: its place along each mesh dimension that cuts the tensor."""
    mesh, placements = parameter.device_mesh, parameter.placements
    places = [mesh.get_local_rank(d) for d, p in enumerate(placements) if not p.is_replicate()]
    return ",".join(map(str, places))


@torch.no_grad()
def check_loss_is_a_sum(
    model: nn.Module,
    samples: Samples,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Raise UserError where a module of the user's gives another loss than the sum over the
    unmasked labels.

    A sum over all positions is that over the first half of them and that over the rest; a mean is
    not.
    """
    two = Batch(*samples.read(np.arange(min(2, len(samples)))))
    tokens, labels, *_ = two.map(lambda part: torch.from_numpy(np.array(part, dtype=np.int64)))
    first = (torch.arange(labels.numel()) < labels.numel() // 2).view_as(labels)
    masked = (labels, labels.where(first, IGNORE_INDEX), labels.where(~first, IGNORE_INDEX))
    try:
        with evaluating(model), autocast():
            whole, *halves = (
                float(unwrap(model)(tokens.to(ranks.device), m.to(ranks.device))) for m in masked
            )
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        problem = f"forward(tokens, labels) of your model failed on two samples: {type(error).__name__}: {first_line(error)}"
        takes = "tokens and labels, int64 [B, T], and returns a scalar, the loss summed over labels that are not -100"
        raise UserError(f"{problem}. It takes {takes}") from error
    wrong = math.isfinite(whole) and abs(sum(halves) - whole) > 0.3 * abs(whole)
    if any(ranks.all_gather_object("sum of the loss", wrong)):
        parts = f"{whole:.4g} for two samples, {halves[0]:.4g} and {halves[1]:.4g} for the two halves of their labels"
        raise UserError(
            f"your model's forward(tokens, labels) gives no sum: {parts}. Return the loss summed over labels that are not -100 "
            '(reduction="sum"); Windlass divides it by their number in the whole step (train.startup_checks=false: no check)'
        )


def check_first_loss(loss: float, rows: int, fresh: bool) -> str:
    """What is suspicious about the loss of the first step, held against that of guessing among
    `rows` tokens; or ""."""
    chance = math.log(max(2, rows))
    likely = 0.5 * chance < loss < 1.5 * chance + 1 if fresh else loss < 1.5 * chance + 1
    if likely or loss == 0 or not math.isfinite(loss):  # 0: every label of the step was masked
        return ""
    causes = "the tokenizer may not be the model's (data.tokenizer), or its weights were not loaded"
    if fresh:
        causes = "look at model.init_std and model.logit_cap, or the labels"
        causes = causes if loss > chance else "labels may be in the input"
    return f"the first loss is {loss:.4g}, and guessing among {rows:,} tokens gives {chance:.4g}: {causes}"


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """A hash of a tensor's bits, on its own device: the sum of its words, each times an odd number
    by its place."""
    flat = tensor.detach().contiguous().reshape(-1)
    words = flat.view(
        {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    )
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, words.numel(), HASH_WORDS):
        chunk = words[start : start + HASH_WORDS].long()
        places = torch.arange(start, start + chunk.numel(), device=chunk.device)
        total += (chunk * (places * 0x9E3779B1 + 1 | 1)).sum()
    return int(total)


def uses_dropout(model: nn.Module) -> bool:
    """Whether a module of the model draws random numbers in training."""
    settings = [
        (type(m).__name__, name, value) for m in model.modules() for name, value in vars(m).items()
    ]
    rates = [
        value
        for kind, name, value in settings
        if "dropout" in name or (name == "p" and "Dropout" in kind)
    ]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)
