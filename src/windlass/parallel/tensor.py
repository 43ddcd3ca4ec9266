"""Tensor parallelism (arXiv 1909.08053) of our GPT and of models of `transformers`, by a plan.

A plan names a style for modules. A parameter that is cut becomes a plain tensor, this
rank's part, so its gradient, optimizer state and checkpoint need no correction. A divided module
gets a subclass whose forward pass has the collectives; the model knows nothing of ranks. Embedding
and head are cut by vocabulary, in a model of `transformers` if the head is plain.

With `sequence` (arXiv 2205.05198), while our GPT trains, the ranks also divide the residual stream
along time. Otherwise the stream is whole on every rank.

Legend: B batch, T time, S time seen, D model width, H heads, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.model.frozen import in_autocast, raised
from windlass.model.gpt import GPT
from windlass.model.hf_network import ROWS, SHARED, check
from windlass.model.loss import Piece
from windlass.model.share import Cut, Peers, become
from windlass.parallel.context import Copy, DividedBlock, DividedGPT, Gather, Scatter, Sum, gather

GPT_PLAN = {
    "attn.qkv": "qkv_colwise",
    "attn.out": "rowwise",
    "ff.gate": "colwise",
    "ff.up": "colwise",
    "ff.down": "rowwise",
}
"""The styles of each block of our GPT."""
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("gate", "up"))
"""Layers of one module that read the same tensor."""


class Entrance:
    """The way of a tensor into sibling layers; it enters once, so its gradient is summed once."""

    def __init__(self, readers: int):
        self.readers, self.left = readers, 0
        self.given: Tensor | None = None
        self.entered: Tensor | None = None

    def __call__(self, x: Tensor, enter: Callable[[Tensor], Tensor]) -> Tensor:
        if self.entered is None or self.given is not x:
            self.given, self.entered, self.left = x, enter(x), self.readers
        y = self.entered
        self.left -= 1
        if not self.left:
            self.given = self.entered = None
        return y


class Part(nn.Module):
    """A module with this rank's part of its parameters.

    Subclasses come before the module's own class in the order of inheritance.
    """

    tensor: Peers
    sequence: bool
    entrance: Entrance
    held: range  # this rank's part of the dimension that is cut
    whole: int  # the size of that dimension

    def enter(self, x: Tensor) -> Tensor:
        """Before matrices cut by outputs: the whole stream [B, T, D] on each rank.

        The backward pass adds up the ranks' gradients.
        """
        x = in_autocast(x)  # the matrices would round it anyway
        if self.sequence and self.training:
            return Gather.apply(x, 1, self.tensor)  # type: ignore[no-any-return]
        return Copy.apply(x, self.tensor)  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """After matrices cut by inputs: the sum over the ranks of [B, T, D], as a stream."""
        if self.sequence and self.training:
            return Scatter.apply(x, 1, self.tensor)  # type: ignore[no-any-return]
        return Sum.apply(x, self.tensor)  # type: ignore[no-any-return]


class Columns(Part):
    """A linear layer with some of its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.entrance(x, self.enter))  # type: ignore[no-any-return]


class GatheredColumns(Columns):
    """The same, with all outputs on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.leave(F.pad(y, (self.held.start, self.whole - self.held.stop)))


class SharedKeys(Columns):
    """Queries, keys and values of a GPT with fewer heads of keys than ranks.

    Each rank computes a part of a head, and the ranks gather the heads. This rank's queries belong
    to head `key_head`.
    """

    query_width: int
    head_width: int
    key_head: int

    def forward(self, x: Tensor) -> Tensor:
        qkv = super().forward(x)
        q, kv = qkv.split([self.query_width, qkv.shape[-1] - self.query_width], dim=-1)
        kv = Gather.apply(kv.unflatten(-1, (2, -1)).movedim(-1, 0), 0, self.tensor)
        kv = kv.narrow(0, self.key_head * self.head_width, self.head_width).movedim(0, -1)
        return torch.cat([q, kv.flatten(-2)], dim=-1)


class Rows(Part):
    """A linear layer of some of its inputs; the whole bias is added to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        y = self.leave(F.linear(x, raised(module.weight, x)))
        return y if module.bias is None else y + module.bias.to(y.dtype)


