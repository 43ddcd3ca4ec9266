"""One rank's share of a pass through our GPT, and the collectives between the shares.

Tensor parallelism (arXiv 1909.08053) cuts matrices: queries, keys, values, gate and up by rows, the
outputs of attention and feed-forward by columns, the tables by vocabulary. Every element of a cut
parameter is on one rank, so gradients, optimizer state and checkpoints need no correction. With
`sequence` (arXiv 2205.05198) the residual stream between the cut matrices is divided along time.

Context parallelism divides the tokens of each sequence. Attention exchanges tokens for heads
(Ulysses, arXiv 2309.14509) if the heads of keys suffice. Otherwise it gathers keys and values, and
each rank holds an early and a late part of the sequence, so that all have equal work (arXiv
2407.21783, section 3.3.2).

The collectives are torch's functional ones, which `torch.compile` traces.

Legend: B batch, T time, D model width, H heads, K key and value heads, E width of a head.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.model.documents import Spans, attend
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

collective = torch.ops._c10d_functional
T_ = TypeVar("T_", bound=Tensor)


def is_sharded(tensor: Tensor | None) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor, as FSDP2 and `shard_optim` have them.

    The import of DTensor takes as long as half of torch's own, so only what makes one imports it.
    """
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether FSDP2 shards a module, without the import of FSDP2."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def local_part(tensor: Tensor) -> Tensor:
    """The storage on this rank; writing to it writes to the tensor."""
    return tensor.to_local() if is_sharded(tensor) else tensor


