"""Our GPT as GPT-2 or Llama of `transformers`, and back: which it is, its configuration, and the names of its weights.

Arithmetic on names and shapes; a tensor is asked for only when it is needed, so that no side is held as a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


def differences(settings: ModelSettings) -> dict[str, list[str]]:
    """For each architecture of `transformers` what about a model is not as there; empty where it matches."""
    m = settings
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


def architecture(settings: ModelSettings) -> str:
    """`gpt2` or `llama`; a UserError says what differs from the nearer of them where it is neither."""
    found = differences(settings)
    name = min(found, key=lambda n: len(found[n]))
    if found[name]:
        titles = {"gpt2": "GPT-2", "llama": "Llama"}
        raise UserError(
            f"no architecture of transformers computes what this model does; from {titles[name]}, the nearest, it differs in "
            + ", ".join(found[name])
        )
    return name


def config(settings: ModelSettings, vocab: int, eot: int | None) -> dict[str, Any]:
    """The `config.json` that goes with a model's weights."""
    m, name = settings, architecture(settings)
    common = {
        "vocab_size": vocab,
        "bos_token_id": eot,
        "eos_token_id": eot,
        "tie_word_embeddings": m.tie_head,
        "dtype": "float32",
    }
    if name == "gpt2":
        return {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_layer": m.layers, "n_head": m.heads,
            "n_embd": m.width, "n_inner": m.ff_width_, "n_positions": m.context, "layer_norm_epsilon": m.norm_eps,
            "activation_function": GPT2_ACTIVATIONS[m.activation], "initializer_range": m.init_std,
            "attn_pdrop": m.dropout, "embd_pdrop": m.dropout, "resid_pdrop": m.dropout, **common,
        }  # fmt: skip
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": m.layers,
        "num_attention_heads": m.heads, "num_key_value_heads": m.kv_heads_, "hidden_size": m.width,
        "head_dim": m.width // m.heads, "intermediate_size": m.ff_width_, "max_position_embeddings": m.context,
        "rms_norm_eps": m.norm_eps, "hidden_act": "silu", "attention_bias": m.attn_bias, "mlp_bias": m.ff_bias,
        "attention_dropout": m.dropout, "initializer_range": m.init_std,
        "rope_parameters": {"rope_type": "default", "rope_theta": m.rope_theta}, "rope_theta": m.rope_theta, **common,
    }  # fmt: skip


def to_hf(settings: ModelSettings, read: Read) -> Iterator[tuple[str, Tensor]]:
    """The weights under the names of `transformers`, one after the other; biases that we do not have are zero there."""
    if architecture(settings) == "gpt2":
        yield from _to_gpt2(settings, read)
    else:
        yield from _to_llama(settings, read)


def _to_gpt2(m: ModelSettings, read: Read) -> Iterator[tuple[str, Tensor]]:
    def bias(name: str, there: bool, like: Tensor) -> Tensor:
        return read(name) if there else torch.zeros(like.shape[0], dtype=like.dtype)

    yield "transformer.wte.weight", read("embedding.weight")
    yield "transformer.wpe.weight", read("positions.weight")
    for i in range(m.layers):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for mine, name in (("attn_norm", "ln_1"), ("ff_norm", "ln_2")):
            weight = read(f"{ours}.{mine}.weight")
            yield f"{theirs}.{name}.weight", weight
            yield f"{theirs}.{name}.bias", bias(f"{ours}.{mine}.bias", m.norm_bias, weight)
        for mine, name, has_bias in (
            ("attn.qkv", "attn.c_attn", m.attn_bias), ("attn.out", "attn.c_proj", m.attn_bias),
            ("ff.up", "mlp.c_fc", m.ff_bias), ("ff.down", "mlp.c_proj", m.ff_bias),
        ):  # fmt: skip
            weight = read(f"{ours}.{mine}.weight")
            yield f"{theirs}.{name}.weight", weight.t().contiguous()  # GPT-2 keeps its matrices the other way round
            yield f"{theirs}.{name}.bias", bias(f"{ours}.{mine}.bias", has_bias, weight)
    weight = read("norm.weight")
    yield "transformer.ln_f.weight", weight
    yield "transformer.ln_f.bias", bias("norm.bias", m.norm_bias, weight)
    if not m.tie_head:
        yield "lm_head.weight", read("head.weight")


