"""Runs with averaged weights: against the weights of all checkpoints, resumed, branched,
evaluated, exported.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from small_runs import recipe_of

import windlass
from helpers import refused
from windlass import Recipe, train
from windlass.checkpoint.format import Checkpoint, open_checkpoint, step_dir
from windlass.evaluation.source import find_source, open_model
from windlass.parallel.ranks import alone
from windlass.run import Run

STEPS, BETA = 12, 0.7
EVERY_STEP = {"checkpoint.every": 1, "checkpoint.keep_last": 30, "eval.every": 4}
ROUNDING = 1e-6


def averaged(corpus: Path, run: Path, **more: Any) -> Recipe:
    return recipe_of(corpus, run, **EVERY_STEP | {"train.average": BETA} | more)


def at(run: Run, step: int) -> Checkpoint:
    return open_checkpoint(step_dir(run.checkpoints_dir, step))


def defined(run: Run, name: str) -> torch.Tensor:
    """The last average in float64, from the weights of every step's checkpoint."""
    weights = [at(run, step).tensor(f"model/{name}").double() for step in range(1, STEPS + 1)]
    average = weights[0]
    for n, weight in enumerate(weights[1:], start=1):
        beta = min(BETA, (1 + n) / (10 + n))
        average = beta * average + (1 - beta) * weight
    return average


@pytest.fixture(scope="module")
def ema(corpus, tmp_path_factory) -> Run:
    return train(averaged(corpus, tmp_path_factory.mktemp("ema") / "run"))


def losses(run: Run) -> list[tuple[Any, ...]]:
    keys = ("step", "loss", "average_loss", "full_average_loss")
    return [tuple(map(line.get, keys)) for line in run.lines("eval")]


def test_a_run_averages_saves_and_evaluates(ema):
    last = at(ema, STEPS)
    assert len(last.names("average/")) == len(last.names("model/"))
    for name in last.names("average/"):
        wanted = defined(ema, name.removeprefix("average/"))
        torch.testing.assert_close(last.tensor(name).double(), wanted, rtol=0, atol=ROUNDING)
    for step in range(1, STEPS + 1):
        assert at(ema, step).counters["averaged"] == step
    for step, loss, average_loss, _ in losses(ema):
        assert (average_loss is not None) == (step > 0)
        if average_loss is not None:
            run = f"{ema.path}@{step}"
            scores = windlass.evaluate(run, weights="average", overrides=["eval.batches=100"])
            assert scores.results["loss"]["loss"] == pytest.approx(average_loss, rel=ROUNDING)
            assert average_loss != loss


def test_a_branch_continues_starts_or_drops_an_average(corpus, tmp_path, ema, capsys):
    origin = f"{ema.path}@6"
    same = train(averaged(corpus, tmp_path / "same"), branch_from=origin)
    for name in at(ema, STEPS).names():
        assert torch.equal(at(same, STEPS).tensor(name), at(ema, STEPS).tensor(name))
    assert losses(same) == [line for line in losses(ema) if line[0] > 6]
    capsys.readouterr()
    dropped = train(recipe_of(corpus, tmp_path / "none", **EVERY_STEP), branch_from=origin)
    assert "train.average was" in " ".join(capsys.readouterr().out.split())
    assert not at(dropped, STEPS).names("average/")
    begun = train(averaged(corpus, tmp_path / "begun"), branch_from=f"{dropped.path}@9")
    assert at(begun, STEPS).counters["averaged"] == 3
    with refused("train.average", "run.dir"):
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
