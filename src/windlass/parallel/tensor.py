"""Tensor parallelism (arXiv 1909.08053) of our GPT and of models of `transformers`, by a plan.

A cut parameter becomes a plain tensor, this rank's part. A divided module gets a subclass with the
collectives. In our GPT ranks also divide the residual stream along time (arXiv 2205.05198).

Legend: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.model.gpt import GPT
from windlass.model.hf_network import SHARED, tensor_plan
from windlass.model.loss import Piece
from windlass.model.quantised import product_dtype, raised
from windlass.model.sharding import Cut, Peers, become
from windlass.parallel.collectives import Copy, Gather, Scatter, Sum, gather
from windlass.parallel.context import DividedBlock, DividedGPT

GPT_PLAN = {
    "attn": "entrance",
    "ff": "entrance",
    "attn.qkv": "qkv_colwise",
    "attn.out": "rowwise",
    "ff.gate": "colwise",
    "ff.up": "colwise",
    "ff.down": "rowwise",
}
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("gate", "up"))
"""Layers of one module that read the same tensor."""


class Entrance:
    """Gathers an input once for sibling layers, so that its gradient is reduced once. It serves
    models of `transformers`, in which other layers may read the same input."""

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
    """A module with this rank's part of its parameters; comes before the module's own class."""

    tensor: Peers
    sequence: bool  # ranks divide the residual stream along time, in training
    entrance: Entrance
    held: range  # this rank's part of the dimension that is cut
    whole: int  # the size of that dimension

    def enter(self, x: Tensor) -> Tensor:
        """Before matrices cut by outputs: the whole stream [B, T, D] on each rank."""
        x = x.to(product_dtype(x))  # the matrices would round it anyway
        if self.sequence and self.training:
            return Gather.apply(x, 1, self.tensor)  # type: ignore[no-any-return]
        return Copy.apply(x, self.tensor)  # type: ignore[no-any-return]

    def leave(self, x: Tensor) -> Tensor:
        """After matrices cut by inputs: the sum over the ranks of [B, T, D], as a stream."""
        if self.sequence and self.training:
            return Scatter.apply(x, 1, self.tensor)  # type: ignore[no-any-return]
        return Sum.apply(x, self.tensor)  # type: ignore[no-any-return]


class Entering(Part):
    """A module whose parts read only its input, which is gathered once for all of them."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(self.enter(x), *args)  # type: ignore[no-any-return]


class Columns(Part):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.entrance(x, self.enter))  # type: ignore[no-any-return]


