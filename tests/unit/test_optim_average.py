"""Averaged weights against float64 means of the weights that really were there."""

import math

import pytest
import torch
from test_training_step import Line, batch
from torch import nn

from bare_trainer import bare_trainer
from windlass.optim.average import Average
from windlass.parallel.env import DistEnv
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe

STEPS = 12
ROUNDING = 1e-6  # of float32, relative


def expected(weights: list[float], beta: float) -> float:
    """The average of weights in order, by its definition."""
    average = weights[0]
    for n, weight in enumerate(weights[1:], start=1):
        decay = min(beta, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weight
    return average


@pytest.mark.parametrize("bad", [(), (1, 5, 6, 9, 12), range(1, 13)], ids=["good", "some", "all"])
@pytest.mark.parametrize("deferred", [False, True])
def test_the_average_is_that_of_the_updates_that_were_made(deferred, bad):
    """Bad steps are skipped by the host, or by the device (`deferred`), which it does not tell."""
    train = {"steps": STEPS, "on_nonfinite": "skip", "max_skips": 99, "average": 0.6}
    recipe, model = Recipe.model_validate({"train": train, "optim": {"lr": 0.05}}), Line()
    trainer = bare_trainer(model, recipe, Ranks(DistEnv(), torch.device("cpu")), deferred)
    average, entered = trainer.average, list[float]()
    for step in range(1, STEPS + 1):
        model.factor = math.inf if step in bad else 1.0
        before = model.weight
        trainer.step(batch(step), 1.0)
        assert (model.weight == before) == (step in bad)
        if step not in bad:
            entered.append(model.weight)
        assert int(average.count) == len(entered)
        if entered:
            wanted = expected(entered, 0.6)
            assert float(average.tensors["w"]) == pytest.approx(wanted, rel=ROUNDING)


def test_an_average_that_begins_anew_keeps_nothing_of_the_memory_it_was_made_in():
    """A resume makes it before the checkpoint fills the weights, perhaps of NaN."""
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    model.weight.data.fill_(math.nan)
    average = Average(model, 0.999)
    model.weight.data.fill_(2.0)
    average.load(0)
    average.update(torch.zeros(()))
    assert list(average.tensors) == ["weight"], "frozen weights have no average"
    assert average.tensors["weight"].tolist() == [[2.0] * 3] * 2


def test_the_model_gets_its_weights_back_bit_for_bit():
    model = nn.Linear(3, 2)
    average = Average(model, 0.999)
    for _ in range(3):
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter))
        average.update(torch.zeros(()))
    trained = [p.clone() for p in model.parameters()]
    averaged = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with pytest.raises(KeyboardInterrupt), average.in_model():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, averaged[name]) and parameter.requires_grad
        raise KeyboardInterrupt
    assert all(map(torch.equal, model.parameters(), trained))
    assert all(torch.equal(average.tensors[name], averaged[name]) for name in averaged)


def test_the_plan_counts_the_average():
    from windlass.estimate.inputs import read_inputs
    from windlass.estimate.memory import memory
    from windlass.estimate.rank import layout_of
    from windlass.model.size import count

    plain = Recipe().replace({"model.vocab": 257})
    averaged = plain.replace({"train.average": 0.999})
    total = count(plain.model, 257).total
    sizes = [read_inputs(recipe).size.checkpoint_bytes for recipe in (plain, averaged)]
    assert sizes[1] - sizes[0] == 4 * total
    for strategy, ranks in {"ddp": 1, "shard_optim": 1, "full_shard": 2}.items():
        rows = [
            memory(r.model, 257, layout_of(r.replace({"parallel.strategy": strategy}), 2))
            for r in (plain, averaged)
        ]
        assert rows[1].total - rows[0].total == rows[1].average == -(-4 * total // ranks)
