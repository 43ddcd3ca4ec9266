"""Models of transformers with tensor parallelism against one process, in float64, to 1e-9."""

import itertools
from pathlib import Path

import pytest
import torch
from equivalence import CONTEXT, VOCAB, built, distance, reference, settings, train, trained
from harness import run_ranks
from test_parallel_layouts import whole_state

import hf_fixtures
from windlass.checkpoint.load import choose_checkpoint, open_checkpoint
from windlass.checkpoint.save import Saver
from windlass.checkpoint.state_dict import gather_state, restore
from windlass.errors import UserError
from windlass.model.build import build_model
from windlass.parallel.parallelize import unwrap
from windlass.recipe import Recipe

NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
KINDS = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_hidden_layers": 2},
    "qwen3": {"num_hidden_layers": 2, "intermediate_size": 37, "tie_word_embeddings": True},
    "gpt2": {"n_layer": 2, **NO_DROPOUT},
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


def each(join, recipes):
    return [trained(join, recipe) for recipe in recipes]


CELLS = {2: ("ddp", "full_shard", "shard_optim"), 4: ("ddp", "full_shard", "shard_optim")}


@pytest.mark.dist
@pytest.mark.parametrize("world", CELLS)
@pytest.mark.parametrize("kind", KINDS)
def test_five_steps_are_those_of_one_process(models, kind, world):
    more = keys(models / kind)
    wanted = reference(**more)
    cells = CELLS[world]
    recipes = [settings("fp64", s, world // 2, 2, **more, parallel__tensor=2) for s in cells]
    for per_rank in run_ranks(each, world, recipes):
        for cell, outcome in zip(cells, per_rank, strict=True):
            assert max(distance(outcome, wanted)) < 1e-9, cell


def logits_of(join, recipes):
    """Logits of whole rows, and of the same rows by a cache in three passes."""
    tokens = torch.arange(2 * CONTEXT).view(2, CONTEXT) % VOCAB
    outcomes = []
    for recipe in recipes:
        with join(recipe) as ranks, torch.no_grad():
            model = unwrap(built(ranks, recipe)[0]).eval()
            cache = model.new_cache(2, CONTEXT)
            parts = [model(part, cache=cache) for part in tokens.split([5, 6, 1], 1)]
            outcomes.append((model(tokens), torch.cat(parts, 1)))
    return outcomes


@pytest.mark.dist
def test_logits_and_a_cache_are_those_of_one_process(models):
    for kind in KINDS:
        more = keys(models / kind)
        [[(wanted, cached)]] = run_ranks(logits_of, 1, [settings("fp64", "single", **more)])
        recipes = [settings("fp64", s, **more, parallel__tensor=2) for s in ("ddp", "full_shard")]
        for per_rank in run_ranks(logits_of, 2, recipes):
            for whole, parts in per_rank:
                torch.testing.assert_close(whole, wanted, rtol=1e-9, atol=1e-12)
                torch.testing.assert_close(parts, cached, rtol=1e-9, atol=1e-12)


OTHERS = {
    "from the seed": ("gpt2", {"model__from_scratch": True}),
    "muon": ("qwen3", {"optim__kind": "muon"}),
    "recomputed": ("llama", {"parallel__activation_checkpointing": "selective"}),
}


@pytest.mark.dist
@pytest.mark.parametrize("name", OTHERS)
def test_other_settings_are_those_of_one_process(models, name):
    kind, changes = OTHERS[name]
    more = keys(models / kind, **changes)
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **more))
    recipes = [settings("fp64", s, 2, **more, parallel__tensor=2) for s in ("ddp", "full_shard")]
    for per_rank in run_ranks(each, 4, recipes):
        for outcome in per_rank:
            assert max(distance(outcome, wanted)) < 1e-9


@pytest.mark.dist
def test_dropout_draws_the_masks_of_one_process(tmp_path):
    llama = {"num_hidden_layers": 2, "attention_dropout": 0.2}
    cells = [("gpt2", {"n_layer": 2}, "auto"), ("llama", llama, "sdpa"), ("llama", llama, "eager")]
    for kind, changes, attention in cells:
        hf_fixtures.save(kind, tmp_path / kind, vocab=VOCAB, **changes)
        more = keys(tmp_path / kind, model__attention=attention, train__micro_batch=8)
        [wanted] = run_ranks(trained, 1, settings("fp64", "single", **more))
        recipe = settings("fp64", "full_shard", **more, parallel__tensor=2)
        for outcome in run_ranks(trained, 2, recipe):
            assert max(distance(outcome, wanted)) < 1e-9, (kind, attention)


