"""Items of a source -> tokens -> shards, in parallel and resumable.

The shards are a pure function of source, tokenizer and `shard_tokens`: neither the number of
workers nor any number of kills changes a byte. The tokenizers release Python's lock, so threads
encode text. Templates of conversations are Python code, so processes encode them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import multiprocessing
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from fractions import Fraction
from functools import lru_cache, partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass.data import tokenizer as tokenizers
from windlass.data.chat import Template
from windlass.data.examples import encode_example, example_group, example_texts
from windlass.data.progress import Progress
from windlass.data.shards import Index, Row, ShardWriter
from windlass.data.sources import Item, Source, SourceSpec, text_of
from windlass.data.split import FEW, LONG_TEXT, held_out, trained_characters
from windlass.data.tokenizer import FOLDER, Tokenizer, stretches
from windlass.errors import UserError
from windlass.recipe import DataSettings

BPE_CHARACTERS = 200_000_000  # of the corpus at most, from which byte pairs are learned
BATCH_CHARACTERS = 1 << 18  # for a worker at once: enough that the hand-over costs nothing
BATCH_ITEMS = 256
BEFORE = 256  # characters of the text before a part, for the tokenizer
LEFT_OUT = "left-out.txt"
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Question: Context: Answer: \n"


class Job(NamedTuple):
    """An item for a worker."""

    number: int
    item: Item
    before: str | None = None  # the end of the text that it continues; None: it begins a text
    skip: int = 0  # characters that are committed already
    text: int | None = None  # hash of the whole text up to here; None: of this item alone


class Bad(NamedTuple):
    """An item that cannot be read."""

    item: int
    problem: str


class Encoder:
    """Turns items into rows."""

    def __init__(self, spec: SourceSpec, tokenizer: Tokenizer, template: Template):
        self.spec, self.tokenizer, self.template = spec, tokenizer, template

    def __call__(self, jobs: list[Job]) -> list[Row | Bad]:
        rows = list[Row | Bad]()
        for job in jobs:
            try:
                if self.spec.format == "text":
                    rows += self._text_rows(job)
                else:
                    found = encode_example(job.item, self.spec, self.tokenizer, self.template)
                    rows.append(
                        Row(
                            job.number,
                            found.tokens,
                            found.marks,
                            text=found.text,
                            group=found.group,
                            tail=found.tail,
                            reach=found.reach,
                        )
                    )
            except UserError as error:
                rows.append(Bad(job.number, str(error)))
        return rows

    def _text_rows(self, job: Job) -> list[Row]:
        """A text as rows of at most `STRETCH` characters; none of an empty text."""
        own, text = self.tokenizer, text_of(job.item, self.spec)
        digest = hash_of(text) if job.text is None else job.text
        begins, before = job.before is None and not job.skip, job.before or ""
        if job.skip:
            before, text = (before + text[: job.skip])[-BEFORE:], text[job.skip :]
        rows, parts = list[Row](), list(stretches(text))
        if not parts and not begins and not job.item.more:
            parts = [""]  # the end of a text whose last block is committed
        for number, part in enumerate(parts):
            ids = [own.encode(part, before)]
            last = number == len(parts) - 1 and not job.item.more
            if begins and not number:
                ids.insert(0, np.array(own.first, np.int64))
            if last:
                ids.append(np.array(own.last, np.int64))
            row = Row(job.number, np.concatenate(ids), text=digest if last else 0)
            rows.append(row._replace(characters=len(part), more=not last))
            before = (before + part)[-BEFORE:]
        return rows


def hash_of(text: str) -> int:
    """A 64-bit hash of a text."""
    digest = hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


@lru_cache(maxsize=1)
def encoder_of(directory: Path, spec: SourceSpec) -> Encoder:
    """The encoder of a data directory, for a worker process."""
    folder = directory / FOLDER
    return Encoder(spec, tokenizers.load_tokenizer(folder), Template.of_directory(folder))


def encode_in_process(directory: Path, spec: SourceSpec, jobs: list[Job]) -> list[Row | Bad]:
    return encoder_of(directory, spec)(jobs)


def jobs_of(source: Source, resume: Sequence[int]) -> Iterator[tuple[list[Job], float]]:
    """The items of a source from a place on, in batches, with the fraction read after each."""
    first, skip, *_ = resume
    number, batch, size, before = first, list[Job](), 0, ""
    hashed, begins = hashlib.blake2b(digest_size=8), True  # of a text; whether an item begins one
    item = Item("", None)
    for item in source.items(first):
        job = Job(number, item, skip=0 if number > first else skip)
        if item.more or not begins:  # a block of a long text
            text = str(item.value)
            hashed.update(text.encode("utf-8", "replace"))
            digest = int.from_bytes(hashed.copy().digest(), "little")
            job = job._replace(before=None if begins else before, text=digest)
            if number == first and skip:
                passed = min(skip, len(text))
                skip, job = skip - passed, job._replace(skip=passed)
            before = (before + text)[-BEFORE:]
            if job.skip < len(text) or not item.more:
                batch.append(job)
        else:
            batch.append(job)
        size += len(item.value) if isinstance(item.value, str | bytes) else 1000
        if size >= BATCH_CHARACTERS or len(batch) >= BATCH_ITEMS:
            yield batch, item.fraction
            batch, size = [], 0
        begins = not item.more
        if begins:
            number, before, hashed = number + 1, "", hashlib.blake2b(digest_size=8)
    yield batch, item.fraction


def encode(
    source: Source, directory: Path, encoder: Encoder, resume: Sequence[int], workers: int
) -> Generator[tuple[list[Row | Bad], int, float], None, None]:
    """The rows of a source from a place on, in order, in batches: with the number of the item after
    each batch, and the fraction of the source that is read.

    Two batches for each worker are read ahead.
    """
    ahead = jobs_of(source, resume)
    head = list(itertools.islice(ahead, 2))
    work: Callable[[list[Job]], list[Row | Bad]] = encoder
    pool: Executor
    if len(head) < 2 or workers == 1 or source.spec.format == "text":
        pool = ThreadPoolExecutor(workers)
    else:
        method = multiprocessing.get_context("forkserver")
        pool = ProcessPoolExecutor(workers, method)
        work = partial(encode_in_process, directory, source.spec)
    with pool:
        waiting = deque(
            (pool.submit(work, jobs), jobs, fraction)
            for jobs, fraction in [*head, *itertools.islice(ahead, 2 * workers - len(head))]
        )
        after = resume[0]
        try:
            while waiting:
                future, jobs, fraction = waiting.popleft()
                rows = future.result()
                if jobs:
                    after = jobs[-1].number + (not jobs[-1].item.more)
                yield rows, after, fraction
                for more in itertools.islice(ahead, 1):
                    waiting.append((pool.submit(work, more[0]), *more))
        finally:
            for future, _, _ in waiting:
                future.cancel()


def write_source(
    source: Source,
    directory: Path,
    index: Index,
    encoder: Encoder,
    enough: Callable[[ShardWriter, Row], bool],
    workers: int,
    progress: Progress,
) -> Index:
    """Write the shards of a source after those that `index` has; returns the index as written.

    `enough(writer, row)` is asked after each row: whether to stop there.
    """
    index.shards, index.complete, index.left_out = index.full_shards, False, index.resume[3]
    index = index.save(
        directory
    )  # a kill must not leave the name of a short shard that is replaced
    listing = directory / LEFT_OUT
    known = listing.read_text("utf-8").splitlines(keepends=True) if index.left_out else []
    listing.write_text("".join(known[: index.left_out]), "utf-8")
    spec, tokenizer = source.spec, encoder.tokenizer
    if index.shards:
        progress.note(f"{spec.name}: going on after {index.tokens:,} committed tokens")
    batches = encode(source, directory, encoder, index.resume, workers)
    writer = ShardWriter(directory, index, tokenizer.dtype)
    with contextlib.closing(batches), writer, listing.open("a", encoding="utf-8") as left_out:
        for rows, after, fraction in batches:
            for row in rows:
                if isinstance(row, Bad):
                    if spec.on_bad_item == "stop":
                        advice = 'data.on_bad_item="skip" leaves such items out'
                        raise UserError(f"{row.problem} ({advice})")
                    index.left_out += 1
                    left_out.write(f"{row.problem}\n")
                    left_out.flush()
                    continue
                writer.add(row)
                if enough(writer, row):
                    index.items = row.item + 1
                    return writer.finish(complete=False)
            index.items = after
            progress.update(f"tokens of {spec.name}", fraction, writer.tokens)
        return writer.finish(complete=True)


# -- tokenizers that the corpus makes


def learn_tokenizer(
    data: DataSettings, train: list[Source], val: list[Source], progress: Progress
) -> Tokenizer:
    """The tokenizer made from the corpus: its characters, or byte pairs of its training text."""
    names = ", ".join(source.spec.name for source in train)
    if data.tokenizer == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from {names}")
        each, fraction = BPE_CHARACTERS // len(train), data.val_fraction * (not val)
        texts = (
            part
            for source in train
            for part in first_characters(training_parts(source, fraction), each)
        )
        return tokenizers.train_bpe(texts, data.tokenizer_vocab)
    characters: set[str] = set() if data.format == "text" else set(LAYOUT_CHARACTERS)
    for source in (*train, *val):
        for item in source.items():
            characters |= set().union(*texts_of(item, source.spec))
    if not characters:
        raise UserError(f"data.source: there is no text in {names}")
    alone = len(train) == 1 and all(source.single_text for source in (*train, *val))
    return tokenizers.char_tokenizer(characters, with_eot=not alone)


def texts_of(item: Item, spec: SourceSpec) -> list[str]:
    """The texts of an item; none if it cannot be read and `data.on_bad_item` leaves it out."""
    try:
        return [text_of(item, spec)] if spec.format == "text" else example_texts(item, spec)
    except UserError:
        if spec.on_bad_item == "stop":
            raise
        return []


def first_characters(texts: Iterable[str], characters: int) -> Iterator[str]:
    """Texts of `characters` characters together, the last one cut."""
    for text in texts:
        yield text[:characters]
        if (characters := characters - len(text)) <= 0:
            return


def training_parts(source: Source, fraction: float) -> Iterator[str]:
    """The texts of a source that are not held out, in parts of at most `STRETCH` characters.

    Of a text in several blocks only the first one is used, except in a source of few documents.
    """
    spec, sizes, size = source.spec, list[int](), 0
    share, is_text = Fraction(str(fraction)), source.spec.format == "text"
    for item in source.items() if fraction and is_text else ():
        size += sum(map(len, texts_of(item, spec)))
        if not item.more:
            sizes, size = [*sizes, size], 0
            if sum(map(bool, sizes)) == FEW:
                break
    few, number, done = sum(map(bool, sizes)) < FEW, 0, 0
    for item in source.items():
        texts = texts_of(item, spec)
        length = sum(map(len, texts))
        if is_text and fraction:
            if few or done or item.more or length > LONG_TEXT:
                whole = sizes[number] if few else length * (not done)
                texts = ["".join(texts)[: max(0, trained_characters(whole, share) - done)]]
            elif held_out(np.array([hash_of("".join(texts))], np.uint64), fraction)[0]:
                texts = []
        elif fraction and held_out(np.array([example_group(item, spec)], np.uint64), fraction)[0]:
            texts = []
        yield from (part for text in texts for part in stretches(text))
        number, done = (number, done + length) if item.more else (number + 1, 0)
