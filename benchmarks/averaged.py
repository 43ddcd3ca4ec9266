"""The validation loss of averaged weights beside the raw ones, at the end of trainings with a
constant and with a decayed learning rate.

    python benchmarks/averaged.py input.txt [--steps 1000] [--seeds 3]

`input.txt` is tiny Shakespeare. A callback keeps all averages of a training at once, because they
do not change it; each run takes about a minute on an idle core.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from windlass import Callback, Recipe, train
from windlass.data.open import open_data
from windlass.evaluation.likelihood import evaluate_loss
from windlass.evaluation.source import alone
from windlass.optim.average import Average
from windlass.recipe.settings import AverageSettings

SCHEDULES = {
    "constant": ["optim.schedule.kind=constant"],
    "to zero": ["optim.schedule.kind=wsd", "optim.schedule.decay=0.4"],
}
AVERAGES = {
    "raw": AverageSettings(),
    "ema, beta 0.99": AverageSettings(kind="ema", beta=0.99),
    "ema, beta 0.999": AverageSettings(kind="ema", beta=0.999),
    "tail, last 0.1": AverageSettings(kind="tail", last=0.1),
    "tail, last 0.2": AverageSettings(kind="tail", last=0.2),
    "tail, last 0.5": AverageSettings(kind="tail", last=0.5),
}


class Averaging(Callback):
    """Keeps every average, and measures each after the last step."""

    def __init__(self, recipe: Recipe, steps: int):
        self.recipe, self.steps, self.losses = recipe, steps, dict[str, float]()
        self.data, self.averages = open_data(recipe), dict[str, Average]()

    def on_step(self, event: Any) -> None:
        if not self.averages:
            horizon = self.recipe.horizon(self.steps, len(self.data.train))
            for name, settings in AVERAGES.items():
                self.averages[name] = Average(event.model, settings, horizon)
        for name, average in self.averages.items():
            average.update(event.step, torch.zeros(()))
            if event.step == self.steps:
                with average.in_model():
                    assert self.data.val is not None
                    scores = evaluate_loss(event.model, self.data.val, alone("cpu"), 64)
                assert scores is not None
                self.losses[name] = scores["loss"]


def losses(options: argparse.Namespace, folder: Path, schedule: str, seed: int) -> dict[str, float]:
    """The loss of every average after a training."""
    changes = [
        *(f"data.source={options.text}", f"data.dir={folder / 'data'}", f"run.seed={seed}"),
        *(f"run.dir={folder / f'{schedule}-{seed}'}", f"train.steps={options.steps}"),
        *("eval.every=0", "checkpoint.every=0", "train.threads=1", "telemetry.every=100"),
        *SCHEDULES[schedule],
    ]
    recipe = Recipe.load("shakespeare-char-fast", changes)
    averaging = Averaging(recipe, options.steps)
    with contextlib.redirect_stdout(sys.stderr):
        train(recipe, callbacks=[averaging])
    return averaging.losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text", type=Path)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    seeds = range(1, options.seeds + 1)
    head = " ".join(f"{f'seed {seed}':>8}" for seed in seeds)
    print(f"{'learning rate':14} {'weights':16} {head} {'mean':>8} {'to raw':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for schedule in SCHEDULES:
            runs = [losses(options, Path(folder), schedule, seed) for seed in seeds]
            raw = statistics.fmean(run["raw"] for run in runs)
            for name in AVERAGES:
                own = [run[name] for run in runs]
                mean, shown = statistics.fmean(own), " ".join(f"{loss:8.4f}" for loss in own)
                row = f"{schedule:14} {name:16} {shown} {mean:8.4f} {mean - raw:+8.4f}"
                print(row, flush=True)


if __name__ == "__main__":
    main()
