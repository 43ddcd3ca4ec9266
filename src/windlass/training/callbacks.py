"""A user's own code in a training: callbacks that see it, log a measure or stop it, and suites that measure the model.

They run on every rank, because a sharded model computes on all ranks together; `on_save` runs on rank 0.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from windlass.errors import UserError
from windlass.evaluation.source import evaluating
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import autocast, unwrap
from windlass.recipe import Recipe
from windlass.recipe.settings import OWN_SUITE

Measuring = Callable[[Any, int], Mapping[str, Any]]
"""A suite as a function of the model, in evaluation mode, and the step; it returns numbers by name."""


@dataclass(frozen=True)
class Suite:
    """A suite that says which of its numbers get better as they fall.

    A function alone is a suite, too. More of its numbers is better, except for the names that
    Windlass knows, as `loss` and `perplexity`.
    """

    measure: Measuring
    lower: Sequence[str] = ()

    def __call__(self, model: Any, step: int) -> Mapping[str, Any]:
        return self.measure(model, step)


@dataclass(frozen=True)
class StepResult:
    """What a step leaves behind, on the device: nothing here was waited for."""

    loss: Tensor  # scalar: this rank's share; the sum over the ranks (where it was taken, in place) is the loss per unmasked label
    grad_norm: Tensor  # scalar: the global norm before clipping, the same on every rank
    tokens: int  # of the step over all ranks, without padding
    label_tokens: int  # those that count in the loss: masked prompts do not
    padded_tokens: (
        int  # tokens of the step with padding and masked ones, over all ranks: what was computed
    )
    spike: float | None = (
        None  # the loss over all ranks, where it is a spike and the update was not made
    )


@dataclass
class Moment:
    """What a callback is called with: `step` steps are completed, and `model` is as it is after them."""

    step: int
    model: nn.Module
    _callbacks: Callbacks = field(repr=False)

    def log(self, name: str, value: Any) -> None:
        """Write a measure of your own, a number, into ledger, trackers and report, at the step where the run stands."""
        self._callbacks.logged[name] = number(value, f"log({name!r}, ...)")

    def stop(self, reason: str = "") -> None:
        """Have the run saved and stopped after the next step, on all ranks at the same one; it can be resumed."""
        self._callbacks.asked = reason or "a callback"


@dataclass
class Step(Moment):
    """Of `on_step`. To read a number waits for the device."""

    _result: StepResult = field(repr=False)

    @property
    def loss(self) -> float:  # over all ranks
        return float(self._result.loss)

    @property
    def grad_norm(self) -> float:  # before clipping
        return float(self._result.grad_norm)


@dataclass
class Evaluated(Moment):
    """Of `on_eval`; `results`: suite → its measures."""

    results: dict[str, dict[str, Any]]


@dataclass
class Saved(Moment):
    """Of `on_save`; saves are written in the background, so `step`, of the checkpoint, may lie behind the run's."""

    path: Path


@dataclass
class Callbacks:
    """The user's functions, and what they asked for."""

    on_step: Callable[[Step], object] | None = None
    on_eval: Callable[[Evaluated], object] | None = None
    on_save: Callable[[Saved], object] | None = None
    own: Mapping[str, Measuring] = field(default_factory=dict)  # suites by their names
    asked: str = ""  # why the run is to stop; empty: it is not
    logged: dict[str, float] = field(default_factory=dict)  # since the last `log` line

    def check(self, recipe: Recipe) -> None:
        """Raise UserError where a suite has no usable name, or none measures what the recipe calls the best."""
        for name in self.own:
            if not re.fullmatch(r"\w+", name):
                raise UserError(
                    f"suites: {name!r} is no name for a suite; use letters, digits and _"
                )
        best = recipe.checkpoint.best
        suite = best.partition(".")[0]
        if suite.startswith(OWN_SUITE) and (name := suite.removeprefix(OWN_SUITE)) not in self.own:
            give = f'train(..., suites={{"{name}": f}})'
            raise UserError(f"checkpoint.best: {best} is measured by a suite of your own: {give}")

    def stepped(self, step: int, model: nn.Module, result: StepResult, ranks: Ranks) -> None:
        if self.on_step is not None:
            with own_code(ranks, step):
                self.on_step(Step(step, unwrap(model), self, result))

    def evaluated(
        self, step: int, model: nn.Module, lines: Sequence[Mapping[str, Any]], ranks: Ranks
    ) -> None:
        if self.on_eval is not None:
            results = {
                line["suite"]: {key: value for key, value in line.items() if key != "suite"}
                for line in lines
            }
            with own_code(ranks, step):
                self.on_eval(Evaluated(step, unwrap(model), self, results))

    def saved(self, step: int, model: nn.Module, path: Path) -> None:
        if self.on_save is not None:
            self.on_save(Saved(step, unwrap(model), self, path))

    def suites(
        self, state: Any, ranks: Ranks, recipe: Recipe
    ) -> dict[str, Callable[[nn.Module], dict[str, Any]]]:
        """The user's suites by their names in the ledger; `state.step` is read when one is measured."""
        return {
            OWN_SUITE + name: partial(self.measure, name, state, ranks, recipe) for name in self.own
        }

    def measure(
        self, name: str, state: Any, ranks: Ranks, recipe: Recipe, model: nn.Module
    ) -> dict[str, Any]:
        """The numbers of a suite. Those of rank 0 count, so that all ranks call the same model the best."""
        started = time.perf_counter()
        with (
            own_code(ranks, state.step),
            evaluating(model),
            torch.no_grad(),
            autocast(recipe, ranks.device),
        ):
            numbers = self.own[name](unwrap(model), state.step)
        where = f"suites[{name!r}]"
        if not isinstance(numbers, Mapping):
            raise UserError(
                f'{where} returned {numbers!r}; return a dictionary of numbers, as {{"score": 0.3}}'
            )
        measured: dict[str, Any] = {str(k): number(v, f"{where}: {k}") for k, v in numbers.items()}
        measured["runtime_s"] = time.perf_counter() - started
        if lower := list(getattr(self.own[name], "lower", ())):
            measured["lower"] = lower
        return dict(ranks.broadcast_object("own suite", measured))


@contextlib.contextmanager
def own_code(ranks: Ranks, step: int) -> Iterator[None]:
    """The user's code runs, which may take any time: the phase is `callback`."""
    before = ranks.status.phase
    ranks.mark(step, "callback")
    yield
    ranks.mark(step, before)


def number(value: Any, where: str) -> float:
    """A number of the user's, also a tensor's or an array's only one."""
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(f"{where}: {value!r} is not a number") from None
