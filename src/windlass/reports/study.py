"""What a study's runs say together: the table of its cells, medians over seeds, the winner, loss against what was swept.

Pure but for `read_study`: everything else takes cells, each what it sets and its run as a view, in the order of the grid.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.recipe import Recipe, presets, typed
from windlass.reports.measures import measures
from windlass.reports.tables import Table
from windlass.reports.text import show
from windlass.reports.view import RunView, view
from windlass.study.study import Study

SEED, WORLD = "run.seed", "parallel.world"
Assignment = Mapping[str, Any]
NOT_REPEATED = ("run.name", "run.dir", "run.notes", "preset", "checkpoint.", "eval.", "telemetry.")
"""Settings that a command to train the winner does not repeat: names, and what a study does without to be quick."""


@dataclass(frozen=True)
class Cell:
    """A cell of a study: what it sets, its run, and what was decided about it from outside."""

    assignment: Assignment
    view: RunView | None
    """None: not begun."""
    state: str
    """`waiting`, `running`, `interrupted`, `finished`, `failed`, `diverged`, `pruned`."""
    reason: str = ""

    @property
    def label(self) -> str:
        """The swept settings on one line, by the last part of their keys."""
        return named(self.assignment)

    @property
    def label_without_seed(self) -> str:
        """The label of the cells that differ in the seed alone."""
        return named({key: value for key, value in self.assignment.items() if key != SEED})


@dataclass(frozen=True)
class StudyView:
    """A study as a report sees it."""

    name: str
    cells: Sequence[Cell]
    recipe: Recipe | None = None
    path: str = ""
    """Where it lies, as it was given."""

    @property
    def keys(self) -> list[str]:
        """The swept settings, in the order of the grid."""
        return list(dict.fromkeys(key for cell in self.cells for key in cell.assignment))

    @property
    def begun(self) -> list[Cell]:
        """The cells that have a run."""
        return [cell for cell in self.cells if cell.view is not None]

    @property
    def views(self) -> list[RunView]:
        """The runs that there are."""
        return [cell.view for cell in self.cells if cell.view is not None]


def named(assignment: Assignment) -> str:
    """Settings on one line, by the last part of their keys."""
    return ", ".join(f"{short(key)} {show(value)}" for key, value in assignment.items()) or "the recipe"


def short(key: str) -> str:
    """The last part of a dotted key."""
    return key.rsplit(".", 1)[-1]


def is_study(path: str | Path) -> bool:
    """Whether a directory holds a study."""
    return Study.is_study(path)


def read_study(path: str | Path) -> StudyView:
    """The study at `path` with its runs; UserError where it is none."""
    study = Study.open(path)
    cells = []
    for r in study.results():
        seen = view(r.run, named(r.cell.assignment)) if r.begun else None
        cells.append(Cell(r.cell.assignment, seen, r.state, r.reason))
    return StudyView(study.path.resolve().name, cells, study.recipe, study.path.as_posix())


# ---------------------------------------------------------------- tables


def cell_table(cells: Sequence[Cell]) -> Table:
    """A row a cell: what it sets, its state, losses, tokens, speed and device-hours; in the order of the grid."""
    keys = list(dict.fromkeys(key for cell in cells for key in cell.assignment))
    rows = []
    for cell in cells:
        found = measures(cell.view) if cell.view is not None else {}
        rows.append(
            (
                *(cell.assignment.get(key) for key in keys), cell.state, found.get("steps"), found.get("tokens"),
                found.get("train_loss"), found.get("eval_loss"), found.get("best_eval_loss"),
                found.get("train_tokens_per_s"), found.get("device_hours"), cell.reason or None,
            )
        )  # fmt: skip
    columns = (
        *keys, "state", "steps", "tokens", "train_loss", "eval_loss", "best_eval_loss", "tokens_per_s", "device_hours", "reason",
    )  # fmt: skip
    heads = (
        *keys, "State", "Steps", "Tokens", "Final training loss", "Final evaluation loss", "Best evaluation loss", "Tokens/s",
        "Device-hours", "Reason",
    )  # fmt: skip
    kinds = (*("" for _ in keys), "", "count", "count", "loss", "loss", "loss", "rate", "hours", "")
    table = Table(columns, rows, heads, kinds)
    return table if any(cell.reason for cell in cells) else drop_last(table)


def drop_last(table: Table) -> Table:
    """The table without its last column."""
    return Table(table.columns[:-1], [row[:-1] for row in table.rows], table.labels[:-1], table.kinds[:-1])


def score(cell: Cell) -> float | None:
    """The best evaluation loss of a cell that finished; None for any other."""
    if cell.view is None or cell.state != "finished":
        return None
    value = measures(cell.view).get("best_eval_loss")
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


@dataclass(frozen=True)
class Group:
    """Cells that set the same but for the seed."""

    assignment: dict[str, Any]
    cells: list[Cell] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        """A measure of the finished cells, where it is a finite number."""
        found = [measures(c.view).get(name) for c in self.cells if c.view is not None and c.state == "finished"]
        return [float(v) for v in found if isinstance(v, (int, float)) and math.isfinite(v)]

    def median(self, name: str) -> float | None:
        """The median over the seeds."""
        values = self.values(name)
        return statistics.median(values) if values else None


def by_seed(cells: Sequence[Cell]) -> list[Group]:
    """The cells grouped by everything they set but the seed, in the order of the grid."""
    groups: dict[str, Group] = {}
    for cell in cells:
        rest = {key: value for key, value in cell.assignment.items() if key != SEED}
        groups.setdefault(repr(sorted(rest.items())), Group(rest)).cells.append(cell)
    return list(groups.values())


def seed_table(cells: Sequence[Cell]) -> Table | None:
    """Medians and spread over the seeds of the best evaluation loss; None where the seed is no axis."""
    if not any(SEED in cell.assignment for cell in cells):
        return None
    groups = by_seed(cells)
    keys = list(dict.fromkeys(key for group in groups for key in group.assignment))
    rows = []
    for group in groups:
        values = group.values("best_eval_loss")
        spread = max(values) - min(values) if len(values) > 1 else None
        numbers = (group.median("best_eval_loss"), min(values, default=None), max(values, default=None), spread)
        rows.append(
            (
                *(group.assignment.get(k) for k in keys),
                *numbers,
                group.median("eval_loss"),
                len(group.cells),
                len(values),
            )
        )
    columns = (*keys, "median", "low", "high", "spread", "median_final", "of_seeds", "seeds")
    heads = (*keys, "Best evaluation loss, median", "Lowest", "Highest", "Spread", "Final, median", "Seeds", "Finished")
    return Table(columns, rows, heads, (*("" for _ in keys), *("loss",) * 5, "count", "count"))


# ---------------------------------------------------------------- the winner


@dataclass(frozen=True)
class Winner:
    """The assignment with the lowest best evaluation loss, by the median where seeds are an axis."""

    assignment: dict[str, Any]
    loss: float
    cells: list[Cell]

    @property
    def seeds(self) -> str:
        """`2 seeds`, or `1 of 2 seeds` while some have not finished; empty where the seed is no axis."""
        if not any(SEED in cell.assignment for cell in self.cells):
            return ""
        done, of = sum(score(cell) is not None for cell in self.cells), len(self.cells)
        text = f"{of} seeds" if of > 1 else "1 seed"
        return text if done == of else f"{done} of {text}"


def winner_text(best: Winner) -> tuple[str, str]:
    """What the winner sets, and its loss with the number of seeds that it is the median of."""
    what = ", ".join(f"{key} = {show(value)}" for key, value in best.assignment.items()) or "the recipe as it is"
    measure = f"median of the best evaluation loss over {best.seeds}" if best.seeds else "best evaluation loss"
    return what, f"{measure}: {show(best.loss, 'loss')}"


def winner(cells: Sequence[Cell]) -> Winner | None:
    """The winner among what has finished, those with all their seeds before the others; None where nothing has."""
    scored = [(value, group) for group in by_seed(cells) if (value := group.median("best_eval_loss")) is not None]
    if not scored:
        return None
    loss, group = min(scored, key=lambda pair: (any(score(cell) is None for cell in pair[1].cells), pair[0]))
    return Winner(group.assignment, loss, group.cells)


def winner_command(study: StudyView, assignment: Assignment, world: int = 1) -> tuple[str, str]:
    """The command that trains an assignment in full on `world` ranks (or as many as it says itself), and a remark.

    Where the study's recipe is a preset with changes, those are repeated, but for a number of steps that was cut down
    for the study; else the study's own recipe file is named.
    """
    recipe, remark = study.recipe, ""
    source, overrides = f"{study.path or study.name}/recipe.toml", dict(assignment)
    if recipe is not None and recipe.preset in presets():
        plain = Recipe.load(recipe.preset)
        changed = {
            k: v for k, v in recipe.flat().items() if not k.startswith(NOT_REPEATED) and v != plain.flat().get(k)
        }
        steps, full = changed.get("train.steps"), plain.train.steps
        if "train.steps" not in assignment and isinstance(steps, int) and (isinstance(full, str) or steps < full):
            del changed["train.steps"]
            remark = f"The study's cells had {show(steps)} steps; this is the preset's full length, {show(full)}."
        source, overrides = recipe.preset, changed | overrides
    world = overrides.pop(WORLD, world)
    words = ["windlass", "train", source, *(f"{key}={typed(value)}" for key, value in overrides.items())]
    words += ["--world", str(world)] if world > 1 else []
    return " ".join(_quoted(word) for word in words), remark


def _quoted(word: str) -> str:
    safe = all(c.isalnum() or c in "._-+=/:@%,~" for c in word)
    return word if safe and word else "'" + word.replace("'", "'\"'\"'") + "'"
