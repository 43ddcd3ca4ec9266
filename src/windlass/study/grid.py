"""The axes of a grid (see `windlass sweep --help`), and its cells."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import UserError
from windlass.recipe import NON_SEMANTIC, Recipe, parse_override, plain, typed
from windlass.recipe.layers import from_here
from windlass.variables import scrub

SEED = "run.seed"
WORLD, NODES = "parallel.world", "parallel.nodes"
AXES_ONLY = (WORLD, NODES)  # axes that are not settings: a cell's ranks and its hosts
ONE = {NODES: 1}  # the value of a cell that does not set it
Assignment = dict[str, Any]  # dotted keys and the values of one cell


class Axis(NamedTuple):
    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Cell:
    """One run of a study: the settings it assigns, and the resulting recipe."""

    assignment: Assignment
    recipe: Recipe
    # The recipe's hash, with other settings (strategy, ranks) that differ from the base.
    key: str
    directory: str  # relative to the study: readable, unique, safe as a file name

    @staticmethod
    def of(base: Recipe, assignment: Assignment, directory: str = "") -> Cell:
        """The cell of an assignment; raises UserError if its recipe is invalid."""
        changes = {k: v for k, v in assignment.items() if k not in AXES_ONLY}
        recipe = base.replace(changes | {"run.base": base.run.base})  # its paths start there
        usual = base.flat() | ONE
        outside = [k for k in sorted(assignment) if k.startswith((*AXES_ONLY, *NON_SEMANTIC))]
        other = {k: assignment[k] for k in outside if assignment[k] != usual.get(k)}
        text = json.dumps([recipe.config_hash, other])
        key = hashlib.sha256(text.encode()).hexdigest()[:12] if other else recipe.config_hash
        words = re.sub(r"[^A-Za-z0-9.=+-]+", "-", label_of(scrub(assignment))).strip("-")[:80]
        return Cell(assignment, recipe, key, directory or f"runs/{words}-{key[:8]}")

    @property
    def label(self) -> str:
        return label_of(self.assignment)

    @property
    def overrides(self) -> list[str]:
        settings = {k: v for k, v in self.assignment.items() if k not in AXES_ONLY}
        return [f"{key}={typed(value)}" for key, value in settings.items()]

    @property
    def world(self) -> int | None:
        return self.assignment.get(WORLD)

    @property
    def nodes(self) -> int:
        return int(self.assignment.get(NODES, 1))


def label_of(assignment: Assignment, names: Mapping[str, str] | None = None) -> str:
    """An assignment on one line, by `short_names` or the given names: `lr=0.001 kind=wsd`."""
    names = names or short_names(assignment)
    texts = ((names[k], f"{v:g}" if isinstance(v, float) else v) for k, v in assignment.items())
    return " ".join(f"{name}={text}" for name, text in texts if text is not None)


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """The shortest unique ending of each key: `lr`, but `optim.kind` beside `schedule.kind`."""
    keys = list(keys)
    names = {}
    for key in keys:
        parts = key.split(".")
        endings = [".".join(parts[place:]) for place in range(len(parts) - 1, -1, -1)]
        unique = (e for e in endings if sum(f".{k}".endswith(f".{e}") for k in keys) == 1)
        names[key] = next(unique, key)
    return names


def expand(base: Recipe, axes: Iterable[Axis]) -> list[Cell]:
    """All cells of a grid, with validated recipes; the last axis changes fastest."""
    axes = list(axes)
    keys = [key for axis in axes for key in axis.keys]
    assignments = []
    for values in itertools.product(*(axis.values for axis in axes)):
        typed_here = dict(zip(keys, itertools.chain(*values), strict=True))
        assignments.append(from_here(typed_here, base.run.base))
    return cells_of(base, assignments)


def cells_of(base: Recipe, assignments: Iterable[Assignment]) -> list[Cell]:
    """A cell for each assignment; UserError if two are equal, or if recipes are invalid."""
    cells, problems = list[Cell](), list[str]()
    for assignment in assignments:
        world = assignment.get(WORLD, 1)
        try:
            if type(world) is not int or world < 1:
                raise UserError(f"{WORLD} is a number of ranks, not {world!r}")
            cells.append(Cell.of(base, assignment))
            if WORLD in assignment:
                cells[-1].recipe.batch(world)  # raises if the ranks cannot share the global batch
        except UserError as error:
            problems.append(f"{' '.join(f'{k}={v}' for k, v in assignment.items())}: {error}")
    if problems:
        raise UserError("\n".join(["some cells of the grid are invalid:", *problems]))
    keys = [cell.key for cell in cells]
    if equal := [cell.label for cell in cells if keys.count(cell.key) > 1]:
        raise UserError(f"cells of the grid are equal: {'; '.join(equal)}")
    return cells


def read_axes(axes: str | Iterable[Any] | Mapping[str, Any]) -> list[Axis]:
    """Axes as typed, or as a mapping of keys to lists of values."""
    if not isinstance(axes, Mapping):
        return [parse_axis(text) for text in ([axes] if isinstance(axes, str) else axes)]
    parsed = []
    for key, values in axes.items():
        is_list = isinstance(values, Iterable) and not isinstance(values, str)
        rows = plain(list(values)) if is_list else []
        if not rows:
            raise UserError(f"{key}: {values!r} is not a list of values; write {{{key!r}: [...]}}")
        parsed.append(Axis((key,), tuple((value,) for value in rows)))
    return parsed


def parse_axis(text: str) -> Axis:
    """One `key=a,b,c`, `key=low:high:log:n` or `a+b=1+2,3+4`; a UserError lists these forms."""
    left, _, right = text.partition("=")
    keys = tuple(key.strip() for key in left.split("+"))
    if not all(keys) or not right.strip():
        forms = "KEY=A,B,C or KEY=LOW:HIGH:log:N or A+B=1+2,3+4"
        raise UserError(f"{text!r} is not an axis; write {forms}")
    if len(keys) == 1 and right.count(":") == 3 and right.split(":")[2] in ("log", "lin"):
        first, last, kind, number = right.split(":")
        try:
            low, high, count = float(first), float(last), int(number)
        except ValueError:
            low, high, count = 0.0, 0.0, 0
        if count < 2 or (kind == "log" and min(low, high) <= 0):
            forms = "LOW:HIGH:log:N (above 0) or LOW:HIGH:lin:N, with at least 2 values"
            raise UserError(f"{text}: a range is {forms}")
        spaced = (np.geomspace if kind == "log" else np.linspace)(low, high, count).tolist()
        whole = not re.search(r"[.eE]", first + last)
        return Axis(keys, tuple((round(v) if whole else float(f"{v:.6g}"),) for v in spaced))
    rows = [_split(part, "+") if len(keys) > 1 else [part] for part in _split(right, ",")]
    if not all(len(row) == len(keys) and all(map(str.strip, row)) for row in rows):
        raise UserError(f"{text!r}: write a value of {', '.join(keys)} between two commas")
    values = ((parse_override(f"key={text.strip()}")[1] for text in row) for row in rows)
    return Axis(keys, tuple(map(tuple, values)))


def _split(text: str, separator: str) -> list[str]:
    """Split outside of brackets and quotes; the + of an exponent (1e+3) does not split."""
    part = rf"""((?:\[[^]]*\]|"[^"]*"|'[^']*'|\d[eE]\+\d|[^{separator}])*)(?:\{separator}|$)"""
    return re.findall(part, text)[:-1]  # the last one is the empty match at the end
