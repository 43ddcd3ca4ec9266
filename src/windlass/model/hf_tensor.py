"""Tensor parallelism of a model of `transformers`, by the plan that its architecture declares.

The plan (`tp_plan`) names a style for modules and parameters, as "model.layers.*.mlp.up_proj":
"colwise". Windlass reads the plan and divides the model as it divides its own GPT: a parameter is a
plain tensor, this rank's part, and the module gets a subclass whose forward pass has the
collectives. The residual stream is whole on every rank, so the gradients of parameters that are not
cut are complete. Embedding and head are cut by vocabulary if the head is plain.

Legend: B batch, T time, S time seen, D model width, H heads.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from windlass.errors import UserError
from windlass.model.frozen import raised
from windlass.model.loss import Piece
from windlass.model.share import Cut, Peers, Share

GPT2_PLAN = {
    "transformer.h.*.attn.c_attn": "qkv_colwise",
    "transformer.h.*.attn.c_proj": "rowwise",
    "transformer.h.*.mlp.c_fc": "colwise",
    "transformer.h.*.mlp.c_proj": "rowwise",
}
SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that read the same tensor."""


class Entrance:
    """The way of a tensor into sibling layers; it enters once, so its gradient is summed once."""

    def __init__(self, share: Share, readers: int):
        self.share, self.readers, self.left = share, readers, 0
        self.given: Tensor | None = None
        self.entered: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        if self.entered is None or self.given is not x:
            self.given, self.entered, self.left = x, self.share.enter(x), self.readers
        y = self.entered
        self.left -= 1
        if not self.left:
            self.given = self.entered = None
        return y


class Part(nn.Module):
    """A module with this rank's part of its parameters.

    Subclasses come before the class of `transformers` in the order of inheritance.
    """

    share: Share
    entrance: Entrance
    held: range  # this rank's part of the dimension that is cut
    whole: int  # the size of that dimension


class Columns(Part):
    """A linear layer with some of its outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.entrance(x))  # type: ignore[no-any-return]


class GatheredColumns(Columns):
    """The same, with all outputs on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return self.share.leave(F.pad(y, (self.held.start, self.whole - self.held.stop)))


class Head(Columns):
    """The head with some rows of the vocabulary: all logits on every rank, without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return self.share.gather_logits(super().forward(x), self.whole)


class Rows(Part):
    """A linear layer of some of its inputs; the whole bias is added to the sum."""

    def forward(self, x: Tensor) -> Tensor:
        module: Any = self
        weight = module.weight if isinstance(self, nn.Linear) else module.weight.T
        y = self.share.leave(F.linear(x, raised(weight, x)))
        return y if module.bias is None else y + module.bias.to(y.dtype)


class SplitRows(Rows):
    """The same, of an input that is whole on every rank."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.entrance(x)[..., self.held.start : self.held.stop])


class Embedding(Part):
    """An embedding with some rows of the vocabulary."""

    def forward(self, tokens: Tensor) -> Tensor:
        elsewhere = (tokens < self.held.start) | (tokens >= self.held.stop)
        x = super().forward((tokens - self.held.start).masked_fill(elsewhere, 0))
        return self.share.leave(x.masked_fill(elsewhere.unsqueeze(-1), 0.0))


class Experts(Part):
    """A mixture of experts, with a part of each expert."""

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        x, weights = self.share.add_gradients(x), self.share.add_gradients(weights)
        return self.share.leave(super().forward(x, index, weights))


