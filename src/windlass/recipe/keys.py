"""Messages for a key that Windlass does not have, or a value that a setting cannot have. `nearest`
tries the keys of other tools (`other_tools.toml`), the name in other sections, then misspellings.
"""

from __future__ import annotations

import difflib
import json
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, Field, TypeAdapter

from windlass.recipe.layers import flatten

ALIKE = 0.75  # least `SequenceMatcher.ratio` of two names; `lrr` and `lr` have 0.8
# pydantic's errors that say little without the setting's description
UNCLEAR = ("string_pattern_mismatch", "tuple_type", "missing", "dict_type")
# limits of a number in a JSON schema
BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}


@cache
def other_tools() -> dict[str, dict[str, tuple[str, str]]]:
    """The keys of each other tool, each with our key (or `key=value`, or empty) and a remark."""
    tools = tomllib.loads(Path(__file__).with_name("other_tools.toml").read_text(encoding="utf-8"))
    for keys in tools.values():
        keys |= {key: (ours, "") for key, ours in keys.items() if isinstance(ours, str)}
    return tools


def nearest(key: str, fields: Mapping[str, Any]) -> str:
    """The answer to an unknown key: a setting to write instead, or the names in its section."""
    for name in (key, key.rpartition(".")[2]):  # also without its section
        answers: dict[str, str] = {}
        for keys in other_tools().values():
            if name in keys:
                answers.setdefault(*keys[name])
        words = []
        for ours, remark in answers.items():
            note = f" ({remark})" if remark else ""
            words.append(f"write {ours}{note}" if ours else remark)
        if words:
            return " or ".join(words)
    parts = key.split(".")
    for start in range(len(parts)):  # `lora.rank` is the end of `model.lora.rank`
        ending = "." + ".".join(parts[start:])
        if same := [field for field in fields if f".{field}".endswith(ending)]:
            return f"did you mean {' or '.join(same)}?"
    alike = dict[str, float]()
    for field in fields:  # by the less similar half; a key may lack its section
        pairs = zip(key.rpartition(".")[::2], field.rpartition(".")[::2], strict=True)
        ratios = [difflib.SequenceMatcher(None, a, b).ratio() if a else 1.0 for a, b in pairs]
        alike[field] = min(ratios)
    likely = max(alike, key=lambda field: alike[field])
    if alike[likely] >= ALIKE:
        return f"did you mean {likely}?"
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
            inside = members[0].model_fields.items()
            rows |= {f"{key}.{inner.alias or name}": inner for name, inner in inside}
    return rows


def problems_of(errors: list[Any], fields: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Keys and messages for pydantic's errors; the members of a union make one message."""
    problems: dict[str, str] = {}
    known = {**fields, **rows_of(fields)}

    def without_index(key: str) -> str:  # `data.mix.0.weight` is `data.mix.weight`
        return re.sub(r"\.\d+(?=\.)", "", key)

    for error in errors:
        prefixes = list(accumulate(map(str, error["loc"]), "{}.{}".format))
        whole = prefixes[-1]
        value = error["input"]
        # pydantic appends the member of a union or the index of a list to the key
        key = next((k for k in reversed(prefixes) if without_index(k) in known), "")
        if error["type"] == "extra_forbidden":
            for leaf in flatten({whole: value}) or [whole]:  # each key of an unknown table
                name = without_index(leaf)
                hint = nearest(name, fields if name == leaf else known)
                problems[leaf] = f"it is not a setting; {hint}"
        elif not key:
            inside = ", ".join(k for k in fields if k.startswith(f"{whole}."))
            problems[whole] = f"this is a section; its settings are {inside}"
        elif error["type"] in UNCLEAR and (error["type"], whole) != ("missing", key):
            description = " ".join(known[without_index(key)].description.split())
            form = error.get("ctx", {}).get("pattern") or values(known[without_index(key)])
            problems[key] = f"{json.dumps(value)} does not match {form}: {description}"
        else:
            is_ours = error["type"] == "value_error"
            text = str(error["ctx"]["error"]) if is_ours else error["msg"]
            given = f", not {json.dumps(value, default=str)}"
            earlier = problems.get(key, "").removesuffix(given)
            text = "; ".join(filter(None, [earlier, text]))
            problems[key] = text if text.endswith("?") else text + given  # a question has a name
    return list(problems.items())


def values(field: Any) -> str:
    annotation = Annotated[field.annotation, Field(), *field.metadata]
    duration = (field.json_schema_extra or {}).get("description")
    return str(duration or _values(TypeAdapter(annotation).json_schema()))


def _values(schema: Mapping[str, Any]) -> str:
    if members := schema.get("anyOf"):
        return " or ".join(map(_values, members))
    if members := schema.get("prefixItems"):
        return f"list of {' and '.join(map(_values, members))}"
    if choices := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        return ", ".join(map(json.dumps, choices))
    kind = str(schema.get("type") or schema["$ref"].rpartition("/")[2])
    if "items" in schema:
        kind = f"list of {_values(schema['items'])}"
    return " ".join([kind, *(f"{sign} {schema[k]}" for k, sign in BOUNDS.items() if k in schema)])
