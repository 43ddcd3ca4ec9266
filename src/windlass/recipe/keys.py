"""The message about a key or a value that a recipe cannot have: the setting that was meant, the values that it takes.

A wrong key is looked up among the keys of other tools (`other_tools.toml`), then among the same names in other sections, then
among misspellings. Where nothing is sure the answer lists what there is.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping
from datetime import date, time
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
    "checkpoint.best": "loss, squad.f1, squad.exact_match, hellaswag.acc, hellaswag.acc_norm, hellaswag.acc_per_token, own:SUITE.MEASURE",
    "telemetry.tags": "a list of short names",
    "eval.suites": "a list of loss, hellaswag, squad and lm-eval:TASKS",
}
"""What a setting with a `pattern` may be, in words."""


def other_tools() -> dict[str, dict[str, tuple[str, str]]]:
    """For each tool its keys, each with our key (or `key=value`; empty where there is none) and a remark."""
    tools = tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))
    return {
        tool: {
            key: (answer, "") if isinstance(answer, str) else tuple(answer)
            for key, answer in keys.items()
        }
        for tool, keys in tools.items()
    }


def _answers(key: str) -> dict[str, str]:
    """Our keys (or `key=value`) for a key of other tools, each with a remark."""
    name = key.rpartition(".")[2]
    answers: dict[str, str] = {}
    for keys in other_tools().values():
        for other, (own, remark) in keys.items():
            if other in (key, name) or key == other.rpartition(".")[2]:
                answers.setdefault(own, remark)
    return answers


def meant(key: str, fields: Mapping[str, Any]) -> list[str]:
    """The settings that an unknown key may stand for."""
    return (
        [own.partition("=")[0] for own in _answers(key)]
        or _same_name(key, fields)
        or _misspelled(key, fields)
    )


def nearest(key: str, fields: Mapping[str, Any]) -> str:
    """What to write instead of an unknown key; where that is not sure, what its section has, or the sections."""
    if answers := _answers(key):
        remarks = {
            own: f" ({remark})" if own and remark else remark for own, remark in answers.items()
        }
        return " or ".join(
            f"write {own}{remark}" if own else remark for own, remark in remarks.items()
        )
    if likely := meant(key, fields):
        return f"did you mean {' or '.join(likely)}?"
    section = key.rpartition(".")[0] + "."
    inside = [k.removeprefix(section) for k in fields if k.startswith(section)] or [
        k for k in fields if "." in k
    ]
    return f"there are {', '.join(dict.fromkeys(k.partition('.')[0] for k in inside))}"


def _same_name(key: str, fields: Mapping[str, Any]) -> list[str]:
    """The settings that end like the key, by as many of its parts as any does: `lora.rank` finds `model.lora.rank`."""
    parts = key.split(".")
    endings = (".".join(parts[start:]) for start in range(len(parts)))
    return next(
        (same for end in endings if (same := [k for k in fields if f".{k}".endswith(f".{end}")])),
        [],
    )


def _misspelled(key: str, fields: Mapping[str, Any]) -> list[str]:
    """The setting whose section and name are both spelled nearly like the key's; a key without a section may have any."""
    section, _, name = key.rpartition(".")

    def likeness(candidate: str) -> float:
        own_section, _, own_name = candidate.rpartition(".")
        sections = difflib.SequenceMatcher(None, section, own_section).ratio() if section else 1.0
        return min(sections, difflib.SequenceMatcher(None, name, own_name).ratio())

    best = max(fields, key=likeness)
    return [best] if likeness(best) >= ALIKE else []


def problems_of(errors: list[Any], fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and messages of pydantic's errors, in the words of a recipe; the members of a union are one problem."""
    wanted: dict[str, list[str]] = {}
    given: dict[str, str] = {}
    problems: dict[str, str] = {}
    for error in errors:
        parts, value = [str(part) for part in error["loc"]], error["input"]
        if error["type"] == "extra_forbidden":
            key = ".".join(parts)
            for leaf in flatten({key: value}) or [
                key
            ]:  # of a table that is no section, all of its keys
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
    return [
        *problems.items(),
        *((key, f"{' or '.join(words)}{given[key]}") for key, words in wanted.items()),
    ]


def _wanted(error: Any, key: str, field: Any) -> str:
    """What a value should have been, by pydantic's kind of error."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "value_error":  # the words of our own check
        return str(context["error"])
    if kind == "literal_error":
        return f"it is {context['expected']}"
    if kind == "string_pattern_mismatch":
        return f"it takes {FORMS.get(key, context['pattern'])}"
    if bound := next(
        (f"{words} {context[name]}" for name, words in BOUNDS.items() if name in context), ""
    ):
        return f"it must be {bound}"
    if get_origin(field.annotation) is tuple:
        example = json.dumps(field.default, separators=(",", ":"))
        return f"it needs {('no', 'one', 'two')[len(field.default)]} numbers, as {key}={example}"
    if isinstance(value := error["input"], int | float | date | time) and str in (
        field.annotation,
        *get_args(field.annotation),
    ):
        quoted = json.dumps(str(value))
        return f"it takes text, in quotation marks: {quoted} in a file, {key}='{quoted}' in a shell"
    return f"it takes {values(field)}"


def choices(field: Any) -> list[str]:
    """The few values that a setting takes, where they are few."""
    if field.annotation is bool:
        return ["true", "false"]
    return (
        list(map(str, get_args(field.annotation)))
        if get_origin(field.annotation) is Literal
        else []
    )


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
    if annotation in plain:
        return plain[annotation]
    origin, members = get_origin(annotation), get_args(annotation)
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
