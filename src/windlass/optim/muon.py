"""Muon on matrices and AdamW on everything else, as one optimizer.

Muon replaces the momentum of a matrix by the nearest matrix whose singular values are all about one
(K. Jordan et al., https://kellerjordan.github.io/posts/muon/; at scale: arXiv 2502.16982). "About":
five steps of an odd quintic polynomial, x -> a x + b x^3 + c x^5 on every singular value, with
coefficients that trade exactness for a fast rise at zero.

That needs the whole matrix. If matrices are cut, the ranks divide them: each rank receives the
pieces of its own matrices, orthogonalises them and sends the pieces back. The ranks share the work,
and with FSDP2 the result equals one process's bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from windlass.model.share import Cut, cut_of, is_sharded, local_part, whole_shape

# From Jordan's post: steepest at 0, and [0, 1] goes to about [0.7, 1.2].
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
Matrix = tuple[Any, tuple[int, ...]]
"""A parameter, and the rows of each of the matrices stacked in it."""


def orthogonalise(matrix: Tensor, dtype: torch.dtype, parts: Sequence[int] = ()) -> Tensor:
    """About U V^T of U S V^T, by Newton-Schulz steps in `dtype`; `parts`: rows of stacked ones."""
    if len(parts) > 1:
        return torch.cat([orthogonalise(part, dtype) for part in matrix.split(list(parts))])
    a, b, c = COEFFICIENTS
    x = matrix.to(dtype)
    tall = x.size(0) > x.size(1)
    if tall:
        x = x.T  # so that the gram matrix is taken on the shorter side
    # The Frobenius norm is an upper bound of the largest singular value.
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def orthogonalise_cut(
    x: Tensor, dtype: torch.dtype, parts: Sequence[int], cut: Cut | None
) -> Tensor:
    """The same for the part of a matrix that this rank of `tp` holds.

    Its ranks gather the matrix, and each orthogonalises it and keeps its part.
    """
    if cut is None:
        return orthogonalise(x, dtype, parts)
    whole = cut.gather(x.to(dtype))
    return cut.take(orthogonalise(whole, dtype, parts))


def update_scale(shape: Sequence[int]) -> float:
    """The factor of a matrix's update besides the learning rate; the shape is [outputs, inputs]."""
    return math.sqrt(max(1.0, shape[0] / shape[1]))


