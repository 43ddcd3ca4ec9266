"""Models of transformers in low precision and compiled: the same numbers and types, sharded or not."""

import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import grad_norm, recipe, run_ranks
from torch._dynamo.utils import counters

import hf_fixtures
from windlass.evaluation.generate import Sampling, generate
from windlass.evaluation.passes import Passes
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.parallel import collectives
from windlass.parallel.parallelize import parallelize, sync_gradients, unwrap
from windlass.parallel.precision import autocast


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
    """The loss and gradient norm of one step of a model of `transformers`, the types that its norms
    gave, a text, and the number of graphs that its generation compiled.
    """
    # the compiler looks at gradients of inner tensors, and warns itself
    warnings.simplefilter("ignore")
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
            if type(module).__name__.endswith("Norm") and settings.train.compile is not True:
                module.register_forward_hook(lambda _, __, out: kinds.add(out.dtype))
        total, norm = loss_and_norm(model, settings, ranks)
        before = counters["stats"]["unique_graphs"]
        sampling = Sampling(max_tokens=6, temperature=0)
        passes = Passes(autocast=lambda: autocast(settings, ranks.device))
        text = generate(model, [[1, 2, 3]], sampling, ranks, passes=passes)
        return total, norm, kinds, text, counters["stats"]["unique_graphs"] - before


@pytest.mark.dist
def test_norms_of_transformers_give_the_same_types_sharded_or_not(tmp_path):
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    # the norm of its queries gets low numbers already
    directory = hf_fixtures.save("qwen3", tmp_path, num_hidden_layers=2)
    (plain,) = run_ranks(hf_step, 1, "single", directory)
    step = partial(hf_step, train__precision="bf16")
    for strategy in ("ddp", "full_shard"):
        for loss, size, kinds, _, _ in run_ranks(step, 2, strategy, directory):
            # as autocast leaves it: gains in float32 times what came in
            assert kinds == {torch.float32}, strategy
            assert loss == pytest.approx(plain[0], rel=5e-3), strategy
            assert size == pytest.approx(plain[1], rel=3e-2), strategy
