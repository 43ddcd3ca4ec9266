"""Our GPT as GPT-2, Llama, Qwen3, Arcee or Apertus of `transformers`, by tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from windlass.recipe.network import ModelSettings

Read = Callable[[str], Tensor]  # gives the tensor of a name, whole, on the CPU
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu2": "relu2"}
"""Our names of activations, and GPT-2's."""
BIASES = {"norm_bias": "norm", "attn_bias": ".attn.", "ff_bias": ".ff."}
"""The settings that give modules a bias, each with a part of these modules' names."""
MODULES = {
    "embedding": ("transformer.wte", "model.embed_tokens"),
    "positions": ("transformer.wpe", ""),
    "blocks.#.attn_norm": ("transformer.h.#.ln_1", "model.layers.#.input_layernorm"),
    "blocks.#.ff_norm": ("transformer.h.#.ln_2", "model.layers.#.post_attention_layernorm"),
    "blocks.#.attn.qkv": (
        "transformer.h.#.attn.c_attn",
        " ".join(f"model.layers.#.self_attn.{one}_proj" for one in "qkv"),
    ),
    "blocks.#.attn.out": ("transformer.h.#.attn.c_proj", "model.layers.#.self_attn.o_proj"),
    "blocks.#.ff.gate": ("", "model.layers.#.mlp.gate_proj"),
    "blocks.#.ff.up": ("transformer.h.#.mlp.c_fc", "model.layers.#.mlp.up_proj"),
    "blocks.#.ff.down": ("transformer.h.#.mlp.c_proj", "model.layers.#.mlp.down_proj"),
    "norm": ("transformer.ln_f", "model.norm"),
    "head": ("lm_head", "lm_head"),
}
"""Our modules, GPT-2's and Llama's; ours may stack the rows of several of theirs."""
APERTUS = {
    "blocks.#.attn_norm": "model.layers.#.attention_layernorm",
    "blocks.#.ff_norm": "model.layers.#.feedforward_layernorm",
}
"""Names that Apertus has in place of Llama's; Qwen3 and Arcee have Llama's."""
SETTINGS = {
    "layers": ("n_layer", "num_hidden_layers"),
    "heads": ("n_head", "num_attention_heads"),
    "kv_heads": ("", "num_key_value_heads"),
    "width": ("n_embd", "hidden_size"),
    "ff_width": ("n_inner", "intermediate_size"),
    "context": ("n_positions", "max_position_embeddings"),
    "norm_eps": ("layer_norm_epsilon", "rms_norm_eps"),
    "attn_bias": ("", "attention_bias"),
    "ff_bias": ("", "mlp_bias"),  # not of Qwen3 and Apertus
}
"""Our settings, and the entries with the same meaning of GPT-2's and of Llama's configuration."""
GATED = {False: "llama", True: "qwen3"}
PLAIN = {False: "arcee", True: "apertus"}
"""Architectures with RoPE and RMSNorm, with and without a gate, by `qk_norm`."""
OWN_SETTINGS = (
    *("layers", "heads", "kv_heads", "width", "ff_width", "context", "norm", "final_norm"),
    *("norm_eps", "position", "rope_theta", "activation", "attn_bias", "ff_bias", "norm_bias"),
    *("qk_norm", "logit_cap", "dropout", "init_std"),
)
"""Settings in the configuration of a model that is exported with its code."""