class MuonAdamW(torch.optim.Optimizer):
    """Groups with `muon=True` hold matrices that are orthogonalised; the others are AdamW's.

    State of a parameter: `momentum_buffer`, or AdamW's `step`, `exp_avg`, `exp_avg_sq`; each is
    shaped and sharded like its parameter. The momentum of matrices is a running mean, and the
    update looks ahead (Nesterov).

    Args:
        groups: Each has `params`, `lr`, `weight_decay` (decoupled, times the learning rate), `muon`
            and perhaps `parts`: for each matrix the rows of the matrices stacked in it.
        momentum, betas, eps, fused: as in torch's Muon and AdamW.
        device_type: Where matrices are orthogonalised.
        group: Ranks that hold equal plain tensors (DDP) and share the work.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        fused: bool = True,
        device_type: str = "cpu",
        group: dist.ProcessGroup | None = None,
    ):
        self.device_type, self.group = device_type, group
        # torch's names: whether `found_inf` makes the update conditional, on the device, and whether
        # the update divides the gradients by `grad_scale`.
        self._step_supports_amp_scaling = fused
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        # For the Newton-Schulz steps; None: the matrix's.
        self.dtype = torch.bfloat16 if device_type == "cuda" else None
        super().__init__(list(groups), {"lr": 0.0, "weight_decay": 0.0, "muon": False})
        for g in self.param_groups:
            if g["muon"]:
                g.update(momentum=momentum)
                g.setdefault("parts", [(whole_shape(p)[0],) for p in g["params"]])
            else:
                g.update(betas=betas, eps=eps, fused=fused)

    def add_param_group(self, group: dict[str, Any]) -> None:
        # torch's own imports torch._dynamo, which takes as long as half of `import torch`.
        self.param_groups.append(self.defaults | group | {"params": list(group["params"])})

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in (p for g in self.param_groups for p in g["params"]):
            p.grad = None

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for g in self.param_groups:
            if g["muon"]:
                if self.grad_scale is not None:
                    grads = [local_part(p.grad) for p in g["params"] if p.grad is not None]
                    torch._foreach_mul_(grads, 1 / self.grad_scale)
                pairs = zip(g["params"], g["parts"], strict=True)
                self._muon(g, [(p, tuple(parts)) for p, parts in pairs if p.grad is not None])
            elif parameters := [p for p in g["params"] if p.grad is not None]:
                self._adamw(g, parameters)

    def _adamw(self, g: dict[str, Any], parameters: list[Tensor]) -> None:
        for p in parameters:
            if not self.state[p]:
                self.state[p] = new_state(p, g)
        how = {key: g[key] for key in ("lr", "weight_decay", "eps")}
        how |= {"beta1": g["betas"][0], "beta2": g["betas"][1]}
        how |= {"amsgrad": False, "maximize": False}
        by_kind: dict[Any, list[Tensor]] = {}
        for p in parameters:
            by_kind.setdefault((p.device, p.dtype), []).append(p)
        for (device, _), some in by_kind.items():
            states, grads = [self.state[p] for p in some], [p.grad for p in some]
            moments = ([s[key] for s in states] for key in ("exp_avg", "exp_avg_sq"))
            steps = [s["step"] for s in states]
            if not g["fused"]:
                adamw(some, grads, *moments, [], steps, **how)
                continue
            bad = self.found_inf if self.found_inf is None else self.found_inf.to(device)
            torch._foreach_add_(steps, 1)
            how["grad_scale"], how["found_inf"] = self.grad_scale, bad
            torch._fused_adamw_(some, grads, *moments, [], steps, **how)
            if bad is not None:  # the kernel left the rest as it was
                torch._foreach_sub_(steps, [bad] * len(steps))

    def _muon(self, g: dict[str, Any], matrices: list[Matrix]) -> None:
        lr, shrink = g["lr"], 1 - g["lr"] * g["weight_decay"]
        ahead = (self._momentum(p, g) for p, _ in matrices)
        for (p, parts), update in zip(matrices, self._orthogonalised(matrices, ahead), strict=True):
            weight, scale = local_part(p), update_scale((max(parts), whole_shape(p)[1]))
            new = (weight * shrink).add_(update.to(weight), alpha=-lr * scale)
            weight.copy_(self._if_finite(new, weight))

    def _momentum(self, p: Tensor, g: dict[str, Any]) -> Tensor:
        """Move this rank's part of a momentum towards the gradient, and look one step ahead."""
        if not self.state[p]:
            self.state[p] = new_state(p, g)
        rate = g["momentum"]
        gradient, momentum = local_part(p.grad), local_part(self.state[p]["momentum_buffer"])
        gradient = self._if_finite(gradient, momentum)  # the momentum stays
        momentum.lerp_(gradient, 1 - rate)
        return gradient.lerp(momentum, rate)

    def _if_finite(self, new: Tensor, old: Tensor) -> Tensor:
        """`new`, or `old` if this step's gradients were not finite; the host does not wait."""
        if self.found_inf is None:
            return new
        return torch.where(self.found_inf.to(new.device) > 0, old, new)

    def _orthogonalised(self, matrices: list[Matrix], ahead: Iterator[Tensor]) -> Iterator[Tensor]:
        """This rank's part of each orthogonalised update, in order; a few matrices at a time."""
        if not matrices:
            return
        dtype = self.dtype or matrices[0][0].dtype
        if is_sharded(matrices[0][0]):
            yield from self._sharded(matrices, ahead, dtype)
        elif self.group is not None and dist.get_world_size(self.group) > 1:
            yield from _replicated(matrices, ahead, dtype, self.group)
        else:
            for (p, parts), x in zip(matrices, ahead, strict=True):
                yield orthogonalise_cut(x, dtype, parts, cut_of(p))

    def _sharded(
        self, matrices: list[Matrix], ahead: Iterator[Tensor], dtype: torch.dtype
    ) -> Iterator[Tensor]:
        """Each rank collects its own matrices, orthogonalises them and sends the rows back.

        One dimension of the mesh cuts every matrix, by rows; its ranks share the work.
        """
        from torch.distributed.tensor import Shard

        like: Any = matrices[0][0]
        dim = like.placements.index(Shard(0))
        mesh = like.device_mesh
        group, world, rank = mesh.get_group(dim), mesh.size(dim), mesh.get_local_rank(dim)
        for start in range(0, len(matrices), world):
            batch = matrices[start : start + world]
            local = [x.to(self.device_type, dtype) for x in islice(ahead, world)]
            out, into = [x.numel() for x in local] + [0] * (world - len(batch)), [0] * world
            if rank < len(batch):
                mine, parts = batch[rank]
                height, width = mine.shape
                # As torch.chunk divides: the last ranks may have fewer rows, or none.
                each = -(-height // world)
                into = [max(0, min(each, height - r * each)) * width for r in range(world)]
            flat, sent = local[0].new_empty(sum(into)), torch.cat([x.reshape(-1) for x in local])
            dist.all_to_all_single(flat, sent, into, out, group=group)
            if rank < len(batch):
                whole = flat.view(mine.shape)
                flat = orthogonalise_cut(whole, dtype, parts, cut_of(mine)).reshape(-1)
            back = flat.new_empty(sum(out))
            dist.all_to_all_single(back, flat, out, into, group=group)
            for x, own in zip(back.split(out[: len(batch)]), local, strict=True):
                yield x.view(own.shape)


def new_state(p: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
    """A parameter's state before its first update, as Muon and torch's AdamW have it."""
    if group.get("muon"):
        return {"momentum_buffer": torch.zeros_like(p)}
    step = torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu")
    return {"step": step, "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}


def _replicated(
    matrices: list[Matrix], ahead: Iterator[Tensor], dtype: torch.dtype, group: dist.ProcessGroup
) -> Iterator[Tensor]:
    """Equal plain tensors on all ranks: each orthogonalises its own and broadcasts them."""
    world, rank = dist.get_world_size(group), dist.get_rank(group)
    for start in range(0, len(matrices), world):
        batch = zip(matrices[start : start + world], islice(ahead, world), strict=True)
        updates, works = list[Tensor](), list[Any]()
        for owner, ((p, parts), x) in enumerate(batch):
            if owner == rank:
                new = orthogonalise_cut(x, dtype, parts, cut_of(p))
            else:
                new = torch.empty_like(x, dtype=dtype)
            updates.append(new.contiguous())
        for owner, x in enumerate(updates):
            works.append(dist.broadcast(x, group=group, group_src=owner, async_op=True))
        for update, work in zip(updates, works, strict=True):
            work.wait()
            yield update