class SplitRows(Rows):
    """The same, of an input that is whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.entrance(x, self.enter)[..., self.held.start : self.held.stop])


class DividedEmbedding(Part):
    """An embedding with some rows of the vocabulary."""

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.held.start) | (tokens >= self.held.stop)
        x = super().forward((tokens - self.held.start).masked_fill(elsewhere, 0))
        return self.leave(x.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class DividedPositions(Part):
    """A whole table of learned positions, looked up for this rank's part of the stream."""

    def forward(self, positions: Tensor) -> Tensor:
        if self.sequence and self.training:
            positions = positions.chunk(self.tensor.size, -1)[self.tensor.rank]
        return super().forward(positions)  # type: ignore[no-any-return]


class DividedHead(Part):
    """A head with some rows of the vocabulary: its loss, or all logits, without gradients."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        y: Tensor = super().forward(x, *args)
        return y if y.dim() == 0 else gather_logits(y, self.whole, self.tensor)


STYLES: dict[str, type[Part]] = {
    "colwise": Columns,
    "qkv_colwise": Columns,
    "colwise_gather_output": GatheredColumns,
    "rowwise": Rows,
    "rowwise_split_input": SplitRows,
}


Cuts = dict[str, Cut]
"""How parameters are cut, by their names."""


def divide_gpt(model: GPT, tensor: Peers | None, context: Peers | None, sequence: bool) -> Cuts:
    """Keep this rank's part of the parameters of our GPT, and have its modules compute it."""
    m: Any = model
    m.__class__ = DividedGPT
    m.tensor_ranks, m.context_ranks, m.sequence = tensor, context, sequence
    for block in model.blocks() if model.settings.dropout else ():
        become(block, DividedBlock)
    if tensor is None:
        return {}
    divider = Divider(model, tensor, sequence)
    ends = [(name, name.split(".", 2)[-1]) for name in divider.modules]
    divider.apply({name: GPT_PLAN[end] for name, end in ends if end in GPT_PLAN})
    for block in model.blocks():
        attn: Any = block.attn
        if attn.kv_heads < tensor.size:
            become(attn.qkv, SharedKeys)
            attn.qkv.query_width = model.settings.width // tensor.size
            attn.qkv.head_width = attn.head_width
            attn.qkv.key_head = tensor.rank * attn.kv_heads // tensor.size
        attn.heads, attn.kv_heads = attn.heads // tensor.size, max(1, attn.kv_heads // tensor.size)
    if model.settings.position == "learned":
        divider.style(model.positions, DividedPositions)
    divider.cut_vocabulary("embedding", DividedEmbedding, model.vocab)
    model.head.piece = divider.cut_vocabulary("head", DividedHead, model.vocab)
    return divider.keep_parts()


def divide_hf(model: Any, tensor: Peers) -> tuple[Cuts, set[str]]:
    """The same for an `HfModel`; also returns the names of parameters with partial gradients.

    UserError if the model cannot be divided so.
    """
    network, partial = model.model, set[str]()
    plan, divider = check(network, tensor.size), Divider(network, tensor)
    divider.apply(plan)
    for name, style in plan.items():
        if style == SHARED:
            names = divider.modules[name].named_parameters()
            partial |= {f"model.{name}.{key}" for key, _ in names}
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    if model.head_form is not None and isinstance(embedding, nn.Embedding):
        names = {module: name for name, module in divider.modules.items()}
        divider.cut_vocabulary(names[embedding], DividedEmbedding, len(embedding.weight))
        padding, held = embedding.padding_idx, embedding.held  # padding's row gets no gradient
        embedding.padding_idx = padding - held.start if padding in held else None
        model.piece = divider.cut_vocabulary(names[head], DividedHead, len(head.weight))
    return {f"model.{name}": cut for name, cut in divider.keep_parts().items()}, partial