@pytest.mark.dist
def test_gathered_and_fused_layers_are_those_of_one_process(tmp_path):
    """Phi-3 gathers fused layers; OLMo 2 normalises all heads; GPT-NeoX fuses queries and keys."""
    for kind, changes in {"phi3": {"pad_token_id": 0}, "olmo2": {}, "gpt_neox": {}}.items():
        hf_fixtures.save(kind, tmp_path / kind, vocab=VOCAB, num_hidden_layers=2, **changes)
        more = keys(tmp_path / kind)
        [wanted] = run_ranks(trained, 1, settings("fp64", "single", **more))
        recipe = settings("fp64", "full_shard", **more, parallel__tensor=2)
        for outcome in run_ranks(trained, 2, recipe):
            assert max(distance(outcome, wanted)) < 1e-9, kind


def moved(join, folder: Path, steps: list[tuple[str, Recipe]]):
    """Read the first checkpoint of each pair, train a step, and write the second."""
    losses = []
    for (source, _), (name, recipe) in itertools.pairwise(steps):
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            if (folder / source).exists():
                path = choose_checkpoint(folder / source).path
                restore(open_checkpoint(path), model, trainer.optimizer)
                expected = torch.load(folder / source / "whole.pt")
                held = whole_state(model, trainer.optimizer)
                assert held.keys() == expected.keys()
                assert all(torch.equal(held[key], value) for key, value in expected.items())
            number = int(name[-1])
            losses += train(ranks, recipe, trainer, range(number, number + 1))[0]
            saver = Saver(folder / name / "checkpoints", ranks.rank, ranks.world, piece_bytes=512)
            state = gather_state(model, trainer.optimizer, ranks.rank, ranks.world)
            saver.save(2, state, {"step": 2})
            assert not saver.wait()[0].error
            held = whole_state(model, trainer.optimizer)
            ranks.all_gather_object("saved", 1)
            if ranks.main:
                torch.save(held, folder / name / "whole.pt")
    return losses


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_a_checkpoint_moves_to_one_process_and_back(models, tmp_path, kind):
    more = keys(models / kind)
    single = settings("fp64", "single", **more)
    [wanted] = run_ranks(trained, 1, single)
    full, ddp = (settings("fp64", s, **more, parallel__tensor=2) for s in ("full_shard", "ddp"))
    start = [("none", full), ("tensor0", full)]
    losses = run_ranks(moved, 2, tmp_path, start)[0]
    losses += run_ranks(moved, 1, tmp_path, [start[-1], ("one1", single)])[0]
    losses += run_ranks(moved, 2, tmp_path, [("one1", ddp), ("tensor2", ddp), ("tensor3", full)])[0]
    assert losses == pytest.approx(wanted[0][:4], rel=1e-9)


@pytest.mark.dist
@pytest.mark.parametrize("kind", KINDS)
def test_low_precision_stays_near_one_process(models, kind):
    more = keys(models / kind, parallel__activation_checkpointing="full")
    [wanted] = run_ranks(trained, 1, settings("fp32", "single", **more))
    for strategy in ("ddp", "full_shard"):
        recipe = settings("bf16", strategy, **more, parallel__tensor=2)
        for outcome in run_ranks(trained, 2, recipe):
            losses, norms, _ = distance(outcome, wanted)
            assert losses < 5e-3
            assert norms < 5e-2


def refusal(**more) -> str:
    recipe = settings("fp64", "ddp", **more)
    with pytest.raises(UserError) as caught:
        build_model(recipe, VOCAB)
    return str(caught.value)


def test_what_cannot_be_divided_is_refused_when_the_model_is_built(models, tmp_path):
    hf_fixtures.save("bloom", tmp_path / "bloom", vocab=VOCAB)
    assert "no tp_plan" in refusal(**keys(tmp_path / "bloom", parallel__tensor=2))
    message = refusal(**keys(models / "llama", parallel__tensor=4))
    assert "4 ranks do not divide" in message
    assert "2 attention heads" in message
    assert message.endswith("write 2")
    adapters = {"model__lora__rank": 2, "parallel__tensor": 2}
    more = {"parallel__context": 2, "parallel__pipeline": 2}
    with pytest.raises(UserError, match=r"(?s)parallel\.tensor.*model\.lora"):
        settings("fp64", "ddp", **keys(models / "llama", **adapters))
    with pytest.raises(UserError, match=r"(?s)parallel\.context.*parallel\.pipeline"):
        settings("fp64", "ddp", **keys(models / "llama", **more))
