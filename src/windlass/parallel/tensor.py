"""Tensor parallelism (arXiv 1909.08053) of our GPT and of models of `transformers`, by a plan.

A cut parameter becomes a plain tensor, this rank's part. A divided module gets a mixin with the
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
from windlass.model.loss import VocabShard
from windlass.model.quantised import FrozenProduct, product_dtype, raised
from windlass.model.sharding import Cut, Peers, add_mixin
from windlass.parallel.collectives import Copy, Gather, Scatter, Sum, gather
from windlass.parallel.context import DividedBlock, DividedGPT

GPT_PLAN = {
    "attn": "input",
    "ff": "input",
    "attn.qkv": "qkv_colwise",
    "attn.out": "rowwise",
    "ff.gate": "colwise",
    "ff.up": "colwise",
    "ff.down": "rowwise",
}
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("gate", "up"))
"""Layers of one module that read the same tensor."""


class SharedInput:
    """Gathers an input once for sibling layers, so that its gradient is reduced once. It serves
    models of `transformers`, in which other layers may read the same input."""

    def __init__(self, readers: int):
        self.readers, self.left = readers, 0
        self.source: Tensor | None = None
        self.gathered: Tensor | None = None

    def __call__(self, x: Tensor, gather_input: Callable[[Tensor], Tensor]) -> Tensor:
        if self.gathered is None or self.source is not x:
            self.source, self.gathered, self.left = x, gather_input(x), self.readers
        y = self.gathered
        self.left -= 1
        if not self.left:
            self.source = self.gathered = None
        return y


class DividedModule(nn.Module):
    """Mixin of a module that holds this rank's part of its parameters."""

    tensor: Peers
    sequence: bool  # ranks divide the residual stream along time, in training
    shared_input: SharedInput
    own_range: range  # of the dimension that is cut, on this rank
    full_size: int  # of that dimension

    def gather_input(self, x: Tensor) -> Tensor:
        """The whole stream [B, T, D] on each rank, for matrices that are cut by outputs."""
        x = x.to(product_dtype(x))  # the matrices would round it anyway
        if self.sequence and self.training:
            return Gather.apply(x, 1, self.tensor)  # type: ignore[no-any-return]
        return Copy.apply(x, self.tensor)  # type: ignore[no-any-return]

    def reduce_output(self, x: Tensor) -> Tensor:
        """The sum of [B, T, D] over the ranks, after matrices that are cut by inputs."""
        if self.sequence and self.training:
            return Scatter.apply(x, 1, self.tensor)  # type: ignore[no-any-return]
        return Sum.apply(x, self.tensor)  # type: ignore[no-any-return]


class DividedInput(DividedModule):
    """A module whose parts read only its input, which is gathered once for all of them."""

    def forward(self, x: Tensor, *args: Any) -> Tensor:
        return super().forward(self.gather_input(x), *args)  # type: ignore[no-any-return]


class ColumnParallel(DividedModule):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.shared_input(x, self.gather_input))  # type: ignore[no-any-return]


