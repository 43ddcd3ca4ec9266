"""A rank of a training whose rank 1 spoils a weight of its own: `python spoiled.py STEP [KEY=VALUE...]` (0: before step 1)."""

from __future__ import annotations

import sys
from typing import Any

import torch

from windlass import Recipe, train
from windlass.errors import RunFailed
from windlass.training import setup

after, made, set_up = int(sys.argv[1]), [], setup.set_up


def spoil(step: int, _: object = None) -> None:
    if step == after and made[0].ranks.rank == 1:
        with torch.no_grad():
            next(iter(made[0].model.parameters())).view(-1)[0] += 1.0


def spoiling(*arguments: Any) -> Any:
    made.append(set_up(*arguments))
    spoil(0)
    return made[0]


setup.set_up = spoiling
try:
    train(Recipe.load("quickstart", sys.argv[2:]), on_step=spoil)
except RunFailed as failure:
    sys.exit(f"failed: {failure}")
