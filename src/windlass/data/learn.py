"""Tokenizers that are learned from a corpus: its characters, or byte pairs of its training text."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from windlass.data import vocabulary
from windlass.data.examples import example_group, example_texts
from windlass.data.progress import Progress
from windlass.data.records import Item, SourceSpec, text_of
from windlass.data.sources import Source
from windlass.data.split import FEW, training_characters
from windlass.data.tokenizer import Tokenizer, stretches
from windlass.errors import UserError
from windlass.recipe import DataSettings

BPE_CHARACTERS = 50_000_000  # of the corpus at most, from which byte pairs are learned
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Tool: Question: Context: Answer: \n"


def learn_tokenizer(
    data: DataSettings, train: list[Source], val: list[Source], progress: Progress
) -> Tokenizer:
    """The tokenizer made from the corpus: its characters, or byte pairs of its training text."""
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
        return [text_of(item, spec)] if spec.format == "text" else example_texts(item, spec)
    except UserError:
        if spec.on_bad_item == "stop":
            raise
        return []


class Document(NamedTuple):
    """A document or example of a source."""

    group: int  # the hash that decides whether it is held out
    characters: int
    texts: list[str]  # its characters, as far as a tokenizer may learn from them


def first_documents(source: Source, characters: int) -> list[Document]:
    """The first documents, which have so many characters, and FEW of them at least."""
    documents, groups, spec = list[Document](), set[int](), source.spec
    digest, size, kept = hashlib.blake2b(digest_size=8), 0, list[str]()
    is_text = spec.format == "text"
    for item in source.items():
        for text in texts_of(item, spec):
            kept.append(text[: max(0, characters)])
            size, characters = size + len(text), characters - len(text)
            digest.update(text.encode("utf-8", "replace") if is_text else b"")
        if item.more or not size:
            continue
        group = int.from_bytes(digest.digest(), "little") if is_text else example_group(item, spec)
        documents.append(Document(group, size, kept))
        if len(groups) < FEW:
            groups.add(group)
        elif characters <= 0:
            break
        digest, size, kept = hashlib.blake2b(digest_size=8), 0, []
    return documents


def training_texts(
    source: Source, fraction: float, validated: set[int], characters: int
) -> Iterator[str]:
    """The texts of the first documents that train, in parts of at most `STRETCH` characters:
    without what is held out, and without documents of the `validated` groups."""
    documents = first_documents(source, characters)
    groups = np.array([document.group for document in documents], np.uint64)
    sizes = np.array([document.characters for document in documents], np.int64)
    are_examples = source.spec.format != "text"
    rooms = training_characters(groups, sizes, fraction, are_examples=are_examples).tolist()
    for document, room in zip(documents, rooms, strict=True):
        if document.group in validated:
            continue
        done = 0
        for text in document.texts:
            yield from stretches(text[: max(0, room - done)])
            done += len(text)
