"""The tokens of a pass that a rank computes, and attention among the tokens of all ranks.

Attention exchanges tokens for heads (Ulysses, arXiv 2309.14509) if the heads of keys suffice.
Otherwise each rank holds one early and one late part of the row, and gathers all keys and values
(arXiv 2407.21783, section 3.3.2).

Legend: B batch, T time, S time seen, H heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from windlass.model.attention import Documents, Spans, attend, dropout_mask, masked_attention
from windlass.model.gpt import GPT, Block, Pass
from windlass.model.sharding import Peers
from windlass.recipe.settings import IGNORE_INDEX

collective = torch.ops._c10d_functional


def gather(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """The parts of all ranks, along a dimension."""
    parts = collective.all_gather_into_tensor(x.contiguous(), peers.size, peers.group)
    parts = collective.wait_tensor(parts)
    return parts if dim == 0 else torch.cat(parts.chunk(peers.size), dim)


def scatter(x: Tensor, dim: int, peers: Peers) -> Tensor:
    x = x.contiguous() if dim == 0 else torch.cat(x.chunk(peers.size, dim))
    part = collective.reduce_scatter_tensor(x, "sum", peers.size, peers.group)
    return collective.wait_tensor(part)  # type: ignore[no-any-return]


def exchange(x: Tensor, peers: Peers) -> Tensor:
    """Part i of the first dimension goes to rank i, and part j comes from rank j."""
    each = [1] * peers.size
    parts = collective.all_to_all_single(x.contiguous(), each, each, peers.group)
    return collective.wait_tensor(parts)  # type: ignore[no-any-return]


class Gather(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.how = dim, peers
        return gather(x, dim, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter(grad, *ctx.how), None, None


class Scatter(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.how = dim, peers
        return scatter(x, dim, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, *ctx.how), None, None


class Exchange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return exchange(x, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return exchange(grad, ctx.peers), None


class Copy(Function):
    """The same tensor; the backward pass adds up the gradients of the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.peers.add_up(grad), None


