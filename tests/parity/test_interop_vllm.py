"""An export's `config.json` as vLLM reads it: architecture, sizes and rotary embedding. No GPU."""

from pathlib import Path

import pytest

import hf_fixtures

vllm = pytest.importorskip("vllm", reason="not run: vllm is not installed")


@pytest.mark.parametrize("kind", hf_fixtures.NETWORKS)
def test_vllm_reads_the_configuration_of_an_export(
    kind: str, tmp_path: Path, data_files: Path
) -> None:
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
