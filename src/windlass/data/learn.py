"""The tokenizer of a recipe: saved beside prepared data, named, or learned from the corpus."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass import hub
from windlass.data import vocabulary
from windlass.data.chat import Template
from windlass.data.examples import example_of
from windlass.data.limits import Limit, Need
from windlass.data.locate import (
    Member,
    SourceSpec,
    directory_of,
    hash_of_key,
    root_of,
    tokenizer_key,
)
from windlass.data.progress import Progress
from windlass.data.records import Item, text_of
from windlass.data.shards import INDEX, lock_directory
from windlass.data.sources import Source, open_source
from windlass.data.split import held_out
from windlass.data.tokenizer import DESCRIPTION, FOLDER, Tokenizer, stretches
from windlass.errors import UserError
from windlass.recipe import DataSettings, Recipe

BPE_CHARACTERS = 50_000_000  # of the corpus at most, from which byte pairs are learned
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Tool: Question: Context: Answer: \n"


def open_tokenizer(
    recipe: Recipe,
    wanted: list[Member[SourceSpec]],
    files: dict[str, str],
    choice: str,
    describe: Callable[[SourceSpec], Any],
    progress: Progress,
) -> tuple[Tokenizer, Template]:
    """The tokenizer and the chat template of a recipe's sources.

    Windlass prefers the ones saved beside prepared data, because their origin may have changed. If
    `data.changed` (`choice`) is "prepare", it opens the origin again.
    """
    data, specs = recipe.data, [spec for member in wanted for spec in member.sources]
    is_learned = vocabulary.is_learned(data.tokenizer)
    folders = dict[str, Path]()  # of saved tokenizers, by the format of the source
    if choice != "prepare" or not (is_learned or files):
        for spec in specs:
            directory = directory_of(spec, recipe)
            if (directory / INDEX).is_file():
                folders.setdefault(spec.format, directory / FOLDER)
    if folders:
        tokenizer = vocabulary.load_tokenizer(next(iter(folders.values())))
    elif is_learned:
        learned = _learned(recipe, wanted, describe, progress)
        tokenizer = vocabulary.with_tokens(learned, data.add_tokens)
    else:
        named = vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
        tokenizer = vocabulary.with_tokens(named, data.add_tokens)
    if "chat" in folders:
        return tokenizer, Template.of_directory(folders["chat"])
    template = Template()
    if any(spec.format == "chat" for spec in specs):
        if recipe.tokenizer.startswith("hf:"):
            place = hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
            template = Template.of_directory(place)
        template = template.with_settings(data)
    return tokenizer, template


def _learned(
    recipe: Recipe,
    wanted: list[Member[SourceSpec]],
    describe: Callable[[SourceSpec], Any],
    progress: Progress,
) -> Tokenizer:
    """The tokenizer that the corpus makes, in a directory for each state of the corpus."""
    train = [spec for member in wanted for spec in member.train]
    val = [spec for member in wanted for spec in member.val]
    if any(spec.kind == "shards" for spec in train):
        problem = f"data.tokenizer: {recipe.data.tokenizer} needs the corpus"
        raise UserError(f"{problem}: use another for shards:")
    key = tokenizer_key(recipe) | {"now": [describe(spec) for spec in (*train, *val)]}
    directory = root_of(recipe) / f"tokenizer-{hash_of_key(key)}"
    with lock_directory(directory, progress.note):
        if not (directory / FOLDER / DESCRIPTION).is_file():
            of_train = [open_source(spec, progress.note) for spec in train]
            of_val = [open_source(spec, progress.note) for spec in val]
            learn_tokenizer(recipe.data, of_train, of_val, progress).save(directory)
    return vocabulary.load_tokenizer(directory / FOLDER)


# -- learning


def learn_tokenizer(
    data: DataSettings, train: list[Source], val: list[Source], progress: Progress
) -> Tokenizer:
    """The tokenizer of the corpus: its characters, or byte pairs of its training text."""
    names = ", ".join(source.spec.name for source in train)
    if data.tokenizer == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from {names}")
        each, fraction = BPE_CHARACTERS // len(train), data.val_fraction * (not val)
        validated = {d.group for source in val for d in first_documents(source, BPE_CHARACTERS)}
        parts = (training_texts(source, fraction, validated, each) for source in train)
        return vocabulary.train_bpe(itertools.chain.from_iterable(parts), data.tokenizer_vocab)
    characters: set[str] = set() if data.format == "text" else set(LAYOUT_CHARACTERS)
    for source in (*train, *val):
        for item in source.items():
            characters |= set().union(*texts_of(item, source.spec))
    if not characters:
        raise UserError(f"data.source: there is no text in {names}")
    alone = len(train) == 1 and all(source.single_text for source in (*train, *val))
    return vocabulary.char_tokenizer(characters, with_eot=not alone)


def texts_of(item: Item, spec: SourceSpec) -> list[str]:
    """The texts of an item; none if it cannot be read and `data.on_bad_item` leaves it out."""
    try:
        return [text_of(item, spec)] if spec.format == "text" else example_of(item, spec).texts
    except UserError:
        if spec.on_bad_item == "stop":
            raise
        return []


class Document(NamedTuple):
    """A document or example of a source."""

    group: int  # the hash that decides whether it is held out
    characters: int
    texts: list[str]  # its characters, as far as a tokenizer may learn from them


def first_documents(source: Source, most: int) -> list[Document]:
    """The documents of a source up to a limit of `most` characters."""
    documents, spec, need, before = list[Document](), source.spec, Need(Limit(most)), 0
    is_text = spec.format == "text"
    digest, size, texts = hashlib.blake2b(digest_size=8), 0, list[str]()
    for item in source.items():
        for text in texts_of(item, spec):
            texts.append(text[: max(0, most - before - size)])
            size += len(text)
            digest.update(text.encode("utf-8", "replace") if is_text else b"")
        if item.more or not size:
            continue
        group = (
            int.from_bytes(digest.digest(), "little") if is_text else example_of(item, spec).group
        )
        documents.append(Document(group, size, texts))
        before += size
        if need.is_met(group, size, before):
            break
        digest, size, texts = hashlib.blake2b(digest_size=8), 0, []
    return documents


def training_texts(
    source: Source, fraction: float, validated: set[int], characters: int
) -> Iterator[str]:
    """The texts of the first documents that train, in parts of at most `STRETCH` characters:
    without what is held out, and without documents of the `validated` groups."""
    documents = first_documents(source, characters)
    groups = np.array([document.group for document in documents], np.uint64)
    sizes = np.array([document.characters for document in documents], np.int64)
    whole, cuts = held_out(groups, sizes, fraction, are_examples=source.spec.format != "text")
    rooms = np.where(cuts < 0, sizes, cuts) * ~whole
    for document, room in zip(documents, rooms.tolist(), strict=True):
        if document.group in validated:
            continue
        done = 0
        for text in document.texts:
            yield from stretches(text[: max(0, room - done)])
            done += len(text)
