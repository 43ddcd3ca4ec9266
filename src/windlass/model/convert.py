"""Our GPT as GPT-2, Llama, Qwen3, Arcee or Apertus of `transformers`, by tensors.

Only functions import torch, because `plan` uses this module.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

from windlass.errors import UserError
from windlass.recipe.network import ModelSettings

if TYPE_CHECKING:
    from torch import Tensor

Read = Callable[[str], "Tensor"]  # gives the tensor of a name, whole, on the CPU
ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "relu2": "relu2"}
"""Our names of activations, and GPT-2's."""
BIASES = {"norm_bias": "norm", "attn_bias": ".attn.", "ff_bias": ".ff."}
"""The settings that give modules a bias, each with a part of these modules' names."""
LLAMA = {
    "embedding": "model.embed_tokens",
    "blocks.#.attn_norm": "model.layers.#.input_layernorm",
    "blocks.#.ff_norm": "model.layers.#.post_attention_layernorm",
    "blocks.#.attn.qkv": " ".join(f"model.layers.#.self_attn.{one}_proj" for one in "qkv"),
    "blocks.#.attn.out": "model.layers.#.self_attn.o_proj",
    "blocks.#.ff.gate": "model.layers.#.mlp.gate_proj",
    "blocks.#.ff.up": "model.layers.#.mlp.up_proj",
    "blocks.#.ff.down": "model.layers.#.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}
UNGATED = {name: there for name, there in LLAMA.items() if name != "blocks.#.ff.gate"}
APERTUS_NORMS = {
    "blocks.#.attn_norm": "model.layers.#.attention_layernorm",
    "blocks.#.ff_norm": "model.layers.#.feedforward_layernorm",
}
MODULES = {
    "gpt2": {
        "embedding": "transformer.wte",
        "positions": "transformer.wpe",
        "blocks.#.attn_norm": "transformer.h.#.ln_1",
        "blocks.#.ff_norm": "transformer.h.#.ln_2",
        "blocks.#.attn.qkv": "transformer.h.#.attn.c_attn",
        "blocks.#.attn.out": "transformer.h.#.attn.c_proj",
        "blocks.#.ff.up": "transformer.h.#.mlp.c_fc",
        "blocks.#.ff.down": "transformer.h.#.mlp.c_proj",
        "norm": "transformer.ln_f",
        "head": "lm_head",
    },
    "llama": LLAMA,
    "qwen3": LLAMA,
    "arcee": UNGATED,
    "apertus": UNGATED | APERTUS_NORMS,
}
"""Our modules in order, and theirs; ours may stack the rows of several of theirs."""
LLAMA_SETTINGS = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "width": "hidden_size",
    "ff_width": "intermediate_size",
    "context": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "attn_bias": "attention_bias",
}
SETTINGS = {
    "gpt2": {
        "layers": "n_layer",
        "heads": "n_head",
        "width": "n_embd",
        "ff_width": "n_inner",
        "context": "n_positions",
        "norm_eps": "layer_norm_epsilon",
    },
    "llama": LLAMA_SETTINGS | {"ff_bias": "mlp_bias"},
    "qwen3": LLAMA_SETTINGS,
    "arcee": LLAMA_SETTINGS | {"ff_bias": "mlp_bias"},
    "apertus": LLAMA_SETTINGS,
}
"""Our settings, and the entries of a configuration with the same meaning."""
COMMON: dict[str, Any] = {"logit_cap": (0.0,), "final_norm": (True,)}
ROPE: dict[str, Any] = {"position": ("rope",), "norm": ("rmsnorm",), **COMMON}
ALLOWED: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpt2": {
        "position": ("learned",),
        "norm": ("layernorm",),
        "activation": tuple(ACTIVATIONS),
        "qk_norm": (False,),
        **COMMON,
    },
    "llama": {"activation": ("swiglu",), "qk_norm": (False,), **ROPE},
    "qwen3": {"activation": ("swiglu",), "qk_norm": (True,), "ff_bias": (False,), **ROPE},
    "arcee": {"activation": tuple(ACTIVATIONS), "qk_norm": (False,), **ROPE},
    "apertus": {"activation": tuple(ACTIVATIONS), "qk_norm": (True,), "ff_bias": (False,), **ROPE},
}
"""The values of our settings that an architecture allows. RoPE and RMSNorm have one for each choice
of a gated feed-forward layer and of normalised queries and keys."""
OWN_SETTINGS = (
    *("layers", "heads", "kv_heads", "width", "ff_width", "context", "norm", "final_norm"),
    *("norm_eps", "position", "rope_theta", "activation", "attn_bias", "ff_bias", "norm_bias"),
    *("qk_norm", "logit_cap", "dropout", "init_std"),
)
"""Settings in the configuration of a model that is exported with its code."""
CLASSES = {kind: kind.capitalize() for kind in MODULES} | {"gpt2": "GPT2"}


