"""Models of transformers with tensor parallelism against one process, in float64, to 1e-9, and the
types of their norms. `test_checkpoint_reshard.py` has their checkpoints.
"""

from pathlib import Path

import equivalence as eq
import pytest
import torch
from harness import run_ranks

import hf_fixtures
from helpers import refused
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
        hf_fixtures.save(kind, folder / kind, vocab=eq.VOCAB, **changes)
    return folder


def keys(directory: Path, **more):
    return {"model__kind": "hf", "model__name": str(directory), **more}


def recipes_of(models: Path, precision: str, strategies: list[str], **more):
    """The recipes of all kinds, strategy after strategy."""
    all_keys = [keys(models / kind, **more) for kind in KINDS]
    return [eq.settings(precision, s, **of_kind) for s in strategies for of_kind in all_keys]


STRATEGIES = ("ddp", "full_shard", "shard_optim")
FULL = pytest.mark.full


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world", [pytest.param(2, marks=FULL), 4])
def test_trainings_are_those_of_one_process(models, world, kind):
    of_kind = keys(models / kind)
    recipes = [eq.settings("fp64", s, world, 2, **of_kind, tensor=2) for s in STRATEGIES]
    eq.check(world, recipes, eq.reference(**of_kind))


@pytest.mark.dist
def test_logits_and_a_cache_are_those_of_one_process(models):
    [wanted] = run_ranks(eq.logits_of, 1, recipes_of(models, "fp64", ["single"]))
    divided = recipes_of(models, "fp64", ["ddp", "full_shard"], tensor=2)
    for per_rank in run_ranks(eq.logits_of, 2, divided):
        for pair, expected in zip(per_rank, wanted * 2, strict=True):
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
    "adapters": ("llama", {"model__lora__rank": 2, "model__lora__dropout": 0.3}),
    "adapters and whole modules, tied": (
        "qwen3",
        {
            "model__lora__rank": 2,
            "model__lora__targets": ["q_proj", "layers.1.*(o|down)_proj"],
            "model__lora__modules_to_save": ["embed_tokens", "norm"],
        },
    ),
    "adapted ends, frozen in bf16": (
        "llama",
        {
            "model__lora__rank": 2,
            "model__lora__targets": ["lm_head", "embed_tokens", "up_proj", "v_proj"],
            "model__frozen_precision": "bf16",
        },
    ),
}


@pytest.mark.dist
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[FULL] * (name == "gpt_neox")) for name in OTHERS]
)
def test_other_trainings_are_those_of_one_process(models, name):
    kind, changes = OTHERS[name]
    if kind not in KINDS:
        hf_fixtures.save(kind, models / kind, vocab=eq.VOCAB, num_hidden_layers=2)
    more = keys(models / kind, **changes)
    [wanted] = run_ranks(eq.trained, 1, eq.settings("fp64", "single", **more))
    adapted = "model__lora__rank" in changes
    strategies = ("ddp", "full_shard") if adapted else ("full_shard",)
    eq.check(2, [eq.settings("fp64", s, 2, **more, tensor=2) for s in strategies], wanted)


@pytest.mark.dist
def test_low_precision_stays_near_one_process(models):
    more = {"parallel__activation_checkpointing": "full"}
    [wanted] = run_ranks(eq.each, 1, recipes_of(models, "fp32", ["single"], **more))
    divided = recipes_of(models, "bf16", ["ddp", "full_shard"], tensor=2, **more)
    for per_rank in run_ranks(eq.each, 2, divided):
        for outcome, expected in zip(per_rank, wanted * 2, strict=True):
            losses, norms, _ = eq.distance(outcome, expected)
            assert losses < 5e-3
            assert norms < 5e-2


def step_with_norms(join, recipe):
    """The loss and gradient norm of a step, and the types that the model's norms gave."""
    with join(recipe) as ranks:
        model, trainer = eq.built(ranks, recipe)
        kinds: set[torch.dtype] = set()
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                module.register_forward_hook(lambda _, __, out: kinds.add(out.dtype))
        losses, norms = eq.train(ranks, recipe, trainer, range(1))
        return losses[0], norms[0], kinds


@pytest.mark.dist
def test_norms_give_the_same_types_sharded_or_not(models):
    """The norm of Qwen3's queries gets low numbers already."""
    more = keys(models / "qwen3", parallel__activation_checkpointing="selective")
    (plain,) = run_ranks(step_with_norms, 1, eq.settings("fp32", "single", **more))
    for strategy in ("ddp", "full_shard"):
        for loss, size, kinds in run_ranks(
            step_with_norms, 2, eq.settings("bf16", strategy, 2, **more)
        ):
            # as autocast leaves it: gains in float32 times what came in
            assert kinds == {torch.float32}, strategy
            assert loss == pytest.approx(plain[0], rel=5e-3), strategy
            assert size == pytest.approx(plain[1], rel=3e-2), strategy


def test_what_cannot_be_divided_is_refused_when_the_model_is_built(models, tmp_path):
    hf_fixtures.save("llama", tmp_path / "llama", vocab=eq.VOCAB, attention_dropout=0.1)
    reasons = {"bloom": "lacks a tp_plan", "gpt2": "lacks a tp_plan", "mixtral": "experts"}
    reasons |= {"phi3": "rowwise_split_input", "olmo2": "colwise_gather_output"}
    for kind in reasons:
        hf_fixtures.save(kind, tmp_path / kind, vocab=eq.VOCAB)
    advice, llama = "parallel.tensor=1", models / "llama"
    cases = [(tmp_path / kind, 2, (reason, advice)) for kind, reason in reasons.items()]
    cases += [
        (tmp_path / "llama", 2, ("dropout in the attention", advice)),
        (llama, 4, ("4 ranks do not divide the 2 key and value heads", "write 2")),
        (llama, 3, ("3 ranks do not divide the 4 attention heads",)),
    ]
    for directory, ranks, words in cases:
        with refused(*words):
            build_model(eq.settings("fp64", "ddp", **keys(directory, tensor=ranks)), eq.VOCAB)
    with refused("parallel.tensor", "4-bit"):
        low = {"model__lora__rank": 2, "model__lora__base": "4bit"}
        eq.settings("fp64", "ddp", **keys(llama, **low, tensor=2))
    with refused("parallel.context", "parallel.pipeline"):
        eq.settings("fp64", "ddp", **keys(llama, context=2, pipeline=2))
