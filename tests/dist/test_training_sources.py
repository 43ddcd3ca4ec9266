"""The loss of a mixture's sources in an evaluation, on every layout: the numbers of one process in
float64."""

import numpy as np
import pytest
import torch
from equivalence import built, rows, settings
from harness import run_ranks
from test_parallel_equivalence import on

from windlass.data.mixture import MixedSamples
from windlass.evaluation.likelihood import evaluate_loss
from windlass.evaluation.passes import Passes
from windlass.model.sharding import unwrap

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
    """The losses of an evaluation, and the sources' losses from the model's own logits."""
    with join(recipe) as ranks:
        model, _ = built(ranks, recipe)
        samples, expected = mixed(spread=True), {}
        evaluated = evaluate_loss(Passes(unwrap(model), ranks), samples, 4, 30, whole=True)
        if ranks.world == 1:
            batch = samples.read(np.arange(len(samples))).map(torch.from_numpy)
            with torch.no_grad():
                logits = model(batch.tokens)
            losses = torch.nn.functional.cross_entropy(
                logits.transpose(1, 2), batch.labels, reduction="none"
            )
            for source, name in enumerate(NAMES):
                here = (batch.sources == source).unsqueeze(1) & (batch.labels >= 0)
                expected[f"source.{name}.full_loss"] = float(losses[here].mean())
        return {k: v for k, v in evaluated.items() if "loss" in k}, expected


CELLS = {
    2: [on("ddp"), on("full_shard"), on(tensor=2), on(context=2), on(pipeline=2)],
    4: [on("full_shard", tensor=2), on(pipeline=2, context=2)],
}


def each(join, recipes):
    return [by_source(join, recipe) for recipe in recipes]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.full)])
def test_every_layout_shows_the_losses_of_the_rows_one_by_one(world):
    [[wanted, expected]] = run_ranks(by_source, 1, settings("fp64", "single"))
    assert len(expected) == 3 and {"source.a.loss", *expected} <= set(wanted)
    assert {name: wanted[name] for name in expected} == pytest.approx(expected, rel=1e-12, abs=0)
    recipes = [settings(world=world, **cell) for cell in CELLS[world]]
    for per_rank in run_ranks(each, world, recipes, timeout=120):
        for cell, (scores, _) in zip(CELLS[world], per_rank, strict=True):
            assert scores == pytest.approx(wanted, rel=1e-9, abs=0), cell