class Sum(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return peers.add_up(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class TokenPart(NamedTuple):
    """The tokens of a pass on this rank, as places in a row of `length`; later ones are padding."""

    length: int
    places: Tensor  # in attention and feed-forward
    stream: Tensor  # in the residual stream, of which a rank of `tensor` may have a part
    tensor: Peers | None  # the ranks that divide the heads
    context: Peers | None  # the ranks that divide the tokens
    masks: tuple[Any, ...]
    """The mask of each part of an attention: `Spans` of documents, or a causal mask; None: square.
    If the ranks gather keys there is an early and a late part, else one. (`torch.compile` takes
    causal masks as arguments but does not make them.)"""

    def tokens(self, whole: Tensor) -> Tensor:
        """The columns of a row's tokens or positions [..., T]; padding repeats the last one."""
        return whole[..., self.places.clamp(max=self.length - 1)]

    def labels(self, whole: Tensor) -> Tensor:
        return self.tokens(whole).masked_fill(self.places >= self.length, IGNORE_INDEX)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout of the stream [B, T, D]; the mask is a slice of the one of all tokens."""
        whole = dropout_mask((x.shape[0], self.length, x.shape[2]), rate, x)
        return x * whole[:, self.stream.clamp(max=self.length - 1)]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rate: float) -> Tensor:
        """Causal attention [B, H, T, E] of this rank's heads and tokens, with dropout at `rate`."""
        c, keep, (H, K) = self.context, None, (q.shape[1], k.shape[1])
        if rate:  # this rank's slice of the mask of all heads
            first, of_all = (self.tensor.rank * H, self.tensor.size * H) if self.tensor else (0, H)
            whole = dropout_mask((q.shape[0], of_all, self.length, self.length), rate, q)
            keep = whole[:, first : first + H]
        if c is None:
            return causal(q, k, v, keep, self.masks[0])
        if len(self.masks) == 1:
            parts = [x.unflatten(1, (c.size, -1)).movedim(1, 0) for x in (q, k, v)]
            here = Exchange.apply(torch.cat(parts, 2), c)  # [ranks, B, H + 2K of a rank, T, E]
            each = [H // c.size, K // c.size, K // c.size]
            # [B, heads of a rank, all tokens, E]
            q, k, v = (x.movedim(0, 2).flatten(2, 3) for x in here.split(each, dim=2))
            if keep is not None:
                keep = keep[:, c.rank * each[0] : (c.rank + 1) * each[0]]
            y = causal(q, k, v, keep, self.masks[0])
            y = Exchange.apply(y.unflatten(2, (c.size, -1)).movedim(2, 0), c)
            return y.movedim(0, 1).flatten(1, 2)
        # [T, ...]: the parts of rank 0, which are parts 0 and 2 n - 1 of the row, of rank 1, ...
        chunks = Gather.apply(torch.cat([k, v], 1).movedim(2, 0), 0, c).chunk(2 * c.size)
        k, v = torch.cat([*chunks[::2], *chunks[::-2]]).movedim(0, 2).split([K, K], dim=1)
        outputs, size = [], q.shape[2] // 2
        for number, part in enumerate((c.rank, 2 * c.size - 1 - c.rank)):
            stop = (part + 1) * size
            some = None if keep is None else keep[:, :, part * size : stop]
            mine = q[:, :, number * size : (number + 1) * size]
            mask = self.masks[number]
            outputs.append(causal(mine, k[:, :, :stop], v[:, :, :stop], some, mask))
        return torch.cat(outputs, 2)


class DividedBlock(Block):
    def drop(self, x: Tensor, spans: Any) -> Tensor:
        return spans.drop(x, self.dropout) if self.training else x  # type: ignore[no-any-return]


class DividedGPT(GPT):
    shares_gradient = False  # the head's gradient and the lookup's are of other ranks
    tensor_ranks: Peers | None
    context_ranks: Peers | None
    sequence: bool  # `tensor_ranks` divide the residual stream in training

    def prepare(
        self, tokens: Tensor, labels: Tensor | None, start: int, documents: Documents | None
    ) -> Pass:
        if not self.training and (labels is None or self.context_ranks is None):
            return super().prepare(tokens, labels, start, documents)
        assert not start, "a cache needs evaluation mode"
        positions, within = super().prepare(tokens, labels, 0, None).positions, None
        if documents is not None:
            rate = self.settings.dropout if self.training else 0.0
            positions, within = documents.positions, documents.within(list(self.blocks), rate)
        part = self.part(tokens.shape[1], labels is not None, tokens.device, within)
        labels = None if labels is None else part.labels(labels)
        return Pass(part.tokens(tokens), labels, part.tokens(positions), part)

    def part(
        self,
        length: int,
        has_labels: bool,
        device: torch.device,
        within: Callable[[int, int], Spans] | None = None,
    ) -> TokenPart:
        """This rank's part of rows; rows without labels are whole, as logits need them."""
        context, parts, mine = self.context_ranks if has_labels else None, 1, [0]
        if context is not None:
            by_heads = next(iter(self.blocks)).attn.kv_heads % context.size == 0  # type: ignore
            parts = context.size if by_heads else 2 * context.size
            mine = [context.rank] if by_heads else [context.rank, parts - 1 - context.rank]
        tensor = self.tensor_ranks
        streams = tensor.size if tensor is not None and self.sequence and self.training else 1
        multiple = streams // math.gcd(streams, len(mine))  # `streams` divides a rank's tokens
        each = -(-length // (parts * multiple)) * multiple
        every = torch.arange(parts * each, device=device)
        places = torch.cat([every[i * each : (i + 1) * each] for i in mine])
        stream = places.view(streams, -1)[tensor.rank] if tensor and streams > 1 else places
        masks: list[Any] = []
        for i in mine:
            first, stop = (0, parts * each) if len(mine) == 1 else (i * each, (i + 1) * each)
            if within is not None:
                masks.append(within(first, stop))
            elif first:
                from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo

                masks.append(causal_lower_right(each, stop))
            else:
                masks.append(None)
        return TokenPart(length, places, stream, tensor, context, tuple(masks))

    def drop(self, x: Tensor, here: Pass) -> Tensor:
        rate = self.settings.dropout if self.training else 0.0
        return here.spans.drop(x, rate) if rate else x

    def end(self, x: Tensor, here: Pass, *args: Any) -> Tensor:
        ranks = self.tensor_ranks if self.sequence and self.training else None
        if here.labels is None and ranks is not None:
            x = gather(x, 1, ranks)[:, : here.spans.length]  # logits need no gradient
        return super().end(x, here, *args)


def causal(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, mask: Any = None) -> Tensor:
    """Attention of the last T of S tokens; `keep` [B, H, T, S]: dropout mask without padding."""
    T, S = q.shape[2], k.shape[2]
    if keep is None and isinstance(mask, Spans):
        return mask.attention(q, k, v)
    if keep is None:
        return attend(q, k, v, mask, mask is None)
    keep = F.pad(keep[..., :S], (0, max(0, S - keep.shape[3]), 0, T - keep.shape[2]))
    return masked_attention(q, k, v, keep, mask.mask if isinstance(mask, Spans) else None)
