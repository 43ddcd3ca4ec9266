"""Questions and conversations, from their files to rows of tokens: made once, kept in the data directory, checked on opening."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import hub
from windlass.data import chat, squad
from windlass.data.lock import only_one
from windlass.data.progress import Progress, console
from windlass.data.rows import Rows, choose
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.data.vocabulary import (
    char_tokenizer,
    kind_of,
    load_tokenizer,
    named_tokenizer,
    tokenizer_files,
    train_bpe,
)
from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.recipe import Recipe

INDEX = "items.json"
SHAPING = (
    "format", "source", "eval_source", "tokenizer", "tokenizer_vocab", "val_fraction", "train_size", "eval_size",
)  # fmt: skip
"""The settings of `[data]` that determine the rows; `model.context` and `run.seed` do too."""
LAYOUT = squad.PROMPT + "User: System: Assistant: \n"
"""What a character tokenizer must know besides the characters of the items."""


@dataclass(frozen=True)
class Items:
    """The rows of a recipe, and what belongs to them."""

    train: Rows
    val: Rows | None
    tokenizer: Tokenizer
    template: chat.Template
    fingerprint: str
    directory: Path


def shaping(recipe: Recipe) -> dict[str, Any]:
    """Everything that determines the rows: settings, and the content of the files, those of a local tokenizer too."""
    data = recipe.data
    tokenizer = tokenizer_files(data.tokenizer, layout=True)
    files = [s.removeprefix("squad:") for s in (data.source, data.eval_source) if s and s != "squad"]
    sums = {file: _sha256(path) for file in files for path in sorted(_paths(file))}
    return {
        **{key: getattr(data, key) for key in SHAPING},
        "tokenizer": recipe.tokenizer,
        "context": recipe.model.context,
        "seed": recipe.run.seed,
        "layout": squad.PROMPT if data.format == "squad" else chat.LAYOUT,
        "files": sums,
        **({"tokenizer files": tokenizer} if tokenizer or data.tokenizer.startswith("hf:") else {}),
    }


def _paths(pattern: str) -> list[Path]:
    from windlass.data.corpus import find_files

    path = Path(pattern).expanduser()
    return [path] if path.is_file() else find_files(pattern)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def directory_of(recipe: Recipe) -> Path:
    """Where the rows of a recipe lie: `data.dir`, or `data/<format>-<digest of what shapes them>`."""
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    # Not by the tokenizer's files: the rows are found, with the tokenizer saved beside them, also where those are gone.
    shaped = {key: value for key, value in shaping(recipe).items() if key != "tokenizer files"}
    digest = hashlib.sha256(json.dumps(shaped, sort_keys=True).encode()).hexdigest()
    return Path("data") / f"{recipe.data.format}-{digest[:8]}"


def prepare_items(recipe: Recipe, progress: Progress | None = None) -> Path:
    """Make the rows of a recipe where they are not there yet; exactly one process of a file system does.

    Raises:
        UserError: The source or the tokenizer is not what it should be; the directory holds other data.
    """
    directory = directory_of(recipe)
    wanted = shaping(recipe)
    if _ready(directory, wanted):
        return directory
    shown = progress or console()
    try:
        with only_one(directory, lambda: _ready(directory, wanted), shown.note, "prepares") as left:
            if left:
                _make(recipe, directory, wanted, shown)
    finally:
        shown.close()
    return directory


def open_items(recipe: Recipe, *, prepare_if_missing: bool = True, progress: Progress | None = None) -> Items:
    """The rows of a recipe, made if need be, checked against what was written down when they were made; UserError."""
    directory = directory_of(recipe)
    if not _ready(directory, shaping(recipe)):
        if not prepare_if_missing:
            raise UserError(f"there are no prepared data in {directory}: run `windlass prepare` first")
        prepare_items(recipe, progress)
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    found: dict[str, Rows] = {}
    for name, fingerprint in index["rows"].items():
        path = directory / f"{name}.npz"
        try:
            found[name] = Rows.load(path)
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            raise UserError(f"{path} cannot be read ({error}); delete {directory} and prepare the data again") from None
        if found[name].fingerprint != fingerprint:
            raise UserError(f"{path} was changed after it was made; delete {directory} and prepare the data again")
    tokenizer = load_tokenizer(recipe, directory)
    whole = hashlib.sha256(json.dumps([index["rows"], tokenizer.fingerprint]).encode()).hexdigest()
    template = chat.Template.load(directory / FOLDER)
    return Items(found["train"], found.get("val"), tokenizer, template, whole, directory)


def _ready(directory: Path, wanted: dict[str, Any]) -> bool:
    try:
        there = json.loads((directory / INDEX).read_text(encoding="utf-8"))["settings"]
    except (OSError, ValueError, KeyError):
        return False
    if wanted.get("tokenizer files") == {}:  # they are gone, or of the Hub: what was saved beside the rows counts
        there = {**there, "tokenizer files": {}}
    if changed := [key for key in sorted({*wanted, *there}) if wanted.get(key) != there.get(key)]:
        lines = [f"  {key}: prepared with {there.get(key)!r}, wanted {wanted.get(key)!r}" for key in changed]
        raise UserError(
            "\n".join([f"{directory} holds data that were prepared otherwise; give another data.dir:", *lines])
        )
    return True


def _make(recipe: Recipe, directory: Path, wanted: dict[str, Any], shown: Progress) -> None:
    train: list[Any]
    held_out: list[Any]
    if recipe.data.format == "squad":
        questions, held_out = squad.questions(recipe)
        train = questions
        texts = [
            text for q in train for text in (squad.PROMPT.format(question=q.question, context=q.context), *q.answers)
        ]
        tokenizer, template = _tokenizer(recipe, directory, texts, shown), chat.Template()

        def rows(items: Sequence[Any]) -> Rows:
            return squad.rows(items, tokenizer, recipe.model.context)
    else:
        conversations, held_out = _conversations(recipe)
        train = conversations
        texts = [message["content"] for conversation in conversations for message in conversation]
        tokenizer, template = _tokenizer(recipe, directory, texts, shown), _template(recipe)

        def rows(items: Sequence[Any]) -> Rows:
            return chat.rows(items, template, tokenizer, recipe.model.context)

    made = {"train": _shown(rows, train, "training data", shown)}
    if held_out:
        made["val"] = _shown(rows, held_out, "validation data", shown)
    tokenizer.save(directory)
    template.save(directory / FOLDER)
    for name, part in made.items():
        partial = directory / f".{name}.tmp"
        part.save(partial)
        partial.replace(directory / f"{name}.npz")
    from windlass.data.shards import write_json

    write_json(directory / INDEX, {"settings": wanted, "rows": {name: part.fingerprint for name, part in made.items()}})


def _shown(rows: Callable[[Sequence[Any]], Rows], items: Sequence[Any], what: str, shown: Progress) -> Rows:
    shown.update(what, 0.0, 0)
    made = rows(items)
    if len(made) < len(items):
        shown.note(f"{len(items) - len(made)} of {len(items)} items do not fit into the context and are left out")
    return made


def _conversations(recipe: Recipe) -> tuple[list[Any], list[Any]]:
    """Training and evaluation conversations: `train_size` and `eval_size` of them as `run.seed` chooses."""
    data, seed = recipe.data, recipe.run.seed
    train: list[Any] = chat.read_files(data.source)
    held_out: list[Any] = []
    if data.eval_source:
        held_out = chat.read_files(data.eval_source, "data.eval_source")
    elif data.val_fraction and len(train) > 1:
        count = max(1, int(len(train) * Fraction(str(data.val_fraction))))
        places = set(choose([str(i) for i in range(len(train))], count, seed, "split"))
        held_out = [item for i, item in enumerate(train) if i in places]
        train = [item for i, item in enumerate(train) if i not in places]
    return (
        [train[i] for i in choose([str(i) for i in range(len(train))], data.train_size, seed, "train")],
        [held_out[i] for i in choose([str(i) for i in range(len(held_out))], data.eval_size, seed, "eval")],
    )


def _tokenizer(recipe: Recipe, directory: Path, texts: list[str], shown: Progress) -> Tokenizer:
    """The tokenizer that the recipe names, or one made from the training texts."""
    kind = kind_of(recipe.data.tokenizer)
    if kind == "bpe":
        shown.note(f"learning {recipe.data.tokenizer_vocab:,} byte pairs from the training items")
        return train_bpe(dict.fromkeys(texts), recipe.data.tokenizer_vocab)
    if kind == "char":
        return char_tokenizer([*texts, LAYOUT], with_eot=True)
    return named_tokenizer(recipe.tokenizer)


def _template(recipe: Recipe) -> chat.Template:
    """The chat template of the recipe's tokenizer."""
    kind, _, place = recipe.tokenizer.partition(":")
    return chat.Template.of_directory(hub.tokenizer_directory(place)) if kind == "hf" else chat.Template()
