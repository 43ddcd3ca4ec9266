"""A recipe's settings before validation, as TOML values: presets, files and changes."""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from datetime import date, time
from itertools import takewhile
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from windlass.errors import UserError, did_you_mean
from windlass.fileio import read_json

# in a run: the recipe to read and edit, and the recipe as Windlass last recorded it
RECIPE, LINEAGE = "recipe.toml", "lineage.json"
RUN_FILES = (LINEAGE, "metrics.jsonl")  # a directory with a recipe and one of these is a run
SECTIONS = 10  # tables and keys at the top of a whole recipe, `preset` among them
Changes = str | Mapping[str, Any] | Iterable[str]
"""Settings to change: `{"optim.lr": 3e-4}`, nested or dotted, or text as on the command line
(`["optim.lr=3e-4"]`)."""

PATHS = re.compile(  # settings; `run.dir` always starts from the working directory
    r"data\.(source|eval_source|mix|dir|tokenizer|chat_template)"
    r"|data\.mix\.[^.]+\.(source|eval_source)"
    r"|model\.(name|init_from)|eval\.(hellaswag_file|squad_file|lm_eval_tasks)"
    r"|checkpoint\.base"
)
# values that are not relative paths
WORDS = re.compile(r"|stdlib|squad|auto|byte|char|bpe|gpt2|~.*|(shards:)?\w+://.*", re.DOTALL)
PREFIX = re.compile("(hf|squad|shards|gpt2):")


def home_of(base: str) -> Path | None:
    """The directory that the relative paths of a recipe start from; None: the working directory,
    also if the base does not exist here."""
    home = Path(base).expanduser()
    return home if base and home.is_dir() and home.absolute() != Path.cwd() else None


def located(key: str, value: Any, home: Path) -> Any:
    """A setting's value with its relative paths as absolute ones from `home`; `hf:NAME` and
    `model.name` are names on the Hub unless such a directory exists."""
    if not PATHS.fullmatch(key):
        return value
    if isinstance(value, list):
        return [located(key, one, home) for one in value]
    if isinstance(value, Mapping):  # a source of a mixture
        return {name: located(f"data.mix.0.{name}", one, home) for name, one in value.items()}
    if isinstance(value, BaseModel):
        return value.model_copy(update=located(key, dict(value), home))
    if not isinstance(value, str) or WORDS.fullmatch(value):
        return value
    prefix = match[0] if (match := PREFIX.match(value)) else ""
    path = home / value.removeprefix(prefix)
    may_be_name = prefix == "hf:" or key == "model.name"
    return value if may_be_name and not path.exists() else f"{prefix}{path}"


def from_here(changes: Mapping[str, Any], base: str) -> dict[str, Any]:
    """Dotted settings, typed in the working directory, for a recipe with another `run.base`."""
    if home_of(base) is None or "run.base" in changes:
        return dict(changes)
    return {key: located(key, value, Path.cwd()) for key, value in changes.items()}


def flatten(
    tree: Mapping[str, Any], prefix: str = "", *, keep_empty: bool = False
) -> dict[str, Any]:
    """A nested mapping as dotted keys, without empty mappings unless `keep_empty`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        is_inner = isinstance(value, Mapping) and not (keep_empty and not value)
        inner = flatten(value, f"{prefix}{key}.", keep_empty=keep_empty) if is_inner else {}
        flat |= inner if is_inner else {prefix + key: value}
    return flat


def presets(folder: str = "") -> dict[str, Path]:
    directory = Path(__file__).parents[1] / "presets" / folder
    return {path.stem: path for path in sorted(directory.glob("*.toml"))}


def study_presets() -> dict[str, Path]:
    return presets("studies")


def first_sentence(preset: Path) -> str:
    """The first sentence of the comment at the top of a preset."""
    lines = preset.read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    sentence = " ".join(line.lstrip("# ") for line in comment).partition(". ")[0]
    return f"{sentence.rstrip('.')}."


def parse_override(text: str) -> tuple[str, Any]:
    """`a.b=value` as key and TOML value; a date is text, and so is a value that is not TOML."""
    key, equals, value = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise UserError(f"{text!r} is not an override; write KEY=VALUE, for example optim.lr=3e-4")
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return key, value
    return key, value if isinstance(parsed, date | time) else parsed


def typed(value: Any) -> str:
    """A setting's value as a user types it after the `=`; `parse_override` reads the same value."""
    is_plain = isinstance(value, str) and value == value.strip() and value.isprintable()
    return value if is_plain and parse_override(f"key={value}")[1] == value else _toml(value)


