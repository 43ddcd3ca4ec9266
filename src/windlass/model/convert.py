"""Our GPT as GPT-2 or Llama of `transformers`, and back: which of them it is, its configuration, its weights.

One map of names (`their_names`) serves both directions. A tensor is read only when it is needed, so that neither side is
held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.recipe.settings import ModelSettings

Read = Callable[[str], Tensor]
"""Gives the tensor of a name, whole, on the CPU."""

GPT2_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu2": "relu2"}
"""Our names of activations, and those of `transformers`."""
BIASES = ("attn_bias", "ff_bias", "norm_bias")
"""The settings that say which modules of the blocks have a bias."""

OUTSIDE = {
    "gpt2": {
        "embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head",
    },
    "llama": {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"},
}  # fmt: skip
INSIDE = {
    "gpt2": {
        "attn_norm": "ln_1", "ff_norm": "ln_2", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj",
        "ff.up": "mlp.c_fc", "ff.down": "mlp.c_proj",
    },
    "llama": {
        "attn_norm": "input_layernorm", "ff_norm": "post_attention_layernorm",
        "attn.qkv": "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "attn.out": "self_attn.o_proj",
        "ff.gate": "mlp.gate_proj", "ff.up": "mlp.up_proj", "ff.down": "mlp.down_proj",
    },
}  # fmt: skip
"""Our modules outside and inside a block, and theirs; several of theirs lie in ours on top of one another."""
BLOCKS = {"gpt2": "transformer.h", "llama": "model.layers"}


def their_names(kind: str, name: str) -> tuple[str, ...]:
    """The names of one of our weights in `transformers`."""
    module, _, leaf = name.rpartition(".")
    if not module.startswith("blocks."):
        return (f"{OUTSIDE[kind][module]}.{leaf}",)
    _, number, inner = module.split(".", 2)
    return tuple(f"{BLOCKS[kind]}.{number}.{theirs}.{leaf}" for theirs in INSIDE[kind][inner].split())


def our_names(kind: str, m: ModelSettings, biases: Collection[str]) -> Iterator[str]:
    """Our weights' names in order, with those of `BIASES` that are given; a bias follows its weight."""
    yield from ("embedding.weight", "positions.weight") if kind == "gpt2" else ("embedding.weight",)
    for i in range(m.layers):
        for module in INSIDE[kind]:
            yield f"blocks.{i}.{module}.weight"
            if f"{'norm' if 'norm' in module else module.partition('.')[0]}_bias" in biases:
                yield f"blocks.{i}.{module}.bias"
    yield from ("norm.weight", "norm.bias") if "norm_bias" in biases else ("norm.weight",)
    if not m.tie_head:
        yield "head.weight"


def own_biases(m: ModelSettings) -> set[str]:
    """Which of `BIASES` our model has."""
    return {key for key in BIASES if getattr(m, key) and (key != "norm_bias" or m.norm == "layernorm")}


def to_hf(m: ModelSettings, read: Read) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of `transformers`, one after the other.

    GPT-2 has all biases: those that we do not have are zero there, and its matrices are transposed.
    """
    kind = architecture(m)
    own = set(our_names(kind, m, own_biases(m)))
    tensor = torch.empty(0)
    for name in our_names(kind, m, BIASES if kind == "gpt2" else own_biases(m)):
        tensor = read(name) if name in own else tensor.new_zeros(tensor.shape[0])
        theirs = their_names(kind, name)
        if kind == "gpt2" and name.startswith("blocks.") and tensor.dim() == 2:
            yield theirs[0], tensor.t().contiguous()
        elif len(theirs) == 1:
            yield theirs[0], tensor
        else:
            head = m.width // m.heads
            rows = [m.heads * head, m.kv_heads_ * head, m.kv_heads_ * head]
            yield from zip(theirs, (part.contiguous() for part in tensor.split(rows)), strict=True)


def from_hf(m: ModelSettings, name: str, read: Read) -> Tensor:
    """One of our weights, by its name, from the weights of the matching architecture."""
    kind = "gpt2" if m.position == "learned" else "llama"
    parts = [read(theirs) for theirs in their_names(kind, name)]
    tensor = parts[0] if len(parts) == 1 else torch.cat(parts)
    if name == "positions.weight":
        return tensor[: m.context]
    return tensor.t() if kind == "gpt2" and name.startswith("blocks.") and tensor.dim() == 2 else tensor


def dropped(m: ModelSettings, theirs: dict[str, Any]) -> list[str]:
    """Our names of the biases that their weights have and our model has not: they must be zero for the two to be equal."""
    kind = "gpt2" if m.position == "learned" else "llama"
    own = set(our_names(kind, m, own_biases(m)))
    return [name for name in our_names(kind, m, [key for key in BIASES if theirs.get(key)]) if name not in own]


def differences(m: ModelSettings) -> dict[str, list[str]]:
    """For each architecture of `transformers` what about a model is not as there; empty where it matches."""
    both = {
        "model.qk_norm": m.qk_norm,
        "model.logit_cap": m.logit_cap > 0,
        "model.head_bias": m.head_bias,
        "model.final_norm = false": not m.final_norm,
    }
    gpt2 = {
        f'model.position = "{m.position}" (GPT-2 has "learned")': m.position != "learned",
        f'model.norm = "{m.norm}" (GPT-2 has "layernorm")': m.norm != "layernorm",
        f'model.activation = "{m.activation}" (GPT-2 has no gated one)': m.activation not in GPT2_ACTIVATIONS,
        f"model.kv_heads = {m.kv_heads} (GPT-2 has as many as heads)": m.kv_heads_ != m.heads,
    }
    llama = {
        f'model.position = "{m.position}" (Llama has "rope")': m.position != "rope",
        f'model.norm = "{m.norm}" (Llama has "rmsnorm")': m.norm != "rmsnorm",
        f'model.activation = "{m.activation}" (Llama has "swiglu")': m.activation != "swiglu",
    }
    return {
        name: [text for text, differs in {**own, **both}.items() if differs]
        for name, own in (("gpt2", gpt2), ("llama", llama))
    }


def architecture(m: ModelSettings) -> str:
    """`gpt2` or `llama`; a UserError says what differs from the nearer of them where it is neither."""
    by_kind = differences(m)
    name = min(by_kind, key=lambda n: len(by_kind[n]))
    if by_kind[name]:
        title = {"gpt2": "GPT-2", "llama": "Llama"}[name]
        raise UserError(
            f"no architecture of transformers computes what this model does; from {title}, the nearest, it differs in "
            + ", ".join(by_kind[name])
        )
    return name


def config(m: ModelSettings, vocab: int, eot: int | None) -> dict[str, Any]:
    """The `config.json` that goes with a model's weights."""
    common = {
        "vocab_size": vocab, "bos_token_id": eot, "eos_token_id": eot, "tie_word_embeddings": m.tie_head,
        "initializer_range": m.init_std, "dtype": "float32",
    }  # fmt: skip
    if architecture(m) == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": m.layers, "n_head": m.heads,
            "n_embd": m.width, "n_inner": m.ff_width_, "n_positions": m.context, "layer_norm_epsilon": m.norm_eps,
            "activation_function": GPT2_ACTIVATIONS[m.activation],
            "attn_pdrop": m.dropout, "embd_pdrop": m.dropout, "resid_pdrop": m.dropout, **common,
        }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads, "num_key_value_heads": m.kv_heads_, "hidden_size": m.width,
        "head_dim": m.width // m.heads, "intermediate_size": m.ff_width_, "max_position_embeddings": m.context,
        "rms_norm_eps": m.norm_eps, "hidden_act": "silu", "attention_bias": m.attn_bias, "mlp_bias": m.ff_bias,
        "attention_dropout": m.dropout,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta}, "rope_theta": m.rope_theta, **common,
    }  # fmt: skip


