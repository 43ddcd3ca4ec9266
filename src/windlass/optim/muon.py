"""Muon on matrices and AdamW on everything else, as one optimizer.

Muon replaces the momentum of a matrix by the nearest matrix whose singular values are all about one
(K. Jordan et al., https://kellerjordan.github.io/posts/muon/; at scale: arXiv 2502.16982), by five
steps of an odd polynomial, x -> a x + b x^3 + c x^5, on every singular value.

That needs the whole matrix, so the ranks divide cut matrices. Equal shapes are orthogonalised as
one stack: a small matrix takes less time than the start of its kernels on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from windlass.model.sharding import cut_of, is_sharded, local_part, rows_of_rank, whole_shape
from windlass.optim import adamw
from windlass.optim.adamw import BF16_DROPPED, places, random_bits, rounded, rounding_key

# From Jordan's post: steepest at 0, and [0, 1] goes to about [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
"""Maximum number of elements that a rank orthogonalises in one stack; one matrix may exceed it."""


class Matrix(NamedTuple):
    """A parameter whose matrices Muon orthogonalises."""

    name: str
    parameter: Any
    parts: tuple[int, ...]  # the rows of each of the matrices that are stacked in it


def orthogonalise(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """About U V^T of U S V^T, for a matrix or each in a stack; Newton-Schulz steps in `dtype`."""
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    tall = x.size(-2) > x.size(-1)
    x = x.mT if tall else x  # so that the gram matrix has the shorter side
    # The Frobenius norm is an upper bound of the largest singular value.
    norm = x.norm() if x.dim() == 2 else x.norm(dim=(-2, -1), keepdim=True)
    x = x / norm.clamp(min=1e-7)
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalise_all(matrices: Sequence[Matrix], values: Sequence[Tensor]) -> list[Tensor]:
    """The values of matrices, orthogonalised. The ranks of `tp` gather each matrix that they cut,
    and each keeps its part of the result."""
    pieces, by_shape = list[Tensor](), dict[tuple[int, ...], list[int]]()
    for matrix, x in zip(matrices, values, strict=True):
        cut = cut_of(matrix.parameter)
        whole = cut.gather(x) if cut else x
        pieces += whole.split(list(matrix.parts))
    for i, x in enumerate(pieces):
        by_shape.setdefault((min(x.shape), max(x.shape)), []).append(i)
    for same in by_shape.values():
        if len(same) == 1:
            pieces[same[0]] = orthogonalise(pieces[same[0]], pieces[same[0]].dtype)
            continue
        wide = [pieces[i].T if pieces[i].size(0) > pieces[i].size(1) else pieces[i] for i in same]
        results = orthogonalise(torch.stack(wide), wide[0].dtype)
        for i, x in zip(same, results, strict=True):
            pieces[i] = x if x.shape == pieces[i].shape else x.T
    left, updates = iter(pieces), list[Tensor]()
    for matrix in matrices:
        parts, cut = list(islice(left, len(matrix.parts))), cut_of(matrix.parameter)
        x = torch.cat(parts) if len(parts) > 1 else parts[0]
        updates.append(cut.take(x) if cut else x)
    return updates


def update_scale(shape: Sequence[int]) -> float:
    """The factor of a matrix's update besides the learning rate; the shape is [outputs, inputs]."""
    return math.sqrt(max(1.0, shape[0] / shape[1]))