def _to_llama(m: ModelSettings, read: Read) -> Iterator[tuple[str, Tensor]]:
    parts = _qkv_rows(m)
    yield "model.embed_tokens.weight", read("embedding.weight")
    for i in range(m.layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        yield f"{theirs}.input_layernorm.weight", read(f"{ours}.attn_norm.weight")
        yield f"{theirs}.post_attention_layernorm.weight", read(f"{ours}.ff_norm.weight")
        for kind in ["weight"] + ["bias"] * m.attn_bias:
            for name, rows in zip("qkv", read(f"{ours}.attn.qkv.{kind}").split(parts), strict=True):
                yield f"{theirs}.self_attn.{name}_proj.{kind}", rows.contiguous()
            yield f"{theirs}.self_attn.o_proj.{kind}", read(f"{ours}.attn.out.{kind}")
        for kind in ["weight"] + ["bias"] * m.ff_bias:
            for name in ("gate", "up", "down"):
                yield f"{theirs}.mlp.{name}_proj.{kind}", read(f"{ours}.ff.{name}.{kind}")
    yield "model.norm.weight", read("norm.weight")
    if not m.tie_head:
        yield "lm_head.weight", read("head.weight")


def _qkv_rows(m: ModelSettings) -> list[int]:
    head = m.width // m.heads
    return [m.heads * head, m.kv_heads_ * head, m.kv_heads_ * head]


def settings_of(config: Any) -> dict[str, Any]:
    """The settings `[model]` of our GPT that compute what a GPT-2 or Llama of `transformers` does; `vocab` among them.

    Raises:
        UserError: It is neither, or a variant of them that ours is not.
    """
    kind = getattr(config, "model_type", "")
    if kind == "gpt2":
        ours = {theirs: mine for mine, theirs in GPT2_ACTIVATIONS.items()}
        unlike = {
            "activation_function": config.activation_function not in ours,
            "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        }
        _refuse(kind, unlike)
        return {
            "layers": config.n_layer, "heads": config.n_head, "kv_heads": 0, "width": config.n_embd,
            "ff_width": config.n_inner or 4 * config.n_embd, "context": config.n_positions, "position": "learned",
            "norm": "layernorm", "norm_bias": True, "norm_eps": float(config.layer_norm_epsilon), "final_norm": True, "activation": ours[config.activation_function],
            "attn_bias": True, "ff_bias": True, "tie_head": bool(config.tie_word_embeddings), "vocab": config.vocab_size,
        }  # fmt: skip
    if kind == "llama":
        rope = getattr(config, "rope_parameters", None) or {}
        unlike = {
            "hidden_act": config.hidden_act != "silu",
            "rope scaling": rope.get("rope_type", "default") != "default",
            "head_dim": (config.head_dim or config.hidden_size // config.num_attention_heads)
            * config.num_attention_heads
            != config.hidden_size,
        }
        _refuse(kind, unlike)
        return {
            "layers": config.num_hidden_layers, "heads": config.num_attention_heads,
            "kv_heads": config.num_key_value_heads, "width": config.hidden_size, "ff_width": config.intermediate_size,
            "context": config.max_position_embeddings, "position": "rope",
            "rope_theta": float(rope.get("rope_theta", getattr(config, "rope_theta", 10_000.0))), "norm": "rmsnorm", "norm_eps": float(config.rms_norm_eps),
            "final_norm": True, "activation": "swiglu", "attn_bias": config.attention_bias, "ff_bias": config.mlp_bias,
            "tie_head": bool(config.tie_word_embeddings), "vocab": config.vocab_size,
        }  # fmt: skip
    raise UserError(
        f"model.init_from: weights of {kind or 'an unknown architecture'} do not fit our GPT; GPT-2 and Llama do"
    )


def _refuse(kind: str, unlike: dict[str, bool]) -> None:
    if names := [name for name, differs in unlike.items() if differs]:
        raise UserError(f"model.init_from: this {kind} is a variant that our GPT is not: {', '.join(names)}")


def check_fit(settings: ModelSettings, vocab: int, theirs: dict[str, Any], where: str) -> None:
    """Raise a UserError that lists every setting that must be changed for weights to fit.

    A shorter context is fine, and so are more rows of the embedding than there are weights for, and biases that we do not
    have where they are zero there (see `dropped`).
    """
    m = settings
    mine = {
        **m.model_dump(), "kv_heads": m.kv_heads_, "ff_width": m.ff_width_, "vocab": vocab,
        "qk_norm": m.qk_norm, "logit_cap": m.logit_cap, "head_bias": m.head_bias,
    }  # fmt: skip
    wanted = {
        **theirs,
        "kv_heads": theirs["kv_heads"] or theirs["heads"],
        "qk_norm": False,
        "logit_cap": 0.0,
        "head_bias": False,
    }

    def fits(key: str, value: Any) -> bool:
        if key == "context":
            return bool(mine[key] <= value)
        if key == "vocab":
            return bool(mine[key] >= value)
        return mine[key] == value or (key in BIASES and value is True)

    wrong = [key for key, value in wanted.items() if not fits(key, value)]
    if wrong:
        lines = [f"  model.{key} = {_toml(wanted[key])}  (it is {_toml(mine[key])})" for key in wrong]
        raise UserError("\n".join([f"model.init_from: the weights of {where} are of another shape; write", *lines]))


def dropped(settings: ModelSettings, theirs: dict[str, Any]) -> list[str]:
    """Our names of the biases that their weights have and our model has not: they must be zero for the two to be equal."""
    m, found = settings, []
    gone = {key for key in BIASES if theirs.get(key) and not getattr(m, key)}
    for i in range(m.layers):
        parts = ["attn.qkv", "attn.out"] * ("attn_bias" in gone) + ["attn_norm", "ff_norm"] * ("norm_bias" in gone)
        parts += (["ff.gate"] * (m.activation == "swiglu") + ["ff.up", "ff.down"]) * ("ff_bias" in gone)
        found += [f"blocks.{i}.{part}.bias" for part in parts]
    return found + ["norm.bias"] * ("norm_bias" in gone)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def from_hf(settings: ModelSettings, name: str, read: Read) -> Tensor:
    """One of our weights, by its name, from the weights of the matching architecture."""
    m = settings
    if m.position == "learned":
        found = _from_gpt2(name, read)
        return found[: m.context] if name == "positions.weight" else found
    return _from_llama(name, read)


def _from_gpt2(name: str, read: Read) -> Tensor:
    whole = {
        "embedding.weight": "transformer.wte.weight", "positions.weight": "transformer.wpe.weight",
        "norm.weight": "transformer.ln_f.weight", "norm.bias": "transformer.ln_f.bias", "head.weight": "lm_head.weight",
    }  # fmt: skip
    if name in whole:
        return read(whole[name])
    _, block, module, *rest, kind = name.split(".")
    layers = {
        ("attn_norm",): "ln_1", ("ff_norm",): "ln_2", ("attn", "qkv"): "attn.c_attn", ("attn", "out"): "attn.c_proj",
        ("ff", "up"): "mlp.c_fc", ("ff", "down"): "mlp.c_proj",
    }  # fmt: skip
    found = read(f"transformer.h.{block}.{layers[(module, *rest)]}.{kind}")
    return found.t() if found.dim() == 2 else found


def _from_llama(name: str, read: Read) -> Tensor:
    whole = {
        "embedding.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight",
    }  # fmt: skip
    if name in whole:
        return read(whole[name])
    _, block, module, *rest, kind = name.split(".")
    prefix = f"model.layers.{block}"
    if (module, *rest) == ("attn", "qkv"):
        return torch.cat([read(f"{prefix}.self_attn.{part}_proj.{kind}") for part in "qkv"])
    layers = {
        ("attn_norm",): "input_layernorm", ("ff_norm",): "post_attention_layernorm", ("attn", "out"): "self_attn.o_proj",
        ("ff", "gate"): "mlp.gate_proj", ("ff", "up"): "mlp.up_proj", ("ff", "down"): "mlp.down_proj",
    }  # fmt: skip
    return read(f"{prefix}.{layers[(module, *rest)]}.{kind}")
