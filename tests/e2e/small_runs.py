"""Small trainings for tests: settings with dropout, runs that stop and fail."""

import sys
from pathlib import Path
from typing import Any

import pytest

import helpers
from forked import launch
from helpers import each_step
from windlass import train
from windlass.errors import RunFailed
from windlass.recipe import Recipe
from windlass.run import Run

KILLED = Path(__file__).parent / "killed.py"
WSD = {
    "optim.schedule.kind": "wsd",
    "optim.schedule.warmup": 2,
    "optim.schedule.decay": 4,
    "checkpoint.keep_last": 10,
}
OPTIONS = WSD | {"optim.schedule.decay": 6}


def settings(
    corpus: Path, run: Path, strategy: str = "auto", micro: int = 0, **more: object
) -> list[str]:
    values = {
        "run.dir": f"'{run}'",
        "data.source": f"'{corpus / 'text.txt'}'",
        "data.dir": f"'{corpus / 'data'}'",
        "data.tokenizer": "char",
        "model.vocab": 0,
        "model.layers": 2,
        "model.heads": 2,
        "model.width": 16,
        "model.context": 16,
        "model.dropout": 0.2,
        "train.steps": 12,
        "train.global_batch": 8,
        "train.micro_batch": micro,
        "checkpoint.every": 3,
        "eval.every": 4,
        "eval.sample_every": 0,
        "telemetry.every": 1,
        "parallel.strategy": strategy,
        "parallel.timeout_seconds": 60,
        "parallel.startup_timeout_seconds": 60,
        **more,
    }
    return [f"{key}={value}" for key, value in values.items()]


def recipe_of(corpus: Path, run: Path, **more: object) -> Recipe:
    return Recipe.load("quickstart", settings(corpus, run, **more))  # type: ignore[arg-type]


def start(world: int, overrides: list[str], kill_after: int = 0) -> int:
    """Train on so many ranks, which kill themselves after a step; the launcher's exit code."""
    return launch([sys.executable, str(KILLED), "quickstart", str(kill_after), *overrides], world)


def untouched(recipe: Recipe, *overrides: str, **options: Any) -> Run:
    """The same training in one go, in a directory of its own beside the recipe's."""
    place = f"run.dir='{recipe.run_dir.with_name('whole')}'"
    return train(recipe.replace(place, *overrides), **options)


def stopped(recipe: Recipe, step: int) -> Run:
    """The run after `--stop-at STEP`."""
    return train(recipe, stop_at=step)


def failed(recipe: Recipe, **options: Any) -> Run:
    """The run after a failure that follows its first step."""

    def fail(now: Any) -> None:
        raise RunFailed("a failure of the test")

    with pytest.raises(RunFailed):
        train(recipe, callbacks=[each_step(fail)], **options)
    return Run(recipe.run_dir)


def curve(run: Run) -> list[tuple]:
    return helpers.curve(run, "loss", "grad_norm", "lr", "tokens", "samples", "epoch")


def evaluations(run: Run) -> list[tuple]:
    return [(line["step"], line["loss"], line["tokens"]) for line in run.lines("eval")]
