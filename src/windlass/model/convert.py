"""Our GPT as GPT-2 or Llama of `transformers`, and back: which of them it is, its configuration, its weights.

Each table serves both directions. A tensor is read only when it is needed, so that neither side is held as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from windlass.errors import UserError
from windlass.recipe.network import ModelSettings

Read = Callable[[str], Tensor]  # gives the tensor of a name, whole, on the CPU
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu2": "relu2"}  # our names, and GPT-2's
BIASES = {"norm_bias": "norm", "attn_bias": ".attn.", "ff_bias": ".ff."}
"""The settings that say which modules have a bias, and what is in the names of those modules."""
MODULES = {
    "gpt2": {
        "embedding": "transformer.wte", "positions": "transformer.wpe",
        "blocks.#.attn_norm": "transformer.h.#.ln_1", "blocks.#.ff_norm": "transformer.h.#.ln_2",
        "blocks.#.attn.qkv": "transformer.h.#.attn.c_attn", "blocks.#.attn.out": "transformer.h.#.attn.c_proj",
        "blocks.#.ff.up": "transformer.h.#.mlp.c_fc", "blocks.#.ff.down": "transformer.h.#.mlp.c_proj",
        "norm": "transformer.ln_f", "head": "lm_head",
    },
    "llama": {
        "embedding": "model.embed_tokens",
        "blocks.#.attn_norm": "model.layers.#.input_layernorm", "blocks.#.ff_norm": "model.layers.#.post_attention_layernorm",
        "blocks.#.attn.qkv": "model.layers.#.self_attn.q_proj model.layers.#.self_attn.k_proj model.layers.#.self_attn.v_proj",
        "blocks.#.attn.out": "model.layers.#.self_attn.o_proj", "blocks.#.ff.gate": "model.layers.#.mlp.gate_proj",
        "blocks.#.ff.up": "model.layers.#.mlp.up_proj", "blocks.#.ff.down": "model.layers.#.mlp.down_proj",
        "norm": "model.norm", "head": "lm_head",
    },
}  # fmt: skip
"""Our modules in order, and those of `transformers`; several of those lie in ours on top of one another."""
SETTINGS = {
    "gpt2": {
        "layers": "n_layer", "heads": "n_head", "width": "n_embd", "ff_width": "n_inner", "context": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
    "llama": {
        "layers": "num_hidden_layers", "heads": "num_attention_heads", "kv_heads": "num_key_value_heads",
        "width": "hidden_size", "ff_width": "intermediate_size", "context": "max_position_embeddings",
        "norm_eps": "rms_norm_eps", "attn_bias": "attention_bias", "ff_bias": "mlp_bias",
    },
}  # fmt: skip
"""Our settings, and the entries of a configuration that say the same."""
COMMON: dict[str, Any] = {"qk_norm": (False,), "logit_cap": (0.0,), "head_bias": (False,), "final_norm": (True,)}
ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {"position": ("learned",), "norm": ("layernorm",), "activation": tuple(ACTIVATIONS), **COMMON},
    "llama": {"position": ("rope",), "norm": ("rmsnorm",), "activation": ("swiglu",), **COMMON},
}
"""What our settings may be where the architecture has no choice."""


def their_names(m: ModelSettings, name: str) -> list[str]:
    """The names of one of our weights in `transformers`."""
    module, _, leaf = name.rpartition(".")
    number = re.search(r"\d+", module)
    there = MODULES["gpt2" if m.position == "learned" else "llama"][re.sub(r"\d+", "#", module)]
    return [f"{one}.{leaf}".replace("#", number.group() if number else "") for one in there.split()]


def our_names(kind: str, m: ModelSettings, biases: Collection[str]) -> Iterator[str]:
    """Our weights' names, with the given ones of `BIASES`; a bias follows its weight."""
    first, *modules = MODULES[kind]
    inside = [name for name in modules if "#" in name]
    outside = [name for name in modules if "#" not in name and not (name == "head" and m.tie_head)]
    for module in (first, *(name.replace("#", str(i)) for i in range(m.layers) for name in inside), *outside):
        yield f"{module}.weight"
        if next((key for key, part in BIASES.items() if part in module), "") in biases:
            yield f"{module}.bias"


def own_biases(m: ModelSettings) -> set[str]:
    """Which of `BIASES` our model has."""
    return {key for key in BIASES if getattr(m, key) and (key != "norm_bias" or m.norm == "layernorm")}


