"""How large a model of `transformers` is: counted on its own modules, on the meta device, from its configuration alone.

No weights are read. Where a name is not a local directory, only the configuration is fetched from the Hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass import hub
from windlass.model.hf import HfModel, find_blocks, is_adapter, open_hf
from windlass.model.size import HfSizes
from windlass.recipe.settings import ModelSettings

if TYPE_CHECKING:
    from windlass.recipe import Recipe

ATTENTION_NAMES = ("attn", "attention")
FEED_FORWARD_NAMES = ("mlp", "ffn", "feed_forward", "feedforward", "experts", "moe", "fc1", "fc2")
CONFIG_FILES = ["config.json", "*.py"]
"""What is fetched of a model that is not on this machine: no weights."""


def read_sizes(recipe: Recipe, flops: bool = True) -> HfSizes:
    """The sizes of a recipe's model of `transformers`, from its configuration.

    Args:
        recipe: its section `[model]` is read; the FLOPs are for sequences of `model.context` tokens.
        flops: whether torch counts the FLOPs of a pass as well, which takes a second or two for a large model.

    Raises:
        UserError: the configuration cannot be had, or is of no causal language model.
    """
    settings = recipe.model
    model = open_hf(_configuration(settings), settings)
    model.context = settings.context
    found = sizes_of(model)
    if not flops:
        return found
    from dataclasses import replace

    return replace(found, counted_flops=count_flops(model, settings.context))


def _configuration(settings: ModelSettings) -> Path:
    """A local directory with the model's configuration."""
    path = Path(settings.name).expanduser()
    if path.is_dir() or path.is_absolute() or settings.name.startswith((".", "~")) or settings.name.count("/") > 1:
        return hub.directory(settings.name, settings.revision)
    hub.prepare()
    with hub.explained(f"model.name: {settings.name}"):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(settings.name, revision=settings.revision or None, allow_patterns=CONFIG_FILES))


def sizes_of(model: HfModel) -> HfSizes:
    """Count a model's parameters by part. Its parameters may be anywhere, and not yet wrapped or sharded.

    A part is told by the module that holds it (embedding, norm, head) or by the names on the way to it (attention,
    feed-forward); what neither tells is `other`.
    """
    blocks = find_blocks(model.model)
    inside = {id(p) for block in blocks for p in block.parameters()}
    head = _weight(model.model.get_output_embeddings())  # type: ignore[operator]
    parts: dict[str, int] = {}
    in_blocks = trained_in_blocks = matrices = multiplied = trained_multiplied = 0
    share, of_blocks = _expert_share(model.config), max(1, len(blocks))
    for part, name, p in _parts(model.model, head):
        n, trained = p.numel(), p.requires_grad
        parts[part] = parts.get(part, 0) + n
        if id(p) in inside:
            in_blocks, trained_in_blocks = in_blocks + n, trained_in_blocks + n * trained
            matrices += n * (trained and p.ndim == 2)
        if p is head or (p.ndim >= 2 and part not in ("embedding", "positions")):
            active = round(n * share) if "experts." in name or name.endswith("experts") else n
            multiplied, trained_multiplied = multiplied + active, trained_multiplied + active * trained
    heads, width = _attention_shape(model)
    return HfSizes(
        like=_like(model, len(blocks), parts, heads), vocab=model.vocab, parts=_ordered(parts),
        trained=sum(p.numel() for p in model.parameters() if p.requires_grad),
        block=-(-in_blocks // of_blocks), trained_block=-(-trained_in_blocks // of_blocks),
        block_matrices=matrices // of_blocks, multiplied=multiplied, trained_multiplied=trained_multiplied,
        attention=len(blocks) * width, head=head.numel() if head is not None else 0,
        squares=getattr(model.config, "_attn_implementation", "") == "eager", whole_logits=not model._plain_head,
        extra_hidden=3 if any(type(m).__name__ == "NewGELUActivation" for m in model.modules()) else 0,
    )  # fmt: skip


def _weight(module: Any) -> nn.Parameter | None:
    return getattr(module, "weight", None)


def _parts(model: nn.Module, head: nn.Parameter | None) -> Iterator[tuple[str, str, nn.Parameter]]:
    """Every parameter once, with the part it belongs to and its name."""
    seen: set[int] = set()
    table = _weight(model.get_input_embeddings())  # type: ignore[operator]
    head_module = model.get_output_embeddings()  # type: ignore[operator]
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            if p is None or id(p) in seen:
                continue
            seen.add(id(p))
            yield _part(f"{path}.{name}".lower(), module, p, table, head, head_module), f"{path}.{name}", p


def _part(name: str, module: nn.Module, p: nn.Parameter, table: Any, head: Any, head_module: Any) -> str:
    if is_adapter(name):
        return "adapters"
    if p is table:
        return "embedding"
    if p is head or module is head_module:
        return "head"
    if isinstance(module, nn.Embedding):
        return "positions"
    if "norm" in type(module).__name__.lower():
        return "norms"
    if any(word in name for word in FEED_FORWARD_NAMES):
        return "feed_forward"
    if any(word in name for word in ATTENTION_NAMES):
        return "attention"
    return "other"


def _ordered(parts: dict[str, int]) -> dict[str, int]:
    order = ("embedding", "positions", "attention", "feed_forward", "norms", "head", "adapters", "other")
    return {name: parts[name] for name in order if parts.get(name)}


def _expert_share(config: Any) -> float:
    """Of a mixture of experts, the share of them that one token goes through; 1 where there is none."""
    text = config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(text, name, None))), 0)
    chosen = getattr(text, "num_experts_per_tok", None)
    return chosen / experts if experts and chosen else 1.0