class Peers(NamedTuple):
    """The ranks of one dimension of the mesh."""

    group: str  # torch's name of their process group
    rank: int  # this rank's place
    size: int

    def piece(self, number: int) -> range:
        """This rank's part of `number` indices; the parts differ by one index at most."""
        return range(number * self.rank // self.size, number * (self.rank + 1) // self.size)


@dataclass(frozen=True)
class Cut:
    """The indices of one dimension of a parameter that this rank of `tp` holds, in local order."""

    dim: int
    size: int  # of the whole dimension
    ranges: tuple[range, ...]
    peers: Peers

    def within(self, start: int, stop: int) -> Iterator[range]:
        """The indices in the whole of the local ones from `start` to before `stop`."""
        for r in self.ranges:
            if part := r[max(start, 0) : max(stop, 0)]:
                yield part
            start, stop = start - len(r), stop - len(r)

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        parts = [whole.narrow(self.dim, r.start, len(r)) for r in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def gather(self, part: Tensor) -> Tensor:
        """The whole tensor from the parts of all ranks; every rank of `tp` calls it.

        The parts go through a table of zeros, because they may differ in size and order.
        """
        shape = list(part.shape)
        shape[self.dim] = self.size
        whole, start = part.new_zeros(shape), 0
        for r in self.ranges:
            rows = part.narrow(self.dim, start, len(r))
            whole.narrow(self.dim, r.start, len(r)).copy_(rows)
            start += len(r)
        return all_reduce(whole, self.peers)


def cut_of(tensor: Tensor) -> Cut | None:
    """How a parameter, or a tensor like it, is cut over `tp`; None if each rank has all of it."""
    return getattr(tensor, "cut", None)


def with_cut(tensor: T_, cut: Cut | None) -> T_:
    """The same tensor, with its cut written on it. (FSDP2 replaces parameters but keeps names.)"""
    if cut is not None:
        tensor.cut = cut  # type: ignore[attr-defined]
    return tensor


def has_partial_gradient(parameter: Tensor) -> bool:
    """Whether each rank of `tp` has all of a parameter, but its gradient for some heads only."""
    return getattr(parameter, "partial_gradient", False)


def whole_shape(tensor: Tensor) -> torch.Size:
    """The shape over all ranks."""
    shape, cut = list(tensor.shape), cut_of(tensor)
    if cut is not None:
        shape[cut.dim] = cut.size
    return torch.Size(shape)


class Rows(NamedTuple):
    """The tokens of a pass that this rank holds, as places in the sequence of `length` tokens.

    Parts have equal sizes. A part that is too long ends with padding: places past the last token.
    """

    start: int  # the place of the pass's first token; above 0 with a cache
    length: int
    inner: Tensor  # in attention and feed-forward
    stream: Tensor  # in the residual stream
    context: Peers | None = None  # the ranks that divide the tokens; None: this rank has all
    masks: tuple[Any, ...] = ()
    """The mask of each part of an attention: `Spans` of documents, or a causal mask, None if square.
    If the ranks gather keys there is an early and a late part, else one, and none without
    documents or `context`. (`torch.compile` takes causal masks as arguments but does not make
    them.)"""

    def place(self, which: Tensor) -> Tensor:
        """Places for a lookup; padding takes the last one."""
        return which.clamp(max=self.length - 1)

    def tokens(self, whole: Tensor) -> Tensor:
        """The inner columns of the pass's tokens [B, T]."""
        return whole[:, self.place(self.inner) - self.start]

    def labels(self, whole: Tensor) -> Tensor:
        """The inner columns of labels [B, T]; padding is masked."""
        return self.tokens(whole).masked_fill(self.inner >= self.length, IGNORE_INDEX)

    def drop(self, x: Tensor, rate: float) -> Tensor:
        """Dropout of the stream [B, T, D]; the mask is a slice of the one of all tokens."""
        whole = torch.ones(x.shape[0], self.length, x.shape[2], dtype=x.dtype, device=x.device)
        return x * F.dropout(whole, rate)[:, self.place(self.stream)]


def drop(x: Tensor, rate: float, rows: Rows | None) -> Tensor:
    """Dropout, of a rank's `rows` with a slice of the whole mask; it costs nothing at rate 0."""
    if not rate:
        return x
    return F.dropout(x, rate) if rows is None else rows.drop(x, rate)


@dataclass(frozen=True)
class Share:
    """This rank's share: its heads and vocabulary (`tensor`), its tokens (`context`, `sequence`).

    Every method is the identity for the whole model.
    """

    tensor: Peers | None = None
    context: Peers | None = None
    sequence: bool = False  # with `tensor`: it divides the residual stream along time

    @property
    def is_whole(self) -> bool:
        return self.tensor is None and self.context is None

    def by_heads(self, kv_heads: int) -> bool:
        """Whether the ranks of `context` exchange heads; `kv_heads` of keys on a rank."""
        return self.context is not None and kv_heads % self.context.size == 0

    def rows(
        self,
        start: int,
        length: int,
        kv_heads: int,
        device: torch.device,
        within: Callable[[int, int], Spans] | None = None,
    ) -> Rows:
        """This rank's part of `length` tokens from place `start` on (above 0: without context).

        `within(first, stop)` returns the attention of these tokens within their documents.
        """
        inner, c, t = torch.arange(start, start + length, device=device), self.context, self.tensor
        masks: list[Any] = [within(0, length)] if within and c is None else []
        if c is not None:
            halves = 1 if self.by_heads(kv_heads) else 2
            each = -(-length // (halves * c.size))
            parts = torch.arange(halves * c.size * each, device=device).view(-1, each)
            mine = (c.rank, 2 * c.size - 1 - c.rank)[:halves]
            inner = torch.cat([parts[i] for i in mine])
            if halves == 2:
                from torch.nn.attention.bias import causal_lower_right  # imports torch._dynamo

            for stop in ((i + 1) * each for i in mine if halves == 2):
                if within:
                    masks.append(within(stop - each, stop))
                else:
                    masks.append(causal_lower_right(each, stop) if stop > each else None)
            if halves == 1:
                masks = [within(0, c.size * each) if within else None]
        stream = inner
        if t is not None and self.sequence:
            short = -len(inner) % t.size
            stream = torch.cat([inner, inner.new_full((short,), start + length)])
            stream = stream.view(t.size, -1)[t.rank]
        return Rows(start, start + length, inner, stream, c, tuple(masks))

    def add_gradients(self, x: Tensor) -> Tensor:
        """The same tensor; the backward pass adds up the gradients of the ranks of `tensor`."""
        return x if self.tensor is None else _Copy.apply(x, self.tensor)

    def enter(self, x: Tensor, rows: Rows | None = None) -> Tensor:
        """Before matrices cut by rows: all inner tokens of the stream [B, T, D] on each rank.

        The backward pass adds up the ranks' gradients. Only `sequence` needs `rows`.
        """
        if self.tensor is None:
            return x
        if torch.is_autocast_enabled(x.device.type):  # the matrices would round it anyway
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if not self.sequence:
            return self.add_gradients(x)
        assert rows is not None
        return _Gather.apply(x, 1, self.tensor).narrow(1, 0, len(rows.inner))

    def leave(self, x: Tensor) -> Tensor:
        """After matrices cut by columns: the sum over the ranks of [B, T, D], as a stream."""
        if self.tensor is None:
            return x
        if not self.sequence:
            return _Sum.apply(x, self.tensor)
        return _Scatter.apply(F.pad(x, (0, 0, 0, -x.shape[1] % self.tensor.size)), self.tensor)

    def share_keys(self, x: Tensor, query_width: int, head_width: int, first: int) -> Tensor:
        """Queries and a part of a head of keys and values -> queries and whole heads [B, T, ...].

        For fewer heads of keys and values than ranks: each rank computes a part of a head, and the
        ranks gather the heads. This rank's queries belong to head `first`.
        """
        assert self.tensor is not None
        q, kv = x.split([query_width, x.shape[-1] - query_width], dim=-1)
        kv = _Gather.apply(kv.unflatten(-1, (2, -1)).movedim(-1, 0), 0, self.tensor)
        kv = kv.narrow(0, first * head_width, head_width).movedim(0, -1)
        return torch.cat([q, kv.flatten(-2)], dim=-1)

    def gather_logits(self, logits: Tensor, vocab: int) -> Tensor:
        """All columns of logits [..., V] from each rank's columns; without gradients."""
        t = self.tensor
        if t is None:
            return logits
        sizes = [len(t._replace(rank=r).piece(vocab)) for r in range(t.size)]
        padded = F.pad(logits.detach(), (0, max(sizes) - logits.shape[-1]))
        parts = gather(padded, -1, t).split(max(sizes), dim=-1)
        return torch.cat([part[..., :n] for part, n in zip(parts, sizes, strict=True)], -1)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, rate: float) -> Tensor:
        """Causal attention [B, H, T, E] of this rank's heads and tokens, with dropout at `rate`."""
        c, t, (H, K) = rows.context, self.tensor, (q.shape[1], k.shape[1])
        keep, first = None, 0 if t is None else t.rank * H
        if rate:  # of all heads and tokens, in the order of the whole model
            every = H if t is None else t.size * H
            shape = (q.shape[0], every, rows.length, rows.length)
            keep = F.dropout(torch.ones(shape, dtype=q.dtype, device=q.device), rate)
            keep = keep[:, first : first + H]
        if c is None:
            return causal(q, k, v, keep, rows.masks[0] if rows.masks else None)
        if self.by_heads(K):
            each, size = (H // c.size, K // c.size, K // c.size), c.size
            parts = [x.unflatten(1, (size, -1)).movedim(1, 0) for x in (q, k, v)]
            here = _Exchange.apply(torch.cat(parts, 2), c)  # [ranks, B, H + 2K of a rank, T, E]
            q, k, v = (
                x.movedim(0, 2).flatten(2, 3) for x in here.split(list(each), dim=2)
            )  # [B, heads of a rank, all tokens, E]
            if keep is not None:
                keep = keep[:, c.rank * each[0] : (c.rank + 1) * each[0]]
            y = causal(q, k, v, keep, rows.masks[0])
            y = _Exchange.apply(y.unflatten(2, (size, -1)).movedim(2, 0), c)
            return y.movedim(0, 1).flatten(1, 2)
        # [T, ...]: the parts of rank 0, which are parts 0 and 2 n - 1 of the sequence, of rank 1, ...
        kv = _Gather.apply(torch.cat([k, v], 1).movedim(2, 0), 0, c)
        order = itertools.chain.from_iterable((r, 2 * c.size - 1 - r) for r in range(c.size))
        places = sorted(enumerate(order), key=lambda pair: pair[1])
        chunks = kv.chunk(2 * c.size)
        k, v = torch.cat([chunks[i] for i, _ in places]).movedim(0, 2).split([K, K], dim=1)
        outputs, size = [], q.shape[2] // 2
        for number, part in enumerate((c.rank, 2 * c.size - 1 - c.rank)):
            stop = (part + 1) * size
            some = None if keep is None else keep[:, :, part * size : stop]
            mine = q[:, :, number * size : (number + 1) * size]
            mask = rows.masks[number]
            outputs.append(causal(mine, k[:, :, :stop], v[:, :, :stop], some, mask))
        return torch.cat(outputs, 2)


WHOLE = Share()


def causal(q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None = None, mask: Any = None) -> Tensor:
    """Attention of the last T of S tokens; `mask` as in `Rows.masks`. `keep` [B, H, T, S] is a
    dropout mask, or a part of it without the padding at the end.
    """
    T, S = q.shape[2], k.shape[2]
    if keep is None and isinstance(mask, Spans):
        return mask.attention(q, k, v)
    if keep is None:
        return attend(q, k, v, mask, mask is None)
    if q.shape[1] != k.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    seen = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
    if isinstance(mask, Spans):
        assert mask.mask is not None
        seen = mask.mask == 0
    scores = (q @ k.transpose(2, 3) / math.sqrt(q.shape[3])).masked_fill(~seen, -math.inf)
    keep = F.pad(keep[..., :S], (0, max(0, S - keep.shape[3]), 0, T - keep.shape[2]))
    return (scores.softmax(-1) * keep) @ v


def gather(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """The parts of all ranks, along a dimension."""
    parts = collective.all_gather_into_tensor(x.contiguous(), peers.size, peers.group)
    parts = collective.wait_tensor(parts)
    return parts if dim == 0 else torch.cat(parts.chunk(peers.size), dim)


def scatter(x: Tensor, dim: int, peers: Peers) -> Tensor:
    """This rank's part, along a dimension, of the sum over the ranks."""
    x = x.contiguous() if dim == 0 else torch.cat(x.chunk(peers.size, dim))
    return collective.wait_tensor(  # type: ignore[no-any-return]
        collective.reduce_scatter_tensor(x, "sum", peers.size, peers.group)
    )


def all_reduce(x: Tensor, peers: Peers) -> Tensor:
    """The sum over the ranks."""
    done = collective.all_reduce(x.contiguous(), "sum", peers.group)
    return collective.wait_tensor(done)  # type: ignore[no-any-return]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, peers: Peers) -> Tensor:
        ctx.how = dim, peers
        return gather(x, dim, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter(grad, *ctx.how), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return scatter(x, 1, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather(grad, 1, ctx.peers), None


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers = peers
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return all_reduce(grad, ctx.peers), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        return all_reduce(x, peers)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Exchange(torch.autograd.Function):
    """Part i of the first dimension goes to rank i, and part j comes from rank j."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers) -> Tensor:
        ctx.peers, each = peers, [1] * peers.size
        done = collective.all_to_all_single(x.contiguous(), each, each, peers.group)
        return collective.wait_tensor(done)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        each = [1] * ctx.peers.size
        done = collective.all_to_all_single(grad.contiguous(), each, each, ctx.peers.group)
        return collective.wait_tensor(done), None
