"""Models of transformers in low precision: the same numbers and types, sharded or not."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import grad_norm, recipe, run_ranks

import hf_fixtures
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.model.sharding import unwrap
from windlass.parallel import collectives
from windlass.parallel.parallelize import autocast, parallelize, sync_gradients


def loss_and_norm(model, settings, ranks) -> tuple[float, float]:
    """The loss and the gradient norm of four samples, dealt to the ranks."""
    draw = torch.from_numpy(np.random.default_rng(0).integers(0, 64, (4, 17)))
    mine = draw.chunk(ranks.world)[ranks.rank]
    with sync_gradients(model, ranks.strategy, True):
        with autocast(settings, ranks.device):
            loss = model(mine[:, :-1], mine[:, 1:]) / 64
        loss.backward()
    norm = float(grad_norm(model.parameters(), ranks))
    return float(collectives.sum_over_ranks(loss.detach().clone(), ranks)), norm


def hf_step(join, strategy: str, directory: Path, **train):
    """The loss and gradient norm of one step of a model of `transformers`, and the types that its
    norms gave.
    """
    settings = recipe(
        model__kind="hf",
        model__name=str(directory),
        model__context=32,
        parallel__strategy=strategy,
        parallel__activation_checkpointing="selective",
        **train,
    )
    with join(settings) as ranks:
        model = parallelize(build_model(settings, 64), ranks, settings)
        initialise(unwrap(model), 7)
        kinds: set[torch.dtype] = set()
        for module in model.modules():
            if type(module).__name__.endswith("Norm"):
                module.register_forward_hook(lambda _, __, out: kinds.add(out.dtype))
        return *loss_and_norm(model, settings, ranks), kinds


@pytest.mark.dist
def test_norms_of_transformers_give_the_same_types_sharded_or_not(tmp_path):
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    # the norm of its queries gets low numbers already
    directory = hf_fixtures.save("qwen3", tmp_path, num_hidden_layers=2)
    (plain,) = run_ranks(hf_step, 1, "single", directory)
    step = partial(hf_step, train__precision="bf16")
    for strategy in ("ddp", "full_shard"):
        for loss, size, kinds in run_ranks(step, 2, strategy, directory):
            # as autocast leaves it: gains in float32 times what came in
            assert kinds == {torch.float32}, strategy
            assert loss == pytest.approx(plain[0], rel=5e-3), strategy
            assert size == pytest.approx(plain[1], rel=3e-2), strategy
