"""Cross-entropy from hidden states, without ever holding all logits where the vocabulary is large.

Unusual: the gradient of a sum of cross-entropies is known up to the factor that arrives in the backward pass, so it is
computed in the forward pass, while a chunk's logits are there: three products with the head's matrix in all, none repeated.

Legend: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from windlass.recipe.settings import IGNORE_INDEX

CHUNK_BYTES = {"cpu": 2**25, "cuda": 2**29}  # of logits that are held at a time, in fp32


def head_logits(x: Tensor, weight: Tensor, bias: Tensor | None = None, cap: float = 0.0) -> Tensor:
    """Logits [..., V] of hidden states [..., D], in the arithmetic of the pass; `cap` as in `model.logit_cap`."""
    logits = F.linear(x.to(weight.dtype), weight, bias)
    return cap * torch.tanh(logits / cap) if cap else logits


def cross_entropy_sum(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    cap: float = 0.0,
    chunk: int | None = None,
) -> Tensor:
    """Sum of the cross-entropy over the unmasked labels: a scalar, float32 (float64 for float64 hidden states).

    Args:
        x: Hidden states [..., D].
        weight: The head's matrix [V, D].
        labels: The tokens that follow [...], int64; IGNORE_INDEX where they are masked.
        bias: The head's bias [V].
        cap: Soft bound of the logits, 0 for none.
        chunk: Tokens whose logits are held at a time; None: chosen by the size of the logits; 0: all, through autograd.
    """
    x, labels = x.flatten(0, -2), labels.flatten()
    if (
        chunk is None
    ):  # chunks as even as possible, each of at most CHUNK_BYTES; none where one would do
        most = max(1, CHUNK_BYTES.get(x.device.type, CHUNK_BYTES["cuda"]) // (4 * len(weight)))
        chunks = -(-len(labels) // most)
        chunk = 0 if chunks <= 1 else -(-len(labels) // chunks)
    if chunk:
        return _ChunkedCrossEntropy.apply(
            x, weight, bias, labels, cap, chunk, torch.is_grad_enabled()
        )
    logits = head_logits(x, weight, bias, cap)
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Logits, loss and gradients, a chunk of tokens at a time."""

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
    ) -> Tensor:
        dtype, device = weight.dtype, x.device.type
        if x.dtype != torch.float64 and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        total = torch.float64 if dtype == torch.float64 else torch.float32
        wants = [grad and need for need in ctx.needs_input_grad[:3]]
        dx = torch.empty_like(x, dtype=dtype) if wants[0] else None
        dw = torch.zeros_like(weight, dtype=total) if wants[1] else None
        db = torch.zeros_like(bias, dtype=total) if wants[2] and bias is not None else None
        loss = torch.zeros((), dtype=total, device=x.device)
        with torch.autocast(device, enabled=False):
            head, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
            for start in range(0, len(labels), chunk):
                part = slice(start, start + chunk)
                unmasked = (labels[part] != IGNORE_INDEX).unsqueeze(1)
                rows = (
                    x[part].to(dtype).masked_fill(~unmasked, 0.0)
                )  # a NaN in a masked row has no effect
                logits = F.linear(rows, head, shift).to(total)
                slope = None
                if cap:  # in place: the capped logits, and the slope of the cap at each of them
                    logits.div_(cap).tanh_()
                    slope = 1 - logits.square()
                    logits.mul_(cap)
                log_p = logits.log_softmax(1)
                del logits  # a chunk of logits is large: freed as soon as possible
                target = labels[part].clamp(min=0).unsqueeze(1)
                loss -= log_p.gather(1, target).mul_(unmasked).sum()
                if not any(wants):
                    continue
                d = log_p.exp_()  # the gradient: the probabilities, less 1 at the target
                d.scatter_(1, target, d.gather(1, target) - 1)
                d = (d if slope is None else d.mul_(slope)).to(dtype)
                if dx is not None:
                    dx[part] = (d @ head).masked_fill_(~unmasked, 0.0)
                if dw is not None:
                    dw.addmm_(d.t(), rows) if dtype == total else dw.add_(d.t() @ rows)
                if db is not None:
                    db += unmasked.squeeze(1).to(dtype) @ d
                del d, log_p, slope
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
        return (*(None if g is None else g.mul_(factor) for g in grads), None, None, None, None)
