"""FSDP2 (arXiv 2304.11277): its units, and the modules that compute in float32."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from windlass.model.documents import HALF
from windlass.model.frozen import HeldEmbedding
from windlass.model.share import become, is_fsdp
from windlass.model.size import unit_blocks
from windlass.parallel.dist import Ranks
from windlass.recipe.settings import ParallelSettings


def shard(
    model: nn.Module,
    blocks: list[nn.Module],
    ranks: Ranks,
    settings: ParallelSettings,
    low: torch.dtype | None,
) -> None:
    """FSDP2 over blocks, over the model's `ends()`, and over the rest as one unit.

    It gathers parameters in the precision `low`; None: as they are.

    Small blocks of a model that runs them in order (it has `ends`) share a unit, because a
    collective and FSDP2's hooks would take longer than they.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    pinned = ranks.device.type == "cuda"
    shard_unit = functools.partial(
        fully_shard,
        mesh=ranks.mesh.part("dp_replicate", "dp_shard"),
        offload_policy=CPUOffloadPolicy(pinned) if settings.offload else OffloadPolicy(),
        mp_policy=MixedPrecisionPolicy(
            param_dtype=low, reduce_dtype=torch.float32 if low else None, cast_forward_inputs=False
        ),
    )
    ends: Any = getattr(model, "ends", lambda: ([], []))
    first, last = ends()

    in_order, each = hasattr(model, "ends") and ranks.mesh.pp is None, 1
    if in_order:
        each = unit_blocks(len(blocks), sum(p.numel() for b in blocks for p in b.parameters()))
    units = [blocks[i : i + each] for i in range(0, len(blocks), each)]
    if first:
        units.insert(0, first)
    keeps = ranks.strategy.keeps_gathered
    for unit in units:  # the backward pass begins with the last one, unless a pipeline waits
        shard_unit(
            unit, reshard_after_forward=not keeps and (unit is not units[-1] or not in_order)
        )
    if last:
        shard_unit(last, reshard_after_forward=False)
    shard_unit(model, reshard_after_forward=False)
    for module in model.modules():
        if is_fsdp(module):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks a scaled sum
    heads: list[Any] = [model, *(unit[0] for unit in units), *last[:1]]
    ahead, back = settings.forward_prefetch, settings.backward_prefetch
    for i, unit in enumerate(heads):
        if ahead:
            unit.set_modules_to_forward_prefetch(heads[i + 1 : i + 1 + ahead])
        if back and i:
            unit.set_modules_to_backward_prefetch(heads[max(1, i - back) : i][::-1])


def raise_tables_and_norms(model: nn.Module, device: torch.device) -> None:
    """Have embeddings and norms compute in float32 although their parameters have low precision.

    The residual stream stays in float32, and so do the sums of a token's gradients.
    """
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding))
    wide: list[nn.Module] = [m for m in tables if not isinstance(m, HeldEmbedding)]
    if device.type == "cpu":  # on CUDA autocast raises norms by itself
        wide += [module for module in model.modules() if is_foreign_norm(module)]
    for module in wide:
        become(module, InFloat32)


def is_foreign_norm(module: nn.Module) -> bool:
    """Whether a module is another library's norm; ours raise their own weights."""
    kind, vectors = type(module), [p.dim() <= 1 for p in module.parameters()]
    is_norm = "norm" in kind.__name__.lower() and bool(vectors) and all(vectors)
    return is_norm and not kind.__module__.startswith("windlass.")


class InFloat32(nn.Module):
    """A module that raises its gathered low-precision parameters in each forward pass.

    It comes before the module's class in the order of inheritance.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        parameters = self.named_parameters()
        wide = {name: p.float() for name, p in parameters if p.dtype in HALF}
        if not wide:
            return super().forward(*args, **kwargs)
        # It comes back here with the wide parameters in their places.
        return torch.func.functional_call(self, wide, args, kwargs)
