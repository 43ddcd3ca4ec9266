"""A study on disk: `studies/<name>`, a directory of runs (`runs/<cell>`) of one recipe and a grid. No torch.

`recipe.toml` has what all cells share, `study.json` the axes as they were typed and each cell's run directory, and
`statuses.json` what a sweep decided about cells: diverged, pruned, failed, interrupted, each with its reason. All else
(states, losses, the winner) is computed from the runs' ledgers when it is asked for.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock

from windlass.checkpoint.retention import best, better, scores_by_step
from windlass.errors import UserError
from windlass.estimate.optimum import resolve_steps
from windlass.fileio import read_json, write_atomic
from windlass.recipe import Recipe, presets, typed
from windlass.run import Line, Run, effective, read_lines
from windlass.study.grid import SEED, WORLD, Assignment, Cell, expand, label, parse_axis
from windlass.telemetry.timing import throughput

# settings of a study that the command to train its winner leaves out: names, and what was cut down to be quick
NOT_REPEATED = ("run.name", "run.dir", "run.notes", "preset", "checkpoint.", "eval.", "telemetry.")
Axes = Sequence[str] | Mapping[str, Sequence[Any]]  # `["optim.lr=1e-2,1e-3"]` as typed, or `{"optim.lr": [1e-2, 1e-3]}`


def diverged(first: float, last: float) -> bool:
    """Whether a training loss diverged: the last one is not finite, or more than 1 nat above the first."""
    return not math.isfinite(last) or last > first + 1.0


@dataclass(frozen=True)
class CellResult:
    """How a cell stands, from its run's ledger; None for what the ledger does not have (yet)."""

    cell: Cell
    run: Run  # whether it has begun or not
    measure: str  # what cells are compared by: the recipe's `checkpoint.best`
    state: str = "waiting"  # `waiting`, `running`, `interrupted`, `finished`, `failed`, `diverged` or `pruned`
    reason: str = ""
    step: int = 0  # the last one with a `train` line
    last_step: int = 0  # the last one with any line: an evaluation may come where no `train` line is due
    steps: int | None = None
    loss: float | None = None
    first_loss: float | None = None
    eval_loss: float | None = None
    best_loss: float | None = None
    score: float | None = None  # the best value of `measure`, step 0 included
    evaluations: tuple[tuple[str, int, float], ...] = ()  # time (sorts as text), step > 0, and value of `measure`
    tokens: int = 0
    tokens_per_s: float | None = None  # tokens over time in steps
    device_hours: float | None = None

    @property
    def begun(self) -> bool:
        return self.run.recipe_path.is_file()

    @property
    def divergence(self) -> str:
        if self.loss is None or self.first_loss is None or not diverged(self.first_loss, self.loss):
            return ""
        return f"loss {self.loss:.3f} at step {self.step}, after {self.first_loss:.3f} at the first"

    def row(self) -> dict[str, Any]:
        """What the cell sets and how it stands, as plain values for a table or JSON."""
        left_out = ("cell", "run", "measure", "last_step", "first_loss", "evaluations")
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**self.cell.assignment, **values, "run": str(self.run.path)}


@dataclass(frozen=True)
class Group:
    """The cells that set the same but for the seed; its numbers are those of the finished ones."""

    assignment: Assignment  # without the seed
    results: list[CellResult]

    @property
    def scores(self) -> list[float]:
        return [r.score for r in self.results if r.state == "finished" and r.score is not None]

    @property
    def median(self) -> float | None:
        return statistics.median(self.scores) if self.scores else None

    @property
    def label(self) -> str:
        return label(self.assignment) or "the recipe"

    @property
    def seeds(self) -> str:
        """`2 seeds`, or `1 of 2 seeds` while some have not finished; empty where the seed is no axis."""
        total, finished = len(self.results), len(self.scores)
        text = f"{total} seed{'s' * (total > 1)}" if finished == total else f"{finished} of {total} seeds"
        return text if SEED in self.results[0].cell.assignment else ""


