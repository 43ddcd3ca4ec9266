"""Questions and conversations of random tokens, written as shards and opened as samples."""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass.data.recipe_sources import Member, SourceSpec
from windlass.data.samples import ExampleSamples
from windlass.data.shards import Corpus, Index, Row, ShardWriter
from windlass.data.split import divide
from windlass.data.tokenizer_kinds import byte_tokenizer
from windlass.recipe import DataSettings

BYTES = byte_tokenizer()


class Example(NamedTuple):
    tokens: list[int]
    marks: list[bool]
    group: int
    tail: int = 0
    reach: int = 1


def examples(
    count: int, seed: int = 3, longest: int = 60, tails: bool = False, vocab: int = 250
) -> list[Example]:
    """Examples of 1 to `longest` tokens; with `tails` half of them keep their ends, as questions."""
    draw, made = random.Random(seed), []
    for _ in range(count):
        size = draw.randint(2, longest)
        tokens, marks = draw.choices(range(1, vocab), k=size), draw.choices([False, True], k=size)
        marks[0], tail, reach = False, 0, draw.randint(2, size)
        if tails and draw.random() < 0.5:
            tail = draw.randint(1, size - 1)
            reach = draw.randint(1, size - tail)
            marks[-1] = True
        else:
            marks = [place >= reach - 1 and mark for place, mark in enumerate(marks)]
            marks[reach - 1] = True
        made.append(Example(tokens, marks, draw.getrandbits(64), tail, reach))
    return made


def corpus_of(rows: list[Example], folder: Path, shard_tokens: int = 501) -> Corpus:
    index = Index(
        key={}, source={}, tokenizer=BYTES.describe(), shard_tokens=shard_tokens, masked=True
    )
    folder.mkdir(parents=True, exist_ok=True)
    with ShardWriter(folder, index) as writer:
        for number, one in enumerate(rows):
            tokens, marks = np.array(one.tokens, np.int64), np.array(one.marks, bool)
            own = {"group": one.group, "tail": one.tail, "reach": one.reach}
            writer.add(Row(number, tokens, marks, text=one.group, **own))
        index = writer.finish(complete=True)
    return Corpus(folder, index, SourceSpec("x", "x", "chat"), BYTES)


def opened(
    rows: list[Example], folder: Path, context: int, *, packed: bool = False, pad: int = 255, **more
) -> ExampleSamples:
    """The samples of examples."""
    corpus = corpus_of(rows, folder, **more)
    member = Member("", DataSettings(val_fraction=0), [corpus.spec], [])
    tokens = divide([member], {corpus.spec: corpus}).train[0]
    return ExampleSamples(tokens, context, pad=pad, packed=packed)
