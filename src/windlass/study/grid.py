"""From what is typed as axes (AXIS_HELP has the forms) to the cells of a grid. Pure: no disk, no torch.

Axes are crossed with each other; the keys of one zipped axis (`a+b=1+2,3+4`) change together.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from windlass.errors import UserError
from windlass.recipe import NON_SEMANTIC, Recipe, parse_override, typed

SEED = "run.seed"
WORLD = "parallel.world"
"""An axis that is no setting of a recipe: the number of ranks that train a cell."""

AXIS_HELP = """\
    optim.lr=1e-2,1e-3,1e-4              three values
    optim.lr=1e-4:1e-2:log:5             five values from 1e-4 to 1e-2, evenly on a logarithmic axis
    model.width=128:512:lin:4            four values evenly on a linear axis (whole numbers stay whole)
    optim.lr+train.global_batch=1e-3+64,5e-4+128
                                         a zip: both change together, two values
    run.seed=1,2,3                       seeds: the table adds medians and spread
    parallel.strategy=ddp,full_shard     any setting of a recipe, also those that change no result
    parallel.world=1,2,4                 the ranks of a cell: no setting, but an axis; overrides --world
"""

Assignment = dict[str, Any]
"""Dotted keys and the values of one cell."""


@dataclass(frozen=True)
class Axis:
    """One axis of a grid: one key, or several that change together, and the values they take."""

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    def assignments(self) -> list[Assignment]:
        """What each value of the axis sets."""
        return [dict(zip(self.keys, value, strict=True)) for value in self.values]


@dataclass(frozen=True)
class Cell:
    """One run of a study: what it sets, and the recipe that follows."""

    assignment: Assignment
    recipe: Recipe

    @cached_property
    def key(self) -> str:
        """Identifies the cell: the recipe's hash, with what the hash leaves out (strategy, ranks) where that is set."""
        other = {
            name: value for name, value in sorted(self.assignment.items()) if name.startswith((WORLD, *NON_SEMANTIC))
        }
        if not other:
            return self.recipe.config_hash
        return hashlib.sha256(json.dumps([self.recipe.config_hash, other]).encode()).hexdigest()[:12]

    @property
    def label(self) -> str:
        """The swept settings on one line, by the last part of their keys: `lr=0.001 kind=wsd`."""
        return label(self.assignment)

    @property
    def directory(self) -> str:
        """Its run directory, relative to the study's: readable, safe as a file name, unique."""
        words = re.sub(r"[^A-Za-z0-9.=+-]+", "-", self.label).strip("-")[:80]
        return f"runs/{words}-{self.key[:8]}"

    @property
    def overrides(self) -> list[str]:
        """The assignment as command-line overrides, without the number of ranks."""
        return [f"{key}={typed(value)}" for key, value in self.assignment.items() if key != WORLD]

    @property
    def world(self) -> int | None:
        """Its number of ranks where that is an axis."""
        return self.assignment.get(WORLD)


def label(assignment: Assignment) -> str:
    """Settings on one line, by the last part of their keys: `lr=0.001 kind=wsd`."""
    return " ".join(f"{k.rsplit('.', 1)[-1]}={f'{v:g}' if isinstance(v, float) else v}" for k, v in assignment.items())


def expand(base: Recipe, axes: Iterable[Axis]) -> list[Cell]:
    """All cells of the grid, the last axis changing fastest; each one's recipe is validated.

    Raises:
        UserError: two axes set one key, two cells are equal, or some recipes are invalid (all of them are named).
    """
    axes = list(axes)
    keys = [key for axis in axes for key in axis.keys]
    repeated = sorted({key for key in keys if keys.count(key) > 1})
    if repeated:
        raise UserError(f"{repeated[0]} is set by two axes of the grid")
    cells, problems = [], []
    for combination in itertools.product(*(axis.assignments() for axis in axes)):
        assignment = {key: value for part in combination for key, value in part.items()}
        try:
            cells.append(make_cell(base, assignment))
        except UserError as error:
            problems.append(f"{' '.join(f'{k}={v}' for k, v in assignment.items())}: {error}")
    if problems:
        raise UserError("\n".join(["some cells of the grid are invalid:", *problems]))
    identities = [cell.key for cell in cells]
    equal = [cell.label for cell in cells if identities.count(cell.key) > 1]
    if equal:
        raise UserError(f"cells of the grid are equal: {'; '.join(equal)}")
    return cells


