"""Optimizers of `torch.optim` by name: resumed bit for bit, their groups, and what is refused
before anything is written.
"""

from pathlib import Path

import pytest
import torch

from helpers import curve, refused, tiny_recipe, write_corpus
from windlass import train
from windlass.checkpoint.load import open_checkpoint
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.build import build_optimizer
from windlass.recipe import Recipe, RecipeError

OPTIONS = {"SGD": {"optim__options__momentum": 0.9}, "Adam": {"optim__options__amsgrad": True}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt", words=2000)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor", "NAdam", "Adagrad", "ASGD", "Rprop"])
def test_a_stopped_run_continues_bit_for_bit(name: str, corpus: Path, tmp_path: Path) -> None:
    settings = {"optim__kind": f"torch.optim.{name}", **OPTIONS.get(name, {}), "train__steps": 6}
    straight = train(tiny_recipe(corpus, tmp_path / "straight", **settings))
    recipe = tiny_recipe(corpus, tmp_path / "stopped", **settings)
    train(recipe, stop_at=3)
    assert curve(train(recipe)) == curve(straight) and len(curve(straight)) == 6
    first, second = (
        open_checkpoint(run / "checkpoints" / "step-00000006")
        for run in (straight.path, recipe.run_dir)
    )
    assert first.names() == second.names() and any(n.startswith("optim/") for n in first.names())
    assert all(torch.equal(first.tensor(n), second.tensor(n)) for n in first.names())


def test_adamw_by_its_name_is_adamw_with_the_same_groups(corpus: Path, tmp_path: Path) -> None:
    own = tiny_recipe(corpus, tmp_path / "own", train__steps=4)
    options = {"betas": list(own.optim.betas), "eps": own.optim.eps, "fused": True}
    adamw = {"optim.kind": "torch.optim.AdamW", "optim.options": options}
    named = own.replace({**adamw, "run.dir": str(tmp_path / "named")})
    assert curve(train(own)) == curve(train(named))
    initialise(model := build_model(named, 257, device="cpu"), 0)
    groups = build_optimizer(model, named.optim, "cpu").param_groups
    fields = [(g["name"], g["weight_decay"], g["base_lr"]) for g in groups]
    assert fields == [("decay", 0.1, 1e-2), ("no_decay", 0.0, 1e-2)]


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("Adafctor", {}, ("optim.kind", "did you mean Adafactor")),
        ("LBFGS", {}, ("optim.kind", "LBFGS")),
        ("SGD", {"momentun": 0.9}, ("optim.options", "did you mean momentum")),
        ("SGD", {"momentum": -1}, ("optim.options", "momentum")),
        ("Muon", {}, ("optim.kind", "does not take this model")),
    ],
)
def test_what_torch_does_not_have_or_take_is_one_message(kind, options, words, corpus, tmp_path):
    settings = {"optim__kind": f"torch.optim.{kind}", "optim__options": options}
    with refused(*words):
        train(tiny_recipe(corpus, tmp_path / "run", **settings))
    assert kind == "Muon" or not (tmp_path / "run").exists()


def test_a_kind_that_is_none_and_options_of_our_own_are_refused_by_the_recipe() -> None:
    with refused("optim.kind", "torch.optim.SGD", error=RecipeError):
        Recipe.load("quickstart", ["optim.kind=sgd"])
    with refused("optim.options", "adamw", error=RecipeError):
        Recipe.load("quickstart", ["optim.options.momentum=0.9"])
