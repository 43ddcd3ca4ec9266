"""Messages for a key that Windlass does not have, or a value that a setting cannot have.

`nearest` looks a wrong key up among the keys of other tools (`other_tools.toml`), then among the
same names in other sections, then among misspellings. If none is near, it lists the settings of the
section.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from windlass.recipe.layers import flatten
from windlass.recipe.network import describe
from windlass.recipe.other_tools import answers_of, in_words
from windlass.recipe.units import DURATION

ALIKE = 0.75
"""Least `SequenceMatcher.ratio` of a misspelled name and the right one: `lrr` and `lr` have 0.8."""
BOUNDS = {"gt": "greater than", "ge": "at least", "lt": "less than", "le": "at most"}
NAME_FORM = "letters, digits and . _ + = - alone"
FORMS = {
    "preset": NAME_FORM,
    "run.name": NAME_FORM,
    "data.mix.name": "letters, digits, _ and - alone",
    "data.sha256": "64 hexadecimal digits",
    "data.tokenizer": "byte, char, gpt2, gpt2:DIR (with vocab.bpe and encoder.json), "
    "hf:NAME_OR_DIR, bpe (trained on the corpus) or auto (the model's own)",
    "checkpoint.best": "loss, loss.average_loss, squad.f1, squad.exact_match, hellaswag.acc, "
    "hellaswag.acc_norm, hellaswag.acc_per_token, own:SUITE.MEASURE",
    "checkpoint.resume": "latest, best or a step",
    "telemetry.tags": "a list of short names",
    "telemetry.profile": "STEP:COUNT or STEP:COUNT:all, as 100:3",
    "eval.suites": "a list of loss, hellaswag, squad and lm-eval:TASKS",
}
"""The values of a setting with a `pattern`, in words."""


def meant(key: str, fields: Mapping[str, Any]) -> list[str]:
    """The settings that an unknown key may mean; none if nothing is near."""
    if answers := answers_of(key, fields):
        return [own.partition("=")[0] for own in answers]
    parts = key.split(".")
    for start in range(len(parts)):  # `lora.rank` is the end of `model.lora.rank`
        ending = "." + ".".join(parts[start:])
        if same := [field for field in fields if f".{field}".endswith(ending)]:
            return same
    likely = max(fields, key=lambda field: _likeness(key, field))
    return [likely] if _likeness(key, likely) >= ALIKE else []


def _likeness(key: str, field: str) -> float:
    """How alike two keys are in their less similar half; a key may lack its section."""
    pairs = zip(key.rpartition(".")[::2], field.rpartition(".")[::2], strict=True)
    return min(difflib.SequenceMatcher(None, a, b).ratio() if a else 1.0 for a, b in pairs)


def nearest(key: str, fields: Mapping[str, Any]) -> str:
    """The answer to an unknown key: a setting to write instead, or the names in its section."""
    if answer := in_words(answers_of(key, fields)):
        return answer
    if likely := meant(key, fields):
        return f"did you mean {' or '.join(likely)}?"
    section = key.rpartition(".")[0] + "."
    inside = [field.removeprefix(section) for field in fields if field.startswith(section)]
    names = inside or [field for field in fields if "." in field]
    return f"there are {', '.join(dict.fromkeys(name.partition('.')[0] for name in names))}"


def rows_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of sections in a list, as `data.mix.weight`, each with its pydantic field."""
    rows: dict[str, Any] = {}
    for key, field in fields.items():
        members = get_args(field.annotation) if get_origin(field.annotation) is list else ()
        if members and isinstance(members[0], type) and issubclass(members[0], BaseModel):
            describe(members[0])
            own = members[0].model_fields.items()
            rows |= {f"{key}.{inner.alias or name}": inner for name, inner in own}
    return rows