@dataclass(frozen=True)
class Study:
    """A study's directory. The recipe (what all cells share) and the axes never change; the runs and statuses grow."""

    path: Path
    recipe: Recipe
    axes: list[str]
    cells: list[Cell] = field(repr=False)
    _ledgers: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    @staticmethod
    def create(recipe: Recipe, axes: Axes, path: Path | None = None, *, write: bool = True) -> Study:
        """The study of a recipe (without its `run.dir` and `run.name`) and a grid: opened where it exists, else created.

        `path` None: `studies/<preset>-<hash of recipe and axes>`. `write` False: nothing is written to disk. Raises
        UserError where the directory holds another study, or a cell's recipe is invalid.
        """
        if isinstance(axes, Mapping):
            axes = [f"{key}={','.join(typed(value) for value in values)}" for key, values in axes.items()]
        base = recipe.with_overrides("run.dir=''", "run.name=''")
        name = hashlib.sha256(json.dumps([base.config_hash, list(axes)]).encode()).hexdigest()[:8]
        path = path or Path("studies") / f"{base.preset}-{name}"
        parsed = [parse_axis(text) for text in axes]
        study = Study(path, base, list(axes), expand(base, parsed))
        if Study.is_study(path):
            existing = Study.open(path)
            old = existing.recipe.flat()
            differ = [f"{k}={typed(v)} (there {typed(old.get(k))})" for k, v in base.flat().items() if v != old.get(k)]
            if [parse_axis(text) for text in existing.axes] != parsed:
                differ = [f"its axes are {' '.join(existing.axes)}"]
            if differ:
                what = ", ".join(differ)
                raise UserError(f"{path} holds another study: {what}. Leave out what differs, or give another --dir")
            return existing
        if write:
            path.mkdir(parents=True, exist_ok=True)
            write_atomic(path / "recipe.toml", base.toml())
            listed = [{"assignment": c.assignment, "run": c.directory, "key": c.key} for c in study.cells]
            write_atomic(path / "study.json", json.dumps({"axes": study.axes, "cells": listed}, indent=1))
        return study

    @staticmethod
    def open(path: str | Path) -> Study:
        """The study at `path`; raises UserError where there is none, or its cells have other recipes than at its start."""
        path = Path(path)
        if not Study.is_study(path):
            raise UserError(f"{path} is no study: it has no study.json")
        stored, recipe = read_json(path / "study.json"), Recipe.load(path / "recipe.toml")
        axes = stored.get("axes", [])
        cells = expand(recipe, [parse_axis(text) for text in axes])
        if [cell.key for cell in cells] != [cell.get("key") for cell in stored.get("cells", [])]:
            why = "recipe.toml was edited, study.json is damaged, or this version of Windlass has other settings"
            raise UserError(
                f"{path}: its cells have other recipes than at its start: {why}. Restore it, or use another --dir"
            )
        return Study(path, recipe, axes, cells)

    @staticmethod
    def is_study(path: str | Path) -> bool:
        return (Path(path) / "study.json").is_file()

    @property
    def measure(self) -> str:
        return self.recipe.checkpoint.best

    @property
    def keys(self) -> list[str]:
        return list(self.cells[0].assignment)

    def run_of(self, cell: Cell) -> Run:
        return Run(self.path / cell.directory)

    def runs(self) -> list[Run]:
        return [run for run in map(self.run_of, self.cells) if run.recipe_path.is_file()]

    def results(self) -> list[CellResult]:
        return [self.result(cell) for cell in self.cells]

    def result(self, cell: Cell) -> CellResult:
        run = self.run_of(cell)
        version: tuple[int, ...] = ()
        with suppress(OSError):
            version = run.metrics_path.stat().st_size, run.metrics_path.stat().st_mtime_ns
        if run.path not in self._ledgers or self._ledgers[run.path][0] != version:  # a sweep looks twice a second
            raw = list(read_lines(run.metrics_path))
            events = [line for line in raw if line["kind"] == "event"]
            self._ledgers[run.path] = version, events, summarize(effective(raw), self.measure)
        _, events, values = self._ledgers[run.path]
        state, reason = cell_state(run.state_by(events), events, self.statuses().get(cell.key))
        if values["steps"] is None:
            with suppress(UserError):  # where the number follows from data that is not prepared yet
                values["steps"] = resolve_steps(cell.recipe)
        return CellResult(cell, run, self.measure, state, reason, **values)

    def statuses(self) -> dict[str, dict[str, str]]:
        """By a cell's key what was decided about it: `state` (diverged, pruned, failed or interrupted) and `reason`."""
        return read_json(self.path / "statuses.json")

    def status(self, cell: Cell) -> str:
        return self.statuses().get(cell.key, {}).get("state", "")

    def set_status(self, cell: Cell, state: str, reason: str = "") -> None:
        """Write down what was decided about a cell; an empty state takes it back."""
        with FileLock(self.path / ".statuses.lock"):  # the tasks of an array job write at the same time
            statuses = self.statuses() | {cell.key: {"state": state, "reason": reason}}
            if not state:
                del statuses[cell.key]
            write_atomic(self.path / "statuses.json", json.dumps(statuses, indent=1))

    def groups(self, results: Sequence[CellResult] | None = None) -> list[Group]:
        """The cells grouped by everything they set but the seed, in the order of the grid."""
        groups: dict[str, Group] = {}
        for result in self.results() if results is None else results:
            rest = {key: value for key, value in result.cell.assignment.items() if key != SEED}
            groups.setdefault(repr(rest), Group(rest, [])).results.append(result)
        return list(groups.values())

    def winner(self, results: Sequence[CellResult] | None = None) -> Group | None:
        """The group with the best median score; groups with all their seeds finished come before the others."""
        sign = 1 if better(0.0, 1.0, self.measure) else -1
        groups = [group for group in self.groups(results) if group.scores]
        return min(groups, key=lambda x: (len(x.scores) < len(x.results), sign * (x.median or 0.0)), default=None)

    def winner_command(self, assignment: Assignment, world: int = 1) -> tuple[str, str]:
        """The command that trains an assignment in full on `world` ranks (or as many as it sets itself), and a remark.

        Where the study's recipe is a preset with changes, those are repeated, but for a number of steps that was cut
        down for the study; else the study's own recipe file is named.
        """
        source, settings, remark = f"{self.path.as_posix()}/recipe.toml", {}, ""
        if self.recipe.preset in presets():
            preset, own = Recipe.load(self.recipe.preset), self.recipe.flat()
            source, plain = self.recipe.preset, preset.flat()
            settings = {k: v for k, v in own.items() if not k.startswith(NOT_REPEATED) and v != plain.get(k)}
            steps, full = settings.get("train.steps"), preset.train.steps
            if "train.steps" not in assignment and isinstance(steps, int) and (isinstance(full, str) or steps < full):
                del settings["train.steps"]
                remark = f"The study's cells had {steps} steps; this is the preset's full length, {full}."
        settings |= assignment
        world = settings.pop(WORLD, world)
        words = ["windlass", "train", source, *(f"{key}={typed(value)}" for key, value in settings.items())]
        return shlex.join([*words, "--world", str(world)] if world > 1 else words), remark


