"""The proof of averaged weights: their definition over a kill and another number of ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from windlass.checkpoint.load import AVERAGE, MODEL, open_checkpoint
from windlass.errors import plural
from windlass.run import Run, last_start
from windlass.verification.bench import (
    FLOAT64,
    ROUNDING,
    SEEN,
    STEPS,
    UNSEEN,
    Bench,
    Outcome,
)

KILL = 8
BETA, LAST = 0.7, 8
KINDS: dict[str, dict[str, Any]] = {
    "ema": {"train.average.beta": BETA},
    "tail": {"train.average.last": LAST},
}
Weights = dict[str, Tensor]


def average_exact(bench: Bench) -> Outcome:
    """EMA and tail after a kill on two ranks and a resume on one, against all steps' weights."""
    world, worst = min(2, max(bench.worlds)), 0.0
    if world < 2:
        bench.untried.append("2 ranks before the kill (needs them)")
    for kind, more in KINDS.items():
        settings: dict[str, Any] = {"train.average.kind": kind, **FLOAT64, **more}
        name = f"average-{kind}"
        bench.train(name, world, {"kill_after": KILL}, **settings)
        run = bench.train(name, **settings)
        resumed = int(last_start(run.ledger())["step"])
        first = 1 if kind == "ema" else STEPS - LAST + 1
        averages = held(run, STEPS, AVERAGE)
        worst = max(worst, distance(averages, defined(run, kind, first)))
        if distance(averages, defined(run, kind, resumed + 1)) < 1e3 * ROUNDING:
            return False, f"{UNSEEN}an average that begins anew after the resume"
    text = f"ema and tail, killed on {plural(world, 'rank')} and resumed on one"
    return worst < ROUNDING, f"{text}: largest difference {worst:.1e} in float64{SEEN}"


def held(run: Run, step: int, prefix: str) -> Weights:
    """The tensors of a step's checkpoint whose names begin with `prefix`, without it."""
    checkpoint = open_checkpoint(run.checkpoints_dir / f"step-{step:08d}", deep=False)
    names = checkpoint.names(prefix)
    return {name.removeprefix(prefix): checkpoint.tensor(name).double() for name in names}


def defined(run: Run, kind: str, first: int) -> Weights:
    """The average of the weights of the run's steps from `first` on, by its definition."""
    average = held(run, first, MODEL)
    for n, step in enumerate(range(first + 1, STEPS + 1), start=1):
        decay = n / (n + 1) if kind == "tail" else min(BETA, (1 + n) / (10 + n))
        weights = held(run, step, MODEL)
        average = {name: decay * average[name] + (1 - decay) * weights[name] for name in weights}
    return average


def distance(averages: Weights, wanted: Weights) -> float:
    """The largest absolute difference; weights that are not trained have no average."""
    assert averages, "the checkpoint has no averaged weights"
    return max(float((averages[name] - wanted[name]).abs().max()) for name in averages)
