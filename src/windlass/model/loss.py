"""Cross-entropy from hidden states; with a large vocabulary the logits of all tokens never exist.

The forward pass also computes the gradient, while it holds a chunk's logits: three products, none
repeated.

Legend: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from windlass.model.quantised import product_dtype
from windlass.model.size import loss_chunk
from windlass.recipe.settings import IGNORE_INDEX


class VocabShard(NamedTuple):
    group: str  # torch's name of the process group of the ranks that divide the vocabulary
    first: int  # the number of this rank's first row
    most: int  # the rows of the rank with most: each rank must choose the same chunks
    gather_input: Callable[[Tensor], Tensor]  # whole hidden states on each rank, from this rank's

    def reduce(self, tensor: Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        dist.all_reduce(tensor, op, dist.distributed_c10d._resolve_process_group(self.group))


ChunkLoss = Callable[[Tensor, Tensor, float], Tensor]
"""`chunk_loss`, compiled."""


class SourceSums:
    """Sums of the cross-entropy, and the unmasked labels, by the source of each row, on this rank.

    Not a tuple, so that FSDP2 does not convert its tensors.
    """

    def __init__(self, rows: Tensor, sums: Tensor):
        self.rows, self.sums = rows, sums

    def add(self, losses: Tensor, labels: Tensor, shard: VocabShard | None, part: slice) -> None:
        """Add the losses of `part` of the labels, both flat; ranks of a `shard` add theirs up."""
        losses = losses.detach().flatten()
        if shard:
            shard.reduce(losses)
        tokens = self.rows.repeat_interleave(labels.numel() // len(self.rows))[part]
        both = torch.stack([losses, labels.flatten()[part] != IGNORE_INDEX], 1)
        self.sums.index_add_(0, tokens, both.to(self.sums.dtype))


def takes_sources(model: Any) -> bool:
    """Whether a model's `forward` takes SourceSums; a user's module need not."""
    return "by_source" in inspect.signature(model.forward).parameters


def head_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, cap: float = 0.0) -> Tensor:
    return cap_of_logits(F.linear(x.to(weight.dtype), weight, bias), cap)


def cap_of_logits(logits: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(logits / cap) if cap else logits


def cross_entropy_sum(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    cap: float = 0.0,
    chunk: int | None = None,
    shard: VocabShard | None = None,
    by_source: SourceSums | None = None,
    compiled: ChunkLoss | None = None,
) -> Tensor:
    """Sum of the cross-entropy over the unmasked labels: a scalar in float32, or float64 like the
    hidden states.

    Args:
        x: Hidden states [..., D].
        weight, bias: The head's matrix [V, D] and bias [V], or this rank's rows of them.
        labels: The tokens that follow [...], int64; IGNORE_INDEX for a masked one.
        cap: Soft bound of the logits, 0 for none.
        chunk: Tokens whose logits are held at a time; None: by the size of the logits; 0: all.
        shard: This rank's rows, if ranks divide them. Every rank gets the whole sum.
        by_source: Where to add the loss of each row's source, for a mixture.
        compiled: `chunk_loss`, compiled; for large whole logits with a backward pass.
    """
    x = shard.gather_input(x) if shard else x
    x, labels = x.flatten(0, -2), labels.flatten()
    compiled = None if shard or not torch.is_grad_enabled() else compiled
    if chunk is None:
        # Logits are in fp32; compiled, in their own precision, and with a cap also in fp32.
        each = dtype_of_logits(x, weight).itemsize + 4 * bool(cap) if compiled else 4
        rows = shard.most if shard else len(weight)
        chunk = loss_chunk(len(labels), rows, each, x.device.type)
        compiled = compiled if chunk else None
    if chunk or shard:
        size, grad = chunk or len(labels), torch.is_grad_enabled()
        return _ChunkedCrossEntropy.apply(
            x, weight, bias, labels, cap, size, grad, shard, by_source, compiled
        )
    return cross_entropy_of_logits(head_logits(x, weight, bias, cap), labels, by_source)


def dtype_of_logits(x: Tensor, weight: Tensor) -> torch.dtype:
    return weight.dtype if x.dtype == torch.float64 else product_dtype(weight)


def cross_entropy_of_logits(
    logits: Tensor, labels: Tensor, by_source: SourceSums | None = None
) -> Tensor:
    """The same from all logits [N, V] and labels [N], by autograd."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if by_source is None:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
    losses = F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")
    by_source.add(losses, labels, None, slice(None))
    return losses.sum()


