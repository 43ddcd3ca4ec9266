"""Models of transformers with tensor parallelism against one process, in float64, to 1e-9.

`test_checkpoint_reshard.py` has their checkpoints.
"""

from pathlib import Path

import pytest
import torch
from equivalence import VOCAB, check, distance, each, logits_of, reference, settings, trained
from harness import run_ranks

import hf_fixtures
from windlass.errors import UserError
from windlass.model.build import build_model

KINDS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2, "intermediate_size": 37, "tie_word_embeddings": True},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Directories of tiny models; the forked ranks share the imports."""
    folder = tmp_path_factory.mktemp("models")
    for kind, changes in KINDS.items():
        hf_fixtures.save(kind, folder / kind, vocab=VOCAB, **changes)
    return folder


def keys(directory: Path, **more):
    return {"model__kind": "hf", "model__name": str(directory), **more}


STRATEGIES = ("ddp", "full_shard", "shard_optim")
FULL = pytest.mark.full


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [pytest.param(2, marks=FULL), 4])
def test_trainings_are_those_of_one_process(models, world, kind):
    of_kind = keys(models / kind)
    recipes = [settings("fp64", s, world, 2, **of_kind, tensor=2) for s in STRATEGIES]
    check(world, recipes, reference(**of_kind))


@pytest.mark.dist
def test_logits_and_a_cache_are_those_of_one_process(models):
    single = [settings("fp64", "single", **keys(models / kind)) for kind in KINDS]
    [wanted] = run_ranks(logits_of, 1, single)
    for strategy in ("ddp", "full_shard"):
        recipes = [settings("fp64", strategy, **keys(models / kind), tensor=2) for kind in KINDS]
        for per_rank in run_ranks(logits_of, 2, recipes):
            for pair, expected in zip(per_rank, wanted, strict=True):
                torch.testing.assert_close(pair, expected, rtol=1e-9, atol=1e-12)


RECOMPUTED = {"parallel__activation_checkpointing": "selective"}
OTHERS = {
    "from the seed": ("llama", {"model__from_scratch": True}),
    "muon, recomputed": ("qwen3", {"optim__kind": "muon", **RECOMPUTED}),
    "frozen in bf16": (
        "llama",
        {"model__freeze": ["model.layers.0.*"], "model__frozen_precision": "bf16"},
    ),
    "gpt_neox": ("gpt_neox", {}),  # fuses queries and keys
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[FULL] * (name == "gpt_neox")) for name in OTHERS]
)
def test_other_trainings_are_those_of_one_process(models, name):
    kind, changes = OTHERS[name]
    if kind not in KINDS:
        hf_fixtures.save(kind, models / kind, vocab=VOCAB, num_hidden_layers=2)
    more = keys(models / kind, **changes)
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **more))
    check(2, [settings("fp64", "full_shard", 2, **more, tensor=2)], wanted)


@pytest.mark.dist
def test_low_precision_stays_near_one_process(models):
    more = {"parallel__activation_checkpointing": "full"}
    of_kind = [keys(models / kind, **more) for kind in KINDS]
    wanted = run_ranks(each, 1, [settings("fp32", "single", **keys) for keys in of_kind])[0]
    for strategy in ("ddp", "full_shard"):
        recipes = [settings("bf16", strategy, **keys, tensor=2) for keys in of_kind]
        for per_rank in run_ranks(each, 2, recipes):
            for outcome, expected in zip(per_rank, wanted, strict=True):
                losses, norms, _ = distance(outcome, expected)
                assert losses < 5e-3
                assert norms < 5e-2


def refusal(**more) -> str:
    recipe = settings("fp64", "ddp", **more)
    with pytest.raises(UserError) as caught:
        build_model(recipe, VOCAB)
    return str(caught.value)


def test_what_cannot_be_divided_is_refused_when_the_model_is_built(models, tmp_path):
    hf_fixtures.save("llama", tmp_path / "llama", vocab=VOCAB, attention_dropout=0.1)
    reasons = {"bloom": "lacks a tp_plan", "gpt2": "lacks a tp_plan", "mixtral": "experts"}
    reasons |= {"phi3": "rowwise_split_input", "olmo2": "colwise_gather_output"}
    for kind, reason in {**reasons, "llama": "dropout in the attention"}.items():
        if kind != "llama":
            hf_fixtures.save(kind, tmp_path / kind, vocab=VOCAB)
        message = refusal(**keys(tmp_path / kind, tensor=2))
        assert reason in message and "parallel.tensor=1" in message
    message = refusal(**keys(models / "llama", tensor=4))
    assert "4 ranks do not divide the 2 key and value heads" in message
    assert message.endswith("write 2")
    assert "3 ranks do not divide the 4 attention heads" in refusal(
        **keys(models / "llama", tensor=3)
    )
    adapters = {"model__lora__rank": 2, "tensor": 2}
    more = {"context": 2, "pipeline": 2}
    with pytest.raises(UserError, match=r"(?s)parallel\.tensor.*adapters"):
        settings("fp64", "ddp", **keys(models / "llama", **adapters))
    with pytest.raises(UserError, match=r"(?s)parallel\.context.*parallel\.pipeline"):
        settings("fp64", "ddp", **keys(models / "llama", **more))
