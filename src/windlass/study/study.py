"""A study on disk: one directory of runs, made from one recipe and a grid. No torch.

    studies/<name>/
      recipe.toml      the recipe that all cells share
      study.json       the axes as they were typed, and each cell's run directory
      statuses.json    what a sweep decided about cells: diverged, pruned, failed, interrupted, each with its reason
      runs/<cell>/     a run directory each

Everything else (states, losses, the winner) is computed from the runs' ledgers when it is asked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from windlass.checkpoint.retention import best, better, scores_by_step
from windlass.errors import UserError
from windlass.estimate.optimum import resolve_steps
from windlass.fileio import read_json, write_atomic
from windlass.recipe import Recipe, presets, typed
from windlass.run import Line, Run, effective, read_lines
from windlass.study.grid import SEED, WORLD, Assignment, Cell, expand, label, parse_axis
from windlass.telemetry.timing import throughput

DIVERGED_NATS = 1.0
"""A training loss this far above the run's first one has diverged."""

NOT_REPEATED = ("run.name", "run.dir", "run.notes", "preset", "checkpoint.", "eval.", "telemetry.")
"""Settings of a study that the command to train its winner leaves out: names, and what was cut down to be quick."""

Axes = Sequence[str] | Mapping[str, Sequence[Any]]
"""`["optim.lr=1e-2,1e-3"]` as it is typed, or `{"optim.lr": [1e-2, 1e-3]}`."""


def diverged(first: float, last: float) -> bool:
    """Whether a training loss diverged: the last one is not finite, or more than 1 nat above the first."""
    return not math.isfinite(last) or last > first + DIVERGED_NATS


class Evaluation(NamedTuple):
    """One evaluation after step 0 of the measure that `checkpoint.best` names."""

    step: int
    value: float
    time: str
    """UTC, ISO 8601: sorts as text."""


@dataclass(frozen=True)
class CellResult:
    """How a cell stands, from its run's ledger; None for what is not known (yet)."""

    cell: Cell
    run: Run
    """The cell's run, whether it has begun or not."""
    measure: str
    """What cells are compared by: the recipe's `checkpoint.best`."""
    state: str = "waiting"
    """`waiting`, `running`, `interrupted`, `finished`, `failed`, `diverged` or `pruned`."""
    reason: str = ""
    step: int = 0
    """The last step with a `train` line."""
    last_step: int = 0
    """The last step with any line: an evaluation may come where no `train` line is due."""
    steps: int | None = None
    loss: float | None = None
    first_loss: float | None = None
    eval_loss: float | None = None
    best_loss: float | None = None
    score: float | None = None
    """The best value of `measure`, step 0 included."""
    evaluations: tuple[Evaluation, ...] = ()
    tokens: int = 0
    tokens_per_s: float | None = None
    """Tokens over time in steps."""
    device_hours: float | None = None

    @property
    def begun(self) -> bool:
        """Whether there is a run directory with a recipe."""
        return self.run.recipe_path.is_file()

    @property
    def at_end(self) -> bool:
        """Whether all steps are done; the last save may still be under way."""
        return bool(self.steps) and self.last_step >= (self.steps or 0)

    @property
    def divergence(self) -> str:
        """Why the loss counts as diverged; empty while it does not."""
        if self.loss is None or self.first_loss is None or not diverged(self.first_loss, self.loss):
            return ""
        above = f", {DIVERGED_NATS:g} above the first" if math.isfinite(self.loss) else ""
        return f"loss {self.loss:.3f} at step {self.step}{above}"

    def row(self) -> dict[str, Any]:
        """What the cell sets and how it stands, as plain values for a table or JSON."""
        names = (
            "state", "reason", "step", "steps", "loss", "eval_loss", "best_loss", "score", "tokens", "tokens_per_s",
            "device_hours",
        )  # fmt: skip
        values = {name: getattr(self, name) for name in names}
        return {**self.cell.assignment, **values, "run": str(self.run.path)}