class Attention(Part):
    """An attention layer with dropout inside; each rank draws the masks of all heads."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)
        with HeadMasks(self.share):
            return super().forward(*args, **kwargs)


class HeadMasks(TorchFunctionMode):
    """Dropout of this rank's heads with its slice of the masks of all heads."""

    def __init__(self, share: Share):
        super().__init__()
        self.share = share

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is F.scaled_dot_product_attention and kwargs.get("dropout_p"):
            return self.attention(*args, **kwargs)
        if function is F.dropout and args[0].dim() == 4 and kwargs.get("training", True):
            return args[0] * self.keep(args[0], kwargs["p"])
        return function(*args, **kwargs)

    def keep(self, scores: Tensor, rate: float) -> Tensor:
        """A mask like the scores [B, H, T, S] of this rank's heads."""
        (B, H, T, S), tensor = scores.shape, self.share.tensor
        assert tensor is not None
        whole = F.dropout(scores.new_ones(B, H * tensor.size, T, S), rate)
        return whole[:, tensor.rank * H : (tensor.rank + 1) * H]

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """`F.scaled_dot_product_attention`, with `keep`."""
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(2, 3) * (scale or 1 / math.sqrt(q.shape[3]))
        if is_causal:
            attn_mask = torch.ones(scores.shape[2:], dtype=torch.bool, device=q.device).tril()
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        return (scores.softmax(-1) * self.keep(scores, dropout_p)).to(v.dtype) @ v


SHARED = "replicated_with_grad_allreduce"
"""A module with whole parameters that serves this rank's heads only, as the norm of queries."""
STYLES: dict[str, type[Part]] = {
    "colwise": Columns,
    "qkv_colwise": Columns,
    "colwise_gather_output": GatheredColumns,
    "colwise_rep": GatheredColumns,
    "rowwise": Rows,
    "rowwise_split_input": SplitRows,
    "rowwise_rep": SplitRows,
    "moe_tp_experts": Experts,
    SHARED: Part,
}
OF_PARAMETERS = ("colwise", "packed_colwise", "rowwise")
WITHOUT_EFFECT = ("local_params", "replicate")  # on plain tensors


def plan_of(model: Any) -> dict[str, str]:
    """The style of each module and parameter that the plan of a network names; maybe empty."""
    plan = dict(getattr(model, "_tp_plan", None) or {})
    if model.config.model_type == "gpt2":
        plan = GPT2_PLAN
    names = [name for name, _ in model.named_modules()]
    names += [name for name, _ in model.named_parameters()]
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    found = {name: plan.get(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), "") for name in names}
    for name, module in model.named_modules():
        if any(module is end for end in ends):
            found[name] = ""  # by `divide_ends`
    return {name: style for name, style in found.items() if style not in ("", *WITHOUT_EFFECT)}


def between(model: Any, plan: dict[str, str]) -> dict[str, bool]:
    """What has no style beside layers that are cut, and whether each rank can have all of it.

    A norm of one head's queries, and an activation with parameters, work on this rank's part. So
    their gradients are partial.
    """
    found = {}
    cut = ("colwise", "packed_colwise")  # and not gathered
    for owner in {name.rpartition(".")[0] for name, style in plan.items() if style in cut}:
        layer = model.get_submodule(owner)
        for name, parameter in layer.named_parameters(prefix=owner):
            module = name.rpartition(".")[0]
            has_style = name in plan or plan.get(module, "moe_tp_experts") != "moe_tp_experts"
            if has_style:
                continue
            is_head = parameter.numel() == getattr(layer, "head_dim", None)
            last = module.rpartition(".")[2]
            what = name if module in plan else module
            found[what] = (is_head and last in ("q_norm", "k_norm")) or last == "act_fn"
    return found


def check(model: Any, ranks: int) -> dict[str, str]:
    """The plan of a network for this number of ranks; UserError if Windlass cannot divide it."""
    plan, kind = plan_of(model), type(model).__name__
    modules, advice = dict(model.named_modules()), "use data parallelism (parallel.tensor=1)"
    if any(".lora_" in name for name, _ in model.named_parameters()):
        problem = "Windlass does not divide a model with adapters (model.lora)"
        raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")
    if not plan:
        raise UserError(f"parallel.tensor = {ranks}: {kind} has no tp_plan: {advice}")
    for name, style in plan.items():
        module = modules.get(name)
        linear = module is None or isinstance(module, nn.Linear) or is_transposed(module)
        if style not in (OF_PARAMETERS if module is None else STYLES) or (
            not linear and issubclass(STYLES[style], (Columns, Rows))
        ):
            problem = f'{kind} divides {name} by the style "{style}", which Windlass does not have'
            raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")
    for name, is_shared in between(model, plan).items():
        if not is_shared:
            problem = f"{kind}'s tp_plan does not say how to divide {name}"
            raise UserError(f"parallel.tensor = {ranks}: {problem}: {advice}")
        plan[name] = SHARED
    counts = head_counts(model, plan)
    if unfit := [count for count in counts if count % ranks]:
        fit = [n for n in range(1, ranks) if math.gcd(*counts) % n == 0]
        heads = "attention heads" if max(unfit) == max(counts) else "key and value heads"
        problem = f"{ranks} ranks do not divide the {max(unfit)} {heads} of {kind}"
        raise UserError(f"parallel.tensor: {problem}; write {max(fit)}")
    return plan


