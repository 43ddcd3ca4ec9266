"""A user's code in a training: a module, data, callbacks, and suites that measure the model."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from windlass.data.loader import StepBatch
from windlass.errors import UserError
from windlass.model.modes import evaluating, keeping_modes
from windlass.model.sharding import unwrap
from windlass.parallel.parallelize import autocast
from windlass.recipe import Recipe
from windlass.recipe.settings import OWN_SUITE
from windlass.training.state import StepResult

if TYPE_CHECKING:
    from windlass.training.record import Recorder

Measuring = Callable[[Any, int], Mapping[str, Any]]
"""`f(model, step)`: the model is in evaluation mode; returns numbers by name."""


@dataclass(frozen=True)
class Suite:
    """A suite with the names of its numbers that are better if lower. All numbers of a plain
    function are better if higher, except for names that Windlass knows, such as `perplexity`."""

    measure: Measuring
    lower: Sequence[str] = ()

    def __call__(self, model: Any, step: int) -> Mapping[str, Any]:
        return self.measure(model, step)


@dataclass
class Event:
    """What a callback receives. `model` and `optimizer` are as they are after `step` steps."""

    step: int
    epoch: float  # epochs of the training data done
    model: nn.Module
    optimizer: Optimizer
    _callbacks: Callbacks = field(repr=False)

    def log(self, name: str, value: Any) -> None:
        """Write a number as `log.NAME` into the ledger, trackers and report."""
        self._callbacks.recorder.logged[name] = as_float(value, f"log({name!r}, ...)")

    def stop(self, reason: str = "") -> None:
        """Save and stop the run after the next step, on all ranks; it can be resumed."""
        self._callbacks.stop_reason = reason or "a callback"


@dataclass
class StepEvent(Event):
    lr: float  # of this step's update, before the multiplier of a parameter group
    batch: StepBatch  # this rank's samples: `batch.micro[i].batch.tokens` [B, T], `.labels`
    _result: StepResult = field(repr=False)

    @property
    def loss(self) -> float:
        """The loss over all ranks, per unmasked label. Waits for the device."""
        return float(self._result.loss)

    @property
    def grad_norm(self) -> float:
        """The global gradient norm before clipping. Waits for the device."""
        return float(self._result.grad_norm)


@dataclass
class EvaluationEvent(Event):
    results: dict[str, dict[str, Any]]  # suite -> its scores


@dataclass
class SaveEvent(Event):
    """A committed save. `step` is the checkpoint's: the run may be past it."""

    path: Path


class Callback:
    """A user's code in a training: subclass it and override what you need. Every rank calls
    `on_step` and `on_evaluation`, because all ranks compute a sharded model; only rank 0 calls
    `on_save`."""

    def on_step(self, event: StepEvent) -> None: ...

    def on_evaluation(self, event: EvaluationEvent) -> None: ...

    def on_save(self, event: SaveEvent) -> None: ...


@dataclass(frozen=True)
class UserCode:
    """What `train` was given besides a recipe; without a model or data they are the recipe's."""

    model: nn.Module | None = None
    data: Any = None  # `windlass.Data`
    callbacks: Sequence[Callback] = ()
    suites: Mapping[str, Measuring] = field(default_factory=dict)

    def check(self, recipe: Recipe) -> None:
        """Raise UserError if a callback or suite cannot be used or `checkpoint.best` lacks one."""
        for callback in self.callbacks:
            if not isinstance(callback, Callback):
                problem = f"callbacks: {callback!r} is not a windlass.Callback"
                raise UserError(f"{problem}; subclass it and give an object")
        for name in self.suites:
            if not re.fullmatch(r"\w+", name):
                raise UserError(f"suites: {name!r} is not a valid name; use letters, digits and _")
        best = recipe.checkpoint.best
        name = best.partition(".")[0].removeprefix(OWN_SUITE)
        if best.startswith(OWN_SUITE) and name not in self.suites:
            give = f'train(..., suites={{"{name}": f}})'
            raise UserError(f"checkpoint.best: {best} lacks its suite: {give}")


@dataclass
class Callbacks:
    """Calls the user's code, and keeps its request to stop."""

    code: UserCode
    recorder: Recorder
    model: nn.Module
    optimizer: Optimizer
    stop_reason: str = ""  # empty: no callback asked for a stop

    def __post_init__(self) -> None:
        self.ranks, self.state = self.recorder.ranks, self.recorder.state

    def stepped(self, lr: float, batch: StepBatch, result: StepResult) -> None:
        if self.code.callbacks:
            event = self._event(StepEvent, lr=lr, batch=batch, _result=result)
            with self._user_code():
                for callback in self.code.callbacks:
                    callback.on_step(event)

    def evaluated(self, scores: Mapping[str, Mapping[str, Any]]) -> None:
        results = {suite: dict(values) for suite, values in scores.items()}
        event = self._event(EvaluationEvent, results=results)
        with self._user_code():
            for callback in self.code.callbacks:
                callback.on_evaluation(event)

    def saved(self, step: int, path: Path) -> None:
        event = self._event(SaveEvent, path=path)
        event.step = step
        with keeping_modes(self.model):
            for callback in self.code.callbacks:
                callback.on_save(event)

    def suites(self) -> dict[str, Callable[[nn.Module], dict[str, Any]]]:
        """The user's suites by their names in the ledger."""
        return {OWN_SUITE + name: partial(self._measure, name) for name in self.code.suites}

    def _event(self, kind: type[Event], **fields: Any) -> Any:
        epoch, model = self.state.epochs(self.recorder.horizon), unwrap(self.model)
        return kind(self.state.step, epoch, model, self.optimizer, _callbacks=self, **fields)

    def _measure(self, name: str, model: nn.Module) -> dict[str, Any]:
        """Rank 0's scores of a suite, so that all ranks agree on the best checkpoint."""
        suite = self.code.suites[name]
        arithmetic = autocast(self.recorder.recipe, self.ranks.device)
        with self._user_code(), evaluating(model), torch.no_grad(), arithmetic:
            scores = suite(unwrap(model), self.state.step)
        if not isinstance(scores, Mapping):
            advice = 'return a dictionary of numbers, such as {"score": 0.3}'
            raise UserError(f"suites[{name!r}] returned {scores!r}; {advice}")
        measured: dict[str, Any] = {
            str(key): as_float(value, f"suites[{name!r}]: {key}") for key, value in scores.items()
        }
        if lower := list(getattr(suite, "lower", ())):
            measured["lower"] = lower
        return dict(self.ranks.broadcast_object("own suite", measured))

    @contextlib.contextmanager
    def _user_code(self) -> Iterator[None]:
        """The phase `callback`: user code may take any time, and leave the model in any mode."""
        before = self.ranks.status.phase
        self.ranks.mark(self.state.step, "callback")
        with keeping_modes(self.model):
            yield
        self.ranks.mark(self.state.step, before)


def as_float(value: Any, where: str) -> float:
    """A user's number, tensor or array of one element as a float."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where}: {value!r} is not a number") from None
