"""Optimizers of libraries by name: resumed bit for bit, their groups, and what is refused
before anything is written.
"""

from pathlib import Path

import pytest
import torch

from helpers import curve, refused, tiny_recipe, write_corpus
from windlass import errors, train
from windlass.checkpoint.format import open_checkpoint
from windlass.checkpoint.state_dict import from_tensors, to_tensors
from windlass.errors import installed
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.build import build_optimizer, library_optimizer
from windlass.recipe import Recipe, RecipeError
from windlass.recipe.settings import LIBRARY_OPTIMIZERS, OptimSettings

OPTIONS = {
    "torch.optim.SGD": {"optim__options__momentum": 0.9},
    "torch.optim.Adam": {"optim__options__amsgrad": True},
}
TORCH = ("SGD", "Adam", "ASGD")
LIBRARY = ("AdEMAMix",)
library = pytest.mark.skipif(
    not installed("pytorch_optimizer"), reason="pytorch_optimizer is not installed"
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt", words=2000)


@pytest.mark.parametrize(
    "kind",
    [f"torch.optim.{name}" for name in TORCH]
    + [pytest.param(f"pytorch_optimizer.{name}", marks=library) for name in LIBRARY],
)
def test_a_stopped_run_continues_bit_for_bit(kind: str, corpus: Path, tmp_path: Path) -> None:
    settings = {"optim__kind": kind, **OPTIONS.get(kind, {}), "train__steps": 6}
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
        ("torch.optim.SGD", {"momentun": 0.9}, ["did you mean momentum"]),
        ("torch.optim.SGD", {"momentum": -1}, ["momentum"]),
        pytest.param("pytorch_optimizer.AdEMAMix", {"eps": -1.0}, ["rejects them"], marks=library),
    ],
)
def test_options_that_a_library_does_not_take_are_one_message(
    kind, options, words, corpus, tmp_path
):
    settings = {"optim__kind": kind, "optim__options": options}
    with refused("optim.options", *words):
        train(tiny_recipe(corpus, tmp_path / "run", **settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind",
    [f"torch.optim.{name}" for name in LIBRARY_OPTIMIZERS["torch.optim"].split()]
    + [
        pytest.param(f"pytorch_optimizer.{name}", marks=library)
        for name in LIBRARY_OPTIMIZERS["pytorch_optimizer"].split()
    ],
)
def test_ranks_may_divide_what_is_updated_by_element(kind: str) -> None:
    """Steps on some rows of a matrix update them as steps on the whole do."""
    settings = OptimSettings(kind=kind)
    optimizer = library_optimizer(settings)
    draw = torch.Generator().manual_seed(0)
    whole, *grads = torch.randn(4, 4, 6, generator=draw, dtype=torch.float64)
    updated = []
    for rows in (slice(0, 4), slice(0, 2)):
        parameter = torch.nn.Parameter(whole[rows].clone())
        built = optimizer([parameter], lr=settings.lr)
        for grad in grads:
            parameter.grad = grad[rows].clone()
            built.step()
        updated.append(parameter.detach()[:2])
    torch.testing.assert_close(*updated, rtol=1e-9, atol=0.0)


def test_a_missing_library_is_one_message_before_anything_starts(monkeypatch, corpus, tmp_path):
    monkeypatch.setattr(errors, "installed", lambda package: package != "pytorch_optimizer")
    with refused('optim.kind = "pytorch_optimizer.Lion"', "pip install pytorch_optimizer"):
        train(tiny_recipe(corpus, tmp_path / "run", optim__kind="pytorch_optimizer.Lion"))


def test_state_of_every_kind_has_a_name_and_comes_back() -> None:
    matrix, step = torch.arange(6.0).view(2, 3), torch.tensor(7.0)
    state = {"exp_avg": matrix, "step": step}
    group = {"params": [], "lr": 0.1, "step": 7, "name": "decay"}
    tensors = to_tensors(state, group, {"lr": 1.0})
    assert set(tensors) == {"exp_avg", "step", "group.step"}
    back: dict = {}
    from_tensors(dict(sorted(tensors.items())), back, other := {"lr": 0.1})
    assert other == {"lr": 0.1, "step": 7}
    assert torch.equal(back["exp_avg"], matrix) and back["step"] is step


def test_a_kind_that_is_none_and_options_of_our_own_are_refused_by_the_recipe() -> None:
    for kind, word in (("sgd", "torch.optim.SGD"), ("pytorch_optimizer.Lionn", "r.Lion?")):
        with refused("optim.kind", word, error=RecipeError):
            Recipe.load("quickstart", [f"optim.kind={kind}"])
    with refused("optim.options", "adamw", error=RecipeError):
        Recipe.load("quickstart", ["optim.options.momentum=0.9"])
