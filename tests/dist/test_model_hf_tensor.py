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


@pytest.mark.dist
@pytest.mark.parametrize("world", [pytest.param(2, marks=pytest.mark.full), 4])
def test_trainings_are_those_of_one_process(models, world):
    cases = []
    for kind in KINDS:
        of_kind = keys(models / kind)
        wanted = eq.reference(**of_kind)
        for strategy in ("ddp", "full_shard", "shard_optim"):
            recipe = eq.settings("fp64", strategy, world, 2, **of_kind, tensor=2)
            cases.append((kind, recipe, wanted))
    eq.check(world, cases)


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
def test_other_trainings_are_those_of_one_process(models):
    for kind in {"gpt_neox"} | {kind for kind, _ in OTHERS.values()} - set(KINDS):
        hf_fixtures.save(kind, models / kind, vocab=eq.VOCAB, num_hidden_layers=2)
    settings = {name: keys(models / kind, **more) for name, (kind, more) in OTHERS.items()}
    [wanted] = run_ranks(
        eq.each, 1, [eq.settings("fp64", "single", **m) for m in settings.values()]
    )
    divided = []
    for (name, more), expected in zip(settings.items(), wanted, strict=True):
        strategies = ("ddp", "full_shard") if "model__lora__rank" in more else ("full_shard",)
        for strategy in strategies:
            recipe = eq.settings("fp64", strategy, 2, **more, tensor=2)
            divided.append((f"{name}, {strategy}", recipe, expected))
    eq.check(2, divided)


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


def steps_with_norms(join, recipes):
    """The loss and gradient norm of a step, and the types that the model's norms gave."""
    found = []
    for recipe in recipes:
        with join(recipe) as ranks:
            model, trainer = eq.built(ranks, recipe)
            kinds: set[torch.dtype] = set()
            for module in model.modules():
                if type(module).__name__.endswith("Norm"):
                    module.register_forward_hook(lambda _, __, out, k=kinds: k.add(out.dtype))
            [loss], [norm] = eq.train(ranks, recipe, trainer, range(1))
            found.append((loss, norm, kinds))
    return found


@pytest.mark.dist
def test_norms_give_the_same_types_sharded_or_not(models):
    """The norm of Qwen3's queries gets low numbers already."""
    more = keys(models / "qwen3", parallel__activation_checkpointing="selective")
    [[plain]] = run_ranks(steps_with_norms, 1, [eq.settings("fp32", "single", **more)])
    recipes = [eq.settings("bf16", strategy, 2, **more) for strategy in ("ddp", "full_shard")]
    for per_rank in run_ranks(steps_with_norms, 2, recipes):
        for loss, size, kinds in per_rank:
            # as autocast leaves it: gains in float32 times what came in
            assert kinds == {torch.float32}
            assert (loss, size) == (
                pytest.approx(plain[0], rel=5e-3),
                pytest.approx(plain[1], rel=3e-2),
            )


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
