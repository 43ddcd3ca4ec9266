"""The sources that a recipe names, and the directory that has the tokens of each.

The name of a directory has a hash of its key. The key has all settings that determine the tokens:
the source, how Windlass reads its items, and the tokenizer. `prepare.py` compares the state of the
files, which is not in the key.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from windlass.data import vocabulary
from windlass.recipe import DataSettings, Recipe

S = TypeVar("S")  # SourceSpec before a source is prepared, then Corpus
T = TypeVar("T")
DOWNLOADS = ".downloads"  # hidden, so that a source `data/` does not contain it


@dataclass(frozen=True)
class SourceSpec:
    """One source, and how its items are read."""

    name: str  # as the recipe writes it
    place: str  # the same with its path located
    format: str = "text"
    text_key: str = "text"  # may be nested: "doc.text"
    split: str = "train"
    revision: str = ""
    streaming: bool = False
    sha256: str = ""
    separator: str = ""
    special_tokens: bool = False
    columns: tuple[tuple[str, str], ...] = ()  # names of keys, and the keys that have these names
    answers: str = "auto"
    on_bad_item: str = "stop"
    setting: str = "data.source"  # for messages
    downloads: Path = Path("data", DOWNLOADS)

    @property
    def kind(self) -> str:
        """`stdlib`, `https`, `hf`, `squad`, `shards`, or `files` for a path."""
        kind, colon, _ = self.place.partition(":")
        if kind in ("http", "https"):
            return "https"
        named = ("hf", "squad", "shards") if colon else ("stdlib", "squad")
        return kind if kind in named else "files"

    @property
    def path(self) -> str:
        """The place without its kind."""
        return self.place if self.kind == "files" else self.place.partition(":")[2]

    @property
    def key(self) -> dict[str, Any]:
        """The settings that determine the items and do not have their default."""
        kind, is_text = self.kind, self.format == "text"
        has_texts = is_text and kind in ("files", "https")
        applies = {
            "text_key": has_texts or (is_text and kind == "hf"),
            "split": kind == "hf" or self.place == "squad",
            "revision": kind == "hf",
            "sha256": kind == "https",
            "separator": has_texts,
            "special_tokens": has_texts or kind in ("stdlib", "hf") or self.format == "chat",
            "columns": not is_text,
            "answers": self.format == "chat",
            "on_bad_item": kind not in ("stdlib", "shards"),
        }
        settings = {name: getattr(self, name) for name, is_used in applies.items() if is_used}
        changed = {k: value for k, value in settings.items() if value != getattr(SourceSpec, k)}
        python = {"python": platform.python_version()} if kind == "stdlib" else {}
        return {"name": self.name, "format": self.format, **changed, **python}

    @property
    def slug(self) -> str:
        """The source as a short name for a directory: `stdlib`, `input`, `c4-en`."""
        place = re.sub(r"^(hf|shards|squad):", "", self.name).split("?")[0].rstrip("/*")
        name = re.sub(r"[^A-Za-z0-9]+", "-", place.rsplit("/", 1)[-1].split(".")[0])
        return name.strip("-").lower()[:40] or "corpus"


@dataclass(frozen=True)
class Member(Generic[S]):
    """The sources of a recipe, or one source of a mixture."""

    name: str  # in the mixture
    data: DataSettings  # as if the member were the whole recipe
    train: list[S]
    val: list[S]  # separate validation data

    @property
    def sources(self) -> list[S]:
        return [*self.train, *self.val]

    def opened(self, sources: list[T]) -> Member[T]:
        """The member with its sources opened."""
        count = len(self.train)
        return Member(self.name, self.data, sources[:count], sources[count:])


def wanted_sources(recipe: Recipe, only_val: bool = False) -> list[Member[SourceSpec]]:
    """The sources of a recipe; with `only_val` its validation data alone, if that is separate."""
    members, written = list[Member[SourceSpec]](), recipe.as_written.data
    for number in range(len(written.mix) or 1):
        data, located = written.part(number), recipe.data.part(number)
        train, val = _specs(data, located, root_of(recipe) / DOWNLOADS)
        name = written.mix[number].name if written.mix else ""
        members.append(Member(name, data, [] if only_val and val else train, val))
    return members


def _specs(
    data: DataSettings, located: DataSettings, downloads: Path
) -> tuple[list[SourceSpec], list[SourceSpec]]:
    """The training sources and the separate validation sources of settings, which `located` has
    with absolute paths."""
    shared: dict[str, Any] = {
        "format": data.format,
        "text_key": data.text_key,
        "streaming": data.streaming,
        "separator": data.separator,
        "special_tokens": data.special_tokens,
        "columns": tuple(data.columns.items()),
        "answers": data.answers,
        "on_bad_item": data.on_bad_item,
        "downloads": downloads,
    }
    own: dict[str, Any] = {"split": data.split, "revision": data.revision, "sha256": data.sha256}
    names = zip(data.sources, located.sources, strict=True)
    train = [SourceSpec(name, place, **own, **shared) for name, place in names]
    shared["setting"] = "data.eval_source"
    if any(data.eval_sources):
        shared["split"] = data.eval_split or data.split
        names = zip(data.eval_sources, located.eval_sources, strict=True)
        return train, [SourceSpec(name, place, **shared) for name, place in names]
    if data.eval_split and data.sources[0].startswith("hf:"):
        setting = "data.eval_split"
        return train, [
            replace(spec, split=data.eval_split, sha256="", setting=setting) for spec in train
        ]
    questions = [spec for spec in train if spec.name == "squad"]
    return train, [SourceSpec(q.name, q.place, split="validation", **shared) for q in questions]


def root_of(recipe: Recipe) -> Path:
    """`data.dir`, or `data` in the directory that the recipe's paths start from."""
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    return (recipe.home or Path()) / "data"


def directory_of(spec: SourceSpec, recipe: Recipe) -> Path:
    return root_of(recipe) / f"{spec.slug}-{hash_of_key(source_key(spec, recipe))}"


def data_dirs(recipe: Recipe) -> list[Path]:
    """The directories of all sources of a recipe, prepared or not."""
    specs = [spec for member in wanted_sources(recipe) for spec in member.sources]
    return list(dict.fromkeys(directory_of(spec, recipe) for spec in specs))


# -- keys


def source_key(spec: SourceSpec, recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokens of a source."""
    key, data = tokenizer_key(recipe) | {"source": spec.key}, recipe.as_written.data
    if spec.format == "chat" and data.chat_template:
        key["chat_template"] = data.chat_template
    if spec.format == "chat" and data.chat_template_kwargs:
        key["chat_template_kwargs"] = data.chat_template_kwargs
    if spec.name.startswith("shards:") and data.shards_dtype != "auto":
        key["dtype"] = data.shards_dtype
    return key


def tokenizer_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokenizer; a learned one depends on its sources, too."""
    data = recipe.as_written.data
    key: dict[str, Any] = {"tokenizer": recipe.as_written.tokenizer}
    if data.add_tokens:
        key["add_tokens"] = data.add_tokens
    if vocabulary.is_learned(data.tokenizer):
        members = wanted_sources(recipe)
        key["train"] = [spec.key for member in members for spec in member.train]
        separate = [spec.key for member in members for spec in member.val]
        if data.tokenizer == "char":
            return key | {"val": separate}
        key |= {"vocab": data.tokenizer_vocab} | ({} if separate else {"val": data.val_fraction})
    return key


def hash_of_key(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
