"""A study on disk: `studies/<name>`, a directory of runs (`runs/<cell>`) of one recipe and a grid. No torch.

`recipe.toml` has what all cells share, `study.json` the cells (what each sets, and its run directory) and the values that
their settings take, and `statuses.json` what a sweep decided about cells: diverged, pruned, failed, interrupted, each with
its reason. All else (states, losses, the winners) is computed from the runs' ledgers when it is asked for.
"""

from __future__ import annotations

import json
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from windlass.checkpoint.retention import LOSS, lower_is_better
from windlass.errors import UserError, argument
from windlass.estimate.optimum import resolve_steps
from windlass.fileio import read_json, write_atomic
from windlass.recipe import NON_SEMANTIC, Recipe, plain, presets, typed
from windlass.run import Run, effective, read_lines
from windlass.study import grid as grids
from windlass.study.compare import BITS, TOKENIZER, common_measure, evaluated
from windlass.study.grid import (
    SEED,
    WORLD,
    Assignment,
    Cell,
    Scaling,
    cells_of,
    expand,
    label,
    read_axes,
)
from windlass.study.result import RECENT, CellResult, cell_state, summarize, time_left

# settings of a study that the command to train its winner leaves out: names, and what was cut down to be quick
NOT_REPEATED = ("run.name", "run.dir", "run.notes", "preset", "checkpoint.", "eval.", "telemetry.")
# settings by which a lower loss is no better choice: more is computed, or the same in another way
NO_CHOICE = (
    *NON_SEMANTIC,
    *grids.AXES_ONLY,
    SEED,
    "model.layers",
    "model.heads",
    "model.kv_heads",
    "model.width",
    "model.ff_width",
    "model.context",
    "train.steps",
    "train.tokens_per_parameter",
    "train.global_batch",
    "train.precision",
    "train.tf32",
    "data.max_documents",
    "data.max_tokens",
    "data.train_size",
)
# `["optim.lr=1e-2,1e-3"]` as typed, `{"optim.lr": [1e-2, 1e-3]}`, or what each cell sets, one after the other
Axes = Sequence[str] | Mapping[str, Sequence[Any]] | Sequence[Assignment]


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
        text = (
            f"{total} seed{'s' * (total > 1)}"
            if finished == total
            else f"{finished} of {total} seeds"
        )
        return text if SEED in self.results[0].cell.assignment else ""


class Winners(NamedTuple):
    """The best groups of a study, and why there is none, or by what they were compared."""

    groups: list[Group]  # one for each choice of the NO_CHOICE settings that the study varies
    remark: str


def with_seeds(there: Sequence[Assignment], given: Sequence[Assignment]) -> list[Assignment]:
    """New assignments of a study, completed so that all settings have the same seeds.

    New settings without a seed get the seeds of the study, and new seeds alone are for all settings of the study.
    """
    seeds = list(dict.fromkeys(one[SEED] for one in there if SEED in one)) or [None]
    settings = {
        repr(one): one for one in ({k: v for k, v in one.items() if k != SEED} for one in there)
    }
    complete: list[Assignment] = []
    for one in given:
        if one.keys() == {SEED}:
            complete += [rest | one for rest in settings.values()]
        else:
            complete += [
                one if SEED in one or seed is None else one | {SEED: seed} for seed in seeds
            ]
    return complete