class MuonAdamW(torch.optim.Optimizer):
    """Groups with `muon=True` hold matrices that are orthogonalised; the others are AdamW's.

    State of a parameter: `momentum_buffer`, or AdamW's `step`, `exp_avg`, `exp_avg_sq`; each is
    shaped and sharded like its parameter. The momentum of matrices is a running mean, and the
    update looks ahead (Nesterov).

    A group has `params`, `lr`, `weight_decay` (decoupled, times the learning rate), `muon` and
    perhaps `parts`: for each matrix the rows of the matrices stacked in it. `seed`, its `names` and
    the `number` of the update determine the rounding of bf16 weights. Matrices are orthogonalised
    on `device_type`; the ranks of `group` hold equal plain tensors (DDP) and share the work.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        eight_bit: bool = False,
        seed: int = 0,
        device_type: str = "cpu",
        group: dist.ProcessGroup | None = None,
    ):
        self.device_type, self.group = device_type, group
        self.at_once = AT_ONCE.get(device_type, AT_ONCE["cuda"])
        # torch's names: whether `found_inf` makes the update conditional on the device, and whether
        # the update divides the gradients by `grad_scale`.
        self._step_supports_amp_scaling = True
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        # For the Newton-Schulz steps; None: the matrix's.
        self.dtype = torch.bfloat16 if device_type == "cuda" else None
        defaults = {"lr": 0.0, "weight_decay": 0.0, "muon": False, "eight_bit": eight_bit}
        super().__init__(list(groups), defaults | {"seed": seed, "number": 0})
        for g in self.param_groups:
            g.setdefault("names", [str(number) for number in range(len(g["params"]))])
            if g["muon"]:
                g.update(momentum=momentum)
                g.setdefault("parts", [(whole_shape(p)[0],) for p in g["params"]])
            else:
                g.update(betas=betas, eps=eps, fused=True)

    def add_param_group(self, group: dict[str, Any]) -> None:
        # torch's method imports torch._dynamo, which takes as long as half of `import torch`.
        self.param_groups.append(self.defaults | group | {"params": list(group["params"])})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (p for g in self.param_groups for p in g["params"]):
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for g in self.param_groups:
            present = [i for i, p in enumerate(g["params"]) if p.grad is not None]
            named = [(g["names"][i], g["params"][i]) for i in present]
            for _, p in named:
                if not self.state[p]:
                    self.state[p] = adamw.new_state(p, g)
            if not g["muon"]:
                states = [self.state[p] for _, p in named]
                adamw.update(g, named, states, self.grad_scale, self.found_inf)
            elif named:
                if self.grad_scale is not None:
                    torch._foreach_mul_([local_part(p.grad) for _, p in named], 1 / self.grad_scale)
                self._muon(g, [Matrix(*named[n], g["parts"][i]) for n, i in enumerate(present)])

    def _muon(self, g: dict[str, Any], matrices: list[Matrix]) -> None:
        # Equal shapes together, for stacks, and for equal work of the ranks.
        matrices.sort(key=lambda matrix: whole_shape(matrix.parameter))
        first, rate, bad = matrices[0].parameter, g["momentum"], None
        if self.found_inf is not None:
            bad = self.found_inf.to(local_part(first).device) > 0
        dtype = self.dtype or torch.promote_types(first.dtype, torch.float32)
        sharded, group = is_sharded(first), self.group
        if sharded:
            from torch.distributed.tensor import Shard

            group = first.device_mesh.get_group(first.placements.index(Shard(0)))
        world = dist.get_world_size(group) if group is not None else 1
        largest = max(whole_shape(matrix.parameter).numel() for matrix in matrices)
        size = world * max(1, self.at_once // largest)
        for start in range(0, len(matrices), size):
            batch, values = matrices[start : start + size], list[Tensor]()
            for _, p, _ in batch:  # this rank's parts: momenta towards gradients, one step ahead
                momentum = local_part(self.state[p]["momentum_buffer"])
                gradient = unless(bad, local_part(p.grad), momentum)  # the momentum stays
                momentum.lerp_(gradient, 1 - rate)
                values.append(gradient.lerp(momentum, rate).to(self.device_type, dtype))
            if sharded:
                updates = _orthogonalise_shards(batch, values, group)
            elif world > 1:
                updates = _orthogonalise_replicas(batch, values, group)
            else:
                updates = orthogonalise_all(batch, values)
            for (name, p, parts), x in zip(batch, updates, strict=True):
                weight, scale = local_part(p), update_scale((max(parts), whole_shape(p)[1]))
                wide = weight.float() if weight.dtype == torch.bfloat16 else weight
                new = wide * (1 - g["lr"] * g["weight_decay"])
                new.add_(x.to(wide), alpha=-g["lr"] * scale)
                if wide is not weight:
                    new = rounded(new, random_bits(rounding_key(g, name), *places(p)), BF16_DROPPED)
                weight.copy_(unless(bad, new, weight))


def _orthogonalise_shards(batch: list[Matrix], local: list[Tensor], group: Any) -> list[Tensor]:
    """Each rank collects its matrices, orthogonalises them and sends the rows back. One dimension
    of the mesh cuts every matrix, by rows; matrix i is rank i's, modulo its ranks."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    mine, owned = batch[rank::world], [local[r::world] for r in range(world)]
    sizes = list[list[int]]()  # of this rank's matrices: the numbers that each rank holds
    for matrix in mine:
        height, width = matrix.parameter.shape
        sizes.append([len(rows_of_rank(height, world, r)) * width for r in range(world)])
    out = [sum(x.numel() for x in part) for part in owned]
    into = [sum(row[r] for row in sizes) for r in range(world)]
    sent = torch.cat([x.reshape(-1) for part in owned for x in part])
    flat, back = sent.new_empty(sum(into)), sent.new_empty(sum(out))
    dist.all_to_all_single(flat, sent, into, out, group=group)
    # Every rank's piece of the first matrix, of the second, ...
    received = flat.split([row[r] for r in range(world) for row in sizes]) if mine else ()
    wholes = [
        torch.cat(received[i :: len(mine)]).view(matrix.parameter.shape)
        for i, matrix in enumerate(mine)
    ]
    new = orthogonalise_all(mine, wholes)
    split = [x.reshape(-1).split(each) for x, each in zip(new, sizes, strict=True)]
    returned = [row[r] for r in range(world) for row in split]
    dist.all_to_all_single(back, torch.cat([flat[:0], *returned]), out, into, group=group)
    updates = list(local)
    for r, part in enumerate(back.split(out)):
        each = [x.numel() for x in owned[r]]
        pairs = zip(part.split(each), owned[r], strict=True) if each else ()
        updates[r::world] = [x.view(like.shape) for x, like in pairs]
    return updates


def _orthogonalise_replicas(batch: list[Matrix], values: list[Tensor], group: Any) -> list[Tensor]:
    """Equal plain tensors on all ranks: each orthogonalises a part and broadcasts it."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    updates = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in values]
    new = orthogonalise_all(batch[rank::world], values[rank::world])
    updates[rank::world] = [x.contiguous() for x in new]
    works = [
        dist.broadcast(x, group=group, group_src=i % world, async_op=True)
        for i, x in enumerate(updates)
    ]
    for work in works:
        work.wait()
    return updates


def unless(bad: Tensor | None, new: Tensor, old: Tensor) -> Tensor:
    """`new`, or `old` if this step's gradients were not finite; the host does not wait."""
    return new if bad is None else torch.where(bad, old, new)
