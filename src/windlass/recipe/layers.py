"""A recipe's settings before they are checked: presets, files and what they extend, and changes, as plain TOML values."""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from windlass.errors import UserError, marked

CONFIGS = (".yaml", ".yml", ".py")
"""Files in which other tools have their settings."""
SECTIONS = 10
"""Tables and keys at the top of a whole recipe, `preset` among them."""
Changes = str | Mapping[str, Any] | Iterable[str]
"""Settings to change: `{"optim.lr": 3e-4}`, nested or dotted, or text as on the command line (`["optim.lr=3e-4"]`)."""


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= (
            flatten(value, f"{prefix}{key}.")
            if isinstance(value, Mapping)
            else {prefix + key: value}
        )
    return flat


def presets(folder: str = "") -> dict[str, Path]:
    """The recipes that ship with the package, by name."""
    return {
        path.stem: path
        for path in sorted((Path(__file__).parents[1] / "presets" / folder).glob("*.toml"))
    }


def study_presets() -> dict[str, Path]:
    """The studies that ship with the package, by name."""
    return presets("studies")


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=value` as key and TOML value; a value that is no TOML is taken as the text it is."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"{text!r} is no override; write KEY=VALUE, for example optim.lr=3e-4")
    try:
        return key, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value


def typed(value: Any) -> str:
    """A setting's value as it is typed after the `=`, so that `parse_override` reads the same value."""
    is_plain = isinstance(value, str) and value == value.strip() and value.isprintable()
    return value if is_plain and parse_override(f"key={value}")[1] == value else _toml(value)


def _toml(value: Any) -> str:
    """A value as TOML on one line, which is JSON but for tables, infinity, NaN and one control character."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def plain(value: Any) -> Any:
    """A value of Python as TOML has it: paths as text, tuples and NumPy's arrays as lists, its scalars as numbers."""
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def dotted(changes: Changes) -> dict[str, Any]:
    """Changes of settings as dotted keys and plain values."""
    if not isinstance(changes, Mapping):
        return dict(map(parse_override, [changes] if isinstance(changes, str) else changes))
    return {key: plain(value) for key, value in flatten(changes).items()}


def _put(tree: dict[str, Any], dotted: str, value: Any) -> None:
    *path, last = dotted.split(".")
    for part in path:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            raise UserError(f"{dotted}: {part} is a setting, not a section")
    tree[last] = value


def merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put dotted settings into nested ones; another `model.kind` first takes out what was set for the old one's network."""
    model, kind = tree.get("model"), changes.get("model.kind")
    if isinstance(model, dict) and kind and kind != model.get("kind", "gpt"):
        for key in set(model) - {"context"}:
            del model[key]
        if isinstance(optim := tree.get("optim"), dict):
            optim.pop("lr", None)
    for key, value in changes.items():
        _put(tree, key, value)


def _find(recipe: str | Path) -> Path:
    """The file behind a preset's name, a path or a run directory; raises UserError with what was meant."""
    shipped, path, name = presets(), Path(recipe), str(recipe)
    for file in (path / "recipe.toml", path if path.suffix == ".toml" else None, shipped.get(name)):
        if file and file.is_file():
            return file
    if path.is_dir():
        inside = [str(file.parent) for file in sorted(path.glob("*/recipe.toml"))]
        instead = "a run directory, a .toml file or a preset's name"
        if (path / "config.json").is_file():
            instead = f"a recipe, and the model in it: model.kind=hf model.name={name}"
        raise UserError(
            f"{name} is a directory without a recipe (recipe.toml); give {' or '.join(inside) or instead}"
        )
    if path.is_file():
        if path.suffix in CONFIGS:
            raise UserError(f"{name}: a recipe is a TOML file (`windlass init` writes one)")
        train = marked(f'Recipe.load("quickstart", {{"data.source": "{name}"}})')
        raise UserError(f"{name}: it is no recipe; to train on it: {train}")
    if "=" in name:
        raise UserError(f"{name} is a setting; name a recipe before it, as quickstart {name}")
    if name.endswith(".toml") or "/" in name:
        raise UserError(f"there is no recipe or run {name}; the presets are {', '.join(shipped)}")
    if name in study_presets():
        study = tomllib.loads(study_presets()[name].read_text(encoding="utf-8"))
        instead = f"give it to {study['verb']}, or take its recipe, {study['recipe']}"
        raise UserError(f"{name} is a preset of studies, not of recipes: {instead}")
    near = difflib.get_close_matches(name, shipped, n=1)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise UserError(
        f"there is no preset {name}{hint}; there are {', '.join(shipped)}, or give a path to a .toml"
    )


def layers(recipe: str | Path, overrides: Changes = ()) -> list[tuple[str, dict[str, Any]]]:
    """Where a recipe's settings come from, in the order in which they apply: name and dotted settings of each place."""
    path = _find(recipe)
    shipped, preset = (
        presets().values(),
        path.stem if path.stem != "recipe" else path.resolve().parent.name,
    )
    files = [(f"preset {p.stem}" if p in shipped else str(p), own) for p, own in _files(path)]
    places = [("file's name", {"preset": preset}), *files, ("command line", dotted(overrides))]
    for i, (name, own) in enumerate(places):
        sources = {
            repr(later["data.source"]) for _, later in places[i + 1 :] if "data.source" in later
        }
        if name.startswith("preset ") and sources - {repr(own.get("data.source"))}:
            own.pop("eval.prompt", None)  # a preset's prompt is for the preset's texts
    return places


def check_preset(own: dict[str, Any], where: str) -> None:
    """Raise UserError where dotted settings name a shipped preset by `preset`, which takes nothing from it, and are no whole
    recipe: there `extends` is meant."""
    name = own.get("preset")
    if name in presets() and len({key.partition(".")[0] for key in own}) < SECTIONS:
        raise UserError(
            f'{where}: preset is only a name; to start from that preset write extends = "{name}"'
        )


def _files(path: Path, seen: tuple[Path, ...] = ()) -> list[tuple[Path, dict[str, Any]]]:
    """A recipe's file after the files that it extends, each with its own settings under dotted keys."""
    if path.resolve() in seen:
        raise UserError(f"{path}: extends itself by way of {', '.join(str(p) for p in seen)}")
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path}: a byte in line {line} is not UTF-8; save the file as UTF-8"
        ) from None
    except (OSError, tomllib.TOMLDecodeError) as error:
        why = (
            error.strerror if isinstance(error, OSError) else f"{error}; texts need quotation marks"
        )
        raise UserError(f"{path} cannot be read as TOML: {why}") from None
    base = tree.pop("extends", None)
    own = [(path, flatten(tree))]
    if base is None:
        check_preset(own[0][1], str(path))
        return own
    beside = path.parent / str(base)
    return _files(beside if beside.is_file() else _find(str(base)), (*seen, path.resolve())) + own