@dataclass(frozen=True)
class Group:
    """The cells that set the same but for the seed; only finished ones have a say in its numbers."""

    assignment: Assignment
    """Without the seed."""
    results: list[CellResult]
    measure: str

    @property
    def scores(self) -> list[float]:
        """The best value of the measure for each finished cell."""
        return [r.score for r in self.results if r.state == "finished" and r.score is not None]

    @property
    def median(self) -> float | None:
        """The median score over the seeds."""
        return statistics.median(self.scores) if self.scores else None

    @property
    def label(self) -> str:
        """The swept settings on one line."""
        return label(self.assignment) or "the recipe"

    @property
    def seeds(self) -> str:
        """`2 seeds`, or `1 of 2 seeds` while some have not finished; empty where the seed is no axis."""
        if not any(SEED in r.cell.assignment for r in self.results):
            return ""
        total = len(self.results)
        text = f"{total} seeds" if total > 1 else "1 seed"
        return text if len(self.scores) == total else f"{len(self.scores)} of {text}"


@dataclass(frozen=True)
class Study:
    """A study's directory. The recipe and the axes never change; the runs and statuses grow."""

    path: Path
    recipe: Recipe
    """What all cells share."""
    axes: list[str]
    cells: list[Cell] = field(repr=False)
    _ledgers: dict[Path, tuple[Any, list[Line], list[Line]]] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def create(recipe: Recipe, axes: Axes, path: Path | None = None, *, write: bool = True) -> Study:
        """The study of a recipe and a grid: opened where the directory holds the same one, made where it is new.

        Args:
            recipe: what all cells share; `run.dir` and `run.name` are ignored.
            axes: the grid.
            path: the directory; None: `studies/<preset>-<hash of recipe and axes>`.
            write: False: nothing is written to disk.

        Raises:
            UserError: the directory holds another study, or a cell's recipe is invalid.
        """
        if isinstance(axes, Mapping):
            axes = [f"{key}={','.join(typed(value) for value in values)}" for key, values in axes.items()]
        base = recipe.with_overrides("run.dir=''", "run.name=''")
        cells = expand(base, [parse_axis(text) for text in axes])
        name = hashlib.sha256(json.dumps([base.config_hash, list(axes)]).encode()).hexdigest()[:8]
        path = path or Path("studies") / f"{base.preset}-{name}"
        if Study.is_study(path):
            study = Study.open(path)
            _check_same(study, base, axes)
            return study
        study = Study(path, base, list(axes), cells)
        if write:
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(path / "recipe.toml", base.toml())
            listed = [{"assignment": c.assignment, "run": c.directory, "key": c.key} for c in cells]
            write_atomic(path / "study.json", json.dumps({"axes": study.axes, "cells": listed}, indent=1))
        return study

    @staticmethod
    def open(path: str | Path) -> Study:
        """The study at `path`.

        Raises:
            UserError: there is none, it is damaged, or its recipe.toml or this version of Windlass makes other cells of
                it than those it was begun with.
        """
        path = Path(path)
        if not Study.is_study(path):
            raise UserError(f"{path} is no study: it has no study.json")
        stored = read_json(path / "study.json")
        try:
            axes, keys = list(stored["axes"]), [str(cell["key"]) for cell in stored["cells"]]
        except (KeyError, TypeError) as error:
            raise UserError(
                f"{path / 'study.json'} is damaged ({error!r}); restore it, or give another --dir"
            ) from None
        recipe = Recipe.load(path / "recipe.toml")
        cells = expand(recipe, [parse_axis(text) for text in axes])
        if [cell.key for cell in cells] != keys:
            raise UserError(
                f"{path}: its cells have other recipes now than when the study was begun: its recipe.toml was edited, "
                "or this version of Windlass has other settings. Restore what it was begun with, or give another --dir"
            )
        return Study(path, recipe, axes, cells)

    @staticmethod
    def is_study(path: str | Path) -> bool:
        """Whether a directory holds a study."""
        return (Path(path) / "study.json").is_file()

    @property
    def measure(self) -> str:
        """What cells are compared by: `checkpoint.best` of the shared recipe."""
        return self.recipe.checkpoint.best

    @property
    def keys(self) -> list[str]:
        """The swept settings, in the order of the grid."""
        return list(self.cells[0].assignment)

    def run_of(self, cell: Cell) -> Run:
        """The cell's run, whether it has begun or not."""
        return Run(self.path / cell.directory)

    def runs(self) -> list[Run]:
        """The runs that have begun, in the order of the grid."""
        return [run for run in map(self.run_of, self.cells) if run.recipe_path.is_file()]

    def results(self) -> list[CellResult]:
        """Every cell as it stands now, in the order of the grid."""
        statuses = self._statuses()
        return [self.result(cell, statuses) for cell in self.cells]

    def result(self, cell: Cell, statuses: Mapping[str, Mapping[str, str]] | None = None) -> CellResult:
        """A cell as it stands now. `statuses`: where `statuses.json` was read already."""
        run = self.run_of(cell)
        events, lines = self._ledger(run)
        status = (self._statuses() if statuses is None else statuses).get(cell.key)
        state, reason = cell_state(run.state_by(events), lines, status)
        values = summarize(lines, self.measure)
        if values["steps"] is None:
            with suppress(UserError):  # where the number follows from data that is not prepared yet
                values["steps"] = resolve_steps(cell.recipe)
        return CellResult(cell, run, self.measure, state, reason, **values)

    def status(self, cell: Cell) -> str:
        """What was decided about a cell: `diverged`, `pruned`, `failed` or `interrupted`; empty: nothing."""
        return self._statuses().get(cell.key, {}).get("state", "")

    def set_status(self, cell: Cell, state: str, reason: str = "") -> None:
        """Write down what was decided about a cell; an empty state takes it back."""
        with _locked(self.path / ".statuses.lock"):
            statuses = self._statuses()
            statuses.pop(cell.key, None)
            if state:
                statuses[cell.key] = {"state": state, "reason": reason}
            write_atomic(self.path / "statuses.json", json.dumps(statuses, indent=1))

    def groups(self, results: Sequence[CellResult] | None = None) -> list[Group]:
        """The cells grouped by everything they set but the seed, in the order of the grid."""
        groups: dict[str, Group] = {}
        for result in self.results() if results is None else results:
            rest = {key: value for key, value in result.cell.assignment.items() if key != SEED}
            groups.setdefault(repr(sorted(rest.items())), Group(rest, [], self.measure)).results.append(result)
        return list(groups.values())

    def winner(self, results: Sequence[CellResult] | None = None) -> Group | None:
        """The group with the best median score; groups with all their seeds finished come before the others."""
        scored = [(group, group.median) for group in self.groups(results) if group.median is not None]
        sign = 1 if better(0.0, 1.0, self.measure) else -1
        first = min(scored, key=lambda x: (len(x[0].scores) < len(x[0].results), sign * x[1]), default=None)
        return first[0] if first else None

    def winner_command(self, assignment: Assignment, world: int = 1) -> tuple[str, str]:
        """The command that trains an assignment in full on `world` ranks (or as many as it sets itself), and a remark.

        Where the study's recipe is a preset with changes, those are repeated, but for a number of steps that was cut
        down for the study; else the study's own recipe file is named.
        """
        source, overrides, remark = f"{self.path.as_posix()}/recipe.toml", dict(assignment), ""
        if self.recipe.preset in presets():
            plain = Recipe.load(self.recipe.preset)
            defaults = plain.flat()
            changed = {
                key: value
                for key, value in self.recipe.flat().items()
                if not key.startswith(NOT_REPEATED) and value != defaults.get(key)
            }
            steps, full = changed.get("train.steps"), plain.train.steps
            if "train.steps" not in assignment and isinstance(steps, int) and (isinstance(full, str) or steps < full):
                del changed["train.steps"]
                length = f"{full:,}" if isinstance(full, int) else full
                remark = f"The study's cells had {steps:,} steps; this is the preset's full length, {length}."
            source, overrides = self.recipe.preset, changed | overrides
        world = overrides.pop(WORLD, world)
        words = ["windlass", "train", source, *(f"{key}={typed(value)}" for key, value in overrides.items())]
        return shlex.join([*words, "--world", str(world)] if world > 1 else words), remark

    def _statuses(self) -> dict[str, dict[str, str]]:
        return read_json(self.path / "statuses.json")

    def _ledger(self, run: Run) -> tuple[list[Line], list[Line]]:
        """A run's raw events and effective lines; read again only where the file has changed."""
        try:
            stat = run.metrics_path.stat()
        except OSError:
            return [], []
        version = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
        cached = self._ledgers.get(run.path)
        if cached is None or cached[0] != version:
            raw = list(read_lines(run.metrics_path))
            cached = self._ledgers[run.path] = (version, [x for x in raw if x["kind"] == "event"], effective(raw))
        return cached[1], cached[2]


