"""Runs with each kind of optimizer and state, resumed bit for bit; optimizers of libraries by name,
their groups, and what is refused before anything is written.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import curve, refused, tiny_recipe, write_corpus
from windlass import errors, load_model, train
from windlass.checkpoint.format import open_checkpoint
from windlass.errors import installed
from windlass.model.build import build_model
from windlass.model.gpt import initialise
from windlass.optim.build import build_optimizer, library_optimizer
from windlass.recipe.settings import LIBRARY_OPTIMIZERS, OptimSettings

BF16 = {"train__master": "bf16", "train__precision": "bf16"}
library = pytest.mark.skipif(
    not installed("pytorch_optimizer"), reason="pytorch_optimizer is not installed"
)
NAMES = [f"torch.optim.{name}" for name in LIBRARY_OPTIMIZERS["torch.optim"].split()]
NAMES += [
    pytest.param(f"pytorch_optimizer.{name}", marks=library)
    for name in LIBRARY_OPTIMIZERS["pytorch_optimizer"].split()
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "text.txt", words=2000)


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("torch.optim.SGD", {"optim__options__momentum": 0.9}),
        ("torch.optim.Adam", {"optim__options__amsgrad": True}),
        ("torch.optim.ASGD", {}),
        pytest.param("pytorch_optimizer.AdEMAMix", {}, marks=library),
        ("adamw", BF16),
        ("muon", BF16),
        ("adamw8bit", {}),
        ("adamw8bit", BF16),
    ],
)
def test_a_stopped_run_continues_bit_for_bit(
    kind: str, more: dict[str, Any], corpus: Path, tmp_path: Path
) -> None:
    settings = {"optim__kind": kind, "train__steps": 6, **more}
    straight = train(tiny_recipe(corpus, tmp_path / "straight", **settings))
    recipe = tiny_recipe(corpus, tmp_path / "stopped", **settings)
    train(recipe, stop_at=3)
    assert curve(train(recipe)) == curve(straight) and len(curve(straight)) == 6
    first, second = (
        open_checkpoint(run / "checkpoints" / "step-00000006")
        for run in (straight.path, recipe.run_dir)
    )
    assert first.names() == second.names() and any(n.startswith("optim/") for n in first.names())
    for name in first.names():
        assert torch.equal(first.tensor(name).float(), second.tensor(name).float()), name
        low = more is BF16 and name.startswith("model/")
        assert not low or first.dtype(name) == torch.bfloat16, name
    model = load_model(straight)  # in float32, for any device
    assert {p.dtype for p in model.parameters()} == {torch.float32}


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


@pytest.mark.parametrize("kind", NAMES)
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


def test_a_branch_may_change_the_precision_of_weights(corpus: Path, tmp_path: Path) -> None:
    with refused("train.master", 'train.precision="bf16"'):  # `auto` is fp32 on a CPU
        train(tiny_recipe(corpus, tmp_path / "low", train__master="bf16"))
    low = train(tiny_recipe(corpus, tmp_path / "low", train__steps=4, **BF16))
    more = {"model__init_from": str(low.path), "train__steps": 2}
    for name, settings in (("wide", {}), ("again", BF16)):
        run = train(tiny_recipe(corpus, tmp_path / name, **more, **settings))
        assert curve(run)[0][1] < curve(low)[0][1]


def test_bf16_weights_of_an_own_model_of_transformers(corpus: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=257, n_positions=64, n_embd=16, n_layer=1, n_head=2)
    own = GPT2LMHeadModel(config)
    train(tiny_recipe(corpus, tmp_path / "run", train__steps=2, **BF16), model=own)
    assert {p.dtype for p in own.parameters()} == {torch.bfloat16}