def make_cell(base: Recipe, assignment: Assignment) -> Cell:
    """The cell that an assignment makes of the shared recipe; raises UserError where that is invalid."""
    for name in ("run.dir", "run.name"):
        if name in assignment:
            raise UserError(f"{name} cannot be an axis: a study names its runs' directories itself")
    recipe = base.with_overrides(**{name: value for name, value in assignment.items() if name != WORLD})
    if WORLD in assignment:
        world = assignment[WORLD]
        if not isinstance(world, int) or isinstance(world, bool) or world < 1:
            raise UserError(f"{WORLD} is a number of ranks, not {world!r}")
        recipe.batch(world)  # raises where the global batch is not divisible by the world size
    return Cell(assignment, recipe)


def parse_axis(text: str) -> Axis:
    """One `key=a,b,c`, `key=low:high:log:n` or `a+b=1+2,3+4`; raises UserError that lists the accepted forms."""
    left, equals, right = text.partition("=")
    keys = tuple(key.strip() for key in left.split("+"))
    if not equals or not all(keys) or not right.strip():
        raise UserError(f"{text!r} is not an axis; write KEY=A,B,C or KEY=LOW:HIGH:log:N or A+B=1+2,3+4")
    if len(keys) == 1:
        spread = _parse_range(keys[0], right)
        values = spread if spread is not None else [_parse_value(keys[0], part) for part in _split(right, ",")]
        return Axis(keys, tuple((value,) for value in values))
    rows = []
    for part in _split(right, ","):
        parts = _split(part, "+")
        if len(parts) != len(keys):
            raise UserError(f"{text!r}: {part!r} has {len(parts)} values for the {len(keys)} keys {left}")
        rows.append(tuple(_parse_value(key, value) for key, value in zip(keys, parts, strict=True)))
    return Axis(keys, tuple(rows))


def _parse_value(key: str, text: str) -> Any:
    if not text.strip():
        raise UserError(f"{key}: an empty value between two commas")
    return parse_override(f"{key}={text.strip()}")[1]


def _split(text: str, separator: str) -> list[str]:
    """Split outside brackets and quotes; the + of an exponent (1e+3) does not split."""
    parts, depth, quote, start = [], 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == separator and depth == 0:
            if separator == "+" and re.search(r"\d[eE]$", text[:i]) and text[i + 1 : i + 2].isdigit():
                continue
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _parse_range(key: str, text: str) -> list[float | int] | None:
    """The values of `low:high:log:n` or `low:high:lin:n`; None where the text is no range."""
    parts = text.split(":")
    if len(parts) != 4 or parts[2] not in ("log", "lin"):
        return None
    try:
        low, high, count = float(parts[0]), float(parts[1]), int(parts[3])
    except ValueError:
        raise UserError(f"{key}={text}: a range is LOW:HIGH:log:N or LOW:HIGH:lin:N, with numbers") from None
    if count < 2 or (parts[2] == "log" and (low <= 0 or high <= 0)):
        raise UserError(f"{key}={text}: a range has at least 2 values, and on a logarithmic axis both ends above 0")
    if parts[2] == "log":
        ratio = math.log(high / low) / (count - 1)
        values = [low * math.exp(ratio * i) for i in range(count)]
    else:
        values = [low + (high - low) * i / (count - 1) for i in range(count)]
    values[-1] = high  # without the rounding of the formula
    whole = all("." not in p and "e" not in p.lower() for p in parts[:2])
    return [round(v) for v in values] if whole else [float(f"{v:.6g}") for v in values]
