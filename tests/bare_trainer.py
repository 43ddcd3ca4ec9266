"""A Trainer with what its step needs and nothing else, for tests of one step."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from windlass.data.batch import Batch
from windlass.data.loader import MicroBatch, StepBatch
from windlass.model.sharding import unwrap
from windlass.optim.average import Average
from windlass.optim.build import build_optimizer
from windlass.parallel.parallelize import owned_parameters, resolve_precision
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.telemetry.timing import StepTimer
from windlass.training.bad_steps import BadSteps
from windlass.training.state import LossScaler, TrainState
from windlass.training.trainer import Trainer


def bare_trainer(model: nn.Module, recipe: Recipe, ranks: Ranks, deferred: bool = False) -> Trainer:
    """Call its `step(batch, lr_multiplier)`; the events of skipped steps are in `recorder.events`."""
    state, events = TrainState(), list[dict[str, Any]]()
    precision = resolve_precision(recipe.train.precision, ranks.device)
    recorder: Any = SimpleNamespace(
        ranks=ranks,
        state=state,
        timer=StepTimer(),
        events=events,
        emit=lambda name, **more: events.append(more),
    )
    scaler = LossScaler(ranks.device, state, precision)
    parts: dict[str, Any] = {
        "recipe": recipe,
        "ranks": ranks,
        "model": model,
        "state": state,
        "scaler": scaler,
        "recorder": recorder,
        "optimizer": build_optimizer(
            unwrap(model),
            recipe.optim,
            ranks.device.type,
            ranks.mesh.replicas,
            ranks.strategy.shards_optimizer,
        ),
        "owned_parameters": owned_parameters(model),
        "parameters": [p for p in model.parameters() if p.requires_grad],
        "saver": SimpleNamespace(finish_staging=lambda: None),  # nothing is being saved
        "bad_steps": BadSteps(recorder, recipe.train, scaler, deferred),
    }
    parts["average"] = Average(unwrap(model), recipe.train.average)
    trainer = Trainer.__new__(Trainer)
    vars(trainer).update(parts)
    return trainer


def full_rows(recipe: Recipe, vocab: int, micro: int, accumulation: int) -> StepBatch:
    """A step of micro-batches without padding."""
    size = micro * recipe.model.context
    tokens = torch.arange(size).remainder(vocab).view(micro, -1)
    batches = [MicroBatch(k, Batch(tokens, tokens)) for k in range(accumulation)]
    return StepBatch(1, batches, accumulation * size, accumulation * size)
