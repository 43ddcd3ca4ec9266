"""The sources of a recipe, and the directories of their tokens.

A directory's name has a hash of all that determines the tokens: the source, how its items are read,
and the tokenizer.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from windlass.data import vocabulary
from windlass.data.sources import SourceSpec
from windlass.recipe import DataSettings, Recipe

S = TypeVar("S")  # SourceSpec before a source is prepared, then Corpus


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


def wanted_sources(recipe: Recipe, only_val: bool = False) -> list[Member[SourceSpec]]:
    """The sources of a recipe; with `only_val` its validation data alone, if that is separate."""
    members, written = list[Member[SourceSpec]](), recipe.as_written.data
    for number in range(len(written.mix) or 1):
        own, located = written.part(number), recipe.data.part(number)
        fields = ("format", "text_key", "separator", "special_tokens", "answers", "on_bad_item")
        how: dict[str, Any] = {field: getattr(own, field) for field in (*fields, "streaming")}
        how["columns"] = tuple(own.columns.items())
        sources = list(zip(own.sources, located.sources, strict=True))
        of_train = how | {"split": own.split, "revision": own.revision, "sha256": own.sha256}
        train = [SourceSpec(*names, **of_train) for names in sources]
        how |= {"split": own.eval_split or own.split, "setting": "data.eval_source"}
        if any(own.eval_sources):
            separate = list(zip(own.eval_sources, located.eval_sources, strict=True))
        elif own.eval_split and own.sources[0].startswith("hf:"):  # of the same data set
            separate, how = sources, how | {"revision": own.revision, "setting": "data.eval_split"}
        else:
            separate, how["split"] = [pair for pair in sources if pair[0] == "squad"], "validation"
        val = [SourceSpec(*names, **how) for names in separate]
        name = written.mix[number].name if written.mix else ""
        members.append(Member(name, own, [] if only_val and val else train, val))
    return members


def tokenizer_key(recipe: Recipe) -> dict[str, Any]:
    """What determines the tokenizer of a recipe; one made from the corpus depends on its sources."""
    home, data = recipe.home, recipe.as_written.data
    files = vocabulary.tokenizer_files(recipe.data)
    key: dict[str, Any] = {"tokenizer": recipe.as_written.tokenizer}
    if data.add_tokens:
        key["add_tokens"] = data.add_tokens
    if files:  # paths are as written, so that a run and its data can move
        key["files"] = {path.removeprefix(f"{home}/"): digest for path, digest in files.items()}
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


def root_of(recipe: Recipe) -> Path:
    """`data.dir`, or `data` in the directory that the recipe's paths start from."""
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    return (recipe.home or Path()) / "data"


def source_key(spec: SourceSpec, recipe: Recipe) -> dict[str, Any]:
    """What determines the tokens of a source."""
    key = tokenizer_key(recipe) | {"source": spec.key}
    key.pop("files", None)  # a tokenizer that moves or goes stays the one that is saved here
    data = recipe.as_written.data
    if spec.format == "chat" and data.chat_template:
        key["chat_template"] = data.chat_template
    if spec.format == "chat" and data.chat_template_kwargs:
        key["chat_template_kwargs"] = data.chat_template_kwargs
    if spec.name.startswith("shards:") and recipe.data.shards_dtype != "auto":
        key["dtype"] = recipe.data.shards_dtype
    return key


def directory_of(spec: SourceSpec, recipe: Recipe) -> Path:
    return root_of(recipe) / f"{spec.slug}-{hash_of_key(source_key(spec, recipe))}"


def data_dirs(recipe: Recipe) -> list[Path]:
    """The directories of all sources of a recipe, prepared or not."""
    specs = [spec for member in wanted_sources(recipe) for spec in member.sources]
    return list(dict.fromkeys(directory_of(spec, recipe) for spec in specs))
