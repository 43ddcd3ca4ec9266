"""Weights of our GPT in the layouts of `transformers`, and back: GPT-2 and LLaMA. Torch only.

GPT-2 holds models with learned positions, LayerNorm and an ungated feed-forward layer; LLaMA those with RoPE, RMSNorm and
SwiGLU. Both give the same logits. What neither can say (QK-norm, capped logits, no final norm, ...) is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.model.gpt import NORM_EPS
from windlass.recipe.settings import ModelSettings

Weights = Mapping[str, Tensor]

ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu2": "relu2"}
"""Our names and those of GPT-2's `activation_function`."""
_SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_new", "gelu_python": "gelu"}

_GPT2 = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "norm": "transformer.ln_f",
    "head": "lm_head",
    "attn_norm": "ln_1",
    "attn.qkv": "attn.c_attn",
    "attn.out": "attn.c_proj",
    "ff_norm": "ln_2",
    "ff.up": "mlp.c_fc",
    "ff.down": "mlp.c_proj",
}
_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attn_norm": "input_layernorm",
    "attn.qkv": "self_attn.{}_proj",  # three matrices there, one here
    "attn.out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    "ff.gate": "mlp.gate_proj",
    "ff.up": "mlp.up_proj",
    "ff.down": "mlp.down_proj",
}


def family(settings: ModelSettings) -> str:
    """Which architecture of `transformers` gives the same logits: `gpt2` or `llama`.

    Raises:
        UserError: Neither does; the message names the settings that stand in the way.
    """
    m = settings
    never = {
        "model.final_norm = false": not m.final_norm,
        "model.qk_norm": m.qk_norm,
        "model.logit_cap": m.logit_cap > 0,
        "model.head_bias": m.head_bias,
    }
    gpt2 = {
        f'model.position = "{m.position}"': m.position != "learned",
        f'model.norm = "{m.norm}"': m.norm != "layernorm",
        f'model.activation = "{m.activation}"': m.activation not in ACTIVATIONS,
        f"model.kv_heads = {m.kv_heads}": m.kv_heads_ != m.heads,
    }
    llama = {
        f'model.position = "{m.position}"': m.position != "rope",
        f'model.norm = "{m.norm}"': m.norm != "rmsnorm",
        f'model.activation = "{m.activation}"': m.activation != "swiglu",
    }
    name, against = min((("gpt2", gpt2), ("llama", llama)), key=lambda pair: sum(pair[1].values()))
    reasons = [key for key, stands in {**never, **against}.items() if stands]
    if reasons:
        raise UserError(
            f"no architecture of transformers gives this model's logits: nearest is {name}, but for {', '.join(reasons)}"
        )
    return name


def hf_config(settings: ModelSettings, vocab: int) -> dict[str, Any]:
    """The `config.json` of a model in its `family`; tokens that begin and end a text are left to the caller."""
    m, kind = settings, family(settings)
    shared = {"vocab_size": vocab, "tie_word_embeddings": m.tie_head, "initializer_range": m.init_std}
    if kind == "gpt2":
        return shared | {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_positions": m.context,
            "n_embd": m.width,
            "n_layer": m.layers,
            "n_head": m.heads,
            "n_inner": m.ff_width_,
            "activation_function": ACTIVATIONS[m.activation],
            "layer_norm_epsilon": NORM_EPS,
            **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), m.dropout),
        }
    return shared | {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "max_position_embeddings": m.context,
        "hidden_size": m.width,
        "intermediate_size": m.ff_width_,
        "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads,
        "num_key_value_heads": m.kv_heads_,
        "head_dim": m.width // m.heads,
        "hidden_act": "silu",
        "rms_norm_eps": NORM_EPS,
        "rope_theta": m.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
        "attention_bias": m.attn_bias,
        "mlp_bias": m.ff_bias,
        "attention_dropout": m.dropout,
    }


def to_hf(weights: Weights, settings: ModelSettings) -> dict[str, Tensor]:
    """A GPT's state dict under the names and in the layout of its `family`; a tied head is left out.

    GPT-2 has a bias everywhere: those that our model lacks are zero there.
    """
    kind, found = family(settings), {}
    for ours, tensor in weights.items():
        theirs = _their_name(ours, kind)
        if kind == "llama" and ".attn.qkv." in ours:
            for part, piece in zip("qkv", tensor.split(_qkv_rows(settings)), strict=True):
                found[theirs.format(part)] = piece.contiguous()
        elif kind == "gpt2" and _is_transposed(ours):
            found[theirs] = tensor.t().contiguous()
        else:
            found[theirs] = tensor.contiguous()
    if kind == "gpt2":
        for name in [n for n in found if (n.endswith(".weight") and ".h." in n) or ".ln_f." in n]:
            found.setdefault(name.removesuffix("weight") + "bias", found[name].new_zeros(found[name].shape[-1]))
    return found