def their_names(m: ModelSettings, name: str) -> list[str]:
    module, _, leaf = name.rpartition(".")
    number = re.search(r"\d+", module)
    there = MODULES[architecture(m)][re.sub(r"\d+", "#", module)]
    return [f"{one}.{leaf}".replace("#", number.group() if number else "") for one in there.split()]


def our_names(kind: str, m: ModelSettings, biases: Collection[str]) -> Iterator[str]:
    """The names of our weights, with the given `BIASES`; a bias follows its weight."""
    modules = MODULES[kind]
    inside = [name for name in modules if "#" in name]
    in_blocks = [name.replace("#", str(i)) for i in range(m.layers) for name in inside]
    outside = [name for name in modules if "#" not in name and not (name == "head" and m.tie_head)]
    for module in (*outside, *in_blocks):
        yield f"{module}.weight"
        if next((key for key, part in BIASES.items() if part in module), "") in biases:
            yield f"{module}.bias"


def own_biases(m: ModelSettings) -> set[str]:
    has = {key for key in BIASES if getattr(m, key)}
    return has if m.norm == "layernorm" else has - {"norm_bias"}


def to_hf(m: ModelSettings, read: Read) -> Iterator[tuple[str, Tensor]]:
    """The weights as `transformers` names them; GPT-2 has every bias, and transposed matrices."""
    import torch

    kind = architecture(m)
    own, tensor = set(our_names(kind, m, own_biases(m))), torch.empty(0)
    for i in range(m.layers if m.qk_norm else 0):  # our model has no weights in these norms
        for one in "qk":
            yield f"model.layers.{i}.self_attn.{one}_norm.weight", torch.ones(m.width // m.heads)
    for name in our_names(kind, m, BIASES if kind == "gpt2" else own_biases(m)):
        tensor = read(name) if name in own else tensor.new_zeros(tensor.shape[0])
        if name.startswith("norm.") and m.width_multiple != 1:
            tensor = tensor / m.width_multiple  # muP's division of the logits
        there = their_names(m, name)
        if kind == "gpt2" and name.startswith("blocks.") and tensor.dim() == 2:
            yield there[0], tensor.t().contiguous()
        elif len(there) == 1:
            yield there[0], tensor
        else:
            head = m.width // m.heads
            rows = [m.heads * head, m.kv_heads_ * head, m.kv_heads_ * head]
            yield from zip(there, (part.contiguous() for part in tensor.split(rows)), strict=True)


def architecture(m: ModelSettings) -> str:
    """The `model_type` in `transformers`; UserError names the settings that prevent it."""
    allowed = {**ALLOWED, "gpt2": {**ALLOWED["gpt2"], "kv_heads": (0, m.heads)}}
    differs = {
        kind: [key for key, values in keys.items() if getattr(m, key) not in values]
        for kind, keys in allowed.items()
    }
    kind = min(differs, key=lambda kind: len(differs[kind]))
    if wrong := [f"model.{key} = {json.dumps(getattr(m, key))}" for key in differs[kind]]:
        problem = f"transformers lacks such a model; {CLASSES[kind]} differs in {', '.join(wrong)}"
        raise UserError(problem)
    return kind


def export_note(m: ModelSettings) -> str:
    """A warning if an export includes the model's code; else empty."""
    try:
        return "" if m.kind == "hf" else architecture(m) and ""
    except UserError as error:
        return f"an export needs trust_remote_code=True, because {error}"


def own_config(m: ModelSettings, vocab: int) -> dict[str, Any]:
    """The `config.json` of an export with code (interop/modeling_windlass.py)."""
    classes = {"AutoConfig": "WindlassConfig", "AutoModelForCausalLM": "WindlassForCausalLM"}
    auto_map = {auto: f"modeling_windlass.{name}" for auto, name in classes.items()}
    entries = _entries(m, vocab, {key: key for key in OWN_SETTINGS})
    entries |= {"model_type": "windlass", "architectures": ["WindlassForCausalLM"]}
    entries |= {"width_multiple": m.width_multiple}
    return entries | {"auto_map": auto_map}


def _entries(m: ModelSettings, vocab: int, names: dict[str, str]) -> dict[str, Any]:
    resolved = {**m.model_dump(), "kv_heads": m.kv_heads_, "ff_width": m.ff_width_}
    entries = {there: resolved[key] for key, there in names.items()}
    return entries | {"vocab_size": vocab, "tie_word_embeddings": m.tie_head}


def config(m: ModelSettings, vocab: int) -> dict[str, Any]:
    kind = architecture(m)
    causal = "GPT2LMHeadModel" if kind == "gpt2" else f"{CLASSES[kind]}ForCausalLM"
    entries = _entries(m, vocab, SETTINGS[kind])
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
