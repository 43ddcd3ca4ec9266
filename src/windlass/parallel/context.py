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

from windlass.model.attention import Documents, Spans, attend, dropout_mask, masked_attention
from windlass.model.gpt import GPT, Block, Inputs
from windlass.model.sharding import Peers
from windlass.parallel.collectives import Exchange, Gather, gather
from windlass.recipe.settings import IGNORE_INDEX


class TokenPart(NamedTuple):
    """The tokens of a pass on this rank, as columns of a row of `length`; later ones are padding."""

    length: int
    columns: Tensor  # in attention and feed-forward
    stream_columns: Tensor  # in the residual stream, of which a rank of `tensor` may have a part
    tensor: Peers | None  # the ranks that divide the heads
    context: Peers | None  # the ranks that divide the tokens
    masks: tuple[Any, ...]
    """The mask of each part of an attention: `Spans` of documents, or a causal mask; None: square.
    If the ranks gather keys there is an early and a late part, else one. (`torch.compile` takes
    causal masks as arguments but does not make them.)"""

    def tokens(self, whole: Tensor, columns: Tensor | None = None) -> Tensor:
        """The columns of a row's tokens or positions [..., T]; padding repeats the last one."""
        columns = self.columns if columns is None else columns
        return whole[..., columns.clamp(max=self.length - 1)]

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout of the stream [B, T, D]; the mask is a slice of the one of all tokens."""
        whole = dropout_mask((x.shape[0], self.length, x.shape[2]), rate, x)
        return x * whole[:, self.stream_columns.clamp(max=self.length - 1)]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rate: float) -> Tensor:
        """Causal attention [B, H, T, E] of this rank's heads and tokens, with dropout at `rate`."""
        keep = self.kept(q, rate) if rate else None
        if self.context is None:
            return causal(q, k, v, keep, self.masks[0])
        if len(self.masks) == 1:
            return self.by_heads(q, k, v, keep, self.context)
        return self.by_keys(q, k, v, keep, self.context)

    def kept(self, q: Tensor, rate: float) -> Tensor:
        """The dropout mask of this rank's heads [B, H, length, length]: a slice of the whole one."""
        H = q.shape[1]
        heads, first = H, 0
        if self.tensor is not None:
            heads, first = self.tensor.size * H, self.tensor.rank * H
        whole = dropout_mask((q.shape[0], heads, self.length, self.length), rate, q)
        return whole[:, first : first + H]

    def by_heads(self, q: Tensor, k: Tensor, v: Tensor, keep: Any, ranks: Peers) -> Tensor:
        """Exchange this rank's tokens of all heads for all tokens of some heads, and back."""
        parts = [x.unflatten(1, (ranks.size, -1)).movedim(1, 0) for x in (q, k, v)]
        exchanged = Exchange.apply(torch.cat(parts, 2), ranks)  # [ranks, B, H + 2K of a rank, T, E]
        # [B, heads of a rank, all tokens, E]
        heads = [part.shape[2] for part in parts]
        q, k, v = (x.movedim(0, 2).flatten(2, 3) for x in exchanged.split(heads, dim=2))
        if keep is not None:
            keep = keep[:, ranks.rank * heads[0] : (ranks.rank + 1) * heads[0]]
        y = causal(q, k, v, keep, self.masks[0])
        y = Exchange.apply(y.unflatten(2, (ranks.size, -1)).movedim(2, 0), ranks)
        return y.movedim(0, 1).flatten(1, 2)

    def by_keys(self, q: Tensor, k: Tensor, v: Tensor, keep: Any, ranks: Peers) -> Tensor:
        """Gather all keys and values for this rank's early and late part of the queries."""
        K, size = k.shape[1], q.shape[2] // 2
        # [T, ...]: the parts of rank 0, which are parts 0 and 2 n - 1 of the row, of rank 1, ...
        chunks = Gather.apply(torch.cat([k, v], 1).movedim(2, 0), 0, ranks).chunk(2 * ranks.size)
        k, v = torch.cat([*chunks[::2], *chunks[::-2]]).movedim(0, 2).split([K, K], dim=1)
        outputs = []
        for number, part in enumerate((ranks.rank, 2 * ranks.size - 1 - ranks.rank)):
            stop = (part + 1) * size
            some = None if keep is None else keep[:, :, part * size : stop]
            mine = q[:, :, number * size : (number + 1) * size]
            mask = self.masks[number]
            outputs.append(causal(mine, k[:, :, :stop], v[:, :, :stop], some, mask))
        return torch.cat(outputs, 2)


