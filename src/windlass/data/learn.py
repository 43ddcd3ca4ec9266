"""Tokenizers that are learned from a corpus: its characters, or byte pairs of its training text."""

from __future__ import annotations

import hashlib
import itertools
from array import array
from collections.abc import Iterator

import numpy as np

from windlass.data import vocabulary
from windlass.data.examples import example_group, example_texts
from windlass.data.progress import Progress
from windlass.data.sources import Item, Source, SourceSpec, text_of
from windlass.data.split import FEW, held_out_examples, held_out_texts
from windlass.data.tokenizer import Tokenizer, stretches
from windlass.errors import UserError
from windlass.recipe import DataSettings

BPE_CHARACTERS = 200_000_000  # of the corpus at most, from which byte pairs are learned
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
        hashes = [documents_of(source, BPE_CHARACTERS)[0] for source in val]
        validated = np.concatenate([np.zeros(0, np.uint64), *hashes])
        parts = (training_parts(source, fraction, validated, each) for source in train)
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


def documents_of(source: Source, characters: int) -> tuple[np.ndarray, np.ndarray]:
    """The hash of each document or an example's group (uint64), and its characters (int64): of the
    first documents, which have so many characters, and of FEW of them at least."""
    hashes, sizes, distinct = array("Q"), array("q"), set[int]()
    digest, size, spec = hashlib.blake2b(digest_size=8), 0, source.spec
    is_text = spec.format == "text"
    for item in source.items():
        texts = texts_of(item, spec)
        size += sum(map(len, texts))
        if is_text:
            digest.update("".join(texts).encode("utf-8", "replace"))
        if item.more or not size:
            continue
        own = int.from_bytes(digest.digest(), "little") if is_text else example_group(item, spec)
        hashes.append(own)
        sizes.append(size)
        characters -= size
        if len(distinct) < FEW:
            distinct.add(hashes[-1])
        elif characters <= 0:
            break
        digest, size = hashlib.blake2b(digest_size=8), 0
    return np.array(hashes, np.uint64), np.array(sizes, np.int64)


def training_parts(
    source: Source, fraction: float, validated: np.ndarray, characters: int
) -> Iterator[str]:
    """The first `characters` of the texts that train, in parts of at most `STRETCH` each: without
    what is held out, and without documents that have a hash in `validated`."""
    hashes, room = documents_of(source, characters)
    if source.spec.format == "text":
        held, cuts = held_out_texts(hashes, room, fraction)
        room = np.where(cuts >= 0, cuts, room)
    else:
        held = held_out_examples(hashes, fraction)
    rooms, left = iter(np.where(held | np.isin(hashes, validated), 0, room).tolist()), None
    for item in source.items():
        texts = texts_of(item, source.spec)
        if left is None and any(texts):
            left = next(rooms, None)  # the next characters of the document that train
            if left is None:
                return
        for text in texts:
            part = text[: min(left or 0, characters)]
            yield from stretches(part)
            left, characters = (left or 0) - len(part), characters - len(part)
            if characters <= 0:
                return
        if not item.more:
            left = None