def from_hf(weights: Weights, config: Mapping[str, Any], settings: ModelSettings, vocab: int) -> dict[str, Tensor]:
    """The reverse of `to_hf`, for a model of these settings.

    A file with more positions than the model's context is cut; one with fewer tokens than `vocab` (which may be padded for
    speed) is filled up with its mean embedding.

    Args:
        weights: The file's tensors, with or without the prefix `transformer.` or `model.`.
        config: The file's `config.json`.
        settings: The model that takes the weights.
        vocab: Rows of its embedding.

    Raises:
        UserError: The file's architecture, shape or vocabulary is another one, or it has biases that the model lacks.
    """
    kind = family(settings)
    _check_config(config, hf_config(settings, vocab))
    given = {_with_prefix(name, kind): tensor for name, tensor in weights.items()}
    found = {}
    for ours, shape in _shapes(settings, vocab).items():
        theirs = _their_name(ours, kind)
        parts = [theirs.format(p) for p in "qkv"] if "{}" in theirs else [theirs]
        missing = [part for part in parts if part not in given]
        if missing:
            raise UserError(f"the weights hold no {missing[0]}")
        tensor = torch.cat([given.pop(part) for part in parts])
        if kind == "gpt2" and _is_transposed(ours):
            tensor = tensor.t().contiguous()
        found[ours] = _fitted(ours, theirs, tensor, shape)
    if settings.tie_head:
        given.pop("lm_head.weight", None)
    left = [name for name, tensor in given.items() if _matters(name, tensor)]
    if left:
        raise UserError(
            f"the weights hold {left[0]}, for which the model has no place "
            "(model.attn_bias, ff_bias and norm_bias say whether it has biases)"
        )
    return found


def _their_name(ours: str, kind: str) -> str:
    """`blocks.3.attn.out.weight` as the family calls it; `{}` stands for q, k and v where they are apart."""
    table, folder = (_GPT2, "transformer.h") if kind == "gpt2" else (_LLAMA, "model.layers")
    if ours.startswith("blocks."):
        _, number, rest = ours.split(".", 2)
        module, tensor = rest.rsplit(".", 1)
        return f"{folder}.{number}.{table[module]}.{tensor}"
    module, tensor = ours.rsplit(".", 1)
    return f"{table[module]}.{tensor}"


def _is_transposed(ours: str) -> bool:
    """Whether GPT-2 keeps this matrix as [in, out]: those inside the blocks."""
    return ours.startswith("blocks.") and ours.endswith(".weight") and "norm" not in ours


def _qkv_rows(settings: ModelSettings) -> list[int]:
    head = settings.width // settings.heads
    return [settings.width, settings.kv_heads_ * head, settings.kv_heads_ * head]


def _shapes(settings: ModelSettings, vocab: int) -> dict[str, torch.Size]:
    from windlass.model.gpt import GPT

    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in GPT(settings, vocab).state_dict().items()}


def _with_prefix(name: str, kind: str) -> str:
    prefix = "transformer." if kind == "gpt2" else "model."
    return name if name.startswith((prefix, "lm_head.")) else prefix + name


def _matters(name: str, tensor: Tensor) -> bool:
    """Whether a tensor that is left over changes the logits: a mask of old GPT-2 files and a zero bias do not."""
    if name.endswith((".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")):
        return False
    return not (name.endswith(".bias") and not bool(tensor.any()))


def _fitted(ours: str, theirs: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    """The tensor in the model's shape: positions cut, vocabulary filled up, everything else as it is."""
    if ours == "positions.weight" and tensor.shape[0] > shape[0]:
        tensor = tensor[: shape[0]]
    if ours in ("embedding.weight", "head.weight") and tensor.shape[0] < shape[0]:
        rows = tensor.mean(0, keepdim=True).expand(shape[0] - tensor.shape[0], -1)
        tensor = torch.cat([tensor, rows])
    if tensor.shape != shape:
        raise UserError(f"{theirs} has the shape {list(tensor.shape)}, and the model wants {list(shape)}")
    return tensor.clone()


def _check_config(theirs: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a file whose architecture is not the model's; sizes that only tables have are looked at later."""
    if theirs.get("model_type") != wanted["model_type"]:
        raise UserError(
            f"the weights are those of a {theirs.get('model_type')!r}, and the model's settings are those of a "
            f"{wanted['model_type']!r}"
        )
    free = {
        "vocab_size", "n_positions", "max_position_embeddings", "initializer_range", "architectures", "rope_theta",
        "embd_pdrop", "attn_pdrop", "resid_pdrop", "attention_dropout",
    }  # fmt: skip
    given = _normalised(theirs)
    wrong = [
        f"{key} is {given.get(key)!r} there and {value!r} here"
        for key, value in _normalised(wanted).items()
        if key not in free and given.get(key) != value
    ]
    if wrong:
        raise UserError(f"the weights belong to another model: {'; '.join(wrong)}")


def _normalised(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with defaults and synonyms resolved."""
    c = dict(config)
    if c["model_type"] == "gpt2":
        c["n_inner"] = c.get("n_inner") or 4 * c.get("n_embd", 768)
        c["activation_function"] = c.get("activation_function", "gelu_new")
        c["activation_function"] = _SAME_ACTIVATION.get(c["activation_function"], c["activation_function"])
        c.setdefault("layer_norm_epsilon", 1e-5)
        c.setdefault("tie_word_embeddings", True)
        return c
    c["num_key_value_heads"] = c.get("num_key_value_heads") or c.get("num_attention_heads")
    c["head_dim"] = c.get("head_dim") or c.get("hidden_size", 0) // c.get("num_attention_heads", 1)
    rope = c.get("rope_parameters") or c.get("rope_scaling") or {}
    c["rope_parameters"] = {
        "rope_type": rope.get("rope_type", rope.get("type", "default")),
        "rope_theta": float(rope.get("rope_theta", c.get("rope_theta", 10_000.0))),
    }
    for key, value in {"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False}.items():
        c.setdefault(key, value)
    c.setdefault("hidden_act", "silu")
    c.setdefault("rms_norm_eps", 1e-6)
    return c