def problems_of(errors: list[Any], fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and messages for pydantic's errors; the members of a union make one message."""
    problems: dict[str, str] = {}
    rows = rows_of(fields)
    for error in errors:
        if in_row := _problem_of_row(error, rows):
            problems.setdefault(*in_row)
            continue
        prefixes = list(accumulate(map(str, error["loc"]), lambda a, b: f"{a}.{b}"))
        whole, value = prefixes[-1], error["input"]
        # pydantic appends the member of a union or the index of a list to the key
        key = next((prefix for prefix in prefixes if prefix in fields), whole)
        if error["type"] == "extra_forbidden":
            for leaf in flatten({whole: value}) or [whole]:  # each key of an unknown table
                problems[leaf] = f"there is no such setting; {nearest(leaf, fields)}"
        elif key not in fields:
            inside = ", ".join(k for k in fields if k.startswith(f"{key}."))
            problems[key] = f"this is a section; its settings are {inside}"
        else:
            wanted, given = _wanted(error, key, fields[key]), json.dumps(value, default=str)
            problems.setdefault(key, f"{wanted}, not {given}")
    return list(problems.items())


def _problem_of_row(error: Any, rows: Mapping[str, Any]) -> tuple[str, str] | None:
    """The key and message of an error inside a section of a list; None for another error."""
    place = list(map(str, error["loc"]))
    at = next((i for i, part in enumerate(error["loc"]) if isinstance(part, int)), len(place))
    section, inside = ".".join(place[:at]), place[at + 1 : at + 2]
    names = [key.rpartition(".")[2] for key in rows if key.rpartition(".")[0] == section]
    if not names or not inside:
        return None
    key = ".".join([section, *inside])
    if error["type"] == "extra_forbidden":
        text = f"there is no such setting; there are {', '.join(names)}"
    elif error["type"] == "missing":
        text = "it is missing"
    else:
        text = f"{_wanted(error, key, rows[key])}, not {json.dumps(error['input'], default=str)}"
    return ".".join(place[: at + 2]), text


def _wanted(error: Any, key: str, field: Any) -> str:
    """The values that a setting takes, after an error of pydantic."""
    if error["type"] == "value_error":  # the words of our own check
        return str(error["ctx"]["error"])
    if error["type"] == "string_pattern_mismatch":
        return f"it takes {FORMS[key]}"
    if str in (field.annotation, *get_args(field.annotation)) and isinstance(
        error["input"], int | float
    ):
        quoted = json.dumps(str(error["input"]))
        return f"it takes text, in quotation marks: {quoted} in a file, {key}='{quoted}' in a shell"
    is_pair = get_origin(field.annotation) is tuple
    example = f" ({key}={json.dumps(field.default, separators=(',', ':'))})" if is_pair else ""
    return f"it takes {values(field)}{example}"


def choices(field: Any) -> list[str]:
    """The values of a setting that takes one of a few, else none."""
    if field.annotation is bool:
        return ["true", "false"]
    is_choice = get_origin(field.annotation) is Literal
    return list(map(str, get_args(field.annotation))) if is_choice else []


def values(field: Any) -> str:
    """The values that a setting takes, in words."""
    return _values(field.annotation, field.metadata)


def _values(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    plain = {bool: "true or false", str: "text", int: "a whole number", float: "a number"}
    origin, members = get_origin(annotation), get_args(annotation)
    if "Annotated" in str(type(annotation)):
        constraints = [
            c for one in annotation.__metadata__ for c in getattr(one, "metadata", [one])
        ]
        return _values(members[0], [*metadata, *constraints])
    if any("duration" in str(part).lower() for part in (annotation, *metadata)):
        words = DURATION
    elif annotation in plain:
        words = plain[annotation]
    elif origin is Literal:
        words = " or ".join(", ".join(f'"{one}"' for one in members).rsplit(", ", 1))
    elif origin is tuple:
        words = f"a list of {len(members)}, each {_values(members[0])}"
    elif origin is list and get_origin(members[0]) is tuple:
        words = "a list of pairs"
    elif origin is dict:
        words = "a table"
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        keys = [field.alias or name for name, field in annotation.model_fields.items()]
        words = f"a section of {', '.join(keys)}"
    elif annotation is type(None):
        words = "nothing"
    elif origin is list:
        words = f"a list of {_values(members[0]).removeprefix('a ')}"
        words = words.replace("of section of", "of sections of")
    else:
        words = " or ".join(map(_values, members))
    limits = [(part, name) for part in metadata for name in BOUNDS if hasattr(part, name)]
    bounds = [f"{BOUNDS[name]} {getattr(part, name)}" for part, name in limits]
    return f"{words}, {' and '.join(bounds)}" if bounds else words
