"""A GPT with the choices of `ModelSettings`; GPT-2 and Llama are two of its configurations.

Unusual: `forward` computes the loss itself, so that a head sharded by FSDP2 is used inside the
root's forward. The loss is a sum, because the step divides it once by the number of unmasked labels
of all ranks.

Legend: B batch, T time (tokens of this pass), D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.model.block import Block, Norm, multiplied
from windlass.model.cache import LayerCache
from windlass.model.documents import Documents
from windlass.model.loss import PLAIN, Piece, SourceSums, Tail, cross_entropy_sum, head_logits
from windlass.model.rotary import RotaryEmbedding
from windlass.model.share import WHOLE, Cut, Rows, Share, cut_of, drop, whole_shape
from windlass.model.tied import look_up, one_gradient
from windlass.recipe.network import ModelSettings
from windlass.seeds import seed_of

T_ = TypeVar("T_")


class Head(nn.Module):
    """The head: a matrix [V, D] unless it is tied, and perhaps a bias [V]."""

    def __init__(self, settings: ModelSettings, vocab: int):
        super().__init__()
        shape = (vocab, settings.width)
        self.weight = None if settings.tie_head else nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(vocab)) if settings.head_bias else None
        self.cap, self.vocab, self.share = settings.logit_cap, vocab, WHOLE
        self.objective = PLAIN  # of the training
        self.loss_tail: Tail | None = None  # compiled

    def forward(
        self,
        x: Tensor,
        labels: Tensor | None,
        table: Tensor | None,
        by_source: SourceSums | None = None,
    ) -> Tensor:
        """Logits of hidden states [B, T, D], or their summed loss; a tied head uses `table`."""
        weight = table if self.weight is None else self.weight
        assert weight is not None
        tensor = self.share.tensor
        if labels is None:
            logits = head_logits(x, weight, self.bias, self.cap)
            return self.share.gather_logits(logits, self.vocab)
        piece = None
        if tensor is not None:
            piece = Piece(tensor.group, tensor.piece(self.vocab).start, self.vocab)
        objective = self.objective if self.training else PLAIN
        how: Any = {"cap": self.cap, "piece": piece, "objective": objective}
        how |= {"by_source": by_source, "tail": self.loss_tail}
        return cross_entropy_sum(x, weight, labels, self.bias, **how)


class Blocks(nn.ModuleList):
    """The blocks; a call lists them: the units of sharding, checkpointing and compilation.

    It is a module, so that parameters are named `blocks.0...` and `model.blocks()` works too.
    """

    def forward(self) -> list[nn.Module]:
        return list(self)


class GPT(nn.Module):
    """The network with `vocab` rows in its embedding; `initialise` gives its weights values.

    In a pipeline a rank holds some blocks. `elsewhere` has the names of parameters that only other
    ranks hold, `copies` the names of parameters here that count, and are saved, on another rank.
    """

    elsewhere: frozenset[str] = frozenset()
    copies: frozenset[str] = frozenset()
    low_stream = False  # the residual stream in autocast's precision (`train.stream`)

    def __init__(self, settings: ModelSettings, vocab: int):
        super().__init__()
        self.settings, self.vocab, self.context = settings, vocab, settings.context
        self.share, self.kv_heads = WHOLE, settings.kv_heads_
        self.width_multiple = settings.width_multiple  # for the optimizer (muP)
        # With `_weight`, because torch imports torch._dynamo to draw values on the meta device.
        size = vocab, settings.width
        self.embedding = nn.Embedding(*size, _weight=torch.empty(size))
        if settings.position == "learned":
            size = settings.context, settings.width
            self.positions = nn.Embedding(*size, _weight=torch.empty(size))
        self.blocks = Blocks(Block(settings) for _ in range(settings.layers))
        if settings.final_norm:
            self.norm = Norm(settings)
        self.head = Head(settings, vocab)

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        cache: list[LayerCache] | None = None,
        hidden: Tensor | None = None,
        layers: range | None = None,
        by_source: SourceSums | None = None,
        documents: Documents | None = None,
        places: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, T, V], or the loss.

        Args:
            tokens: [B, T], int64; T at most the context.
            labels: The tokens that follow [B, T]; -100 masks one. With labels the result is the
                sum of the cross-entropy over the unmasked ones: a scalar in float32 (float64 if the
                model is).
            cache: Earlier tokens, from `new_cache`; this pass adds its tokens. With a cache the
                result is the last token's logits [B, 1, V].
            layers: The numbers of the blocks to compute, for a stage of a pipeline; default: all.
                Before the last block the result is hidden states [B, T, D].
            hidden: The result of the stage before.
            by_source: Where to add the loss of each row's source, for a mixture.
            documents: Of each row, with [B, T] as in `tokens`; attention stays within them, and
                positions restart in each.
            places: Of tokens, counted over all rows [N]; then only their logits [N, V] result.
        """
        m, layers = self.settings, layers or range(self.settings.layers)
        first, last = cache[layers.start] if cache else None, layers.stop == m.layers
        start, length = first.length if first else 0, tokens.shape[1]
        assert start + length <= self.context, f"{start + length} tokens, context {self.context}"
        # Logits are of whole sequences; the ranks of `context` divide only what has labels.
        share = self.share if labels is not None else replace(self.share, context=None)
        rate, seed = m.dropout if self.training else 0.0, torch.initial_seed()
        rows = spans = None
        within = documents.within(self.blocks(), rate) if documents else None
        if share.is_whole:
            spans = within(0, length) if within else None
        else:
            rows = share.rows(start, length, self.kv_heads, tokens.device, within)
            tokens, labels = rows.tokens(tokens), None if labels is None else rows.labels(labels)
        x, table = self.begin(tokens, hidden, last and labels is not None)
        x, rotary = self.locate(x, range(start, start + length), rows, documents, hidden is None)
        x = self.lowered(x)
        if hidden is None:
            x = drop(multiplied(x, m.multipliers.embedding), rate, rows)
        for i in layers:
            if rate:  # a block's masks do not depend on the blocks before it
                seed_generators(x.device, seed_of(f"windlass/dropout/{seed}/block/{i}"))
            x = getattr(self.blocks, str(i))(x, rotary, cache[i] if cache else None, rows, spans)
        if not last:
            return x
        x = self.norm(x) if m.final_norm else x
        x = share.enter(multiplied(x, m.multipliers.hidden), rows)
        if cache or places is not None:
            x = x[:, -1:] if places is None else x.flatten(0, 1)[places]
        return self.head(x, labels, table, by_source)

    def begin(
        self, tokens: Tensor, hidden: Tensor | None, loss: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Rows of the embedding, unless there are `hidden` states, and the table of a tied head.

        `loss`: this pass also has the head's loss, so that both uses can share a gradient.
        """
        # The middle stages of a pipeline have no embedding.
        table = getattr(self.embedding, "weight", None) if self.settings.tie_head else None
        if hidden is not None:
            return hidden, table
        if loss and table is not None and self.share.is_whole and one_gradient(table):
            x, table = look_up(table, tokens)
        else:
            x = self.embed(tokens)
        return x if self.share.tensor is None else self.share.leave(x), table

    def locate(
        self, x: Tensor, whole: range, rows: Rows | None, documents: Documents | None, first: bool
    ) -> tuple[Tensor, RotaryEmbedding | None]:
        """The stream with learned positions (of the `first` block), and rotary ones for all blocks.

        Args:
            whole: The places of all ranks' tokens.
            documents: Positions restart in each.
        """
        m, positions = self.settings, documents.positions if documents else None
        if m.position == "learned" and first:
            if positions is not None:
                own = positions if rows is None else positions[:, rows.place(rows.stream)]
                return x + F.embedding(own, self.positions.weight), None
            here = slice(whole.start, whole.stop) if rows is None else rows.place(rows.stream)
            return x + self.positions.weight[here], None
        if m.position != "rope":
            return x, None
        if positions is None:
            positions = torch.arange(whole.start, whole.stop, device=x.device)
            positions = positions if rows is None else rows.place(rows.inner)
        elif rows is not None:
            positions = positions[:, rows.place(rows.inner)]
        return x, RotaryEmbedding(m.rope_theta, m.width // m.heads, positions, like=x)

    def lowered(self, x: Tensor) -> Tensor:
        """The stream, in autocast's precision with `low_stream`."""
        if self.low_stream and torch.is_autocast_enabled(x.device.type):
            return x.to(torch.get_autocast_dtype(x.device.type))
        return x

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows [B, T, D] of the embedding; zeros for those that another rank of `tp` holds."""
        tensor = self.share.tensor
        if tensor is None:
            return self.embedding(tokens)  # type: ignore[no-any-return]
        held = tensor.piece(self.vocab)
        elsewhere = (tokens < held.start) | (tokens >= held.stop)
        x = self.embedding((tokens - held.start).masked_fill(elsewhere, 0))
        return x.masked_fill(elsewhere.unsqueeze(-1), 0.0)  # type: ignore[no-any-return]

    def stream_length(self, start: int, length: int, labelled: bool) -> int:
        """This rank's tokens of the residual stream, in a pass of `length` tokens."""
        share = self.share if labelled else replace(self.share, context=None)
        if share.is_whole:
            return length
        return len(share.rows(start, length, self.kv_heads, torch.device("cpu")).stream)

    def divide(self, share: Share) -> None:
        """Keep this rank's part of each parameter, and compute only it."""
        self.share = share
        for block in self.blocks:
            block.attn.divide(share)
            block.ff.share = share
        self.head.share = share
        self.kv_heads = self.blocks[0].attn.kv_heads
        for name, parameter in list(self.named_parameters()):
            if cut := self.cut(name):
                owner, _, last = name.rpartition(".")
                part = cut.take(parameter.detach()).contiguous()
                piece = nn.Parameter(part, parameter.requires_grad)
                setattr(self.get_submodule(owner), last, piece)

    def cut(self, name: str) -> Cut | None:
        """Which part of a parameter this rank holds; None: all of it."""
        m, tensor = self.settings, self.share.tensor
        if tensor is None:
            return None
        matrix = name.removesuffix(".weight").removesuffix(".bias")
        if matrix in ("embedding", "head"):
            return Cut(0, self.vocab, (tensor.piece(self.vocab),), tensor)
        if matrix.endswith("attn.qkv"):
            ranges = self.rows_by_heads(f"{matrix}.weight", tensor.rank, tensor.size)
            rows = sum(self.matrix_parts(f"{matrix}.weight"))
            return Cut(0, rows, tuple(ranges), tensor)
        if matrix.endswith(("ff.up", "ff.gate")):
            return Cut(0, m.ff_width_, (tensor.piece(m.ff_width_),), tensor)
        if name.endswith(("attn.out.weight", "ff.down.weight")):
            size = m.width if "attn" in matrix else m.ff_width_
            return Cut(1, size, (tensor.piece(size),), tensor)
        return None

    def ends(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """The units of sharding beside the blocks; none if the root holds a tied head."""
        if self.settings.tie_head:
            return [], []
        # A stage of a pipeline may lack the embedding, the norm or the head.
        last = [getattr(self, "norm", None), self.head]
        return list(filter(None, [self.embedding])), list(filter(None, last))

    def new_cache(self, batch: int, length: int) -> list[LayerCache]:
        """An empty cache for `batch` rows of up to `length` tokens."""
        assert length <= self.context, f"{length} tokens, context {self.context}"
        return [LayerCache(batch, length) for _ in range(self.settings.layers)]

    def matrix_parts(self, name: str) -> tuple[int, ...]:
        """The rows of each matrix stacked in a parameter; empty if it is one matrix."""
        m = self.settings
        keys = m.width // m.heads * m.kv_heads_
        return (m.width, keys, keys) if name.endswith("attn.qkv.weight") else ()

    def rows_by_heads(self, name: str, piece: int, pieces: int) -> list[range]:
        """The rows of a parameter with `matrix_parts` that one of equal `pieces` holds.

        Each of the matrices is cut, by heads if `pieces` divides them. Attention over the piece is
        then `Attention` with fewer heads: its queries, keys and values lie on top of one another
        as in the whole.
        """
        ranges, start = [], 0
        for rows in self.matrix_parts(name):
            size = rows // pieces
            ranges.append(range(start + piece * size, start + (piece + 1) * size))
            start += rows
        return ranges

    def initial_value(self, name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
        """A parameter's initial value, whole, in float32 on the CPU.

        As in GPT-2: matrices and tables are normal, output projections of sub-layers narrower by
        1 / sqrt(2 layers) (or zero), norms 1, biases 0. With muP the blocks' matrices
        are narrower by 1 / sqrt(width / base width). A sharded parameter takes its slice, so any
        world size and strategy starts from the same bits.
        """
        m = self.settings
        is_output = name.endswith(("attn.out.weight", "ff.down.weight"))
        if name.endswith("bias") or (is_output and m.zero_init_output):
            return torch.zeros(shape)
        if "norm" in name:
            return torch.ones(shape)
        std = m.init_std / math.sqrt(2 * m.layers) if is_output else m.init_std
        if name.startswith("blocks."):
            std /= math.sqrt(m.width_multiple)
        return torch.empty(shape).normal_(0.0, std, generator=generator)


def seed_generators(device: torch.device, seed: int) -> None:
    """Seed torch's generators of a CPU and of `device`.

    `torch.manual_seed` seeds those of every GPU, which takes longer than a small block. Without CUDA
    it takes 0.4 ms, because it formats the stack.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index].manual_seed(seed)


def generator(seed: int, name: str) -> torch.Generator:
    """The CPU generator of a seed and a parameter's name."""
    return torch.Generator().manual_seed(seed_of(f"windlass/init/{seed}/{name}"))


@torch.no_grad()
def initialise(model: nn.Module, seed: int, group: dist.ProcessGroup | None = None) -> None:
    """Give every parameter, whole or sharded, its initial value, in place.

    The unwrapped model has `initial_value(name, shape, generator) -> Tensor`, as `GPT`, or
    `fill_weights(seed)`, as `HfModel`. The ranks of `group` hold the same parameters, or shards of
    them; each draws some and sends them to the others.
    """
    owner: Any = model
    if hasattr(owner, "fill_weights"):
        owner.fill_weights(seed, group=group)
        return

    def draw(item: tuple[str, Tensor]) -> list[Tensor]:
        name, parameter = item
        assert not parameter.is_meta, f"{name} is on the meta device: materialise it first"
        return [owner.initial_value(name, whole_shape(parameter), generator(seed, name))]

    # Those that ranks draw at the same time have similar sizes.
    named = sorted(owner.named_parameters(), key=lambda item: -whole_shape(item[1]).numel())
    for (_, parameter), values in draw_in_turns(named, draw, lambda item: [item[1]], group):
        assign(parameter, values[0])


def draw_in_turns(
    items: Sequence[T_],
    draw: Callable[[T_], list[Tensor]],
    parameters: Callable[[T_], list[Tensor]],
    group: dist.ProcessGroup | None,
) -> Iterator[tuple[T_, list[Tensor]]]:
    """Each item with the whole values of its `parameters`, which one rank of `group` draws."""
    size, rank = (1, 0) if group is None else (dist.get_world_size(group), dist.get_rank(group))
    for start in range(0, len(items), size):
        turn = items[start : start + size]
        mine = draw(turn[rank]) if rank < len(turn) else []
        for sender, item in enumerate(turn):
            values = []
            for i, parameter in enumerate(parameters(item)):
                mesh: Any = getattr(parameter, "device_mesh", None)
                device = parameter.device if mesh is None else mesh.device_type
                if sender == rank:
                    value = mine[i].to(device)
                else:
                    value = torch.empty(whole_shape(parameter), device=device)
                if size > 1:
                    dist.broadcast(value, group=group, group_src=sender)
                values.append(value)
            yield item, values


@torch.no_grad()
def assign(parameter: Tensor, full: Tensor) -> None:
    """Copy a full tensor, or this rank's slice of it, into a parameter, without communication."""
    if cut := cut_of(parameter):
        full = cut.take(full)
    if not hasattr(parameter, "placements"):
        parameter.copy_(full)
        return
    from torch.distributed.tensor import distribute_tensor

    mesh: Any = parameter.device_mesh
    whole = full.to(mesh.device_type)
    # `src_data_rank=None`: every rank has the whole tensor already, so nothing is sent.
    part = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(part.to_local())  # type: ignore[attr-defined]
