"""Averaged weights against float64 means of the weights that really were there."""

import math

import pytest
import torch
from test_training_step import Line, batch
from torch import nn

from bare_trainer import bare_trainer
from helpers import refused
from windlass.optim.average import Average
from windlass.parallel.dist import Ranks
from windlass.parallel.env import DistEnv
from windlass.recipe import Horizon, Recipe
from windlass.recipe.settings import AverageSettings

STEPS = 12
ROUNDING = 1e-6  # of float32, relative


def expected(kind: str, weights: list[float], beta: float) -> float:
    """The average of weights in order, by its definition."""
    if kind == "tail":
        return math.fsum(weights) / len(weights)
    average = weights[0]
    for n, weight in enumerate(weights[1:], start=1):
        decay = min(beta, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weight
    return average


CASES = {
    "ema": ({"kind": "ema", "beta": 0.6}, range(1, 13)),
    "tail": ({"kind": "tail", "last": 8}, range(5, 13)),
    "half": ({"kind": "tail", "last": 0.5}, range(7, 13)),
    "whole run": ({"kind": "tail", "last": 1.0}, range(1, 13)),
}


@pytest.mark.parametrize("bad", [(), (1, 5, 6, 9, 12), range(1, 13)], ids=["good", "some", "all"])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_average_is_that_of_the_updates_that_were_made(case, deferred, bad):
    """Bad steps are skipped by the host, or by the device (`deferred`), which it does not tell."""
    settings, due = CASES[case]
    train = {"steps": STEPS, "on_nonfinite": "skip", "max_skips": 99, "average": settings}
    recipe, model = Recipe.model_validate({"train": train, "optim": {"lr": 0.05}}), Line()
    trainer = bare_trainer(model, recipe, Ranks(DistEnv(), torch.device("cpu")), deferred)
    average, entered = trainer.average, list[float]()
    for step in range(1, STEPS + 1):
        model.factor = math.inf if step in bad else 1.0
        before = model.weight
        trainer.step(batch(step), 1.0)
        assert (model.weight == before) == (step in bad)
        assert (step > average.begin) == (step in due)
        if step in due and step not in bad:
            entered.append(model.weight)
        assert average.begun(step) == len(entered)
        if entered:
            wanted = expected(settings["kind"], entered, settings.get("beta", 0))
            assert float(average.tensors["w"]) == pytest.approx(wanted, rel=ROUNDING)


@pytest.mark.parametrize("kind", ["ema", "tail"])
def test_an_average_that_begins_anew_keeps_nothing_of_the_memory_it_was_made_in(kind):
    """A resume makes it before the checkpoint fills the weights, perhaps of NaN."""
    model = nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(math.nan)
    average = Average(model, AverageSettings(kind=kind), Horizon(STEPS, 100, 1))
    with torch.no_grad():
        model.weight.fill_(2.0)
    average.load(0)
    average.update(STEPS, torch.zeros(()))
    assert average.tensors["weight"].tolist() == [[2.0] * 3] * 2


def moving(kind: str, steps: int = STEPS, **more) -> tuple[nn.Linear, Average]:
    model = nn.Linear(3, 2)
    return model, Average(model, AverageSettings(kind=kind, **more), Horizon(steps, 100, 1))


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_the_model_gets_its_weights_back_bit_for_bit():
    model, average = moving("ema")
    for step in (1, 2, 3):
        move(model)
        average.update(step, torch.zeros(()))
    trained = [p.clone() for p in model.parameters()]
    averaged = {name: tensor.clone() for name, tensor in average.tensors.items()}
    with pytest.raises(KeyboardInterrupt), average.in_model():
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, averaged[name]) and parameter.requires_grad
        raise KeyboardInterrupt
    assert all(map(torch.equal, model.parameters(), trained))
    assert all(torch.equal(average.tensors[name], averaged[name]) for name in averaged)


def test_frozen_weights_have_no_average():
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    average = Average(model, AverageSettings(kind="ema"), Horizon(STEPS, 100, 1))
    assert list(average.tensors) == ["weight"]


def test_an_extended_run_has_a_new_tail():
    """At the end of the shorter run, the tail of the longer one has not begun."""
    model, average = moving("tail", steps=20, last=5)
    assert average.begin == 15
    average.load(0)
    weights = []
    for step in range(13, 21):
        move(model)
        weights.append(model.weight.detach().double())
        average.update(step, torch.zeros(()))
    wanted = torch.stack(weights[-5:]).mean(0)
    torch.testing.assert_close(average.tensors["weight"].double(), wanted, rtol=0, atol=ROUNDING)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"train.average.beta": 0.9}, ("train.average.kind", "ema")),
        (
            {"train.average.kind": "ema", "train.average.beta": 1.0},
            ("train.average.beta", "less than 1"),
        ),
        ({"train.average.kind": "swa"}, ("train.average.kind", "tail")),
        ({"train.average.kind": "tail", "train.average.last": 0}, ("train.average.last", "0.2")),
        ({"checkpoint.best": "loss.average_loss"}, ("checkpoint.best", "train.average.kind")),
        ({"train.ema": 0.999}, ("train.ema", "train.average.kind=ema")),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with refused(*words):
        Recipe().replace(settings)


def test_the_plan_counts_the_average():
    from windlass.estimate.memory import memory
    from windlass.estimate.rank import layout_of
    from windlass.estimate.subject import subject_of
    from windlass.model.size import count

    plain = Recipe().replace({"model.vocab": 257})
    averaged = plain.replace({"train.average.kind": "ema"})
    total = count(plain.model, 257).total
    sizes = [subject_of(recipe).size.checkpoint_bytes for recipe in (plain, averaged)]
    assert sizes[1] - sizes[0] == 4 * total
    for strategy, ranks in {"ddp": 1, "shard_optim": 1, "full_shard": 2}.items():
        rows = [
            memory(r.model, 257, layout_of(r.replace({"parallel.strategy": strategy}), 2))
            for r in (plain, averaged)
        ]
        assert rows[1].total - rows[0].total == rows[1].average == -(-4 * total // ranks)