def _toml(value: Any) -> str:
    """A value as TOML on one line, like JSON except for tables, NaN and a control character."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(one) for key, one in value.items()}
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


def dotted(changes: Changes) -> dict[str, Any]:
    if not isinstance(changes, Mapping):
        return dict(map(parse_override, [changes] if isinstance(changes, str) else changes))
    return {key: plain(value) for key, value in flatten(changes, keep_empty=True).items()}


def merge(tree: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Put dotted settings into nested ones.

    Another `model.kind` first removes the settings of the old one's network and its learning rate.
    `data.mix.NAME.KEY` is a key of the section with that name.
    """
    model = tree.get("model")
    kind = changes.get("model.kind")
    if isinstance(model, dict) and kind and kind != model.get("kind", "gpt"):
        for key in set(model) - {"context"}:
            del model[key]
        if isinstance(optim := tree.get("optim"), dict):
            optim.pop("lr", None)
    for key, value in changes.items():
        *path, last = key.split(".")
        inner = tree
        for part in path:
            value_of_part = inner.setdefault(part, {}) if isinstance(inner, dict) else None
            if isinstance(value_of_part, list):  # sections that other layers have too
                inner[part] = value_of_part = copy.deepcopy(value_of_part)
            if isinstance(inner, list):  # the section with this name, or this number (from 0)
                tables = [(i, one) for i, one in enumerate(inner) if isinstance(one, dict)]
                named = {str(one.get("name", i)): one for i, one in tables}
                numbered = {str(i): one for i, one in tables}
                value_of_part = (numbered | named).get(part)
                if value_of_part is None:
                    names = ", ".join(named) or "none"
                    raise UserError(f"{key}: {part} is missing; there are: {names}")
            inner = value_of_part
            if not isinstance(inner, dict | list):
                raise UserError(f"{key}: {part} is a setting, not a section")
        if isinstance(inner, list):
            raise UserError(f"{key}: write a key of it, as {key}.weight, or the whole list")
        inner[last] = value


def _find(recipe: str | Path) -> Path:
    """The file of a preset, a path or a run directory; UserError suggests a valid one."""
    shipped = presets()
    path = Path(recipe)
    name = str(recipe)
    for file in (path / RECIPE, path if path.suffix == ".toml" else None, shipped.get(name)):
        if file and (file.is_file() or recorded(file)):
            return file
    if path.is_dir():
        advice = "give a run directory, a .toml file or a preset's name"
        if (path / "config.json").is_file():
            advice = f"to fine-tune it write model.kind=hf model.name={name} after a preset's name"
        raise UserError(f"{name} is a directory without a recipe (recipe.toml); {advice}")
    if path.is_file():
        advice = f"to train on it: windlass train quickstart {shlex.quote(f'data.source={name}')}"
        raise UserError(
            f"{name}: it is not a recipe (`windlass init` writes one in TOML); {advice}"
        )
    if "=" in name:
        raise UserError(f"{name} is a setting; name a recipe before it, as quickstart {name}")
    if name.endswith(".toml") or "/" in name:
        listed = ", ".join(shipped)
        raise UserError(f"{name} is neither a recipe nor a run; the presets are {listed}")
    if name in study_presets():
        study = tomllib.loads(study_presets()[name].read_text(encoding="utf-8"))
        instead = f"give it to {study['verb']}, or take its recipe, {study['recipe']}"
        raise UserError(f"{name} is a preset of a study, not of a recipe: {instead}")
    hint = did_you_mean(name, shipped, 0.6)
    raise UserError(f"{name} is not a preset; {hint} (or give a path to a .toml)")


def read_layers(recipe: str | Path, overrides: Changes) -> list[dict[str, Any]]:
    """The dotted settings of a recipe's files and of `overrides`; later ones replace earlier."""
    path = _find(recipe)
    stem = path.stem if path.stem != "recipe" else path.resolve().parent.name
    preset = re.sub("[^A-Za-z0-9._+-]", "-", stem)  # a part of the run's name
    files = _files(path)
    if path.name == RECIPE and any((path.parent / name).is_file() for name in RUN_FILES):
        files.append({"run.dir": str(path.parent)})
    return [{"preset": preset}, *files, dotted(overrides)]


def recorded(path: Path) -> dict[str, Any]:
    """The recipe that Windlass last recorded beside a run's `recipe.toml`; else empty."""
    record = read_json(path.with_name(LINEAGE)) if path.name == RECIPE else {}
    return dict(record.get("recipe") or {})


def check_preset(settings: dict[str, Any], where: str) -> None:
    """Raise UserError if settings write `preset = NAME` instead of `extends`."""
    name = settings.get("preset")
    if name in presets() and len({key.partition(".")[0] for key in settings}) < SECTIONS:
        advice = f'to start from that preset write extends = "{name}"'
        raise UserError(f"{where}: preset is only a name; {advice}")


def _files(path: Path, seen: tuple[Path, ...] = ()) -> list[dict[str, Any]]:
    """The dotted settings of the files that a recipe's file extends, then of the file."""
    if path.resolve() in seen:
        raise UserError(f"{path}: extends itself by way of {', '.join(str(p) for p in seen)}")
    try:
        # A kill may leave a run's `recipe.toml` as it was before its last change, or without one.
        # Any other difference from the recorded recipe is the user's edit.
        tree = recorded(path)
        if path.is_file() or not tree:
            text = path.read_bytes()
            digest = hashlib.sha256(text).hexdigest()
            if not tree or digest != read_json(path.with_name(LINEAGE))["replaced"]:
                tree = tomllib.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise UserError(f"{path}: line {line} is not UTF-8; save it as UTF-8") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        why = f"{error}; texts need quotation marks"
        if recorded(path):
            why += "; if you delete it, Windlass writes the run's own"
        raise UserError(f"{path} cannot be read as TOML: {why}") from None
    base = tree.pop("extends", None)
    mine = flatten(tree, keep_empty=True)
    if base is None:
        check_preset(mine, str(path))
        return [mine]
    beside = path.parent / str(base)
    below = beside if beside.is_file() else _find(str(base))
    files = []
    for settings in _files(below, (*seen, path.resolve())):
        inherited = settings
        if "run.base" in settings:  # a run's recipe, for another run
            home = home_of(settings["run.base"]) or Path.cwd()
            kept = (key for key in settings if key not in ("run.base", "run.dir"))
            inherited = {key: located(key, settings[key], home) for key in kept}
        files.append(inherited)
    return [*files, mine]