def _attention_shape(model: HfModel) -> tuple[int, int]:
    """Heads, and the width of all queries."""
    text = model.config.get_text_config()
    heads = int(getattr(text, "num_attention_heads", 0) or 1)
    size = getattr(text, "head_dim", None) or int(text.hidden_size) // heads
    return heads, heads * int(size)


def _like(model: HfModel, layers: int, parts: dict[str, int], heads: int) -> ModelSettings:
    """The settings of our own GPT that is nearest in shape."""
    text = model.config.get_text_config()
    width = int(text.hidden_size)
    hidden = next((int(n) for name in ("intermediate_size", "n_inner", "ffn_dim") if (n := getattr(text, name, 0))), 0)
    hidden = hidden or 4 * width
    gated = parts.get("feed_forward", 0) > 2.5 * max(1, layers) * width * hidden
    drops = ("attn_pdrop", "attention_dropout", "resid_pdrop", "hidden_dropout", "dropout")
    kinds = {type(m).__name__.lower() for m in model.modules()}
    names = {name for name, _ in model.named_modules()}
    rotary = any("rotary" in name for name in names | kinds)
    return ModelSettings(
        layers=max(1, layers), heads=heads, kv_heads=int(getattr(text, "num_key_value_heads", 0) or 0), width=width,
        ff_width=hidden, context=model.context, norm="rmsnorm" if any("rms" in k for k in kinds) else "layernorm",
        position="learned" if parts.get("positions") else "rope" if rotary else "none",
        activation="swiglu" if gated else "gelu", tie_head=not parts.get("head"),
        dropout=min(0.99, max(float(getattr(text, name, 0) or 0) for name in drops)),
    )  # fmt: skip


def count_flops(model: HfModel, length: int) -> float | None:
    """FLOPs of a token, forward and backward, as torch's counter finds them on the meta device; None where it cannot.

    Attention is counted over the whole square. The model is on the meta device afterwards, buffers included.

    Args:
        model: nothing of it is kept.
        length: tokens in the sequence.
    """
    from torch.utils.flop_counter import FlopCounterMode

    try:
        model.to("meta")
        model.model.set_attn_implementation("eager")  # type: ignore[operator]
        model.config.pad_token_id = None  # else it would look for padding among the tokens
        tokens = torch.zeros(1, length, dtype=torch.int64, device="meta")
        with FlopCounterMode(display=False) as counter:
            model.model(
                input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=False
            ).logits.sum().backward()
    except Exception:  # a network that looks at its numbers cannot be run without them: then the rule alone is known
        return None
    return float(counter.get_total_flops()) / length