def head_counts(model: Any, plan: dict[str, str]) -> list[int]:
    """The numbers of heads, also of keys, that the ranks divide; none if they gather all heads."""
    config, counts = model.config.get_text_config(), list[int]()
    for name in attention_layers(plan):
        owner, _, last = name.rpartition(".")
        layer = model.get_submodule(owner)
        if last in ("k_proj", "v_proj") and isinstance(getattr(layer, "head_dim", None), int):
            counts.append(getattr(layer, last).out_features // layer.head_dim)
        elif isinstance(config.num_attention_heads, int):
            counts.append(config.num_attention_heads)
    return counts


def attention_layers(plan: dict[str, str]) -> list[str]:
    """The layers that give each rank its heads."""
    return [
        name
        for name, style in plan.items()
        if style in ("colwise", "qkv_colwise") and "att" in name.rpartition(".")[0].split(".")[-1]
    ]


def has_dropout(layer: nn.Module) -> bool:
    """Whether a module has dropout itself."""
    rates = [value for key, value in vars(layer).items() if "dropout" in key]
    rates += [child.p for child in layer.children() if isinstance(child, nn.Dropout)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def is_transposed(module: nn.Module) -> bool:
    """Whether a module is the linear layer of GPT-2, whose weight is [inputs, outputs]."""
    return type(module).__name__ == "Conv1D"


def divide(model: Any, share: Share) -> Piece | None:
    """Keep this rank's part of the parameters of an `HfModel`, and have its modules compute it.

    Fills the model's `cuts` and `partial`. Returns the rows of the vocabulary if the head is cut.
    UserError if the model cannot be divided so.
    """
    if share.context is not None or share.sequence or share.tensor is None:
        key = "parallel.sequence=false" if share.sequence else "parallel.context=1"
        raise UserError(f"a model of transformers keeps its residual stream whole: write {key}")
    network, tensor, cuts = model.model, share.tensor, dict[str, Cut]()
    classes: dict[tuple[type, type], type] = {}
    plan = check(network, tensor.size)
    for name, style in plan.items():
        if name not in (modules := dict(network.named_modules())):
            cuts[name] = cut_parameter(network.get_parameter(name), style, tensor)
            continue
        module = modules[name]
        if style == SHARED:
            model.partial |= {f"model.{name}.{key}" for key, _ in module.named_parameters()}
            continue
        module.share, module.entrance = share, entrance_of(network, name, share, plan)
        cuts |= {f"{name}.{key}": cut for key, cut in cuts_of(module, style, tensor)}
        become(module, STYLES[style], classes)
    for name in {name.rpartition(".")[0] for name in attention_layers(plan)}:
        layer = network.get_submodule(name)
        if has_dropout(layer):
            layer.share = share
            become(layer, Attention, classes)
    piece = divide_ends(model, share, cuts, classes)
    keep_parts(network, cuts)
    model.cuts |= {f"model.{name}": cut for name, cut in cuts.items()}
    return piece


def entrance_of(network: Any, name: str, share: Share, plan: dict[str, str]) -> Entrance:
    """The entrance of a layer, which its siblings share."""
    owner, _, last = name.rpartition(".")
    names = next((group for group in SIBLINGS if last in group), (last,))
    siblings = [f"{owner}.{n}" for n in names if plan.get(f"{owner}.{n}", "") in STYLES]
    modules = [network.get_submodule(n) for n in siblings]
    known = (m.entrance for m in modules if hasattr(m, "entrance"))
    return next(known, None) or Entrance(share, len(modules))


def cuts_of(module: Any, style: str, tensor: Peers) -> Iterator[tuple[str, Cut]]:
    """The cuts of a linear layer's parameters; tells the layer its part."""
    kind = STYLES[style]
    if not issubclass(kind, (Columns, Rows)):
        return
    outputs, transposed = issubclass(kind, Columns), is_transposed(module)
    dim = int(outputs == transposed)  # of the weight
    module.whole = size = module.weight.shape[dim]
    module.held = tensor.piece(size)
    ranges: tuple[range, ...] = (module.held,)
    if style == "qkv_colwise":
        each = tensor.piece(size // 3)
        ranges = tuple(range(i + each.start, i + each.stop) for i in range(0, size, size // 3))
    yield "weight", Cut(dim, size, ranges, tensor)
    if outputs and module.bias is not None:
        yield "bias", Cut(0, size, ranges, tensor)
    if outputs and transposed:
        module.nf = sum(map(len, ranges))


def cut_parameter(parameter: Tensor, style: str, tensor: Peers) -> Cut:
    """The cut of a parameter that the plan names itself, as the matrices of all experts."""
    dim = parameter.dim() - 1 if style == "rowwise" else max(0, parameter.dim() - 2)
    size = parameter.shape[dim]
    if style != "packed_colwise":
        return Cut(dim, size, (tensor.piece(size),), tensor)
    half = tensor.piece(size // 2)
    second = range(size // 2 + half.start, size // 2 + half.stop)
    return Cut(dim, size, (half, second), tensor)


def become(module: nn.Module, part: type[Part], classes: dict[tuple[type, type], type]) -> None:
    """Put `part` before a module's class; modules of one class and part get one new class.

    Dynamo guards a function set on a module by its identity, so a function for each module would
    compile every block again.
    """
    kind = type(module)
    if (kind, part) not in classes:
        classes[kind, part] = type(kind.__name__, (part, kind), {"__module__": kind.__module__})
    module.__class__ = classes[kind, part]


def divide_ends(
    model: Any, share: Share, cuts: dict[str, Cut], classes: dict[tuple[type, type], type]
) -> Piece | None:
    """Cut embedding and head by vocabulary if the loss can be computed by pieces."""
    network, tensor = model.model, share.tensor
    embedding, head = network.get_input_embeddings(), network.get_output_embeddings()
    if tensor is None or model.head_form is None or not isinstance(embedding, nn.Embedding):
        return None
    parts: Iterable[tuple[Any, type[Part]]] = ((embedding, Embedding), (head, Head))
    names = {module: name for name, module in network.named_modules()}
    for module, part in parts:
        module.share, module.entrance, module.whole = share, Entrance(share, 1), len(module.weight)
        module.held = tensor.piece(module.whole)
        for key in ("weight", "bias"):
            if getattr(module, key, None) is not None:
                cuts[f"{names[module]}.{key}"] = Cut(0, module.whole, (module.held,), tensor)
        become(module, part, classes)
    padding, held = embedding.padding_idx, embedding.held  # padding's row gets no gradient
    embedding.padding_idx = padding - held.start if padding in held else None
    return Piece(tensor.group, head.held.start, head.whole)


def keep_parts(network: nn.Module, cuts: dict[str, Cut]) -> None:
    """Replace parameters by this rank's parts; tied ones stay tied."""
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for name, whole in list(network.named_parameters(remove_duplicate=False)):
        if cut := cuts.get(name):
            owner, _, last = name.rpartition(".")
            if whole not in parts:
                parts[whole] = nn.Parameter(cut.take(whole.detach()).clone(), whole.requires_grad)
            network.get_submodule(owner)._parameters[last] = parts[whole]
    for module in network.modules():
        if type(module).__name__ == "GPT2Attention" and not module.is_cross_attention:
            attention: Any = module
            attention.split_size = attention.c_attn.nf // 3
            attention.num_heads = attention.split_size // attention.head_dim
