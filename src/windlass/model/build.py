"""Build a recipe's network, without values for its weights, or take the user's module."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.model.gpt import GPT
from windlass.model.quantised import BF16, Linear4bit, lower_frozen, lower_trained
from windlass.model.sharding import is_fsdp, is_sharded
from windlass.model.size import CountedSizes
from windlass.recipe import Recipe

NETWORK = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "width": "hidden_size",
    "vocab": "vocab_size",
}
"""Our names for the sizes of a model of `transformers`, and the names in its configuration."""


def build_model(
    recipe: Recipe, vocab: int, device: str | torch.device = "meta", run: Path | None = None
) -> nn.Module:
    """The network of a recipe's `[model]` on `device`, not initialised.

    `parallelize` gives the meta device's parameters storage; `initialise` or a checkpoint fills
    them. `vocab`: the tokenizer's tokens; `run` may hold a configuration of `transformers`.
    """
    if recipe.model.kind == "hf":
        from windlass.model.hf import build_hf

        model: Any = build_hf(recipe, vocab, run)
        freeze(model.model, recipe.model.freeze)
        lower_frozen(model.model, recipe.model, model.directory)
    else:
        rows = recipe.model.vocab or vocab
        if rows < vocab:
            problem = f"model.vocab = {rows} is too small for the tokenizer"
            raise UserError(f"{problem}: write {vocab} or more, or 0")
        with torch.device("meta"):
            model = GPT(recipe.model, rows)
        freeze(model, recipe.model.freeze)
    if recipe.train.master == "bf16":
        lower_trained(model)
    device = torch.device(device)
    if device.type != "meta":
        materialise(model, device, device)
    return model  # type: ignore[no-any-return]


def freeze(model: nn.Module, patterns: list[str]) -> None:
    """Freeze the parameters whose names match; UserError if a pattern matches none, or all do."""
    parameters = dict(model.named_parameters(remove_duplicate=False))  # a tied one has two names
    for pattern in patterns:
        names = [name for name in parameters if fnmatchcase(name, pattern)]
        if not names:
            near = difflib.get_close_matches(pattern, parameters, n=4, cutoff=0.3)
            shown = ", ".join(list(dict.fromkeys([*near, *parameters]))[:4])
            problem = f"model.freeze: {pattern} is not the name of a parameter"
            raise UserError(f"{problem}; some of the {len(parameters)} names are {shown}")
        for name in names:
            parameters[name].requires_grad_(False)
    if patterns and not any(parameter.requires_grad for parameter in parameters.values()):
        problem = f"model.freeze: {', '.join(patterns)} leave no parameter to train"
        raise UserError(f"{problem}; drop one of them")


def materialise(model: nn.Module, device: torch.device, buffer_device: torch.device) -> None:
    """Move parameters and buffers in place; meta tensors get storage without values."""
    moved: dict[Tensor, Any] = {}
    for module in model.modules():
        for tensors, target in ((module._parameters, device), (module._buffers, buffer_device)):
            for name, tensor in tensors.items():
                if tensor is None or tensor.device == target:
                    continue
                if tensor not in moved:
                    data = tensor.data
                    if not data.is_meta:
                        new = data.to(target)
                    elif is_sharded(data):
                        new = torch.empty_like(data, device=target)
                    else:  # `empty_like` of a meta tensor imports sympy
                        how: Any = {"dtype": data.dtype, "device": target}
                        new = torch.empty_strided(data.shape, data.stride(), **how)
                    if isinstance(tensor, nn.Parameter):
                        new = nn.Parameter(new, tensor.requires_grad)
                    moved[tensor] = new
                tensors[name] = moved[tensor]


def read_sizes(recipe: Recipe, vocab: int = 0) -> CountedSizes:
    return sizes_of(build_model(recipe, vocab))


def sizes_of(model: nn.Module) -> CountedSizes:
    """Count the parameters of a model, not parallelized, perhaps on the meta device."""
    network: dict[str, Any] = {}
    if hasattr(model, "config"):
        config: Any = model.config.get_text_config()  # type: ignore[union-attr, operator]
        for own, name in NETWORK.items():
            if isinstance(value := getattr(config, name, None), int):
                network[own] = value
        network["architecture"] = config.model_type
    if apart := getattr(model, "apart", ()):
        network["apart"] = ", ".join(apart)
    if added := getattr(model, "added", 0):
        network["added"] = added
    parameters = list(model.parameters())
    in_4bit = sum(m.numbers for m in model.modules() if isinstance(m, Linear4bit))
    has_table = isinstance(model, GPT) and model.settings.position == "learned"
    return CountedSizes(
        total=sum(p.numel() for p in parameters) + in_4bit,
        trained=sum(p.numel() for p in parameters if p.requires_grad),
        vocab=int(getattr(model, "vocab", 0)),  # a user's model may lack it
        network=network,
        positions=model.positions.weight.numel() if has_table else 0,  # type: ignore
        in_4bit=in_4bit,
        in_bf16=sum(p.numel() for p in parameters if p.dtype == BF16),
    )


def own_module(model: nn.Module, context: int) -> nn.Module:
    """The user's module; wraps a causal language model of `transformers` as `HfModel`."""
    if not all(hasattr(model, name) for name in ("config", "get_output_embeddings")):
        return model
    from windlass.model.hf import wrap

    return wrap(model, context)


def set_training(model: nn.Module) -> None:
    """Put a user's module in training mode: `from_pretrained` returns models in evaluation mode.

    A frozen part or a single layer inside a training module keeps its evaluation mode.
    """
    parts = [part for whole in model.modules() if whole.training for part in whole.children()]
    evaluating = [part for part in parts if not part.training]
    model.train()
    for part in evaluating:
        if not any(p.requires_grad for p in part.parameters()) or not list(part.children()):
            part.eval()


def scalar(loss: Any) -> Tensor:
    """The loss that a model's forward pass returned; UserError if it is not a scalar tensor."""
    if isinstance(loss, Tensor) and loss.dim() == 0:
        return loss
    shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
    what = f"a {type(loss).__name__}{shape}"
    advice = "return a scalar, the loss summed over labels that are not -100"
    raise UserError(f"forward(tokens, labels) of your model returned {what}; {advice}")


@contextmanager
def keeping_modes(model: nn.Module) -> Iterator[None]:
    """Give every part of a module its mode (training or evaluation) back at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:  # a whole before its parts
            if module.training != training:
                module.train(training)  # an override may do more: loralib adds adapters to weights


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off inside; afterwards modes are restored, and FSDP2's root is sharded again."""
    with keeping_modes(model):
        model.eval()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            for module in model.modules():
                if is_fsdp(module):
                    module.reshard()


@contextmanager
def casting_once(autocast: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Around one of several passes with equal weights, of which only the first casts them."""
    torch.autocast_increment_nesting()
    try:
        with autocast():
            yield
    finally:
        torch.autocast_decrement_nesting()