def _check_same(study: Study, base: Recipe, axes: Sequence[str]) -> None:
    """Raise UserError where a study on disk has other axes or settings: its cells would keep the old ones."""
    if [parse_axis(text) for text in study.axes] != [parse_axis(text) for text in axes]:
        raise UserError(f"{study.path} holds another study, with the axes {' '.join(study.axes)}; give another --dir")
    old, new = study.recipe.flat(), base.flat()
    changed = [f"{key}={typed(new[key])} (there {typed(old[key])})" for key in new if new[key] != old.get(key)]
    if changed:
        raise UserError(
            f"{study.path} holds a study of the same grid with other settings: {', '.join(changed)}. Its cells keep "
            "the settings they were begun with: leave out what differs, or give another --dir"
        )


def cell_state(run_state: str, events: Iterable[Line], status: Mapping[str, Any] | None) -> tuple[str, str]:
    """A cell's state and the reason for it: from its run's state and events, and from what a sweep decided about it."""
    decided = (str(status.get("state", "")), str(status.get("reason", ""))) if status else ("", "")
    if run_state == "finished":
        return run_state, ""
    if decided[0] not in ("", "interrupted"):
        return decided
    if run_state == "failed":
        events = [x for x in events if x["kind"] == "event"]
        last = max((int(x.get("attempt", 0)) for x in events), default=0)
        failures = [x for x in events if x.get("event") == "failed" and int(x.get("attempt", 0)) == last]
        if failures:  # a run that was killed has no such event: it is interrupted
            return "failed", str(failures[-1].get("reason", ""))
    state = {"new": "waiting", "preempted": "interrupted", "failed": "interrupted"}.get(run_state, run_state)
    return decided if decided[0] and state in ("waiting", "interrupted") else (state, "")