class Rows(Part):
    """A linear layer of some of its inputs; the whole bias is added to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        y = self.leave(F.linear(x, raised(module.weight, x)))
        return y if module.bias is None else y + module.bias.to(y.dtype)


class DividedEmbedding(Part):
    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.held.start) | (tokens >= self.held.stop)
        x = super().forward((tokens - self.held.start).masked_fill(elsewhere, 0))
        return self.leave(x.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class DividedHead(Part):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        y: Tensor = super().forward(x, *args)
        if y.dim() == 0:
            return y
        ranks = [self.tensor._replace(rank=rank) for rank in range(self.tensor.size)]
        sizes = [len(one.piece(self.whole)) for one in ranks]
        padded = F.pad(y.detach(), (0, max(sizes) - y.shape[-1]))
        parts = gather(padded, -1, self.tensor).split(max(sizes), dim=-1)
        return torch.cat([part[..., :n] for part, n in zip(parts, sizes, strict=True)], -1)


Cuts = dict[str, Cut]  # how parameters are cut, by their names


def divide_gpt(model: GPT, tensor: Peers | None, context: Peers | None) -> tuple[Cuts, set[str]]:
    """Keep this rank's part of the parameters of our GPT, and have its modules compute it.

    Returns the cuts, and the names of parameters with partial gradients.
    """
    m: Any = model
    m.__class__ = DividedGPT
    m.tensor_ranks, m.context_ranks = tensor, context
    for block in model.blocks if model.settings.dropout else ():
        become(block, DividedBlock)
    if tensor is None:
        return {}, set()
    divider = Divider(model, tensor, sequence=True)
    ends = [(name, name.split(".", 2)[-1]) for name in divider.modules]
    divider.apply({name: GPT_PLAN[end] for name, end in ends if end in GPT_PLAN})
    for block in model.blocks:
        attn: Any = block.attn
        attn.heads, attn.kv_heads = attn.heads // tensor.size, attn.kv_heads // tensor.size
    divider.cut_vocabulary("embedding", DividedEmbedding, model.vocab)
    model.head.piece = divider.cut_vocabulary("head", DividedHead, model.vocab)
    cuts = divider.keep_parts()
    return cuts, {name for name, _ in model.named_parameters()} - cuts.keys()


def divide_hf(model: Any, tensor: Peers) -> tuple[Cuts, set[str]]:
    """The same for an `HfModel`."""
    network, partial = model.model, set[str]()
    plan = tensor_plan(network, tensor.size)
    divider = Divider(network, tensor, sequence=False)
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
    def __init__(self, network: Any, tensor: Peers, sequence: bool):
        self.network, self.tensor, self.sequence = network, tensor, sequence
        self.modules, self.cuts = dict(network.named_modules()), Cuts()

    def style(self, module: nn.Module, part: type[Part]) -> Any:
        divided: Any = module
        divided.tensor, divided.sequence = self.tensor, self.sequence
        become(module, part)
        return divided

    def apply(self, plan: dict[str, str]) -> None:
        """Divide linear layers by their styles; readers of the same input share an entrance."""
        entrances: dict[tuple[str, ...], Entrance] = {}
        for name, style in plan.items():
            if style == SHARED:
                continue
            if style == "entrance":
                self.style(self.modules[name], Entering)
                continue
            if style == "rowwise":
                module = self.style(self.modules[name], Rows)
                size = module.weight.shape[1]
                part = self.pieces((size,))
                self.cuts[f"{name}.weight"] = Cut(1, size, part, self.tensor)
                continue
            owner, _, last = name.rpartition(".")
            module = self.modules[name]
            if plan.get(owner) != "entrance":
                siblings = next((group for group in SIBLINGS if last in group), (last,))
                names = (f"{owner}.{other}" for other in siblings)
                readers = tuple(reader for reader in names if reader in plan)
                entrance = entrances.setdefault(readers, Entrance(len(readers)))
                self.style(module, Columns).entrance = entrance
            size = module.weight.shape[0]
            stacked = style == "qkv_colwise"
            sizes = self.network.matrix_parts(f"{name}.weight") if stacked else (size,)
            part = self.pieces(sizes)
            self.cuts[f"{name}.weight"] = Cut(0, size, part, self.tensor)
            if module.bias is not None:
                self.cuts[f"{name}.bias"] = Cut(0, size, part, self.tensor)

    def pieces(self, sizes: Sequence[int]) -> tuple[range, ...]:
        """This rank's rows of each of the matrices that are stacked in one."""
        starts = itertools.accumulate((0, *sizes))
        pieces = map(self.tensor.piece, sizes)
        pairs = zip(starts, pieces, strict=False)
        return tuple(range(start + piece.start, start + piece.stop) for start, piece in pairs)

    def cut_vocabulary(self, name: str, part: type[Part], vocab: int) -> Piece:
        """Cut an embedding or a head by vocabulary; returns what the loss needs to know."""
        module = self.style(self.modules[name], part)
        module.whole, module.held = vocab, self.tensor.piece(vocab)
        for key, _ in module.named_parameters(recurse=False):
            self.cuts[f"{name}.{key}"] = Cut(0, vocab, (module.held,), self.tensor)
        most = -(-vocab // self.tensor.size)
        return Piece(self.tensor.group, module.held.start, most, module.enter)

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
