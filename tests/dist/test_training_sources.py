"""The loss of a mixture's sources, in training and in an evaluation, on every layout: the numbers
of one process in float64.
"""

import numpy as np
import pytest
import torch
from equivalence import BATCH, built, rows, settings
from harness import run_ranks
from test_parallel_equivalence import on

from windlass.data.loader import Loader
from windlass.data.mixture import MixedSamples, Mixture, Stage
from windlass.evaluation.likelihood import evaluate_loss
from windlass.training.state import LossSum

pytestmark = pytest.mark.dist
NAMES = ("a", "b", "c")


class Some:
    """Some of the equivalence tests' rows, all of one width."""

    def __init__(self, start, stop):
        self.all, self.start, self.stop = rows(80), start, stop

    def __len__(self):
        return self.stop - self.start

    def length(self, index):
        return self.read(np.array([index])).tokens.shape[1]

    def read(self, indices):
        batch = self.all.read(np.append(indices + self.start, np.arange(len(self.all))))
        return batch.map(lambda field: field[: len(indices)])


def mixed(**options):
    parts = zip(NAMES, (Some(0, 40), Some(40, 76), Some(76, 80)), strict=True)
    return MixedSamples(dict(parts), **options)


def by_source(join, recipe):
    """The `train` fields after two steps and three more, and the losses of an evaluation."""
    with join(recipe) as ranks:
        model, trainer = built(ranks, recipe)
        batch, samples = recipe.batch(ranks.world), mixed()
        mixture = Mixture(samples, [Stage(0, (0.6, 0.3, 0.1), (0, 0, 0))], 1)
        trainer.losses = LossSum(trainer.state, ranks, mixture)
        how = {"seed": 1, "prefetch": 0, "mixture": mixture}
        loader, fields = Loader(samples, batch, ranks.mesh.data_rank, **how), []
        for step, micro_batches in zip(range(1, 6), loader, strict=False):
            result = trainer.step(micro_batches, 1.0)
            trainer.state.step += 1
            trainer.losses.add(result.loss)
            if step in (1, 4):  # as at a save: the sums of the steps so far
                trainer.losses.read()
            if step in (2, 5):
                trainer.losses.read()
                fields.append(trainer.losses.take_sources(BATCH))
        evaluated = evaluate_loss(model, mixed(spread=True), ranks, 4, 30, whole=True)
        return fields, {k: v for k, v in evaluated.items() if "loss" in k}


CELLS = {
    2: [on("ddp"), on("full_shard"), on(tensor=2), on(context=2), on(pipeline=2)],
    4: [on("full_shard", tensor=2), on(pipeline=2, context=2)],
}


def each(join, recipes):
    return [by_source(join, recipe) for recipe in recipes]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_layout_shows_the_losses_of_one_process(world):
    [alone] = run_ranks(by_source, 1, settings("fp64", "single"))
    (first, second), evaluated = alone
    assert {name for name in evaluated if "source" in name} == {
        f"source.{name}.{loss}" for name in NAMES for loss in ("loss", "full_loss")
    }
    assert sum(first[f"source.{name}.samples"] for name in NAMES) == 2 * BATCH
    assert sum(second[f"source.{name}.samples"] for name in NAMES) == 5 * BATCH
    recipes = [settings(world=world, **cell) for cell in CELLS[world]]
    wanted = [first, second, evaluated]
    for per_rank in run_ranks(each, world, recipes, timeout=120):
        for cell, (fields, scores) in zip(CELLS[world], per_rank, strict=True):
            for numbers, expected in zip([*fields, scores], wanted, strict=True):
                assert numbers == pytest.approx(expected, rel=1e-9, abs=0), cell


def test_the_losses_are_those_of_the_rows_one_by_one():
    """The first step, before any update, against the model's own logits."""
    recipe = settings("fp64", "single")

    def both(join):
        with join(recipe) as ranks:
            model, trainer = built(ranks, recipe)
            samples = mixed()
            mixture = Mixture(samples, [Stage(0, (0.6, 0.3, 0.1), (0, 0, 0))], 1)
            trainer.losses = LossSum(trainer.state, ranks, mixture)
            batch = samples.read(mixture.indices(np.arange(BATCH))).map(torch.from_numpy)
            with torch.no_grad():
                logits = model(batch.tokens)
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), batch.labels, reduction="none"
            )
            expected = {}
            for source, name in enumerate(NAMES):
                here = (batch.sources == source).unsqueeze(1) & (batch.labels >= 0)
                if here.any():
                    expected[f"source.{name}.loss"] = float(losses[here].mean())
            loader = Loader(
                samples, recipe.batch(1), 0, seed=1, prefetch=0, mixture=mixture, kind="shuffled"
            )
            result = trainer.step(next(loader), 1.0)
            trainer.state.step += 1
            trainer.losses.add(result.loss)
            trainer.losses.read()
            shown = trainer.losses.take_sources(BATCH)
            return {k: v for k, v in shown.items() if k.endswith("loss")}, expected

    [(shown, expected)] = run_ranks(both, 1)
    assert len(expected) > 1 and shown == pytest.approx(expected, rel=1e-12, abs=0)