def to_hf(m: ModelSettings, read: Read) -> Iterator[tuple[str, Tensor]]:
    """The weights as `transformers` names them; GPT-2 has every bias, and transposed matrices."""
    kind, head_width = architecture(m), m.width // m.heads
    rows = [m.heads * head_width, m.kv_heads_ * head_width, m.kv_heads_ * head_width]
    for i in range(m.layers if m.qk_norm else 0):  # ours lack weights
        for one in "qk":
            yield f"model.layers.{i}.self_attn.{one}_norm.weight", torch.ones(head_width)
    for ours, theirs in _modules(kind, m):
        tensors = {"weight": read(f"{ours}.weight")}
        if setting := next((key for key, part in BIASES.items() if part in ours), ""):
            if getattr(m, setting) and (setting != "norm_bias" or m.norm == "layernorm"):
                tensors["bias"] = read(f"{ours}.bias")
            elif kind == "gpt2":
                tensors["bias"] = torch.zeros(len(tensors["weight"]))
        for leaf, value in tensors.items():
            # The final norm contains muP's division of the logits.
            tensor = value / m.width_multiple if ours == "norm" else value
            if kind == "gpt2" and ours.startswith("blocks.") and tensor.dim() == 2:
                tensor = tensor.t()
            names = [f"{name}.{leaf}" for name in theirs.split()]
            parts = tensor.split(rows) if len(names) > 1 else [tensor]
            yield from zip(names, (part.contiguous() for part in parts), strict=True)


def _modules(kind: str, m: ModelSettings) -> Iterator[tuple[str, str]]:
    """The names of our modules, and theirs."""
    absent = ["head"] if m.tie_head else []
    absent += [] if m.activation == "swiglu" else ["blocks.#.ff.gate"]
    for ours, (gpt2, llama) in MODULES.items():
        theirs = gpt2 if kind == "gpt2" else llama
        theirs = APERTUS.get(ours, theirs) if kind == "apertus" else theirs
        if not theirs or ours in absent:
            continue
        for i in range(m.layers if "#" in ours else 1):
            yield ours.replace("#", str(i)), theirs.replace("#", str(i))


def architecture(m: ModelSettings) -> str:
    """The `model_type` in `transformers` that computes the same; empty if none does."""
    if m.logit_cap or not m.final_norm:
        return ""
    if (m.position, m.norm) == ("rope", "rmsnorm"):
        kind = (GATED if m.activation == "swiglu" else PLAIN)[m.qk_norm]
        return "" if m.qk_norm and m.ff_bias else kind
    is_gpt2 = (m.position, m.norm, m.qk_norm) == ("learned", "layernorm", False)
    return "gpt2" if is_gpt2 and m.activation in ACTIVATIONS and m.kv_heads_ == m.heads else ""


def own_config(m: ModelSettings, vocab: int) -> dict[str, Any]:
    """The `config.json` of an export with code (interop/modeling_windlass.py)."""
    classes = {"AutoConfig": "WindlassConfig", "AutoModelForCausalLM": "WindlassForCausalLM"}
    auto_map = {auto: f"modeling_windlass.{name}" for auto, name in classes.items()}
    return _entries(m, vocab, {key: key for key in OWN_SETTINGS}) | {
        "model_type": "windlass",
        "architectures": ["WindlassForCausalLM"],
        "auto_map": auto_map,
        "width_multiple": m.width_multiple,
    }


def _entries(m: ModelSettings, vocab: int, names: dict[str, str]) -> dict[str, Any]:
    resolved = {**m.model_dump(), "kv_heads": m.kv_heads_, "ff_width": m.ff_width_}
    entries = {there: resolved[key] for key, there in names.items()}
    return entries | {"vocab_size": vocab, "tie_word_embeddings": m.tie_head}


def config(m: ModelSettings, vocab: int) -> dict[str, Any]:
    kind = architecture(m)
    causal = "GPT2LMHeadModel" if kind == "gpt2" else f"{kind.capitalize()}ForCausalLM"
    names = {key: pair[kind != "gpt2"] for key, pair in SETTINGS.items()}
    if kind not in ("llama", "arcee"):
        del names["ff_bias"]
    entries = _entries(m, vocab, {key: name for key, name in names.items() if name})
    entries |= {"model_type": kind, "architectures": [causal], "initializer_range": m.init_std}
    if kind == "gpt2":
        dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), m.dropout)
        more = {"activation_function": ACTIVATIONS[m.activation], "n_ctx": m.context}
        return entries | dropout | more
    return entries | {
        "head_dim": m.width // m.heads,
        "hidden_act": ACTIVATIONS.get(m.activation, "silu"),
        "attention_dropout": m.dropout,
        "rope_theta": m.rope_theta,
        "pad_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta},
    }