def settings_of(config: Any) -> dict[str, Any]:
    """The settings `[model]` of our GPT that compute what a GPT-2 or Llama of `transformers` does; `vocab` among them.

    Raises:
        UserError: It is neither, or a variant of them that ours is not.
    """
    kind = getattr(config, "model_type", "")
    settings: dict[str, Any] = {"final_norm": True}
    if kind == "gpt2":
        ours = {theirs: mine for mine, theirs in GPT2_ACTIVATIONS.items()}
        unlike = {
            "activation_function": config.activation_function not in ours,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        }
        settings |= {
            "layers": config.n_layer, "heads": config.n_head, "kv_heads": config.n_head, "width": config.n_embd,
            "ff_width": config.n_inner or 4 * config.n_embd, "context": config.n_positions, "position": "learned",
            "norm": "layernorm", "norm_bias": True, "norm_eps": float(config.layer_norm_epsilon),
            "activation": ours.get(config.activation_function), "attn_bias": True, "ff_bias": True,
        }  # fmt: skip
    elif kind == "llama":
        rope = getattr(config, "rope_parameters", None) or {}
        head_width = config.head_dim or config.hidden_size // config.num_attention_heads
        unlike = {
            "hidden_act": config.hidden_act != "silu",
            "rope scaling": rope.get("rope_type", "default") != "default",
            "head_dim": head_width * config.num_attention_heads != config.hidden_size,
        }
        settings |= {
            "layers": config.num_hidden_layers, "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads, "width": config.hidden_size, "ff_width": config.intermediate_size,
            "context": config.max_position_embeddings, "position": "rope",
            "rope_theta": float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))), "norm": "rmsnorm",
            "norm_eps": float(config.rms_norm_eps), "activation": "swiglu", "attn_bias": config.attention_bias,
            "ff_bias": config.mlp_bias,
        }  # fmt: skip
    else:
        raise UserError(
            f"model.init_from: weights of {kind or 'an unknown architecture'} do not fit our GPT; GPT-2 and Llama do"
        )
    if names := [name for name, differs in unlike.items() if differs]:
        raise UserError(f"model.init_from: this {kind} is a variant that our GPT is not: {', '.join(names)}")
    return settings | {"tie_head": bool(config.tie_word_embeddings), "vocab": config.vocab_size}


def check_fit(m: ModelSettings, vocab: int, theirs: dict[str, Any], where: str) -> None:
    """Raise a UserError that lists every setting that must be changed for weights to fit.

    A shorter context is fine, and so are more rows of the embedding than there are weights for, and biases that we do not
    have where they are zero there (see `dropped`).
    """
    mine = {**m.model_dump(), "kv_heads": m.kv_heads_, "ff_width": m.ff_width_, "vocab": vocab}
    wanted = {**theirs, "qk_norm": False, "logit_cap": 0.0, "head_bias": False}

    def fits(key: str, value: Any) -> bool:
        if key == "context":
            return bool(mine[key] <= value)
        if key == "vocab":
            return bool(mine[key] >= value)
        return mine[key] == value or (key in BIASES and value is True)

    def toml(value: Any) -> str:
        return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)

    lines = [
        f"  model.{key} = {toml(value)}  (it is {toml(mine[key])})"
        for key, value in wanted.items()
        if not fits(key, value)
    ]
    if lines:
        raise UserError("\n".join([f"model.init_from: the weights of {where} are of another shape; write", *lines]))
