"""Tiny models of `transformers` with random weights, and a tokenizer trained here, as directories:
nothing is downloaded.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

VOCAB = 512
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "tie_head": False}
LLAMA |= {"attn_bias": False, "ff_bias": False}
NETWORKS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": LLAMA,
    "qwen3": LLAMA | {"qk_norm": True},
    "arcee": LLAMA | {"activation": "relu2"},
    "apertus": LLAMA | {"activation": "relu2", "qk_norm": True},
}
"""Settings of our GPT, by the architecture that an export of it has."""


def config(kind: str, vocab: int = VOCAB, **changes: Any) -> Any:
    """The configuration of a tiny model: `bloom`, `gpt2`, `llama`, `gemma2` (with capped logits),
    `mistral` (a sliding window), `mamba` and `rwkv` (recurrent), `jamba` (both kinds), `glm4_moe`
    (a router with a saved buffer), `qwen3` (normalised queries).
    """
    from transformers import AutoConfig

    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    if kind == "bloom":
        fields: dict[str, Any] = {"hidden_size": 32, "n_layer": 3, "n_head": 4}
    elif kind == "gpt2":
        fields = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128}
    elif kind in ("mamba", "rwkv"):
        fields = {"hidden_size": 32, "num_hidden_layers": 2}
        fields |= {"attention_hidden_size": 32, "state_size": 4}
    else:
        fields = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3}
        fields |= {"num_attention_heads": 4, "num_key_value_heads": 2}
        fields |= {"max_position_embeddings": 128}
        if kind not in ("jamba", "falcon"):
            fields |= {"head_dim": 8}
    if kind == "mistral":
        fields |= {"sliding_window": 6}
    elif kind == "glm4_moe":
        fields |= {"moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2}
        fields |= {"first_k_dense_replace": 1}
    elif kind == "jamba":
        fields |= {"num_hidden_layers": 4, "num_experts": 4, "mamba_d_state": 4}
        fields |= {"attn_layer_period": 2, "attn_layer_offset": 1}
        fields |= {"expert_layer_period": 2, "expert_layer_offset": 1}
    return AutoConfig.for_model(kind, **{"vocab_size": vocab, **fields, **special, **changes})


def save_gemma3(directory: Path) -> Path:
    """A tiny model with a vision tower, which text does not reach, and its processor's files."""
    from transformers import AutoModelForCausalLM, Gemma3Config

    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    tokens = {"image_token_index": 510, "boi_token_index": 508, "eoi_token_index": 509}
    tokens |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    text = config("gemma3_text").to_dict()
    parts = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(Gemma3Config(**parts, **tokens)).save_pretrained(directory)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (directory / name).write_text('{"processor_class": "Gemma3Processor"}')
    return directory


def save(kind: str, directory: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A tiny model with random weights, saved as `transformers` saves it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config(kind, **changes))
    with torch.no_grad():
        for parameter in model.parameters():
            # biases and norms too, so that none can be forgotten
            parameter.add_(torch.randn_like(parameter) * 0.1)
        for name, buffer in model.named_buffers():
            if name in model.state_dict():
                buffer.add_(torch.randn_like(buffer))
    model.to(dtype).save_pretrained(directory, max_shard_size="40KB")
    return directory


def save_tokenizer(texts: list[str], directory: Path, vocab: int = VOCAB) -> Path:
    """Byte pairs trained on the texts, as a `tokenizer.json` whose end of text is id 0."""
    from windlass.data.tokenizer_kinds import bpe_tokenizer

    bpe_tokenizer(texts, vocab).save(directory)
    shutil.copy(directory / "tokenizer" / "tokenizer.json", directory)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    config |= dict.fromkeys(("eos_token", "bos_token"), "<|endoftext|>")
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def export_of(kind: str, folder: Path, data_files: Path) -> Path:
    """A directory that `export` wrote: a GPT with settings of NETWORKS and GPT-2's tokenizer."""
    from helpers import write_corpus
    from windlass import export, train
    from windlass.recipe import Recipe

    write_corpus(folder / "text.txt", words=400)
    size = {"layers": 2, "heads": 4, "kv_heads": 4 if kind == "gpt2" else 2, "width": 32}
    tree = {
        "model": {**size, "context": 64, **NETWORKS[kind]},
        "data": {"source": str(folder / "text.txt"), "dir": str(folder / "data")},
        "train": {"steps": 1, "global_batch": 4},
        "eval.every": 0,
        "run.dir": str(folder / "run"),
    }
    recipe = Recipe.from_dict(tree).replace({"data.tokenizer": f"gpt2:{data_files / 'gpt2'}"})
    return export(train(recipe), folder / "out")