def cell_state(run_state: str, events: Sequence[Line], status: Mapping[str, str] | None) -> tuple[str, str]:
    """A cell's state and the reason for it: from its run's state and events, and from what a sweep decided about it."""
    decided = (status["state"], status["reason"]) if status else ("", "")
    if run_state == "finished":
        return run_state, ""
    if decided[0] not in ("", "interrupted"):
        return decided
    last = max((x.get("attempt", 0) for x in events), default=0)
    own = [x for x in events if x["event"] == "failed" and x.get("attempt", 0) == last]
    if run_state == "failed" and own:  # a run that was killed has no such event: it is interrupted
        return "failed", str(own[-1].get("reason", ""))
    if run_state == "running" or not decided[0]:
        return {"new": "waiting", "preempted": "interrupted", "failed": "interrupted"}.get(run_state, run_state), ""
    return decided


def summarize(lines: Sequence[Line], measure: str) -> dict[str, Any]:
    """The fields of a CellResult that come from the effective lines of a run's ledger."""
    train, evals = ([x for x in lines if x["kind"] == kind] for kind in ("train", "eval"))
    # JSON has non-finite numbers as text
    losses = [float(x["loss"]) for x in evals if x.get("suite", "loss") == "loss" and "loss" in x]
    suite, _, name = measure.partition(".")  # `loss`, or as `squad.f1`
    own = [x for x in evals if x.get("suite", "loss") == suite and x.get(name or suite) is not None and x["step"] > 0]
    scores, speed = scores_by_step(lines, measure), throughput(lines)
    best_step, last = best(scores, measure), train[-1] if train else {}
    return {
        "step": last.get("step", 0),
        "last_step": max((x["step"] for x in (*train, *evals)), default=0),
        "steps": next((int(x["steps"]) for x in reversed(lines) if x["kind"] == "event" and x.get("steps")), None),
        "loss": float(last["loss"]) if "loss" in last else None,
        "first_loss": float(train[0]["loss"]) if train and "loss" in train[0] else None,
        "eval_loss": losses[-1] if losses else None,
        "best_loss": min(filter(math.isfinite, losses), default=None),
        "score": None if best_step is None else scores[best_step],
        "evaluations": tuple((str(x.get("time", "")), x["step"], float(x[name or suite])) for x in own),
        "tokens": int(last.get("tokens", 0)),
        "tokens_per_s": speed.tokens_per_s if speed else None,
        "device_hours": next((x.get("device_hours") for x in reversed(lines) if x["kind"] == "summary"), None),
    }
