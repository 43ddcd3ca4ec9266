"""The cells of a study: their states, the groups of their seeds, and the best of them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from windlass.errors import UserError, plural
from windlass.estimate.calendar import resolve_steps
from windlass.recipe import NON_SEMANTIC
from windlass.run import Run
from windlass.study.comparable import ValidationData, common_measure, validation_data
from windlass.study.grid import AXES_ONLY, SEED, Assignment, Cell, label_of
from windlass.study.numbers import BITS, RunNumbers
from windlass.telemetry.measures import LOSS

NO_BEST = "Windlass names no best cell"
OPEN_STATES = ("waiting", "interrupted")
# A lower loss does not decide between values of these settings: they change how much is computed,
# or how it is computed.
NO_CHOICE = (
    *NON_SEMANTIC,
    *AXES_ONLY,
    SEED,
    *(f"model.{name}" for name in ("layers", "heads", "kv_heads", "width", "ff_width", "context")),
    *("train.steps", "train.tokens_per_parameter", "train.global_batch"),
    *("train.precision", "train.tf32"),
    *("data.max_tokens", "data.train_size"),
)


@dataclass(frozen=True)
class CellResult:
    """A cell's state and numbers."""

    cell: Cell
    run: Run  # begun or not
    numbers: RunNumbers
    state: str  # `failed`, `interrupted`, `running`, `waiting` or `finished`
    reason: str = ""  # why it failed
    steps: int | None = None  # None: they depend on data that is not prepared yet
    left_s: float | None = None  # seconds to the last step, while it runs

    @cached_property
    def validation(self) -> ValidationData | None:
        return validation_data(self.run, self.cell.recipe, self.numbers)

    def row(self) -> dict[str, Any]:
        """The cell's settings and results as plain values, for a table or JSON."""
        names = ("step", "loss", "eval_loss", "best_loss", "score", "tokens", "tokens_per_s")
        numbers = {name: getattr(self.numbers, name) for name in (*names, "device_hours")}
        state = {"state": self.state, "reason": self.reason, "steps": self.steps}
        more = {"left_s": self.left_s, "run": str(self.run.path)}
        return {**self.cell.assignment, **state, **numbers, **more}


def cell_result(
    cell: Cell, run: Run, numbers: RunNumbers, alive: bool, failure: str | None = None
) -> CellResult:
    """The result of a cell; `alive`: of its run; `failure`: why a sweep saw it fail."""
    state, reason, events = run.state_by(numbers.history, alive), "", numbers.history
    attempt = max((event.get("attempt", 0) for event in events), default=0)
    ends = [e for e in events if e["event"] == "failed" and e.get("attempt", 0) == attempt]
    if state in ("finished", "running"):
        pass
    elif failure is not None:
        state, reason = "failed", failure
    elif state == "new":
        state = "waiting"
    elif ends:
        state, reason = "failed", str(ends[-1].get("reason", ""))
    else:
        state = "interrupted"  # stopped, preempted, or killed
    steps = numbers.steps
    if steps is None:
        with suppress(UserError):
            steps = resolve_steps(cell.recipe)
    left = numbers.seconds_left(steps) if state == "running" else None
    return CellResult(cell, run, numbers, state, reason, steps, left)


@dataclass(frozen=True)
class SeedGroup:
    """The cells that differ only in the seed; the numbers are of the finished ones."""

    assignment: Assignment  # without the seed
    results: list[CellResult]

    @property
    def scored(self) -> list[tuple[float, CellResult]]:
        finished = (result for result in self.results if result.state == "finished")
        return [(r.numbers.score, r) for r in finished if r.numbers.score is not None]

    @property
    def scores(self) -> list[float]:
        return [score for score, _ in self.scored]

    @property
    def median(self) -> float | None:
        return statistics.median(self.scores) if self.scores else None

    @property
    def label(self) -> str:
        return label_of(self.assignment) or "the recipe"

    @property
    def seeds(self) -> str:
        """`2 seeds`, `1 of 2 seeds` while one is unfinished, empty if the seed is not an axis."""
        if SEED not in self.results[0].cell.assignment:
            return ""
        total, finished = plural(len(self.results), "seed"), len(self.scores)
        return total if finished == len(self.results) else f"{finished} of {total}"


def seed_groups(results: Sequence[CellResult]) -> list[SeedGroup]:
    groups: dict[str, SeedGroup] = {}
    for result in results:
        rest = {key: value for key, value in result.cell.assignment.items() if key != SEED}
        groups.setdefault(repr(rest), SeedGroup(rest, [])).results.append(result)
    return list(groups.values())


class Winners(NamedTuple):
    groups: list[SeedGroup]  # the best first; one for each choice of varied NO_CHOICE settings
    remark: str

    @property
    def cell(self) -> CellResult | None:
        """The best cell of the first group."""
        if not self.groups:
            return None
        scored = self.groups[0].scored
        choose = min if scored[0][1].numbers.scores.lower else max
        return choose(scored, key=lambda pair: pair[0])[1]


def find_winners(
    results: Sequence[CellResult], measure: str, values: Mapping[str, Sequence[Any]]
) -> Winners:
    """The groups with the best median score; groups whose seeds have all finished come first.

    Nothing wins if the losses do not compare, or if a lower loss decides between none of the
    varied settings (`values`, by setting); the remark then has the reason.
    """
    remark = ""
    if measure in (LOSS, BITS):
        finished = [result.validation for result in results if result.state == "finished"]
        common, remark = common_measure(finished)
        if not common or (measure, common) == (LOSS, BITS):
            return Winners([], remark)
    varied = [key for key in values if len(values[key]) > 1 and key != SEED]
    choices = [key for key in varied if not key.startswith(NO_CHOICE)]
    amounts = [key for key in varied if key not in choices]
    if not varied:
        return Winners([], f"{NO_BEST}: the study varies only the seed.")
    if not choices:
        only = f"{', '.join(varied)}, which set the amount or kind of computation"
        return Winners([], f"{NO_BEST}: the study varies {only}.")

    sign = 1 if any(result.numbers.scores.lower for result in results) else -1
    # A score decides between the groups that share the amount and kind of computation.
    rivals: dict[str, list[SeedGroup]] = {}
    for group in seed_groups(results):
        rivals.setdefault(repr([group.assignment[key] for key in amounts]), []).append(group)
    best, any_score = [], False
    for groups in rivals.values():
        seeds = max(len(group.results) for group in groups)
        ranked = []
        for group in groups:
            if group.median is not None:
                ranked.append(((len(group.scores) < seeds, sign * group.median), group))
        any_score = any_score or bool(ranked)
        if ranked and len(groups) > 1:
            best.append(min(ranked, key=lambda one: one[0]))
    if not best:
        why = "no cell has finished with a score"
        if any_score:
            shared = ", ".join(amounts)
            why = f"no other choice of {', '.join(choices)} has the {shared} of a finished cell"
        return Winners([], f"{NO_BEST}: {why}.")
    return Winners([group for _, group in sorted(best, key=lambda one: one[0])], remark)
