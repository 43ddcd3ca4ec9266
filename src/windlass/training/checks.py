"""Checks before step 1, each able to stop the run: numbers that would otherwise be wrong in silence."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from windlass.errors import RunFailed
from windlass.parallel import collectives
from windlass.parallel.parallelize import clean_name, named_parameters, unwrap

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks
    from windlass.training.session import Session


def startup_checks(session: Session) -> None:
    """Master weights, ties, replicas, the gradient's norm; raises RunFailed on every rank where one of them is wrong."""
    model, ranks = session.model, session.ranks
    wanted = torch.float64 if session.precision == "fp64" else torch.float32
    found = [
        *master_weights(model, wanted),
        *ties(model, session.ties),
        *norm_probe(model, ranks),
        *replicas(model, ranks),
    ]
    everyone = [text for texts in ranks.all_gather_object("startup checks", found) for text in texts]
    if everyone:
        raise RunFailed("\n".join(["the start-up checks failed (train.startup_checks):", *dict.fromkeys(everyone)]))


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def master_weights(model: nn.Module, wanted: torch.dtype) -> list[str]:
    """Trained parameters that are not held in the master precision: updates smaller than their rounding would be lost."""
    wrong = [name for name, p in named_parameters(model) if p.requires_grad and p.dtype != wanted]
    return [f"master weights are not {wanted}: {', '.join(wrong[:4])}"] if wrong else []


def tie_groups(model: nn.Module) -> list[list[str]]:
    """Names under which one and the same parameter is found, for those with several: tied weights."""
    names: dict[int, list[str]] = {}
    for name, parameter in unwrap(model).named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(clean_name(name))
    return sorted(sorted(group) for group in names.values() if len(group) > 1)


def ties(model: nn.Module, before: list[list[str]]) -> list[str]:
    """Weights that were tied before the model was wrapped and sharded, and are not any more."""
    after = tie_groups(model)
    return [f"{' and '.join(group)} were tied in the model and are not here" for group in before if group not in after]


def norm_probe(model: nn.Module, ranks: Ranks) -> list[str]:
    """The distributed gradient norm on gradients whose norm is known: constants, another one for each parameter."""
    kept = [(p, p.grad) for p in model.parameters() if p.requires_grad]
    expected = 0.0
    try:
        for number, (parameter, _) in enumerate(kept):
            value = 1.0 / (1 + number % 7)
            parameter.grad = torch.full_like(parameter, value)
            expected += value * value * parameter.numel()
        norm = float(collectives.global_grad_norm([p for p, _ in kept], ranks))
    finally:
        for parameter, grad in kept:
            parameter.grad = grad
    expected = math.sqrt(expected)
    if abs(norm - expected) > 1e-4 * expected:
        return [f"the distributed gradient norm of a probe is {norm:.6g} and should be {expected:.6g}"]
    return []


def replicas(model: nn.Module, ranks: Ranks) -> list[str]:
    """Parameters that are not equal, bit for bit, on ranks that should hold the same ones."""
    if ranks.world == 1 or ranks.strategy in ("single", "full_shard", "shard_grad_op"):
        return []
    names = [name for name, _ in named_parameters(model)]
    mine = {"group": _shard_index(ranks), "hash": [fingerprint(local(p)) for _, p in named_parameters(model)]}
    groups: dict[int, list[tuple[int, list[int]]]] = {}
    for rank, theirs in enumerate(ranks.all_gather_object("replicas", mine)):
        groups.setdefault(theirs["group"], []).append((rank, theirs["hash"]))
    found = []
    for members in groups.values():
        first_rank, first = members[0]
        for rank, hashes in members[1:]:
            different = [n for n, a, b in zip(names, first, hashes, strict=True) if a != b]
            if different:
                found.append(f"ranks {first_rank} and {rank} hold different values of {', '.join(different[:4])}")
    return found


def _shard_index(ranks: Ranks) -> int:
    """Which part of the parameters this rank holds: ranks of the same part are replicas."""
    return int(ranks.mesh.get_local_rank("shard")) if ranks.mesh is not None and ranks.mesh.ndim > 1 else 0


@torch.no_grad()
def fingerprint(tensor: Tensor) -> int:
    """A hash of a tensor's bits, on its own device: a sum of the words, each times an odd number that its place decides."""
    flat = tensor.detach().contiguous().reshape(-1)
    if flat.numel() == 0:
        return 0
    words = flat.view(torch.int64) if flat.element_size() == 8 else flat.view(torch.int32).long()
    places = torch.arange(words.numel(), device=words.device, dtype=torch.int64)
    return int((words * (places * 0x9E3779B1 + 1 | 1)).sum())
