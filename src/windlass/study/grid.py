"""From what is typed (GRID_HELP has the forms) to the cells of a grid: pure, no disk, no torch.

Axes are crossed; the values of a zip are not.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from windlass.errors import UserError
from windlass.recipe import NON_SEMANTIC, Recipe, parse_override, typed

WORLD = "parallel.world"
"""An axis that is no setting: how many ranks train a cell."""
TAKEN = ("run.dir", "run.name")
"""Settings that the study itself makes."""

Assignment = dict[str, Any]
"""Dotted keys and the values of one cell."""


@dataclass(frozen=True)
class Axis:
    """One axis of a grid: one key, or several that change together, and the values they take."""

    keys: tuple[str, ...]
    values: tuple[tuple[Any, ...], ...]

    @property
    def name(self) -> str:
        """The keys as they were typed."""
        return "+".join(self.keys)

    def assignments(self) -> list[Assignment]:
        """What each value of the axis sets."""
        return [dict(zip(self.keys, value, strict=True)) for value in self.values]


@dataclass(frozen=True)
class Cell:
    """One run of a study: what it sets, and the recipe that follows."""

    assignment: Assignment
    recipe: Recipe
    key: str = ""
    """Tells the cell from all others: left out, the recipe's digest, and what is set beside it (strategy, ranks, ...)."""
    place: str = ""
    """Its run directory, from the study's; left out, `runs/<slug>`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.key or _key(self.assignment, self.recipe))
        object.__setattr__(self, "place", self.place or f"runs/{slug(self)}")

    @property
    def label(self) -> str:
        """The swept settings on one line, by the last part of their keys: `lr=0.001 kind=wsd`."""
        return " ".join(f"{key.rsplit('.', 1)[-1]}={_short(value)}" for key, value in self.assignment.items())

    @property
    def overrides(self) -> list[str]:
        """The assignment as it would be typed, but for the number of ranks."""
        return [f"{key}={typed(value)}" for key, value in self.assignment.items() if key != WORLD]

    @property
    def world(self) -> int | None:
        """Its number of ranks where that is an axis."""
        return self.assignment.get(WORLD)


def cell_of(base: Recipe, assignment: Assignment, key: str = "", place: str = "") -> Cell:
    """The cell that an assignment makes of the shared recipe; raises UserError where that cannot work."""
    settings = {name: value for name, value in assignment.items() if name != WORLD}
    taken = [name for name in TAKEN if name in settings]
    if taken:
        raise UserError(f"{taken[0]} is no axis: a study names its runs' directories itself")
    recipe = base.with_overrides(**settings)
    if WORLD in assignment:
        world = assignment[WORLD]
        if not isinstance(world, int) or isinstance(world, bool) or world < 1:
            raise UserError(f"{WORLD} is a number of ranks, not {world!r}")
        recipe.batch(world)
    return Cell(assignment, recipe, key, place)


def slug(cell: Cell) -> str:
    """The name of a cell's run directory: readable, safe as a file name, and addressed by the content."""
    words = re.sub(r"[^A-Za-z0-9.=+-]+", "-", cell.label).strip("-")[:80]
    return f"{words}-{cell.key[:8]}"


def _key(assignment: Assignment, recipe: Recipe) -> str:
    """The recipe's digest; with what the digest leaves out, where the cell sets any of that."""
    beside = {name: value for name, value in sorted(assignment.items()) if name.startswith((WORLD, *NON_SEMANTIC))}
    if not beside:
        return recipe.config_hash
    return hashlib.sha256(json.dumps([recipe.config_hash, beside]).encode()).hexdigest()[:12]


def parse_axis(text: str) -> Axis:
    """One `key=a,b,c`, `key=low:high:log:n` or `a+b=1+2,3+4`; raises UserError that says what is accepted."""
    left, equals, right = text.partition("=")
    keys = tuple(key.strip() for key in left.split("+"))
    if not equals or not all(keys) or not right.strip():
        raise UserError(f"{text!r} is no axis of a grid; write KEY=A,B,C or KEY=LOW:HIGH:log:N or A+B=1+2,3+4")
    if len(keys) == 1:
        spread = _spread(keys[0], right)
        typed = spread if spread is not None else [_value(keys[0], part) for part in _split(right, ",")]
        return Axis(keys, tuple((value,) for value in typed))
    rows = []
    for part in _split(right, ","):
        parts = _split(part, "+")
        if len(parts) != len(keys):
            raise UserError(f"{text!r}: {part!r} has {len(parts)} values for the {len(keys)} keys {left}")
        rows.append(tuple(_value(key, value) for key, value in zip(keys, parts, strict=True)))
    return Axis(keys, tuple(rows))


def _value(key: str, text: str) -> Any:
    if not text.strip():
        raise UserError(f"{key}: an empty value between two commas")
    return parse_override(f"{key}={text.strip()}")[1]


def _split(text: str, separator: str) -> list[str]:
    """Split outside brackets and quotes; a + that belongs to an exponent (1e+3) does not split."""
    parts, depth, quote, start = [], 0, "", 0
    for place, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[{(":
            depth += 1
        elif char in "]})":
            depth -= 1
        elif char == separator and depth == 0 and not (separator == "+" and _exponent(text, place)):
            parts.append(text[start:place])
            start = place + 1
    return [*parts, text[start:]]


def _exponent(text: str, place: int) -> bool:
    return (
        place >= 2 and text[place - 1] in "eE" and text[place - 2].isdigit() and text[place + 1 : place + 2].isdigit()
    )


def _spread(key: str, text: str) -> list[float | int] | None:
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
    values[-1] = high
    whole = all("." not in p and "e" not in p.lower() for p in parts[:2])
    return [round(v) for v in values] if whole else [float(f"{v:.6g}") for v in values]


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def expand(base: Recipe, axes: Iterable[Axis]) -> list[Cell]:
    """All cells of the grid, the last axis changing fastest; each one's recipe is checked.

    Raises UserError naming every cell whose recipe cannot work, and where two axes set one key or two cells are equal.
    """
    axes = list(axes)
    keys = [key for axis in axes for key in axis.keys]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise UserError(f"{twice[0]} is set by two axes of the grid")
    cells, problems = [], []
    for combination in itertools.product(*(axis.assignments() for axis in axes)):
        assignment = {key: value for part in combination for key, value in part.items()}
        try:
            cells.append(cell_of(base, assignment))
        except UserError as error:
            problems.append(f"{' '.join(f'{k}={v}' for k, v in assignment.items())}: {error}")
    if problems:
        raise UserError("\n".join(["some cells of the grid cannot work:", *problems]))
    found = [cell.key for cell in cells]
    same = [cell.label for cell in cells if found.count(cell.key) > 1]
    if same:
        raise UserError(f"cells of the grid train the same thing: {'; '.join(same)}")
    return cells
