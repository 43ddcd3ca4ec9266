"""A rank of a training whose rank 1 spoils a weight of its own: `python spoiled.py STEP [KEY=VALUE...]` (0: before step 1)."""

from __future__ import annotations

import importlib
import sys

import torch

from windlass import Recipe, train
from windlass.errors import RunFailed

session = importlib.import_module("windlass.training.session").Session
after, opened, original = int(sys.argv[1]), [], session.open


def spoil(step: int, _: object) -> None:
    one = opened[0]
    if step == after and one.ranks.rank == 1:
        with torch.no_grad():
            next(iter(one.model.parameters())).view(-1)[0] += 1.0


def spoiling(self, *arguments):
    opened.append(self)
    done = original(self, *arguments)
    spoil(0, None)
    return done


session.open = spoiling
try:
    train(Recipe.load("quickstart", sys.argv[2:]), on_step=spoil)
except RunFailed as failure:
    sys.exit(f"failed: {failure}")
