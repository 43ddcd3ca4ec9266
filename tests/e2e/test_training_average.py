"""Runs with averaged weights: against the weights of all checkpoints, resumed, branched,
evaluated, exported; and the mean of several checkpoints.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import corpus, recipe_of

import windlass
from helpers import refused
from windlass import Recipe, train
from windlass.checkpoint.format import Checkpoint, open_checkpoint, step_dir
from windlass.evaluation.source import alone, find_source, open_model
from windlass.run import Run

__all__ = ["corpus"]

STEPS, BETA = 12, 0.7
EVERY_STEP = {"checkpoint.every": 1, "checkpoint.keep_last": 30, "eval.every": 4}
KINDS: dict[str, dict[str, Any]] = {
    "ema": {"train.average.kind": "ema", "train.average.beta": BETA},
    "tail": {"train.average.kind": "tail", "train.average.last": 7},
}
ROUNDING = 1e-6


def averaged(corpus: Path, run: Path, kind: str = "ema", **more: Any) -> Recipe:
    return recipe_of(corpus, run, **EVERY_STEP | KINDS[kind] | more)


def at(run: Run, step: int) -> Checkpoint:
    return open_checkpoint(step_dir(run.checkpoints_dir, step))


def defined(run: Run, kind: str, name: str, last: int = STEPS) -> torch.Tensor:
    """The average after `last` steps in float64, from the weights of every step's checkpoint."""
    first = 1 if kind == "ema" else STEPS - 6
    weights = [at(run, step).tensor(f"model/{name}").double() for step in range(first, last + 1)]
    if kind == "tail":
        return torch.stack(weights).mean(0)
    average = weights[0]
    for n, weight in enumerate(weights[1:], start=1):
        beta = min(BETA, (1 + n) / (10 + n))
        average = beta * average + (1 - beta) * weight
    return average


def assert_defined(run: Run, kind: str, last: int = STEPS) -> None:
    checkpoint = at(run, last)
    names = checkpoint.names("average/")
    assert len(names) == len(checkpoint.names("model/"))
    for name in names:
        short = name.removeprefix("average/")
        wanted = defined(run, kind, short, last)
        torch.testing.assert_close(checkpoint.tensor(name).double(), wanted, rtol=0, atol=ROUNDING)


@pytest.fixture(scope="module", params=KINDS)
def whole(request, corpus, tmp_path_factory) -> Run:
    return train(averaged(corpus, tmp_path_factory.mktemp("whole") / "run", request.param))


@pytest.fixture(scope="module")
def ema(corpus, tmp_path_factory) -> Run:
    return train(averaged(corpus, tmp_path_factory.mktemp("ema") / "run"))


def kind_of(run: Run) -> str:
    return str(run.recipe.train.average.kind)


def losses(run: Run) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "average_loss", "full_average_loss")
    return [tuple(map(line.get, keys)) for line in run.lines("eval")]


def test_a_run_averages_saves_and_evaluates(whole):
    kind, first = kind_of(whole), 1 if kind_of(whole) == "ema" else STEPS - 6
    assert_defined(whole, kind)
    for step in range(1, STEPS + 1):
        count = at(whole, step).counters["averaged"]
        assert count == max(0, step - first + 1)
        assert bool(at(whole, step).names("average/")) == bool(count)
    for step, loss, average_loss, _ in losses(whole):
        assert (average_loss is not None) == (step >= first)
        if average_loss is not None:
            run = f"{whole.path}@{step}"
            scores = windlass.evaluate(run, weights="average", overrides=["eval.batches=100"])
            assert scores.results["loss"]["loss"] == pytest.approx(average_loss, rel=ROUNDING)
            assert average_loss != loss


def test_training_without_an_average_is_the_same(corpus, tmp_path, ema):
    plain = train(recipe_of(corpus, tmp_path / "run", **EVERY_STEP))
    keys = ("step", "loss", "grad_norm")
    rows = [[tuple(line[k] for k in keys) for line in r.lines("train")] for r in (plain, ema)]
    assert rows[0] == rows[1]
    for name in at(plain, STEPS).names():
        assert torch.equal(at(plain, STEPS).tensor(name), at(ema, STEPS).tensor(name))


@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.full), 8])
def test_a_resume_is_exact(whole, corpus, tmp_path, step):
    again = averaged(corpus, tmp_path / "run", kind_of(whole))
    run = train(again, branch_from=f"{whole.path}@{step}")
    new, old = at(run, STEPS), at(whole, STEPS)
    assert all(torch.equal(new.tensor(name), old.tensor(name)) for name in old.names())
    assert losses(run) == [line for line in losses(whole) if line[0] >= step]


def test_a_branch_continues_starts_or_drops_an_average(corpus, tmp_path, ema, capsys):
    origin = f"{ema.path}@6"
    same = train(averaged(corpus, tmp_path / "same"), branch_from=origin)
    for name in at(ema, STEPS).names():
        assert torch.equal(at(same, STEPS).tensor(name), at(ema, STEPS).tensor(name))
    capsys.readouterr()
    dropped = train(recipe_of(corpus, tmp_path / "none", **EVERY_STEP), branch_from=origin)
    assert "train.average.kind was" in " ".join(capsys.readouterr().out.split())
    assert not at(dropped, STEPS).names("average/")
    other = train(averaged(corpus, tmp_path / "tail", "tail"), branch_from=origin)
    assert "train.average.kind was" in " ".join(capsys.readouterr().out.split())
    assert at(other, STEPS).counters["averaged"] == 6
    with refused("train.average.kind", "run.dir"):
        train(recipe_of(corpus, ema.path, **EVERY_STEP))


def test_the_export_of_the_average_has_its_logits(ema, tmp_path):
    """The reference is the network with the tensors of the checkpoint put in by hand."""
    windlass.export(ema, tmp_path / "hf", weights="average")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    own = open_model(find_source(ema), alone("cpu"))
    checkpoint, tokens = at(ema, STEPS), torch.arange(16).view(2, 8) % 9
    with torch.no_grad():
        raw = own(tokens)
        for name, parameter in own.named_parameters():
            parameter.copy_(checkpoint.tensor(f"average/{name}"))
        wanted = own(tokens)
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "hf", trust_remote_code=True
        )
        torch.testing.assert_close(theirs(tokens).logits, wanted, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(raw, wanted, atol=1e-4) and exported
    card = (tmp_path / "hf" / "README.md").read_text()
    assert f"{ema.lines('eval')[-1]['average_loss']:.4f}" in card
