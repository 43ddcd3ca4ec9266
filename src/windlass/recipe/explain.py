"""The explanation of a setting; and a first recipe to edit."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType

from windlass.errors import UserError
from windlass.recipe.keys import nearest, rows_of, values
from windlass.recipe.layers import flatten, parse_override, typed
from windlass.recipe.load import Recipe, settings


def explain(key: str, recipe: str | Path = "", overrides: Iterable[str] = ()) -> str:
    """Describe a setting, with a recipe's value, or each setting of a section in a line. UserError
    suggests a valid key for an unknown one."""
    fields = settings()
    loaded = Recipe.load(recipe, overrides) if recipe else Recipe()
    dumped = loaded.model_dump(mode="json", by_alias=True)
    flat = {k: typed(value) for k, value in flatten(dumped).items()}
    tables = [k for k in fields if k not in flat]
    flat |= {k: typed(attrgetter(k)(loaded)) for k in tables}
    if inside := [k for k in fields if k.startswith(f"{key}.")]:
        width = min(max(len(f"{k} = {flat[k]}") for k in inside), 48)
        lines = []
        for k in inside:  # with the first sentence, up to a semicolon
            text = " ".join(fields[k].description.split()).partition(". ")[0].partition("; ")[0]
            lines.append(f"  {f'{k} = {flat[k]}':<{width}}  {text.rstrip('.')}")
        return "\n".join([f"{key}: {type(attrgetter(key)(loaded)).__doc__}", *lines])
    rows = {k: row for k, row in rows_of(fields).items() if f"{k}.".startswith(f"{key}.")}
    if key in rows:
        description = " ".join(rows[key].description.split())
        default = "" if rows[key].is_required() else f"\ndefault   {typed(rows[key].default)}"
        return f"{key}\n{description}\n\nvalues    {values(rows[key])}{default}"
    if key not in fields:
        raise UserError(f"{key} is not a setting; {nearest(key, fields)}")
    shown = [f"values    {values(fields[key])}", f"default   {typed(fields[key].default)}"]
    description = " ".join(fields[key].description.split())
    keys = [f"  {k}: {' '.join(row.description.split())}" for k, row in rows.items()]
    return "\n".join([f"{key} = {flat[key]}", description, "", *shown, *keys])


def sources_of(data: str) -> list[str]:
    """The sources that `--data` names: one, or several as a list in TOML or JSON."""
    value = parse_override(f"data.source={data}")[1]
    if isinstance(value, list):
        return [str(source) for source in value]
    return [data] if data else []


def write_first_recipe(
    file: Path, data: str = "", model: str = "", form: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Write a short commented recipe for a small GPT or for fine-tuning `model`.

    `form`: settings of `data` that fit the source. UserError if the file exists or cannot be
    written.
    """
    if file.suffix != ".toml":
        raise UserError(f"{file}: a recipe's name ends in .toml, as {file.with_suffix('.toml')}")
    template = Path(__file__).with_name("first_finetuning.toml" if model else "first_recipe.toml")
    text = template.read_text(encoding="utf-8").replace("THIS_FILE", shlex.quote(str(file)))
    sources = sources_of(data)
    given = {"name": model, "source": sources[0] if len(sources) == 1 else sources, **form}
    changes = {key: value for key, value in given.items() if value}
    if data and data != "stdlib":
        changes["prompt"] = ""  # the template's prompt is for Python's source code
    for key, value in changes.items():
        setting = f"{key} = {json.dumps(value, ensure_ascii=False)}"
        if line := re.search(rf"^{key} = [^#]*(?=#)", text, flags=re.M):
            text = text.replace(line[0], setting.ljust(len(line[0]) - 1) + " ", 1)
        elif key in form and value != "text":
            source = re.findall(r"^source = .*$", text, flags=re.M)[0]
            text = text.replace(source, f"{source}\n{setting:<27} # as in your data", 1)
    try:
        with file.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise UserError(f"{file} exists; give another name") from None
    except OSError as error:
        raise UserError(f"{file} cannot be written ({error.strerror}); give another name") from None