class RowParallel(DividedModule):
    """A linear layer of some of its inputs; the whole bias is added to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        weight, x = module.weight, x.to(product_dtype(x))
        trained = weight.requires_grad
        y = F.linear(x, raised(weight, x)) if trained else FrozenProduct.apply(x, weight.to)
        y = self.reduce_output(y)
        return y if module.bias is None else y + module.bias.to(y.dtype)


class DividedDropout(DividedModule):
    """Dropout of this rank's part of an adapter's input, by the mask of the whole input."""

    def forward(self, x: Tensor) -> Tensor:
        whole: Tensor = super().forward(x.new_ones(*x.shape[:-1], self.full_size))
        return x * whole[..., self.own_range.start : self.own_range.stop]


class DividedEmbedding(DividedModule):
    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.own_range.start) | (tokens >= self.own_range.stop)
        x = super().forward((tokens - self.own_range.start).masked_fill(elsewhere, 0))
        return self.reduce_output(x.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class DividedHead(DividedModule):
    def forward(self, x: Tensor, *args: Any) -> Tensor:
        y: Tensor = super().forward(x, *args)
        if y.dim() == 0:
            return y
        ranks = [self.tensor._replace(rank=rank) for rank in range(self.tensor.size)]
        sizes = [len(one.own_range(self.full_size)) for one in ranks]
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
        add_mixin(block, DividedBlock)
    if tensor is None:
        return {}, set()
    divider = Divider(model, tensor, sequence=True)
    ends = [(name, name.split(".", 2)[-1]) for name in divider.modules]
    divider.apply({name: GPT_PLAN[end] for name, end in ends if end in GPT_PLAN})
    for block in model.blocks:
        attn: Any = block.attn
        attn.heads, attn.kv_heads = attn.heads // tensor.size, attn.kv_heads // tensor.size
    divider.cut_vocabulary("embedding", DividedEmbedding, model.vocab)
    model.head.vocab_shard = divider.cut_vocabulary("head", DividedHead, model.vocab)
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
        padding, own = embedding.padding_idx, embedding.own_range  # padding's row gets no gradient
        embedding.padding_idx = padding - own.start if padding in own else None
        model.vocab_shard = divider.cut_vocabulary(names[head], DividedHead, len(head.weight))
    return {f"model.{name}": cut for name, cut in divider.keep_parts().items()}, partial


class Divider:
    def __init__(self, network: Any, tensor: Peers, sequence: bool):
        self.network, self.tensor, self.sequence = network, tensor, sequence
        self.modules, self.cuts = dict(network.named_modules()), Cuts()

    def style(self, module: nn.Module, mixin: type[DividedModule]) -> Any:
        divided: Any = module
        divided.tensor, divided.sequence = self.tensor, self.sequence
        add_mixin(module, mixin)
        return divided

    def apply(self, plan: dict[str, str]) -> None:
        """Divide linear layers by their styles; readers of the same input gather it once."""
        shared_inputs: dict[tuple[str, ...], SharedInput] = {}
        for name, style in plan.items():
            if style == SHARED:
                continue
            if style == "input":
                self.style(self.modules[name], DividedInput)
                continue
            adapted = f"{name}.base_layer" in self.modules
            layer = f"{name}.base_layer" if adapted else name
            if style == "rowwise":
                self.cut_inputs(layer)
                if adapted:
                    # The product of A is whole after its sum over the ranks, so B stays whole.
                    self.cut_inputs(f"{name}.lora_A.default")
                    dropout = self.modules[f"{name}.lora_dropout.default"]
                    if isinstance(dropout, nn.Dropout):
                        size = self.modules[layer].in_features
                        self.style(dropout, DividedDropout).full_size = size
                        dropout.own_range = self.tensor.own_range(size)
                continue
            owner, _, last = name.rpartition(".")
            if plan.get(owner) != "input":
                siblings = next((group for group in SIBLINGS if last in group), (last,))
                names = (f"{owner}.{other}" for other in siblings)
                readers = tuple(reader for reader in names if reader in plan)
                shared_input = shared_inputs.setdefault(readers, SharedInput(len(readers)))
                self.style(self.modules[layer], ColumnParallel).shared_input = shared_input
            self.cut_outputs(layer, stacked=style == "qkv_colwise")
            if adapted:
                # B gathers the product of A, so the gradient of A is whole on each rank.
                b = f"{name}.lora_B.default"
                self.style(self.modules[b], ColumnParallel).shared_input = SharedInput(1)
                self.cut_outputs(b)

    def cut_inputs(self, name: str) -> None:
        module = self.style(self.modules[name], RowParallel)
        size = module.weight.shape[1]
        self.cuts[f"{name}.weight"] = Cut(1, size, self.own_ranges((size,)), self.tensor)

    def cut_outputs(self, name: str, stacked: bool = False) -> None:
        module = self.modules[name]
        size = module.weight.shape[0]
        sizes = self.network.matrix_parts(f"{name}.weight") if stacked else (size,)
        for key, _ in module.named_parameters(recurse=False):
            self.cuts[f"{name}.{key}"] = Cut(0, size, self.own_ranges(sizes), self.tensor)

    def own_ranges(self, sizes: Sequence[int]) -> tuple[range, ...]:
        """This rank's rows of each of the matrices that are stacked in one."""
        starts = itertools.accumulate((0, *sizes))
        pairs = zip(starts, map(self.tensor.own_range, sizes), strict=False)
        return tuple(range(start + own.start, start + own.stop) for start, own in pairs)

    def cut_vocabulary(self, name: str, mixin: type[DividedModule], vocab: int) -> VocabShard:
        """Cut an embedding or a head by vocabulary; returns what the loss needs to know."""
        module = self.style(self.modules[name], mixin)
        module.full_size, module.own_range = vocab, self.tensor.own_range(vocab)
        for key, _ in module.named_parameters(recurse=False):
            self.cuts[f"{name}.{key}"] = Cut(0, vocab, (module.own_range,), self.tensor)
        most = -(-vocab // self.tensor.size)
        return VocabShard(self.tensor.group, module.own_range.start, most, module.gather_input)

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
