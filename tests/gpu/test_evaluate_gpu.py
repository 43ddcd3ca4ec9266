"""Evaluation, generation and models of `transformers` on CUDA: the numbers and texts of the CPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers import curve

pytestmark = pytest.mark.gpu


@pytest.fixture
def run(recipe: Callable[..., Any]) -> Any:
    from windlass import train

    return train(
        recipe("run", "train.precision=fp32", "eval.every=8", "eval.batches=0", "optim.lr=3e-3")
    )


def test_the_validation_loss_is_that_of_the_cpu(run: Any) -> None:
    from windlass import evaluate

    here = run.lines("eval")[-1]
    for device in (run.recipe.parallel.device, "cpu"):
        measured = evaluate(run, ["loss"], [f"parallel.device={device}"]).results["loss"]
        assert measured["loss"] == pytest.approx(here["loss"], rel=1e-5)
    low = evaluate(run, ["loss"], ["train.precision=bf16"]).results["loss"]
    assert low["loss"] == pytest.approx(here["loss"], rel=1e-2)


def test_greedy_text_with_the_cache_is_the_most_likely_token_after_token(run, device):
    import torch

    from windlass.evaluation.api import TextSampler
    from windlass.evaluation.source import find_source

    sampler = TextSampler(find_source(run), device, max_tokens=24, temperature=0.0)
    ids = sampler.source.tokenizer.prompt("def ")
    texts = ["", "", ""]
    for number, piece in sampler.pieces([ids] * 3, after=ids):
        texts[number] += piece
    tokens = torch.tensor([ids], device=device)
    with torch.no_grad():
        for _ in range(24):
            tokens = torch.cat([tokens, sampler.passes.model(tokens)[:, -1:].argmax(-1)], dim=1)
    expected = sampler.source.tokenizer.decode(tokens[0, len(ids) :].tolist())
    assert texts == [expected] * 3 and len(expected) > 0


def test_sampled_text_is_a_function_of_the_seed(run: Any, device: str) -> None:
    from windlass import sample

    def text(seed: int) -> str:
        pieces = sample(run, "def ", device=device, max_tokens=40, seed=seed)
        return "".join(piece for _, piece in pieces)

    assert text(1) == text(1) != text(2)


@pytest.fixture
def bare(tmp_path: Path) -> Callable[[str], Path]:
    """`bare(kind)`: a directory with a tiny model of `transformers` and a tokenizer.

    GPT-2's default configuration has dropout, and a GPU draws other masks than a CPU.
    """
    pytest.importorskip("transformers")
    import hf_fixtures

    def build(kind: str) -> Path:
        texts = ["def the function returns a list of the values"] * 20
        names = ("attn_pdrop", "embd_pdrop", "resid_pdrop") if kind == "gpt2" else ()
        directory = hf_fixtures.save(kind, tmp_path / kind, **dict.fromkeys(names, 0.0))
        return hf_fixtures.save_tokenizer(texts, directory)

    return build


@pytest.mark.parametrize(
    ("kind", "settings"),
    [("llama", ()), ("bloom", ()), ("gpt2", ()), ("llama", ("model.lora.rank=4",))],
)
def test_a_model_of_transformers_trains_as_on_the_cpu_and_is_exported_with_its_logits(
    recipe, bare, device, tmp_path, kind, settings
):
    import torch
    from transformers import AutoModelForCausalLM

    from windlass import export, train
    from windlass.evaluation.source import find_source, open_model
    from windlass.parallel.ranks import alone

    if settings:
        pytest.importorskip("peft")
    more = [f"data.dir='{tmp_path / 'tokens'}'", f"model.name='{bare(kind)}'", *settings]
    more += ["model.kind=hf", "model.context=64", "train.precision=fp32"]
    runs = [
        train(hf_recipe(recipe, name, *more, f"parallel.device={d}"))
        for name, d in (("a", "cpu"), ("b", device))
    ]
    for mine, other in zip(*(curve(run, "loss", "grad_norm") for run in runs), strict=True):
        assert mine[1] == pytest.approx(other[1], rel=1e-3)
        assert mine[2] == pytest.approx(other[2], rel=1e-2)
    folder = export(runs[1], tmp_path / "exported")
    exported = AutoModelForCausalLM.from_pretrained(folder).to(device).eval()
    ours = open_model(find_source(runs[1]), alone(device))
    tokens = torch.randint(1, 300, (2, 20), generator=torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        torch.testing.assert_close(exported(tokens).logits, ours(tokens), rtol=0, atol=1e-4)


def hf_recipe(recipe: Callable[..., Any], name: str, *settings: str) -> Any:
    """The small run's recipe without the shape of its model."""
    from windlass.recipe import Recipe

    small = recipe(name).model_dump(exclude_unset=True)
    del small["model"]
    return Recipe.model_validate({**small, "preset": "hf"}).replace(list(settings))