class Divider:
    """Gives modules their styles and cuts parameters; `cuts` has the cuts by the names."""

    def __init__(self, network: Any, tensor: Peers, sequence: bool = False):
        self.network, self.tensor, self.sequence = network, tensor, sequence
        self.modules, self.cuts = dict(network.named_modules()), Cuts()

    def style(self, module: nn.Module, part: type[Part]) -> Any:
        """Give a module a style."""
        divided: Any = module
        divided.tensor, divided.sequence = self.tensor, self.sequence
        become(module, part)
        return divided

    def apply(self, plan: dict[str, str]) -> None:
        """Divide the linear layers of a plan."""
        for name, style in plan.items():
            if style != SHARED:
                module = self.style(self.modules[name], STYLES[style])
                self.cut_linear(name, module, style)
                module.entrance = self.entrance_of(name, plan)

    def entrance_of(self, name: str, plan: dict[str, str]) -> Entrance:
        """The entrance of a layer, which its siblings share."""
        owner, _, last = name.rpartition(".")
        group = next((group for group in SIBLINGS if last in group), (last,))
        siblings = [self.modules[n] for n in (f"{owner}.{other}" for other in group) if n in plan]
        entrances = (module.entrance for module in siblings if hasattr(module, "entrance"))
        return next(entrances, None) or Entrance(len(siblings))

    def cut_linear(self, name: str, module: Any, style: str) -> None:
        """Cut the matrix of a linear layer."""
        dim = 1 if style in ROWS else 0
        module.whole = size = module.weight.shape[dim]
        module.held = self.tensor.piece(size)
        ranges: tuple[range, ...] = (module.held,)
        if style == "qkv_colwise":
            ranges = stacked_pieces(self.network.matrix_parts(f"{name}.weight"), self.tensor)
        self.cuts[f"{name}.weight"] = Cut(dim, size, ranges, self.tensor)
        if dim == 0 and module.bias is not None:
            self.cuts[f"{name}.bias"] = Cut(0, size, ranges, self.tensor)

    def cut_vocabulary(self, name: str, part: type[Part], vocab: int) -> Piece:
        """Cut an embedding or a head by vocabulary; returns what the loss needs to know."""
        module = self.style(self.modules[name], part)
        module.whole, module.held = vocab, self.tensor.piece(vocab)
        for key, _ in module.named_parameters(recurse=False):
            self.cuts[f"{name}.{key}"] = Cut(0, vocab, (module.held,), self.tensor)
        most = -(-vocab // self.tensor.size)
        return Piece(self.tensor.group, module.held.start, vocab, most, module.enter)

    def keep_parts(self) -> Cuts:
        """Replace parameters by this rank's parts; tied ones stay tied."""
        parts: dict[nn.Parameter, nn.Parameter] = {}
        for name, whole in list(self.network.named_parameters(remove_duplicate=False)):
            if cut := self.cuts.get(name):
                owner, _, last = name.rpartition(".")
                if whole not in parts:
                    part = cut.take(whole.detach()).clone()
                    parts[whole] = nn.Parameter(part, whole.requires_grad)
                self.modules[owner]._parameters[last] = parts[whole]
        return self.cuts


def stacked_pieces(rows: tuple[int, ...], tensor: Peers) -> tuple[range, ...]:
    """This rank's part of each of several matrices that are stacked in one parameter."""
    starts = itertools.accumulate(rows, initial=0)
    pieces = ((start, tensor.piece(size)) for start, size in zip(starts, rows, strict=False))
    return tuple(range(start + piece.start, start + piece.stop) for start, piece in pieces)


def gather_logits(logits: Tensor, vocab: int, tensor: Peers) -> Tensor:
    """All columns of logits [..., V] from each rank's columns; without gradients."""
    sizes = [len(tensor._replace(rank=r).piece(vocab)) for r in range(tensor.size)]
    padded = F.pad(logits.detach(), (0, max(sizes) - logits.shape[-1]))
    parts = gather(padded, -1, tensor).split(max(sizes), dim=-1)
    return torch.cat([part[..., :n] for part, n in zip(parts, sizes, strict=True)], -1)
