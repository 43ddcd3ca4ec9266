"""An export as GGUF, by llama.cpp's own converter: every tensor, read with the package `gguf`.

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

gguf = pytest.importorskip("gguf", reason="not run: gguf is not installed")
CHECKOUT = Path(os.environ.get("LLAMA_CPP", "/nowhere"))
pytestmark = pytest.mark.skipif(
    not (CHECKOUT / "convert_hf_to_gguf.py").is_file(),
    reason="not run: LLAMA_CPP names no checkout of llama.cpp",
)


def permuted(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Rows of queries or keys as llama.cpp's rotary embedding of Llama wants them: in pairs."""
    pairs = matrix.reshape(heads, 2, len(matrix) // heads // 2, *matrix.shape[1:])
    return pairs.swapaxes(1, 2).reshape(matrix.shape)


@pytest.mark.parametrize("kind", hf_fixtures.NETWORKS)
def test_a_converted_export_has_every_tensor(kind: str, tmp_path: Path, data_files: Path) -> None:
    out = hf_fixtures.export_of(kind, tmp_path, data_files)
    command = [
        sys.executable,
        str(CHECKOUT / "convert_hf_to_gguf.py"),
        str(out),
        "--outtype",
        "f32",
    ]
    subprocess.run([*command, "--outfile", str(tmp_path / "model.gguf")], check=True)
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