def summarize(lines: Sequence[Line], measure: str) -> dict[str, Any]:
    """The fields of a CellResult that come from the effective lines of a run's ledger."""
    train = [x for x in lines if x["kind"] == "train"]
    losses = [_number(x.get("loss")) for x in lines if x["kind"] == "eval" and x.get("suite", "loss") == "loss"]
    suite, _, name = measure.partition(".")  # `loss`, or as `squad.f1`
    measured = [
        x for x in lines if x["kind"] == "eval" and x.get("suite", "loss") == suite and x.get(name or suite) is not None
    ]
    scores = scores_by_step(lines, measure)
    best_step, speed = best(scores, measure), throughput(lines)
    last, summary = train[-1] if train else {}, next((x for x in reversed(lines) if x["kind"] == "summary"), {})
    return {
        "step": last.get("step", 0),
        "last_step": max((x["step"] for x in lines if x["kind"] in ("train", "eval")), default=0),
        "steps": next((int(x["steps"]) for x in reversed(lines) if x["kind"] == "event" and x.get("steps")), None),
        "loss": _number(last.get("loss")),
        "first_loss": _number(train[0].get("loss")) if train else None,
        "eval_loss": losses[-1] if losses else None,
        "best_loss": min((x for x in losses if x is not None and math.isfinite(x)), default=None),
        "score": None if best_step is None else scores[best_step],
        "evaluations": tuple(
            Evaluation(x["step"], float(x[name or suite]), str(x.get("time", ""))) for x in measured if x["step"] > 0
        ),
        "tokens": int(last.get("tokens", 0)),
        "tokens_per_s": speed.tokens_per_s if speed else None,
        "device_hours": summary.get("device_hours"),
    }


def _number(value: Any) -> float | None:
    """A JSON number; the ledger has non-finite ones as text."""
    return None if value is None else float(value)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock: the tasks of an array job write statuses at the same time. Not on a file system without locks."""
    with path.open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)  # released when the file closes
        yield