def chunk_loss(logits: Tensor, labels: Tensor, cap: float) -> Tensor:
    """The cross-entropy of each row [n] of a chunk's logits [n, V], which the gradient overwrites.

    The compiler makes two kernels of it. Without it `eager_chunk_loss` needs less memory.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    wide = cap * torch.tanh(wide / cap) if cap else wide
    target = labels.clamp(min=0).unsqueeze(1)
    log_z = wide.logsumexp(1, keepdim=True)
    losses = (log_z - wide.gather(1, target)).squeeze(1) * (labels != IGNORE_INDEX)
    d = (wide - log_z).exp()
    at_label = torch.arange(logits.shape[1], device=logits.device) == target
    d = torch.where(at_label, d - 1, d)
    logits.copy_(d * (1 - (wide / cap).square()) if cap else d)
    return losses


def eager_chunk_loss(
    last: list[Tensor], labels: Tensor, cap: float, shard: VocabShard | None, grad: bool
) -> tuple[Tensor, Tensor | None]:
    """The losses [n] of logits [n, V], and the gradient; empties `last` to free its memory."""
    logits, slope = last.pop(), None
    if cap:
        slope = 1 - logits.div_(cap).tanh_().square()
        logits.mul_(cap)
    target = labels.clamp(min=0).unsqueeze(1)
    is_own: Any = 1  # whether the label is in this rank's rows
    if shard:
        row = target - shard.first
        target = row.clamp(0, logits.shape[1] - 1)
        is_own = (row == target).to(logits.dtype)
        peak = logits.amax(1, keepdim=True)
        shard.reduce(peak, dist.ReduceOp.MAX)
        total = logits.sub_(peak).exp().sum(1, keepdim=True)
        shard.reduce(total)
        log_p = logits.sub_(total.log_())
    else:
        log_p = logits.log_softmax(1)
    del logits
    unmasked = (labels != IGNORE_INDEX).unsqueeze(1)
    losses = (log_p.gather(1, target) * unmasked).mul_(is_own).neg_().squeeze(1)
    if not grad:
        return losses, None
    d = log_p.exp_()
    d.scatter_(1, target, d.gather(1, target) - is_own)
    return losses, d if slope is None else d.mul_(slope)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        cap: float,
        chunk: int,
        grad: bool,
        shard: VocabShard | None,
        by_source: SourceSums | None,
        compiled: ChunkLoss | None,
    ) -> Tensor:
        dtype = dtype_of_logits(x, weight)
        total = torch.float64 if dtype == torch.float64 else torch.float32
        wants = [grad and need for need in ctx.needs_input_grad[:3]]
        dx = torch.empty_like(x, dtype=dtype) if wants[0] else None
        dw = torch.empty_like(weight, dtype=total) if wants[1] else None
        db = torch.zeros_like(bias, dtype=total) if wants[2] and bias is not None else None
        loss = torch.zeros((), dtype=total, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            head, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(labels), chunk):
                part = slice(start, start + chunk)
                unmasked = (labels[part] != IGNORE_INDEX).unsqueeze(1)
                # A NaN in a masked row changes nothing.
                rows = x[part].to(dtype).masked_fill(~unmasked, 0.0)
                if compiled is not None:
                    d = F.linear(rows, head, shift)
                    losses = compiled(d, labels[part], cap)  # `d` becomes the gradient
                else:
                    logits = [F.linear(rows, head, shift).to(total)]
                    losses, d = eager_chunk_loss(logits, labels[part], cap, shard, any(wants))
                loss += losses.sum()
                if by_source is not None:
                    by_source.add(losses, labels, shard, part)
                if d is None:
                    continue
                d = d.to(dtype)
                if dx is not None:
                    dx[part] = (d @ head).masked_fill_(~unmasked, 0.0)
                if dw is not None:
                    # The first chunk writes it: zeros would take a pass over a large matrix.
                    if dtype == total:
                        dw.addmm_(d.t(), rows, beta=1 if start else 0)
                    elif start:
                        dw.add_(d.t() @ rows)
                    else:
                        dw.copy_(d.t() @ rows)
                if db is not None:
                    db += unmasked.squeeze(1).to(dtype) @ d
                del d  # before the next chunk
        if shard:
            shard.reduce(loss)
        ctx.grads = tuple(
            None if g is None or t is None else g.to(t.dtype)
            for g, t in ((dx, x), (dw, weight), (db, bias))
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> Any:
        assert ctx.grads is not None, "a chunked loss has one backward pass"
        grads, ctx.grads = ctx.grads, None
        return (*(None if g is None else g.mul_(factor) for g in grads), *[None] * 7)


def can_share_gradient(table: Tensor) -> bool:
    """Whether a table should get one gradient: it is trained, and not rounded to half precision."""
    trains = torch.is_grad_enabled() and table.requires_grad
    return trains and table.dtype in (torch.float32, torch.float64)


class TiedLookup(torch.autograd.Function):
    """The rows [..., D] of tokens [...] in a table [V, D], and the table for the head's loss.

    It adds the rows to the head's gradient in place; autograd would add two gradients [V, D].
    """

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(tokens)
        return F.embedding(tokens, table), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, gradient: Tensor) -> tuple[Tensor, None]:
        (tokens,) = ctx.saved_tensors
        tokens, rows = tokens.flatten(), rows.flatten(0, -2).to(gradient.dtype)
        # On a CPU `index_put_` on several threads would vary the order of the sums.
        return gradient.index_add_(0, tokens, rows), None
