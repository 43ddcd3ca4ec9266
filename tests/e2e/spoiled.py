"""A rank of a training whose rank 1 spoils a weight of its own before step 1: `python spoiled.py [KEY=VALUE...]`."""

from __future__ import annotations

import sys
from typing import Any

import torch

from windlass import Recipe, train
from windlass.errors import RunFailed
from windlass.training import setup

set_up = setup.set_up


def spoil(*arguments: Any) -> Any:
    trainer = set_up(*arguments)
    if trainer.ranks.rank == 1:
        with torch.no_grad():
            next(iter(trainer.model.parameters())).view(-1)[0] += 1.0
    return trainer


setup.set_up = spoil
try:
    train(Recipe.load("quickstart", sys.argv[1:]))
except RunFailed as failure:
    sys.exit(f"failed: {failure}")
