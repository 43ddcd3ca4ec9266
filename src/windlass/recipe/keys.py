"""Messages for a key that Windlass does not have, or a value that a setting cannot have.

`nearest` looks a wrong key up among the keys of other tools (`other_tools.toml`), then among the
same names in other sections, then among misspellings. If none is near, it lists the settings of the
section.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from datetime import date, time
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from windlass.recipe.layers import flatten
from windlass.recipe.units import DURATION

ALIKE = 0.75
"""Least `SequenceMatcher.ratio` of a misspelled name and the right one: `lrr` and `lr` have 0.8."""
BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
NAME_FORM = "letters, digits and . _ + = - alone"
FORMS = {
    "preset": NAME_FORM,
    "run.name": NAME_FORM,
    "data.sha256": "64 hexadecimal digits",
    "checkpoint.best": "loss, squad.f1, squad.exact_match, hellaswag.acc, hellaswag.acc_norm, "
    "hellaswag.acc_per_token, own:SUITE.MEASURE",
    "telemetry.tags": "a list of short names",
    "eval.suites": "a list of loss, hellaswag, squad and lm-eval:TASKS",
}
"""The values of a setting with a `pattern`, in words."""


@cache
def other_tools() -> dict[str, dict[str, tuple[str, str]]]:
    """The keys of each other tool, each with our key (or `key=value`, or empty) and a remark."""
    text = Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8")
    return {
        tool: {
            key: (answer, "") if isinstance(answer, str) else tuple(answer)
            for key, answer in keys.items()
        }
        for tool, keys in tomllib.loads(text).items()
    }


def _answers(key: str) -> dict[str, str]:
    """Our keys (or `key=value`) for a key of other tools, each with a remark."""
    name, answers = key.rpartition(".")[2], dict[str, str]()
    for keys in other_tools().values():
        for other, (own, remark) in keys.items():
            if other in (key, name) or key == other.rpartition(".")[2]:
                answers.setdefault(own, remark)
    return answers


def meant(key: str, fields: Mapping[str, Any]) -> list[str]:
    """The settings that an unknown key may stand for: another tool's key, the same name, a
    misspelling."""
    if answers := _answers(key):
        return [own.partition("=")[0] for own in answers]
    parts = key.split(".")
    for start in range(len(parts)):  # `lora.rank` is the end of `model.lora.rank`
        ending = "." + ".".join(parts[start:])
        if same := [field for field in fields if f".{field}".endswith(ending)]:
            return same
    likely = max(fields, key=lambda field: _likeness(key, field))
    return [likely] if _likeness(key, likely) >= ALIKE else []


def _likeness(key: str, field: str) -> float:
    """How alike two keys are in their less similar half, section or name; a key may lack its
    section."""
    pairs = zip(key.rpartition(".")[::2], field.rpartition(".")[::2], strict=True)
    return min(difflib.SequenceMatcher(None, a, b).ratio() if a else 1.0 for a, b in pairs)


def nearest(key: str, fields: Mapping[str, Any]) -> str:
    """The answer to an unknown key: what to write instead, or the names that its section has."""
    if answers := _answers(key):
        notes = {own: f" ({remark})" * bool(remark) for own, remark in answers.items()}
        return " or ".join(f"write {own}{notes[own]}" if own else answers[own] for own in answers)
    if likely := meant(key, fields):
        return f"did you mean {' or '.join(likely)}?"
    section = key.rpartition(".")[0] + "."
    inside = [field.removeprefix(section) for field in fields if field.startswith(section)]
    names = inside or [field for field in fields if "." in field]
    return f"there are {', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}"


def problems_of(errors: list[Any], fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and messages for pydantic's errors; the members of a union make one message."""
    wanted: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    problems: dict[str, str] = {}
    for error in errors:
        parts, value = [str(part) for part in error["loc"]], error["input"]
        if error["type"] == "extra_forbidden":
            key = ".".join(parts)
            for leaf in flatten({key: value}) or [key]:  # each key of an unknown table
                problems[leaf] = f"there is no such setting; {nearest(leaf, fields)}"
            continue
        # pydantic appends the member of a union or the index of a list to the key
        prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
        key = next((prefix for prefix in prefixes if prefix in fields), prefixes[0])
        if key not in fields:
            inside = ", ".join(k for k in fields if k.startswith(f"{key}."))
            problems[key] = f"this is a section; its settings are {inside}"
            continue
        shown = str(value) if isinstance(value, date | time) else json.dumps(value, default=str)
        given.setdefault(key, "" if error["type"] == "missing" else f", not {shown}")
        words = _wanted(error, key, fields[key])
        if words not in wanted.setdefault(key, []):
            wanted[key].append(words)
    wrong = ((key, f"{' or '.join(words)}{given[key]}") for key, words in wanted.items())
    return [*problems.items(), *wrong]


def _wanted(error: Any, key: str, field: Any) -> str:
    """The values that a setting takes, by pydantic's kind of error."""
    kind, context, value = error["type"], error.get("ctx", {}), error["input"]
    if kind == "value_error":  # the words of our own check
        return str(context["error"])
    if kind == "literal_error":
        return f"it is {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"it takes {FORMS.get(key, context['pattern'])}"
    for name, words in BOUNDS.items():
        if name in context:
            return f"it must be {words} {context[name]}"
    if get_origin(field.annotation) is tuple:
        example = json.dumps(field.default, separators=(",", ":"))
        return f"it needs {('no', 'one', 'two')[len(field.default)]} numbers, as {key}={example}"
    takes_text = str in (field.annotation, *get_args(field.annotation))
    if takes_text and isinstance(value, int | float | date | time):
        quoted = json.dumps(str(value))
        return f"it takes text, in quotation marks: {quoted} in a file, {key}='{quoted}' in a shell"
    return f"it takes {values(field)}"


def choices(field: Any) -> list[str]:
    """The values of a setting that takes one of a few, else none."""
    if field.annotation is bool:
        return ["true", "false"]
    is_choice = get_origin(field.annotation) is Literal
    return list(map(str, get_args(field.annotation))) if is_choice else []


def values(field: Any) -> str:
    """The values that a setting takes, in words."""
    words = _values(field.annotation)
    if any("duration" in str(part).lower() for part in (field.annotation, *field.metadata)):
        words = DURATION
    limits = [(part, name) for part in field.metadata for name in BOUNDS if hasattr(part, name)]
    bounds = [f"{BOUNDS[name]} {getattr(part, name)}" for part, name in limits]
    return f"{words}, {' and '.join(bounds)}" if bounds else words


def _values(annotation: Any) -> str:
    plain = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    origin, members = get_origin(annotation), get_args(annotation)
    if annotation in plain:
        return plain[annotation]
    if origin is Literal:
        return ", ".join(f'"{member}"' for member in members)
    if "Annotated" in str(type(annotation)):
        return _values(members[0])
    if origin is tuple:
        return f"a list of {len(members)} numbers"
    if origin is dict:
        return "a table"
    if origin is list:
        return f"a list of {_values(members[0]).removeprefix('a ')}"
    return " or ".join(map(_values, members))