def to_hf(m: ModelSettings, read: Read) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of `transformers`, one after the other.

    GPT-2 has all biases: those that we do not have are zero there, and its matrices are transposed.
    """
    kind = architecture(m)
    own, tensor = set(our_names(kind, m, own_biases(m))), torch.empty(0)
    for name in our_names(kind, m, BIASES if kind == "gpt2" else own_biases(m)):
        tensor = read(name) if name in own else tensor.new_zeros(tensor.shape[0])
        there = their_names(m, name)
        if kind == "gpt2" and name.startswith("blocks.") and tensor.dim() == 2:
            yield there[0], tensor.t().contiguous()
        elif len(there) == 1:
            yield there[0], tensor
        else:
            head = m.width // m.heads
            rows = [m.heads * head, m.kv_heads_ * head, m.kv_heads_ * head]
            yield from zip(there, (part.contiguous() for part in tensor.split(rows)), strict=True)


def from_hf(m: ModelSettings, name: str, read: Read) -> Tensor:
    """One of our weights, by its name, from the weights of the matching architecture."""
    tensor = torch.cat([read(there) for there in their_names(m, name)])
    if name == "positions.weight":
        return tensor[: m.context]
    return tensor.t() if m.position == "learned" and name.startswith("blocks.") and tensor.dim() == 2 else tensor


def dropped(m: ModelSettings, there: dict[str, Any]) -> list[str]:
    """Our names of the biases that their weights have and our model has not: they must be zero for the two to be equal."""
    kind = "gpt2" if m.position == "learned" else "llama"
    own = set(our_names(kind, m, own_biases(m)))
    return [name for name in our_names(kind, m, [key for key in BIASES if there.get(key)]) if name not in own]


def toml(value: Any) -> str:
    """A setting's value as it stands in a recipe."""
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def architecture(m: ModelSettings) -> str:
    """`gpt2` or `llama`; a UserError says what differs from the nearer of them where it is neither."""
    allowed = {**ALLOWED, "gpt2": {**ALLOWED["gpt2"], "kv_heads": (0, m.heads)}}
    differs = {
        kind: [
            f"model.{key} = {toml(getattr(m, key))}" for key, values in keys.items() if getattr(m, key) not in values
        ]
        for kind, keys in allowed.items()
    }
    kind = min(differs, key=lambda kind: len(differs[kind]))
    if differs[kind]:
        nearest = {"gpt2": "GPT-2", "llama": "Llama"}[kind]
        raise UserError(f"transformers has no such model; {nearest} differs in {', '.join(differs[kind])}")
    return kind


def config(m: ModelSettings, vocab: int, eot: int | None) -> dict[str, Any]:
    """The `config.json` that goes with a model's weights."""
    kind = architecture(m)
    resolved = {**m.model_dump(), "kv_heads": m.kv_heads_, "ff_width": m.ff_width_}
    entries = {there: resolved[key] for key, there in SETTINGS[kind].items()} | {
        "model_type": kind, "vocab_size": vocab, "bos_token_id": eot, "eos_token_id": eot,
        "tie_word_embeddings": m.tie_head, "initializer_range": m.init_std, "dtype": "float32",
    }  # fmt: skip
    if kind == "gpt2":
        return entries | dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), m.dropout) | {
            "architectures": ["GPT2LMHeadModel"], "activation_function": ACTIVATIONS[m.activation],
        }  # fmt: skip
    return entries | {
        "architectures": ["LlamaForCausalLM"], "head_dim": m.width // m.heads, "hidden_act": "silu",
        "attention_dropout": m.dropout, "rope_theta": m.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
    }  # fmt: skip


def settings_of(config: Any) -> dict[str, Any]:
    """The settings `[model]` of our GPT that compute what a GPT-2 or Llama of `transformers` does; `vocab` among them.

    Raises UserError where it is neither, or a variant of them that ours is not.
    """
    kind = getattr(config, "model_type", "")
    if kind not in SETTINGS:
        raise UserError(f"model.init_from: weights of architecture {kind!r} do not fit; GPT-2's and Llama's do")
    settings = {key: getattr(config, there) for key, there in SETTINGS[kind].items()}
    settings |= {key: values[0] for key, values in ALLOWED[kind].items()}
    if kind == "gpt2":
        ours = {there: own for own, there in ACTIVATIONS.items()}
        unlike = {
            "activation_function": config.activation_function not in ours,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        }
        settings |= dict.fromkeys(BIASES, True) | {"activation": ours.get(config.activation_function)}
        settings |= {"kv_heads": config.n_head, "ff_width": config.n_inner or 4 * config.n_embd}
    else:
        rope = getattr(config, "rope_parameters", None) or {}
        head_width = config.head_dim or config.hidden_size // config.num_attention_heads
        unlike = {
            "hidden_act": config.hidden_act != "silu",
            "rope scaling": rope.get("rope_type", "default") != "default",
            "head_dim": head_width * config.num_attention_heads != config.hidden_size,
        }
        settings["rope_theta"] = float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0)))
    if names := [name for name, differs in unlike.items() if differs]:
        raise UserError(f"model.init_from: this {kind} is a variant that our GPT is not: {', '.join(names)}")
    return settings | {"tie_head": bool(config.tie_word_embeddings), "vocab": config.vocab_size}


def check_fit(m: ModelSettings, vocab: int, there: dict[str, Any], where: str) -> None:
    """Raise a UserError that lists every setting that must be changed for weights to fit.

    A shorter context is fine, and so are more rows of the embedding than there are weights for, and biases that we do not
    have where they are zero there (see `dropped`).
    """
    own = {**m.model_dump(), "kv_heads": m.kv_heads_, "ff_width": m.ff_width_, "vocab": vocab}
    fits = {"context": own["context"] <= there["context"], "vocab": vocab >= there["vocab"]}
    fits |= {key: True for key in BIASES if there.get(key)}
    lines = [
        f"  model.{key} = {toml(value)}  (it is {toml(own[key])})"
        for key, value in there.items()
        if not fits.get(key, own[key] == value)
    ]
    if lines:
        raise UserError("\n".join([f"model.init_from: the weights of {where} are of another shape; write", *lines]))
