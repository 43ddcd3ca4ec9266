"""Options of the schedule and the batch together, in whole runs: exact across stops,
kills and numbers of ranks.
"""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from small_runs import OPTIONS, corpus, curve, evaluations, recipe_of, stopped, untouched

from windlass import train
from windlass.data.loader import Loader
from windlass.data.open import open_data
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.schedule import lr_multiplier
from windlass.run import last_start

__all__ = ["corpus"]

SIZES = [8] * 12


def test_stopped_many_times_it_ends_as_if_nothing_had_happened(corpus, tmp_path):
    recipe = recipe_of(corpus, tmp_path / "run", micro=2, **OPTIONS)
    for step in (2, 3, 5, 9):
        run = stopped(recipe, step)
        assert run.lines("train")[-1]["step"] == step
    run = train(recipe)
    whole = untouched(recipe)
    assert curve(run) == curve(whole) and evaluations(run) == evaluations(whole)
    lines, per_epoch = run.lines("train"), last_start(run.ledger())["samples_per_epoch"]
    horizon = recipe.horizon(12, per_epoch)
    assert [line["samples"] for line in lines] == np.cumsum(SIZES).tolist()
    assert [line["tokens"] for line in lines] == (16 * np.cumsum(SIZES)).tolist()
    assert lines[-1]["epoch"] == pytest.approx(sum(SIZES) / per_epoch)
    lrs = [
        recipe.optim.lr * lr_multiplier(recipe.optim.schedule, horizon, step) for step in range(12)
    ]
    assert [line["lr"] for line in lines] == lrs


def test_the_first_loss_and_gradient_are_those_of_torch(corpus, tmp_path):
    """The first step's loss and norm of the gradient, against autograd through torch's own loss."""
    constant = {"optim.schedule.kind": "constant", "optim.schedule.warmup": 0}
    more = {"model.dropout": 0.0, "train.precision": "fp64", "train.steps": 1, "train.grad_clip": 0}
    recipe = recipe_of(corpus, tmp_path / "run", **OPTIONS | more | constant)
    run = train(recipe)
    data = open_data(recipe)
    model = build_model(recipe, data.vocab, "cpu")
    initialise(model, recipe.run.seed)
    with Loader(data.train, recipe.batch(1), 0, recipe.run.seed) as loader:
        batch = next(loader)
    tokens, labels = (
        torch.cat(part) for part in zip(*(m.batch[:2] for m in batch.micro), strict=True)
    )
    loss = F.cross_entropy(model.double()(tokens).flatten(0, 1), labels.flatten())
    grads = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
    line = run.lines("train")[0]
    assert line["loss"] == pytest.approx(loss.item(), rel=1e-12)
    assert line["grad_norm"] == pytest.approx(norm, rel=1e-11)
