"""An export as other programs read it: as GGUF by llama.cpp's own converter, every tensor; and
`config.json` by vLLM: architecture, sizes and rotary embedding. No GPU.

LLAMA_CPP names a checkout of llama.cpp; the converter needs the packages `gguf` and `sentencepiece`.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

import hf_fixtures

CHECKOUT = Path(os.environ.get("LLAMA_CPP", "/nowhere"))


def permuted(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's rotary embedding of Llama wants them: in pairs."""
    pairs = matrix.reshape(heads, 2, len(matrix) // heads // 2, *matrix.shape[1:])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)


@pytest.mark.skipif(
    not (CHECKOUT / "convert_hf_to_gguf.py").is_file(),
    reason="not run: LLAMA_CPP names no checkout of llama.cpp",
)
@pytest.mark.parametrize("kind", hf_fixtures.NETWORKS)
def test_a_converted_export_has_every_tensor(kind: str, tmp_path: Path, data_files: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="not run: gguf is not installed")
    out = hf_fixtures.export_of(kind, tmp_path, data_files)
    command = [sys.executable, str(CHECKOUT / "convert_hf_to_gguf.py"), str(out), "--outtype=f32"]
    subprocess.run([*command, f"--outfile={tmp_path / 'model.gguf'}"], check=True)
    reader = gguf.GGUFReader(tmp_path / "model.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == kind and fields[f"{kind}.context_length"] == 64
    assert fields["tokenizer.ggml.eos_token_id"] == 50256
    assert len(fields["tokenizer.ggml.tokens"]) == 50257
    converted = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, kind.upper()), 2)
    heads = json.loads((out / "config.json").read_text())
    for name, tensor in load_file(out / "model.safetensors").items():
        value = tensor.numpy()
        if kind == "gpt2" and value.ndim == 2 and ".c_" in name:  # a Conv1D
            value = value.T
        for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if kind in ("llama", "arcee") and part in name:
                value = permuted(value, heads[key])
        there = converted.pop(names.get_name(name, try_suffixes=(".weight", ".bias")))
        assert np.array_equal(there, value), name
    assert not converted


@pytest.mark.parametrize("kind", hf_fixtures.NETWORKS)
def test_vllm_reads_the_configuration_of_an_export(
    kind: str, tmp_path: Path, data_files: Path
) -> None:
    pytest.importorskip("vllm", reason="not run: vllm is not installed")
    import vllm.config  # noqa: F401 - vLLM's modules import each other in this order only
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.transformers_utils import config as reader
    from vllm.transformers_utils import model_arch_config_convertor as sizes

    out = str(hf_fixtures.export_of(kind, tmp_path, data_files))
    config = reader.get_config(out, trust_remote_code=False)
    text = reader.get_hf_text_config(config)
    assert config.model_type == kind
    assert set(config.architectures) <= set(ModelRegistry.get_supported_archs())
    convertors = sizes.MODEL_ARCH_CONFIG_CONVERTORS
    convertor = convertors.get(kind, sizes.ModelArchConfigConvertorBase)
    form = convertor(config, text).convert()
    assert (form.total_num_hidden_layers, form.hidden_size, form.vocab_size) == (2, 32, 50257)
    heads = form.total_num_attention_heads, form.total_num_kv_heads, form.head_size
    assert heads == (4, 4 if kind == "gpt2" else 2, 8)
    assert form.derived_max_model_len_and_key[0] == 64 and form.quantization_config is None
    if kind != "gpt2":
        assert text.rope_parameters["rope_theta"] == 10_000
    generation = reader.try_get_generation_config(out, trust_remote_code=False)
    assert generation is not None and generation.eos_token_id == 50256