@dataclass(frozen=True)
class Study:
    """A study's directory, to which cells are added, and runs and statuses as a sweep goes through them."""

    path: Path
    recipe: Recipe
    cells: list[Cell] = field(repr=False)
    scaling: Scaling | None = None  # None: a sweep
    notes: list[str] = field(
        default_factory=list, repr=False, compare=False
    )  # how it grew when it was given again
    _ledgers: dict[Path, Any] = field(default_factory=dict, repr=False, compare=False)

    def __repr__(self) -> str:
        """Its path, what it varies, and how many cells stand how."""
        states = ", ".join(
            f"{count} {state}" for state, count in Counter(r.state for r in self.results()).items()
        )
        return f"Study({self.path}: {len(self.cells)} cells over {', '.join(self.keys)}; {states})"

    @staticmethod
    def create(
        recipe: Recipe,
        axes: Axes,
        path: Path | None = None,
        *,
        write: bool = True,
        scaling: Scaling | None = None,
    ) -> Study:
        """The study of a recipe (without its `run.dir` and `run.name`) and a grid: created, or what is there grown by it.

        `path` None: `studies/<preset>-<hash of the recipe>`. Without axes the study that is there is opened. `write` False:
        nothing is written to disk. Raises UserError where a cell's recipe is invalid, or the directory holds a study of
        another preset.
        """
        # every setting by name, as recipe.toml has them: none follows from another one in a cell
        base = recipe.replace(**recipe.flat() | {"run.dir": "", "run.name": ""})
        path = path or Path("studies") / f"{base.preset}-{base.config_hash[:8]}"
        own = (
            []
            if isinstance(axes, Mapping)
            else [plain(one) for one in axes if isinstance(one, dict)]
        )
        grid = cells_of(base, own) if own else expand(base, read_axes(axes)) if len(axes) else []
        if not grid and not Study.is_study(path):
            raise UserError(
                f"{path} is no study yet: name what its cells vary, for example optim.lr=1e-2,1e-3"
            )
        if not write:
            there = Study.open(path) if Study.is_study(path) else None
            return there._grown(base, grid, scaling) if there else Study(path, base, grid, scaling)
        try:
            path.mkdir(parents=True, exist_ok=True)
            with FileLock(path / ".study.lock"):
                before = Study.open(path) if Study.is_study(path) else None
                study = (
                    before._grown(base, grid, scaling)
                    if before
                    else Study(path, base, grid, scaling)
                )
                if (
                    study != before
                ):  # the recipe first: its keys in study.json are what tells that it was edited
                    write_atomic(path / "recipe.toml", study.recipe.toml())
                    listed = [
                        {"assignment": c.assignment, "run": c.directory, "key": c.key}
                        for c in study.cells
                    ]
                    stored = {"axes": study.values, "cells": listed}
                    stored |= {"scaling": asdict(study.scaling)} if study.scaling else {}
                    write_atomic(path / "study.json", json.dumps(stored, indent=1))
        except OSError as error:
            raise UserError(
                f"the study {path} cannot be written: {error.strerror}; give another {argument('path', 'DIR')}"
            ) from None
        return study

    @staticmethod
    def open(path: str | Path) -> Study:
        """The study at `path`; raises UserError where there is none, or its cells have other recipes than at its start."""
        path = Path(path)
        if not Study.is_study(path):
            raise UserError(f"{path} is no study: it has no study.json")
        document, recipe = read_json(path / "study.json"), Recipe.load(path / "recipe.toml")
        stored, scaling = document.get("cells", []), document.get("scaling")
        cells = [Cell.of(recipe, cell["assignment"], cell["run"]) for cell in stored]
        if not cells or [cell.key for cell in cells] != [cell.get("key") for cell in stored]:
            why = "recipe.toml was edited, study.json is damaged, or this version of Windlass has other settings"
            what = f"{path}: its cells have other recipes than at its start"
            raise UserError(f"{what}: {why}. Restore it, or use another {argument('path', 'DIR')}")
        return Study(
            path,
            recipe,
            cells,
            Scaling(**scaling | {"project": tuple(scaling["project"])}) if scaling else None,
        )

    def _grown(self, base: Recipe, grid: Sequence[Cell], scaling: Scaling | None) -> Study:
        """This study with the cells of a grid that it does not have; those it has keep their order and directories.

        Where the grid's recipe differs from the study's, its cells set the difference. But what changes no result (how
        often is saved or logged, where it runs) is taken over for all cells, unless the study varies it.
        """
        old, new = self.recipe.flat(), base.flat()
        if bool(self.scaling) != bool(scaling) and grid:
            kind = "a scaling study" if self.scaling else "no scaling study"
            raise UserError(f"{self.path} is {kind}: give another {argument('path', 'DIR')}")
        for key in ("preset", "model.kind"):
            if new[key] != old[key]:
                what = f"{self.path} is a study with {key} = {old[key]}"
                raise UserError(f"{what}, not {new[key]}: give another {argument('path', 'DIR')}")
        differ = {key: value for key, value in new.items() if value != old[key]}
        own = {k: v for k, v in differ.items() if k in self.keys or not k.startswith(NON_SEMANTIC)}
        recipe = self.recipe.replace(**{k: v for k, v in differ.items() if k not in own})
        there = [cell.assignment for cell in self.cells]
        given = with_seeds(there, [own | cell.assignment for cell in grid])
        assignments, places = (
            [*there, *given],
            [*(cell.directory for cell in self.cells), *[""] * len(given)],
        )
        shared, keys = (
            recipe.flat() | grids.ONE,
            dict.fromkeys(key for one in assignments for key in one),
        )
        cells: dict[str, Cell] = {}
        for assignment, place in zip(assignments, places, strict=True):
            cell = Cell.of(
                recipe, {key: assignment.get(key, shared.get(key)) for key in keys}, place
            )
            cells.setdefault(cell.key, cell)
        notes, added = [], len(cells) - len(self.cells)
        if added:
            more = f"{added} new cell{'s' * (added > 1)}"
            notes.append(f"the study grows: {more} beside {len(self.cells)} that are there")
        for key, value in differ.items():
            if key not in own:
                notes.append(
                    f"{key} = {typed(value)} from here on (before: {typed(old[key])}); it makes no new cells"
                )
            elif added:
                notes.append(
                    f"{key} = {typed(value)} makes other cells than those with {key} = {typed(old[key])}"
                )
        return Study(self.path, recipe, list(cells.values()), scaling or self.scaling, notes)

    @staticmethod
    def is_study(path: str | Path) -> bool:
        return (Path(path) / "study.json").is_file()

    @property
    def measure(self) -> str:
        """What cells are compared by: `checkpoint.best`, but bits per byte instead of the loss of several tokenizers."""
        several = any(len(self.values.get(key, ())) > 1 for key in TOKENIZER)
        return (
            BITS if several and self.recipe.checkpoint.best == LOSS else self.recipe.checkpoint.best
        )

    @property
    def keys(self) -> list[str]:
        return list(self.cells[0].assignment)

    @property
    def values(self) -> dict[str, list[Any]]:
        """The settings that cells set, each with its values in the order of the cells."""
        by_key = {key: [cell.assignment[key] for cell in self.cells] for key in self.keys}
        return {
            key: list({repr(value): value for value in values}.values())
            for key, values in by_key.items()
        }

    def run_of(self, cell: Cell) -> Run:
        return Run(self.path / cell.directory)

    def probe_dir(self, cell: Cell) -> Path:
        """Of a scaling study: where the steps of a cell without communication are (study/probe.py)."""
        return self.path / "probes" / Path(cell.directory).name

    def runs(self) -> list[Run]:
        return [run for run in map(self.run_of, self.cells) if run.recipe_path.is_file()]

    def results(self) -> list[CellResult]:
        return [self.result(cell) for cell in self.cells]

    def result(self, cell: Cell) -> CellResult:
        run = self.run_of(cell)
        version: tuple[int, ...] = ()
        with suppress(OSError):
            version = run.metrics_path.stat().st_size, run.metrics_path.stat().st_mtime_ns
        if (
            run.path not in self._ledgers or self._ledgers[run.path][0] != version
        ):  # a sweep looks twice a second
            raw = list(read_lines(run.metrics_path))
            events = [line for line in raw if line["kind"] == "event"]
            lines = list(effective(raw))
            train = [line for line in lines if line["kind"] == "train"][-RECENT:]
            values = summarize(lines, self.measure) | {
                "evaluated": evaluated(run, cell.recipe, lines)
            }
            self._ledgers[run.path] = version, events, train, values
        _, events, train, values = self._ledgers[run.path]
        state, reason = cell_state(run.state_by(events), events, self.statuses().get(cell.key))
        if values["steps"] is None:
            with suppress(UserError):  # where the number follows from data that is not prepared yet
                values["steps"] = resolve_steps(cell.recipe)
        left = time_left(train, values["steps"]) if state == "running" else None
        return CellResult(cell, run, self.measure, state, reason, left_s=left, **values)

    def statuses(self) -> dict[str, dict[str, str]]:
        """By a cell's key what was decided about it: `state` (diverged, pruned, failed or interrupted) and `reason`."""
        return read_json(self.path / "statuses.json")

    def status(self, cell: Cell) -> str:
        return self.statuses().get(cell.key, {}).get("state", "")

    def set_status(self, cell: Cell, state: str, reason: str = "") -> None:
        """Write down what was decided about a cell; an empty state takes it back."""
        with FileLock(
            self.path / ".statuses.lock"
        ):  # the tasks of an array job write at the same time
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

    def winners(self, results: Sequence[CellResult] | None = None) -> Winners:
        """The groups with the best median score; groups with all their seeds finished come before the others.

        There is none where the study varies nothing that a lower loss decides, or the losses cannot be compared.
        """
        results = self.results() if results is None else results
        varied = [key for key, values in self.values.items() if len(values) > 1 and key != SEED]
        choices = [key for key in varied if not key.startswith(NO_CHOICE)]
        remark = ""
        if self.measure in (LOSS, BITS):
            finished = [r.evaluated for r in results if r.state == "finished"]
            measure, remark = common_measure(finished)
            if not measure:
                return Winners([], remark)
        if not choices:
            what = (
                f"{', '.join(varied)}: how much is computed, or how" if varied else "the seed alone"
            )
            return Winners(
                [],
                f"No best is named: the study varies {what}, which a lower loss does not decide.",
            )
        rivals: dict[str, list[Group]] = {}
        for group in self.groups(results):
            place = {key: value for key, value in group.assignment.items() if key not in choices}
            rivals.setdefault(repr(place), []).append(group)
        sign, best_of, fewer = 1 if lower_is_better(self.measure) else -1, [], list[str]()
        for groups in rivals.values():
            scored = [group for group in groups if group.scores] if len(groups) > 1 else []
            if scored:
                most = max(len(group.results) for group in groups)
                best_of.append(
                    min(scored, key=lambda x: (len(x.scores) < most, sign * (x.median or 0.0)))
                )
                fewer += [
                    f"{x.label} has {len(x.results)} of {most} seeds"
                    for x in groups
                    if len(x.results) < most
                ]
        if fewer:
            seeds = ",".join(map(str, self.values[SEED]))
            lacking = f"{'; '.join(fewer)}: add the other cells with run.seed={seeds}, else it is ranked last."
            remark = f"{remark} {lacking}".strip()
        return Winners(best_of, remark)

    def winner_command(self, assignment: Assignment, world: int = 1) -> tuple[str, str]:
        """The command that trains an assignment in full on `world` ranks (or as many as it sets itself), and a remark.

        Where the study's recipe is a preset with changes, those are repeated, but for a number of steps that was cut
        down for the study; else the study's own recipe file is named.
        """
        source, settings, remark = f"{self.path.as_posix()}/recipe.toml", {}, ""
        if self.recipe.preset in presets():
            preset, own = Recipe.load(self.recipe.preset), self.recipe.flat()
            source, plain = self.recipe.preset, preset.flat()
            settings = {
                k: v for k, v in own.items() if not k.startswith(NOT_REPEATED) and v != plain.get(k)
            }
            steps, full = settings.get("train.steps"), preset.train.steps
            if (
                "train.steps" not in assignment
                and isinstance(steps, int)
                and (isinstance(full, str) or steps < full)
            ):
                del settings["train.steps"]
                remark = f"The study's cells had {steps} steps; this is the preset's full length, {full}."
        settings |= {key: value for key, value in assignment.items() if value is not None}
        world = settings.pop(WORLD, world)
        words = [
            "windlass",
            "train",
            source,
            *(f"{key}={typed(value)}" for key, value in settings.items()),
        ]
        return shlex.join([*words, "--world", str(world)] if world > 1 else words), remark
