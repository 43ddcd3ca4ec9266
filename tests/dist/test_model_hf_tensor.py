"""Models of transformers with tensor parallelism against one process, in float64, to 1e-9."""

from pathlib import Path

import pytest
from equivalence import VOCAB, distance, reference, settings, trained
from harness import run_ranks

import hf_fixtures

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
