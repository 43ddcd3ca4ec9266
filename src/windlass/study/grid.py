"""From what is typed as axes (`windlass sweep --help` has the forms) to the cells of a grid. Pure: no disk, no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from windlass.errors import UserError, argument
from windlass.recipe import NON_SEMANTIC, Recipe, parse_override, plain, typed
from windlass.variables import scrub

SEED = "run.seed"
WORLD, NODES, REPEAT = "parallel.world", "parallel.nodes", "repeat"
AXES_ONLY = (WORLD, NODES, REPEAT)
"""Axes that are no settings of a recipe: the ranks that train a cell, their hosts, and which one of several equal runs it is."""
ONE = {NODES: 1, REPEAT: 1}  # what a cell has that does not set them
MODES = ("strong", "fixed-data", "weak", "strategies")  # of a scaling study
Assignment = dict[str, Any]  # dotted keys and the values of one cell


class Axis(NamedTuple):
    """One axis of a grid: one key, or several that change together, and the values they take."""

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Scaling:
    """What makes a study a scaling study, as `study.json` has it."""

    mode: str  # one of MODES
    grow: str = ""  # with `weak`: what grows with the ranks, `batch` or `model`
    warmup: int = 5  # steps of each start that are left out
    repeats: int = 1
    project: tuple[int, ...] = ()  # numbers of ranks past those measured
    preset: str = ""  # of the study, where it was made from one


@dataclass(frozen=True)
class Cell:
    """One run of a study: what it sets, and the recipe that follows."""

    assignment: Assignment
    recipe: Recipe
    key: str  # identifies it: the recipe's hash, with what the hash leaves out (strategy, ranks) where it is not the base's
    directory: (
        str  # its run directory, relative to the study's: readable, safe as a file name, unique
    )

    @staticmethod
    def of(base: Recipe, assignment: Assignment, directory: str = "") -> Cell:
        """The cell of an assignment; raises UserError where its recipe is invalid."""
        recipe = base.replace(**{k: v for k, v in assignment.items() if k not in AXES_ONLY})
        usual = base.flat() | ONE
        outside = [k for k in sorted(assignment) if k.startswith((*AXES_ONLY, *NON_SEMANTIC))]
        other = {k: assignment[k] for k in outside if assignment[k] != usual.get(k)}
        text = json.dumps([recipe.config_hash, other])
        key = hashlib.sha256(text.encode()).hexdigest()[:12] if other else recipe.config_hash
        words = re.sub(r"[^A-Za-z0-9.=+-]+", "-", label(scrub(assignment))).strip("-")[:80]
        return Cell(assignment, recipe, key, directory or f"runs/{words}-{key[:8]}")

    @property
    def label(self) -> str:
        return label(self.assignment)

    @property
    def overrides(self) -> list[str]:
        """The assignment as command-line overrides, without ranks, hosts and repeats."""
        return [
            f"{key}={typed(value)}"
            for key, value in self.assignment.items()
            if key not in AXES_ONLY
        ]

    @property
    def world(self) -> int | None:
        return self.assignment.get(WORLD)

    @property
    def nodes(self) -> int:
        return int(self.assignment.get(NODES, 1))

    @property
    def repeat(self) -> int:
        return int(self.assignment.get(REPEAT, 1))


def label(assignment: Assignment, names: Mapping[str, str] | None = None) -> str:
    """Settings on one line, by their `short_names` or the given names: `lr=0.001 kind=wsd`."""
    names = names or short_names(assignment)
    texts = ((names[k], f"{v:g}" if isinstance(v, float) else v) for k, v in assignment.items())
    return " ".join(f"{name}={text}" for name, text in texts if text is not None)


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """By key the shortest end of it that no other key has: `lr`, but `optim.kind` beside `schedule.kind`."""
    parts, names = {key: key.split(".") for key in keys}, dict[str, str]()
    for key, own in parts.items():
        lengths = range(1, len(own) + 1)
        unique = (
            n for n in lengths if sum(other[-n:] == own[-n:] for other in parts.values()) == 1
        )
        names[key] = ".".join(own[-next(unique, len(own)) :])
    return names


def expand(base: Recipe, axes: Iterable[Axis]) -> list[Cell]:
    """All cells of the grid, the last axis changing fastest, their recipes validated.

    Raises UserError where two axes set one key, or as `cells_of`.
    """
    axes = list(axes)
    keys = [key for axis in axes for key in axis.keys]
    for key in keys:
        if keys.count(key) > 1 or key in ("run.dir", "run.name"):
            own = key in ("run.dir", "run.name")
            why = (
                "each cell has its own: name the study's directory instead"
                if own
                else "two axes of the grid set it"
            )
            raise UserError(f"{key}: {why}")
        if key in ONE:
            raise UserError(
                f"{key} belongs to scaling studies alone, where {argument('nodes', [1, 2])} and {argument('repeats', 3)} make it"
            )
    combinations = itertools.product(*(axis.values for axis in axes))
    return cells_of(
        base, [dict(zip(keys, itertools.chain(*one), strict=True)) for one in combinations]
    )


def cells_of(base: Recipe, assignments: Iterable[Assignment]) -> list[Cell]:
    """A cell for each assignment; UserError where two are equal, or recipes are invalid (all of them are named)."""
    cells, problems = [], []
    for assignment in assignments:
        world = assignment.get(WORLD, 1)
        try:
            if type(world) is not int or world < 1:
                raise UserError(f"{WORLD} is a number of ranks, not {world!r}")
            cells.append(Cell.of(base, assignment))
            if WORLD in assignment:
                cells[-1].recipe.batch(
                    world
                )  # raises where the global batch is not divisible by the world size
        except UserError as error:
            problems.append(f"{' '.join(f'{k}={v}' for k, v in assignment.items())}: {error}")
    if problems:
        raise UserError("\n".join(["some cells of the grid are invalid:", *problems]))
    identities = [cell.key for cell in cells]
    if equal := [cell.label for cell in cells if identities.count(cell.key) > 1]:
        raise UserError(f"cells of the grid are equal: {'; '.join(equal)}")
    return cells


def read_axes(axes: str | Iterable[Any] | Mapping[str, Any]) -> list[Axis]:
    """Axes as typed, or as a mapping of keys (`a+b` for a zip) to their values."""
    if isinstance(axes, Mapping):
        return [_axis(key, values) for key, values in axes.items()]
    return [parse_axis(text) for text in ([axes] if isinstance(axes, str) else axes)]


def _axis(key: str, values: Any) -> Axis:
    """One axis of a mapping; text is read as it is on the command line."""
    if isinstance(values, str):
        return parse_axis(f"{key}={values}")
    keys = tuple(part.strip() for part in key.split("+"))
    rows = plain(list(values) if isinstance(values, Iterable) else values)
    if not isinstance(rows, list) or not rows:
        raise UserError(f"{key}: {values!r} is not a list of values; write {{{key!r}: [...]}}")
    if len(keys) == 1:
        rows = [[value] for value in rows]
    if odd := [row for row in rows if not isinstance(row, list) or len(row) != len(keys)]:
        raise UserError(
            f"{key}: write a list of {len(keys)} values in place of {odd[0]!r}, one for each key"
        )
    return Axis(keys, tuple(map(tuple, rows)))


def parse_axis(text: str) -> Axis:
    """One `key=a,b,c`, `key=low:high:log:n` or `a+b=1+2,3+4`; raises UserError that lists the accepted forms."""
    left, _, right = text.partition("=")
    keys = tuple(key.strip() for key in left.split("+"))
    if not all(keys) or not right.strip():
        raise UserError(
            f"{text!r} is not an axis; write KEY=A,B,C or KEY=LOW:HIGH:log:N or A+B=1+2,3+4"
        )
    if len(keys) == 1 and right.count(":") == 3 and right.split(":")[2] in ("log", "lin"):
        first, last, kind, number = right.split(":")
        try:
            low, high, count = float(first), float(last), int(number)
        except ValueError:
            low, high, count = 0.0, 0.0, 0
        if count < 2 or (kind == "log" and min(low, high) <= 0):
            raise UserError(
                f"{text}: a range is LOW:HIGH:log:N (above 0) or LOW:HIGH:lin:N, with at least 2 values"
            )
        values = (np.geomspace if kind == "log" else np.linspace)(low, high, count).tolist()
        whole = not re.search(r"[.eE]", first + last)
        return Axis(keys, tuple((round(v) if whole else float(f"{v:.6g}"),) for v in values))
    rows = [_split(part, "+") if len(keys) > 1 else [part] for part in _split(right, ",")]
    if not all(len(row) == len(keys) and all(map(str.strip, row)) for row in rows):
        raise UserError(
            f"{text!r}: between two commas there is a value for each of {', '.join(keys)}"
        )
    return Axis(
        keys,
        tuple(tuple(parse_override(f"key={value.strip()}")[1] for value in row) for row in rows),
    )


def _split(text: str, separator: str) -> list[str]:
    """Split outside of brackets and quotes; the + of an exponent (1e+3) does not split."""
    part = rf"""((?:\[[^]]*\]|"[^"]*"|'[^']*'|\d[eE]\+\d|[^{separator}])*)(?:\{separator}|$)"""
    return re.findall(part, text)[:-1]  # the last one is the empty match at the end
