"""Sizes of models of `transformers`, against their own counts, torch's FLOP counter on real passes, and real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import hf_fixtures
from windlass.estimate.memory import Layout, memory
from windlass.model.hf_size import read_sizes
from windlass.model.size import HfSizes
from windlass.recipe import Recipe

KINDS = ("bloom", "gpt2", "llama", "gemma2")
CONTEXT = 48


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Configurations without weights; where weights should lie is a file that cannot be read as any."""
    root = tmp_path_factory.mktemp("hf")
    for kind in KINDS:
        hf_fixtures.config(kind).save_pretrained(root / kind)
        (root / kind / "model.safetensors").write_bytes(b"no weights")
    return {kind: root / kind for kind in KINDS}


def recipe(directory: Path, **model: Any) -> Recipe:
    return Recipe.model_validate({"model": {"kind": "hf", "name": str(directory), "context": CONTEXT, **model}})


def theirs(kind: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(hf_fixtures.config(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_are_those_that_transformers_counts(kind: str, directories: dict[str, Path]) -> None:
    found, reference = read_sizes(recipe(directories[kind]), flops=False), theirs(kind)
    assert found.total == found.trained == reference.num_parameters()
    tables = found.parts["embedding"] + found.parts.get("positions", 0)
    assert found.total - tables == reference.num_parameters(exclude_embeddings=True)
    sizes = {name: p.numel() for name, p in reference.named_parameters()}
    attention = sum(n for name, n in sizes.items() if "attn." in name or "self_attention." in name)
    assert found.parts["attention"] == attention
    assert found.parts["feed_forward"] == sum(n for name, n in sizes.items() if "mlp." in name)
    assert found.parts["norms"] == sum(n for name, n in sizes.items() if "norm" in name.lower() or ".ln_" in name)
    assert found.parts.get("head", 0) == sizes.get("lm_head.weight", 0)
    assert "other" not in found.parts and found.vocab == hf_fixtures.VOCAB
    assert found.block == sum(n for name, n in sizes.items() if ".0." in name)


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_that_torch_counts_in_a_real_pass(kind: str, directories: dict[str, Path]) -> None:
    tokens = torch.randint(1, hf_fixtures.VOCAB, (1, CONTEXT))
    model = theirs(kind)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(input_ids=tokens, use_cache=False).logits.sum().backward()
    real = counter.get_total_flops() / CONTEXT
    found = read_sizes(recipe(directories[kind]))
    assert found.counted_flops == pytest.approx(real, rel=1e-9)
    assert found.flops_per_token() == pytest.approx(real, rel=0.01)
    assert found.flops_per_token(2 * CONTEXT) > found.flops_per_token()


def test_of_adapters_only_they_have_gradients_and_moments(directories: dict[str, Path]) -> None:
    whole = read_sizes(recipe(directories["llama"]), flops=False)
    lora = read_sizes(recipe(directories["llama"], lora={"rank": 4, "targets": ["q_proj", "v_proj"]}))
    adapters = 3 * (4 * (32 + 32) + 4 * (32 + 16))
    assert (lora.trained, lora.parts["adapters"], lora.total) == (adapters, adapters, whole.total + adapters)
    assert lora.checkpoint_bytes() == 4 * lora.total + 8 * adapters
    layout = Layout("full_shard", 4, 4, micro_batch=1)
    small, large = memory(lora, lora.vocab, layout), memory(whole, whole.vocab, layout)
    assert small.parameters == -(-4 * lora.total // 4) and small.moments == 2 * adapters
    assert large.moments == 2 * whole.total
    host = memory(lora, lora.vocab, Layout("full_shard", 4, 4, offload=True, device="cuda")).host
    assert host == pytest.approx((4 * lora.total + 12 * adapters) / 4, abs=4)
    # A frozen matrix has no gradient: two products instead of three.
    assert lora.counted_flops is not None
    assert 4 * whole.total < lora.flops_by_rule == 4 * lora.total + 2 * adapters
    assert lora.counted_flops == pytest.approx(lora.flops_per_token(), rel=0.05)


def test_a_mixture_of_experts_counts_those_a_token_goes_through(tmp_path: Path) -> None:
    from transformers import MixtralConfig

    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=1, max_position_embeddings=64,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    found = read_sizes(recipe(tmp_path), flops=False)
    experts = 2 * 4 * 3 * 32 * 48
    rest = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 32 * 4) + 64 * 32
    assert found.multiplied == experts // 4 + rest


def test_sizes_survive_json(directories: dict[str, Path]) -> None:
    found = read_sizes(recipe(directories["gpt2"]))
    assert HfSizes.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    with pytest.raises((TypeError, KeyError, ValueError)):
        HfSizes.from_dict({"like": {}})


def test_a_training_has_its_length_and_its_mfu(tmp_path: Path) -> None:
    from windlass import train

    texts = [f"The {n} ships of the {n % 7} harbours sailed at {n % 24} o'clock." for n in range(400)]
    hf_fixtures.save("gpt2", tmp_path / "model", n_layer=1, n_embd=16, n_head=2)
    hf_fixtures.save_tokenizer(texts, tmp_path / "model")
    (tmp_path / "corpus.txt").write_text("\n".join(texts), encoding="utf-8")
    tree: dict[str, Any] = {
        "model": {"kind": "hf", "name": str(tmp_path / "model"), "context": 32},
        "data": {
            "source": str(tmp_path / "corpus.txt"), "tokenizer": f"hf:{tmp_path / 'model'}", "dir": str(tmp_path / "data"),
        },
        "train": {"steps": "compute-optimal", "tokens_per_parameter": 0.2, "global_batch": 8},
        "optim": {"schedule": {"warmup": 0}}, "eval": {"every": 0}, "telemetry": {"every": 1, "cpu_peak": True},
        "run": {"dir": str(tmp_path / "run")}, "parallel": {"device": "cpu"},
    }  # fmt: skip
    run = train(Recipe.model_validate(tree))
    sizes = HfSizes.from_dict(run.summary["model_sizes"])
    assert sizes.total == theirs_of(tmp_path / "model")
    assert run.summary["steps"] == int(0.2 * sizes.total) // (8 * 32)
    started = next(e for e in run.events if e["event"] == "started")
    assert started["model_sizes"] == sizes.as_dict()
    lines = run.lines("train")
    peaks = [sizes.flops_per_token() * x["tokens_per_s"] / x["mfu"] for x in lines if x.get("mfu")]
    assert peaks and max(peaks) == pytest.approx(min(peaks), rel=1e-6)


def theirs_of(directory: Path) -> int:
    from transformers import AutoModelForCausalLM

    return int(AutoModelForCausalLM.from_pretrained(directory).num_parameters())
