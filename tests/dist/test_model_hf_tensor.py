"""Models of transformers with tensor parallelism against one process, in float64, to 1e-9."""

import itertools
from pathlib import Path

import pytest
import torch
from equivalence import VOCAB, built, distance, each, logits_of, reference, settings, train, trained
from harness import run_ranks
from test_parallel_layouts import compiled, whole_state

import hf_fixtures
from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import gather_shard, restore
from windlass.errors import UserError
from windlass.model.build import build_model
from windlass.recipe import Recipe

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
@pytest.mark.parametrize("world", [pytest.param(2, marks=FULL), 4])
def test_five_steps_are_those_of_one_process(models, world):
    wanted = {kind: reference(**keys(models / kind)) for kind in KINDS}
    cells = list(itertools.product(KINDS, STRATEGIES))
    recipes = [
        settings("fp64", s, world // 2, 2, **keys(models / kind), parallel__tensor=2)
        for kind, s in cells
    ]
    for per_rank in run_ranks(each, world, recipes):
        for cell, outcome in zip(cells, per_rank, strict=True):
            assert max(distance(outcome, wanted[cell[0]])) < 1e-9, cell


@pytest.mark.dist
def test_logits_and_a_cache_are_those_of_one_process(models):
    single = [settings("fp64", "single", **keys(models / kind)) for kind in KINDS]
    [wanted] = run_ranks(logits_of, 1, single)
    for strategy in ("ddp", "full_shard"):
        recipes = [
            settings("fp64", strategy, **keys(models / kind), parallel__tensor=2) for kind in KINDS
        ]
        for per_rank in run_ranks(logits_of, 2, recipes):
            for pair, expected in zip(per_rank, wanted, strict=True):
                torch.testing.assert_close(pair, expected, rtol=1e-9, atol=1e-12)


RECOMPUTED = {"parallel__activation_checkpointing": "selective"}
OTHERS = {
    "from the seed": ("llama", {"model__from_scratch": True}),
    "muon, recomputed": ("qwen3", {"optim__kind": "muon", **RECOMPUTED}),
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
@pytest.mark.parametrize(
    "kind", ["phi3", pytest.param("olmo2", marks=FULL), pytest.param("gpt_neox", marks=FULL)]
)
def test_gathered_and_fused_layers_are_those_of_one_process(tmp_path, kind):
    """Phi-3 gathers fused layers; OLMo 2 normalises all heads; GPT-NeoX fuses queries and keys."""
    hf_fixtures.save(kind, tmp_path, vocab=VOCAB, num_hidden_layers=2)
    [wanted] = run_ranks(trained, 1, settings("fp64", "single", **keys(tmp_path)))
    recipe = settings("fp64", "full_shard", **keys(tmp_path), parallel__tensor=2)
    for outcome in run_ranks(trained, 2, recipe):
        assert max(distance(outcome, wanted)) < 1e-9


@FULL
@pytest.mark.dist
def test_a_compiled_block_is_one_graph_with_its_collectives(tmp_path):
    """Rows of another length take two more: FSDP2 gives the first block of a unit a view, whose base
    has a varying size.
    """
    hf_fixtures.save("llama", tmp_path, vocab=VOCAB)
    recipe = settings("fp64", "full_shard", 1, 2, **keys(tmp_path), parallel__tensor=2)
    plain = run_ranks(trained, 2, recipe)
    recipe = recipe.replace({"train.compile": True})
    for losses, graphs, breaks in run_ranks(compiled, 2, recipe, timeout=150):
        assert losses == plain[0][0]
        assert (graphs, breaks) == (3, {})


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
            writer = Writer(folder / name / "checkpoints", ranks.rank, ranks.world, piece_bytes=512)
            state = gather_shard(model, trainer.optimizer, ranks.rank, ranks.world)
            writer.write(2, state, {"step": 2})
            assert not writer.wait()[0].error
            held = whole_state(model, trainer.optimizer)
            ranks.all_gather_object("saved", 1)
            if ranks.main:
                torch.save(held, folder / name / "whole.pt")
    return losses


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=FULL)])
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
def test_low_precision_stays_near_one_process(models):
    more = {"parallel__activation_checkpointing": "full"}
    of_kind = [keys(models / kind, **more) for kind in KINDS]
    wanted = run_ranks(each, 1, [settings("fp32", "single", **keys) for keys in of_kind])[0]
    for strategy in ("ddp", "full_shard"):
        recipes = [settings("bf16", strategy, **keys, parallel__tensor=2) for keys in of_kind]
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
    reasons = {"bloom": "no tp_plan", "gpt2": "no tp_plan", "mixtral": "experts"}
    for kind, reason in {**reasons, "llama": "dropout in the attention"}.items():
        if kind != "llama":
            hf_fixtures.save(kind, tmp_path / kind, vocab=VOCAB)
        message = refusal(**keys(tmp_path / kind, parallel__tensor=2))
        assert reason in message and "parallel.tensor=1" in message
    message = refusal(**keys(models / "llama", parallel__tensor=4))
    assert "4 ranks do not divide the 2 key and value heads" in message
    assert message.endswith("write 2")
    assert "3 ranks do not divide the 4 attention heads" in refusal(
        **keys(models / "llama", parallel__tensor=3)
    )
    adapters = {"model__lora__rank": 2, "parallel__tensor": 2}
    more = {"parallel__context": 2, "parallel__pipeline": 2}
    with pytest.raises(UserError, match=r"(?s)parallel\.tensor.*model\.lora"):
        settings("fp64", "ddp", **keys(models / "llama", **adapters))
    with pytest.raises(UserError, match=r"(?s)parallel\.context.*parallel\.pipeline"):
        settings("fp64", "ddp", **keys(models / "llama", **more))