def causal(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, mask: Any = None) -> Tensor:
    """Attention of the last T of S tokens; `keep` [B, H, T, S]: dropout mask without padding."""
    T, S = q.shape[2], k.shape[2]
    if keep is None and isinstance(mask, Spans):
        return mask.attention(q, k, v)
    if keep is None:
        return attend(q, k, v, mask, mask is None)
    keep = F.pad(keep[..., :S], (0, max(0, S - keep.shape[3]), 0, T - keep.shape[2]))
    return masked_attention(q, k, v, keep, mask.mask if isinstance(mask, Spans) else None)


class DividedBlock(Block):
    def drop(self, x: Tensor, spans: Any) -> Tensor:
        return spans.drop(x, self.dropout) if self.training else x  # type: ignore[no-any-return]


class DividedGPT(GPT):
    shares_gradient = False  # the head's gradient and the lookup's are of other ranks
    tensor_ranks: Peers | None  # which divide the residual stream, too, in training
    context_ranks: Peers | None

    def prepare(
        self, tokens: Tensor, labels: Tensor | None, start: int, documents: Documents | None
    ) -> Inputs:
        if not self.training and (labels is None or self.context_ranks is None):
            return super().prepare(tokens, labels, start, documents)
        assert not start, "a cache needs evaluation mode"
        positions, within = super().prepare(tokens, labels, 0, None).positions, None
        if documents is not None:
            rate = self.settings.dropout if self.training else 0.0
            positions, within = documents.positions, documents.within(list(self.blocks), rate)
        part = self.part(tokens.shape[1], labels is not None, tokens.device, within)
        if labels is not None:
            labels = part.tokens(labels).masked_fill(part.columns >= part.length, IGNORE_INDEX)
        # Learned positions are added to the stream; rotary ones are of attention.
        columns = part.stream_columns if self.settings.position == "learned" else part.columns
        return Inputs(part.tokens(tokens), labels, part.tokens(positions, columns), part)

    def part(
        self,
        length: int,
        has_labels: bool,
        device: torch.device,
        within: Callable[[int, int], Spans] | None = None,
    ) -> TokenPart:
        """This rank's part of rows; rows without labels are whole, as logits need them."""
        context = self.context_ranks if has_labels else None
        parts, mine = 1, [0]
        if context is not None:
            parts, mine = context.size, [context.rank]
            if next(iter(self.blocks)).attn.kv_heads % context.size:  # type: ignore[union-attr]
                parts = 2 * context.size
                mine = [context.rank, parts - 1 - context.rank]
        tensor = self.tensor_ranks
        streams = tensor.size if tensor is not None and self.training else 1
        multiple = streams // math.gcd(streams, len(mine))  # `streams` divides a rank's tokens
        each = -(-length // (parts * multiple)) * multiple
        every = torch.arange(parts * each, device=device)
        columns = torch.cat([every[i * each : (i + 1) * each] for i in mine])
        stream = columns.view(streams, -1)[tensor.rank] if tensor and streams > 1 else columns
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
        return TokenPart(length, columns, stream, tensor, context, tuple(masks))

    def drop(self, x: Tensor, inputs: Inputs) -> Tensor:
        rate = self.settings.dropout if self.training else 0.0
        return inputs.spans.drop(x, rate) if rate else x

    def apply_head(self, x: Tensor, inputs: Inputs, *args: Any) -> Tensor:
        ranks = self.tensor_ranks if self.training else None
        if inputs.labels is None and ranks is not None:
            x = gather(x, 1, ranks)[:, : inputs.spans.length]  # logits need no gradient
        return super().apply_head(x, inputs, *args)
