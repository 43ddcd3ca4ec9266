"""A study on disk: `studies/<name>`, a directory of runs of one recipe and a grid.

- `recipe.toml`: the settings that all cells share; `study.json`: `StudyFile`
- `failures.json`: why cells failed
- `runs/<cell>`: a run directory for each cell, whose ledger gives all other numbers
- `probes/` (see `setups.py`), `jobs/` (`jobs.py`), and a ladder's `joined.json` (`ladder.py`)
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.errors import UserError, argument, require
from windlass.fileio import locked, read_json, write_atomic
from windlass.recipe import NON_SEMANTIC, Changes, Recipe, as_recipe, plain, typed
from windlass.recipe.layers import dotted, study_presets
from windlass.run import Run
from windlass.study.comparable import TOKENIZER
from windlass.study.grid import NODES, ONE, WORLD, Assignment, Cell, cells_of, expand, read_axes
from windlass.study.numbers import BITS, RunNumbers, read_numbers
from windlass.study.results import NO_BEST, CellResult, Winners, cell_result, find_winners
from windlass.telemetry.measures import LOSS

STUDY = "study.json"
Kind = Literal["sweep", "ladder", "scaling"]
KINDS = {"sweep": "a sweep", "ladder": "a ladder", "scaling": "a scaling study"}
# `["optim.lr=1e-2,1e-3"]` as typed, `{"optim.lr": [1e-2, 1e-3]}`, or the assignment of each cell
Axes = Sequence[str] | Mapping[str, Sequence[Any]] | Sequence[Assignment]


@dataclass(frozen=True)
class Scaling:
    mode: str  # one of `scale.MODES`
    grow: str = ""  # with `weak`: `batch` or `model` grows with the ranks
    preset: str = ""  # of the study, if it comes from one

    @property
    def kind(self) -> str:
        return f"{self.mode} {self.grow}".strip()


class StoredCell(BaseModel):
    assignment: Assignment
    run: str  # its directory in the study
    key: str  # reveals an edit of the recipe


class StudyFile(BaseModel):
    model_config = ConfigDict(ser_json_inf_nan="constants")

    kind: Kind
    world: int = 0
    cells: list[StoredCell] = Field(min_length=1)
    scaling: Scaling | None = None


@dataclass(frozen=True)
class Study:
    """A study's directory. It may gain cells; its runs and failures change while a sweep works."""

    path: Path
    recipe: Recipe = field(repr=False)
    cells: list[Cell] = field(repr=False)
    kind: Kind = "sweep"
    world: int = 0  # ranks of a cell without `parallel.world`; 0: one, or all ranks of a job
    scaling: Scaling | None = None  # the options of a scaling study
    # By run the size and time of its ledger, and its numbers then.
    _numbers: dict[Path, tuple[tuple[int, ...], RunNumbers]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @staticmethod
    def create(
        recipe: Recipe,
        axes: Axes,
        path: Path | None = None,
        *,
        write: bool = True,
        kind: Kind = "sweep",
        world: int = 0,
        scaling: Scaling | None = None,
    ) -> Study:
        """Create the study of a recipe and a grid, or add the grid's cells to the study at `path`
        (None: `studies/<preset>-<hash>`); without axes open it.

        The recipe's `run.dir` and `run.name` do not count. `write` False: write nothing to disk.
        UserError if a cell's recipe is invalid, or `path` has another study.
        """
        # Every setting by name, as recipe.toml has them, so that no default depends on a cell.
        place = {"run.dir": "", "run.name": "", "run.base": recipe.run.base or str(Path.cwd())}
        base = recipe.replace(**recipe.flat() | place)
        path = path or Path("studies") / f"{base.preset}-{base.config_hash[:8]}"
        if not len(axes) and not Study.is_study(path):
            example = "for example optim.lr=1e-2,1e-3"
            raise UserError(f"{path} is not a study yet: name the axes of its grid, {example}")
        kind = "scaling" if scaling else kind
        cells = list[Cell]()
        if assignments := [plain(one) for one in axes if isinstance(one, dict)]:
            cells = cells_of(base, assignments)
        elif len(axes):
            cells = expand(base, read_axes(axes))
        new = Study(path, base, cells, kind, world, scaling)
        if write:
            path.mkdir(parents=True, exist_ok=True)
        with locked(path / ".study.lock") if write else nullcontext():
            before = Study.open(path) if Study.is_study(path) else None
            study = before._grown(new) if before else new
            if study == before or not write:
                return study
            # The recipe first: the keys in study.json reveal a later edit of the recipe.
            write_atomic(path / "recipe.toml", study.recipe.toml())
            cells = study.cells
            stored = [
                StoredCell(assignment=c.assignment, run=c.directory, key=c.key) for c in cells
            ]
            kind, world, scaling = study.kind, study.world, study.scaling
            file = StudyFile(kind=kind, world=world, cells=stored, scaling=scaling)
            write_atomic(path / STUDY, file.model_dump_json(indent=1))
        return study

    @staticmethod
    def open(path: str | Path) -> Study:
        path = Path(path)
        if not Study.is_study(path):
            raise UserError(f"{path} is not a study: it has no {STUDY}")
        remedy = f"restore it, or give another {argument('path', 'DIR')}"
        try:
            stored = StudyFile.model_validate(read_json(path / STUDY))
        except ValidationError as error:
            place = ".".join(map(str, error.errors()[0]["loc"]))
            raise UserError(f"{path}/{STUDY} is damaged at {place}: {remedy}") from None
        recipe = Recipe.load(path / "recipe.toml")
        cells = [Cell.of(recipe, cell.assignment, cell.run) for cell in stored.cells]
        if [cell.key for cell in cells] != [cell.key for cell in stored.cells]:
            why = f"recipe.toml or {STUDY} was edited, or this Windlass has other settings"
            raise UserError(f"{path}: the recipes of its cells have changed: {why}; {remedy}")
        return Study(path, recipe, cells, stored.kind, stored.world, stored.scaling)

    def _grown(self, given: Study) -> Study:
        """This study with the new cells of `given`; its own keep their order and directories.

        Settings that change no result (how often to save or log) then apply to all cells. UserError
        for other changes of the recipe, which have to be axes.
        """
        elsewhere = f"give another {argument('path', 'DIR')}"
        if self.kind != given.kind and given.cells:
            raise UserError(f"{self.path} is {KINDS[self.kind]}: {elsewhere}")
        old, new = self.recipe.flat(), given.recipe.flat()
        differ = {k: value for k, value in new.items() if value != old[k] and k != "run.base"}
        others = [key for key in differ if not key.startswith(NON_SEMANTIC)]
        if others:
            key = "preset" if "preset" in others else others[0]
            problem = f"{self.path} has {key} = {typed(old[key])}, not {typed(new[key])}"
            raise UserError(f"{problem}: write its values as an axis of a sweep, or {elsewhere}")
        recipe = self.recipe.replace(differ)
        usual = recipe.flat() | ONE
        places = [(cell.directory, cell.assignment) for cell in self.cells]
        places += [("", cell.assignment) for cell in given.cells]
        keys = dict.fromkeys(key for _, assignment in places for key in assignment)
        cells: dict[str, Cell] = {}
        for directory, assignment in places:
            full = {key: assignment.get(key, usual.get(key)) for key in keys}
            cell = Cell.of(recipe, full, directory)
            cells.setdefault(cell.key, cell)
        world, scaling = given.world or self.world, given.scaling or self.scaling
        return Study(self.path, recipe, list(cells.values()), self.kind, world, scaling)

    @staticmethod
    def is_study(path: str | Path) -> bool:
        return (Path(path) / STUDY).is_file()

    @cached_property
    def measure(self) -> str:
        """The measure that ranks cells: `checkpoint.best`; bits per byte for several tokenizers."""
        measure = self.recipe.checkpoint.best
        several = any(len(self.values.get(key, ())) > 1 for key in TOKENIZER)
        return BITS if several and measure == LOSS else measure

    @property
    def keys(self) -> list[str]:
        return list(self.cells[0].assignment)

    @cached_property
    def values(self) -> dict[str, list[Any]]:
        by_key = {key: [cell.assignment[key] for cell in self.cells] for key in self.keys}
        return {key: list({repr(v): v for v in values}.values()) for key, values in by_key.items()}

    @property
    def over_hosts(self) -> bool:
        return NODES in self.cells[0].assignment

    def run_of(self, cell: Cell) -> Run:
        return Run(self.path / cell.directory)

    def ranks_of(self, cell: Cell) -> int:
        """The ranks that train a cell on one machine."""
        return cell.world or self.world or 1

    def runs(self) -> list[Run]:
        return [run for run in map(self.run_of, self.cells) if run.exists]

    def results(self) -> list[CellResult]:
        failures = read_json(self.path / "failures.json")
        return [self.result(cell, failures) for cell in self.cells]

    def result(self, cell: Cell, failures: Mapping[str, str] | None = None) -> CellResult:
        """`failures`: the reasons of failed cells by their keys, if they have been read already."""
        if failures is None:
            failures = read_json(self.path / "failures.json")
        run, version = self.run_of(cell), tuple[int, ...]()
        alive = run.alive
        with suppress(OSError):
            stat = run.metrics_path.stat()
            version = stat.st_size, stat.st_mtime_ns
        if run.path not in self._numbers or self._numbers[run.path][0] != version:
            self._numbers[run.path] = version, read_numbers(run, self.measure)
        return cell_result(cell, run, self._numbers[run.path][1], alive, failures.get(cell.key))

    def set_failure(self, cell: Cell, reason: str | None) -> None:
        """Record why a cell failed; None: it may be tried again."""
        with locked(self.path / ".failures.lock"):  # tasks of an array job write concurrently
            failures = read_json(self.path / "failures.json")
            failures.pop(cell.key, None)
            if reason is not None:
                failures[cell.key] = reason
            write_atomic(self.path / "failures.json", json.dumps(failures, indent=1))

    def winners(self, results: Sequence[CellResult] = ()) -> Winners:
        if self.kind == "ladder":
            return Winners([], f"{NO_BEST}: the law of a ladder compares its cells.")
        return find_winners(results or self.results(), self.measure, self.values)

    def best(self) -> Run:
        """The run of the best of all cells (`Winners.cell`); UserError if there is not one."""
        winners = self.winners()
        if winners.cell is None:
            raise UserError(f"{self.path}: {winners.remark.rstrip('.')}; see to_pandas()")
        return winners.cell.run

    def to_pandas(self) -> Any:
        """The cells as a `pandas.DataFrame`: settings, states, losses, speeds, a row for each."""
        require("pandas", "Study.to_pandas")
        import pandas

        return pandas.DataFrame([r.row() for r in self.results()]).rename_axis("cell")

    def winner_command(self, assignment: Assignment, world: int = 0) -> str:
        """The command that trains an assignment; `world`: the ranks, if it does not set them; 0: as
        the first cell has, which a job may have trained on all of its devices."""
        settings = {key: value for key, value in assignment.items() if value is not None}
        starts = [result.numbers.start for result in self.results()]
        trained = next((int(start["world"]) for start in starts if "world" in start), self.world)
        world = settings.pop(WORLD, world or trained)
        words = [f"{key}={typed(value)}" for key, value in settings.items()]
        words += ["--world", str(world)] if world > 1 else []
        return shlex.join(["windlass", "train", f"{self.path.as_posix()}/recipe.toml", *words])


def load_study(
    source: Any, verb: str, overrides: Changes = ()
) -> tuple[Recipe, dict[str, Any], Path | None]:
    """The recipe of a new or an existing study, the options of its preset, and its directory.

    `source`: a preset of studies for `verb` (`scale` or `sweep`), or anything that `Recipe.load`
    takes, without options. The directory is None for a recipe: it depends on the grid.
    """
    text, files = str(source), study_presets()
    if text in files and not Path(text).exists():
        preset = tomllib.loads(files[text].read_text(encoding="utf-8"))
        if (own := preset.pop("verb")) != verb:
            raise UserError(f"{text} is a preset for {own}, not for {verb}")
        changes = dotted(preset.pop("set", {})) | dotted(overrides)
        recipe = Recipe.load(preset.pop("recipe"), changes)
        path = Path("studies") / f"{text}-{recipe.config_hash[:8]}"
        return recipe, preset | {"preset": text}, path
    if isinstance(source, str | Path):
        recipe = Recipe.load(source, overrides)
    else:
        recipe = as_recipe(source).replace(overrides)
    place = Path(getattr(source, "path", text))
    return recipe, {}, place if Study.is_study(place) else None
