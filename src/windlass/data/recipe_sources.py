"""List the sources that a recipe names, each with the settings by which its items are read, and
their directories under `data.dir`. Recipes share a directory if the settings that determine the
tokens are equal: its name has a hash of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from windlass.data.tokenizer import LEARNED
from windlass.errors import UserError
from windlass.fileio import LockHeld, acquire_lock, locked
from windlass.recipe import DataSettings, Recipe

LOCK = ".lock"
DOWNLOADS = ".downloads"  # hidden, so that a source `data/` does not contain it
KINDS = ("hf", "squad", "shards")
# Settings of `data` that a `SourceSpec` also has.
SHARED = (
    *("format", "text_key", "split", "revision", "sha256", "separator", "special_tokens"),
    *("answers", "on_bad_item", "shards_dtype"),
)


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
    shards_dtype: str = "auto"
    cache_bytes: int = 0  # of remote shards on this machine's disk
    downloads: Path = Path("data", DOWNLOADS)
    is_val: bool = False  # separate validation data
    limit: int = 0  # tokens to read at most, or characters of validation data; 0: all

    @property
    def kind(self) -> str:
        """`stdlib`, `https`, `hf`, `squad`, `shards`, or `files` for a path."""
        kind, colon, _ = self.place.partition(":")
        if kind in ("http", "https"):
            return "https"
        if kind in (KINDS if colon else ("stdlib", "squad")):
            return kind
        return "files"

    @property
    def path(self) -> str:
        return self.place if self.kind == "files" else self.place.partition(":")[2]

    @property
    def key(self) -> dict[str, Any]:
        """The settings that determine the items and do not have their default."""
        key: dict[str, Any] = {"name": self.name, "format": self.format}
        for name in (*SHARED, "columns"):
            if getattr(self, name) != getattr(SourceSpec, name):
                key[name] = getattr(self, name)
        if self.kind == "stdlib":
            key["python"] = platform.python_version()
        return key

    @property
    def slug(self) -> str:
        """The source as a short name for a directory: `stdlib`, `input`, `c4-en`."""
        place = re.sub(rf"^({'|'.join(KINDS)}):", "", self.name).split("?")[0].rstrip("/*")
        name = re.sub(r"[^A-Za-z0-9]+", "-", place.rsplit("/", 1)[-1].split(".")[0])
        return name.strip("-").lower()[:40] or "corpus"


@dataclass(frozen=True)
class Member:
    """The sources of a recipe, or one source of a mixture."""

    name: str  # in the mixture; else empty
    data: DataSettings  # as if the member were the whole recipe
    train: list[SourceSpec]
    val: list[SourceSpec]  # separate validation data

    @property
    def sources(self) -> list[SourceSpec]:
        return [*self.train, *self.val]

    @property
    def held_fraction(self) -> float:
        """The fraction of the training sources that is held out for validation."""
        return 0.0 if self.val else self.data.val_fraction


def members_of(recipe: Recipe, only_val: bool = False) -> list[Member]:
    """The sources of a recipe; with `only_val` its separate validation data alone, if any."""
    written = recipe.as_written.data
    members = list[Member]()
    for number, member in enumerate([part.name for part in written.mix] or [""]):
        # the names as written, and the places with absolute paths
        data, located = written.part(number), recipe.data.part(number)
        prefix = f"data.mix.{member}." if member else "data."
        training = SourceSpec(
            name="",
            place="",
            streaming=data.streaming,
            columns=tuple(data.columns.items()),
            setting=f"{prefix}source",
            cache_bytes=int(data.cache_gb * 1e9),
            downloads=root_of(recipe) / DOWNLOADS,
            limit=-(-data.max_tokens // len(data.sources)),
            **{name: getattr(data, name) for name in SHARED},
        )
        pairs = list(zip(data.sources, located.sources, strict=True))
        train = [replace(training, name=name, place=place) for name, place in pairs]
        validation = replace(training, is_val=True, setting=f"{prefix}eval_source", sha256="")
        if any(data.eval_sources):
            validation = replace(validation, split=data.eval_split or data.split, revision="")
            pairs = list(zip(data.eval_sources, located.eval_sources, strict=True))
        elif data.eval_split and data.sources[0].startswith("hf:"):
            validation = replace(validation, split=data.eval_split, setting="data.eval_split")
        else:
            validation = replace(validation, split="validation")
            pairs = [pair for pair in pairs if pair[0] == "squad"]
        characters = int(data.max_tokens * Fraction(str(data.val_fraction)))
        validation = replace(validation, limit=-(-characters // max(1, len(pairs))))
        val = [replace(validation, name=name, place=place) for name, place in pairs]
        members.append(Member(member, data, [] if only_val and val else train, val))
    return members


def root_of(recipe: Recipe) -> Path:
    """`data.dir`, or `data` in the directory that the recipe's paths start from."""
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    return (recipe.home or Path()) / "data"


def data_dirs(recipe: Recipe) -> list[Path]:
    """The directories of all sources of a recipe, prepared or not."""
    specs = [spec for member in members_of(recipe) for spec in member.sources]
    return list(dict.fromkeys(directory_of(spec, recipe) for spec in specs))


def directory_of(spec: SourceSpec, recipe: Recipe) -> Path:
    return root_of(recipe) / f"{spec.slug}-{hash_of_key(source_key(spec, recipe))}"


def source_key(spec: SourceSpec, recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokens of a source."""
    data = recipe.as_written.data
    key = tokenizer_key(recipe) | {"source": spec.key}
    if spec.format == "chat" and data.chat_template:
        key["chat_template"] = data.chat_template
    if spec.format == "chat" and data.chat_template_kwargs:
        key["chat_template_kwargs"] = data.chat_template_kwargs
    return key


def tokenizer_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokenizer; a learned one depends on its sources, too."""
    data = recipe.as_written.data
    key: dict[str, Any] = {"tokenizer": recipe.as_written.tokenizer}
    if data.add_tokens:
        key["add_tokens"] = data.add_tokens
    if data.tokenizer in LEARNED:
        members = members_of(recipe)
        key["train"] = [spec.key for member in members for spec in member.train]
        key["val"] = [spec.key for member in members for spec in member.val]
        if data.tokenizer == "bpe":
            key["vocab"] = data.tokenizer_vocab
            key["held_out"] = [member.held_fraction for member in members]
    return key


def hash_of_key(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]


def lock_directory(directory: Path, notify: Callable[[str], None]) -> AbstractContextManager[Any]:
    """Hold a directory's lock, which the kernel releases when the process ends."""
    try:
        return acquire_lock(directory / LOCK, seconds=1) or contextlib.nullcontext()
    except LockHeld:
        notify(f"waiting for another process that prepares or checks {directory}")
        return locked(directory / LOCK)
    except OSError as error:
        problem = f"{directory} cannot be written ({error.strerror})"
        raise UserError(f"{problem}; give another data.dir") from None
