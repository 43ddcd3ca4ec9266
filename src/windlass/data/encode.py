"""Items of a source -> tokens -> shards, in parallel and resumable.

The shards are a pure function of source, tokenizer and `shard_tokens`: neither the number of
workers nor any number of kills changes a byte. The tokenizers release Python's lock, so threads
encode text. Templates of conversations are Python code, so processes encode them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from windlass.data import vocabulary
from windlass.data.chat import Template
from windlass.data.examples import encode_example, example_group, example_texts, hash64
from windlass.data.progress import Progress
from windlass.data.shards import Index, Row, ShardWriter
from windlass.data.sources import Item, Source, SourceSpec, text_of
from windlass.data.split import (
    FEW,
    LONG_TEXT,
    held_out,
    held_out_examples,
    surely_held_out,
    trained_characters,
)
from windlass.data.tokenizer import FOLDER, Tokenizer, stretches
from windlass.errors import RunFailed, UserError
from windlass.fileio import write_atomic
from windlass.recipe import DataSettings

BPE_CHARACTERS = 200_000_000  # of the corpus at most, from which byte pairs are learned
VALIDATED = 100_000  # documents of validation data at most, from which byte pairs do not learn
ALL = 1 << 62  # characters
BATCH_CHARACTERS = 1 << 18  # for a worker at once: enough that the hand-over costs nothing
BATCH_ITEMS = 256
BEFORE = 256  # characters of the text before a part, for the tokenizer
LEFT_OUT = "left-out.txt"
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Tool: Question: Context: Answer: \n"


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
                    example = encode_example(job.item, self.spec, self.tokenizer, self.template)
                    rows.append(example._replace(item=job.number))
            except UserError as error:
                rows.append(Bad(job.number, str(error)))
        return rows

    def _text_rows(self, job: Job) -> list[Row]:
        """A text as rows of at most `STRETCH` characters; none of an empty text."""
        tokenizer, text = self.tokenizer, text_of(job.item, self.spec)
        digest = hash64(text) if job.text is None else job.text
        begins, before = job.before is None and not job.skip, job.before or ""
        if job.skip:
            before, text = (before + text[: job.skip])[-BEFORE:], text[job.skip :]
        rows, parts = list[Row](), list(stretches(text))
        if not parts and not begins and not job.item.more:
            parts = [""]  # the end of a text whose last block is committed
        for number, part in enumerate(parts):
            ids = [tokenizer.encode(part, before)]
            last = number == len(parts) - 1 and not job.item.more
            if begins and not number:
                ids.insert(0, np.array(tokenizer.first, np.int64))
            if last:
                ids.append(np.array(tokenizer.last, np.int64))
            row = Row(job.number, np.concatenate(ids), text=digest if last else 0)
            rows.append(row._replace(characters=len(part), more=not last))
            before = (before + part)[-BEFORE:]
        return rows


@contextlib.contextmanager
def worker_processes(
    directory: Path, spec: SourceSpec, count: int
) -> Iterator[Callable[[list[Job]], list[Row | Bad]]]:
    """A function that encodes in one of `count` processes, which end with this one.

    Those of `multiprocessing` would run a user's script again, and outlive a killed parent.
    """
    words = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
    free = SimpleQueue[Any]()

    def encode_in_process(jobs: list[Job]) -> list[Row | Bad]:
        process = free.get()
        try:
            process.stdin.write(pickle.dumps(jobs))
            process.stdin.flush()
            rows: list[Row | Bad] = pickle.load(process.stdout)
            return rows
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            ended = f"a process that tokenizes ended with code {process.wait()}"
            raise RunFailed(f"{ended}; start again to resume, with fewer data.workers") from None
        finally:
            free.put(process)

    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            stack.enter_context(process)
            stack.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(pickle.dumps((directory / FOLDER, spec)))
            free.put(process)
        yield encode_in_process


def serve() -> None:
    """Encode what comes through stdin, until the other end closes it."""
    source, out = sys.stdin.buffer, sys.stdout.buffer
    with contextlib.suppress(EOFError, BrokenPipeError, KeyboardInterrupt):
        folder, spec = pickle.load(source)
        encoder = Encoder(spec, vocabulary.load_tokenizer(folder), Template.of_directory(folder))
        while True:
            out.write(pickle.dumps(encoder(pickle.load(source))))
            out.flush()


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
        if not item.more or job.skip < len(str(item.value)):
            batch.append(job)
        size += len(str(item.value))
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
    use_processes = len(head) == 2 and workers > 1 and source.spec.format != "text"
    with (
        worker_processes(directory, source.spec, workers)
        if use_processes
        else contextlib.nullcontext(encoder) as work,
        ThreadPoolExecutor(workers) as pool,
    ):
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
    # A kill must not leave an index with a short shard that is replaced.
    index = index.save(directory)
    listing = directory / LEFT_OUT
    known = listing.read_text("utf-8").split("\n") if index.left_out else []
    write_atomic(listing, "".join(f"{line}\n" for line in known[: index.left_out]))
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
                    writer.index.left_out += 1
                    left_out.write(" ".join(row.problem.split()) + "\n")
                    left_out.flush()
                    continue
                writer.add(row)
                if enough(writer, row):
                    writer.index.items = row.item + 1
                    return writer.finish(complete=False)
            writer.index.items = after
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
        validated = {
            digest
            for source in val
            for digest in itertools.islice(document_hashes(source), VALIDATED)
        }
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


def document_hashes(source: Source, start: int = 0) -> Iterator[int]:
    """The hash of each document from number `start` on: of its text, or of an example's group."""
    spec, digest = source.spec, hashlib.blake2b(digest_size=8)
    for item in source.items(start):
        if spec.format != "text":
            yield example_group(item, spec) if texts_of(item, spec) else 0
            continue
        digest.update("".join(texts_of(item, spec)).encode("utf-8", "replace"))
        if not item.more:
            yield int.from_bytes(digest.digest(), "little")
            digest = hashlib.blake2b(digest_size=8)


def training_parts(
    source: Source, fraction: float, validated: set[int], characters: int
) -> Iterator[str]:
    """The first `characters` of the texts that train, in parts of at most `STRETCH` each.

    Those with a hash in `validated` do not, nor what is held out. Of a text in several blocks only
    the first one is used, except in a source of few documents.
    """
    spec, is_text, share = source.spec, source.spec.format == "text", Fraction(str(fraction))
    sizes, size, groups, first = list[int](), 0, set[int](), list[int]()
    for item in source.items() if fraction else ():
        texts = texts_of(item, spec)
        size += sum(map(len, texts))
        if not item.more:
            if is_text and 0 < size == len(texts[0]) <= LONG_TEXT:
                first.append(hash64(*texts))
            groups.add((len(sizes) if is_text else example_group(item, spec)) if size else -1)
            sizes, size = [*sizes, size], 0
            if len(groups - {-1}) == FEW:
                break
    few = len(groups := groups - {-1}) < FEW
    array = np.array(sorted(groups), np.uint64)
    held = set(surely_held_out(np.array(first, np.uint64), fraction).tolist())
    if few:
        held = set() if is_text else set(array[held_out_examples(array, fraction)].tolist())
    begins, number, room = True, 0, 0  # room: the next characters of a document that train
    for item in source.items():
        texts = texts_of(item, spec)
        if begins and texts:
            if not is_text:
                digest = example_group(item, spec)
            else:
                digest = next(document_hashes(source, number)) if item.more else hash64(*texts)
            room, is_cut = ALL, is_text and (few or item.more or len(texts[0]) > LONG_TEXT)
            if digest in validated or digest in held:
                room = 0
            elif fraction and is_cut:
                room = trained_characters(sizes[number] if few else len(texts[0]), share)
            elif fraction and not few and held_out(np.array([digest], np.uint64), fraction)[0]:
                room = 0
        for text in texts:
            part = text[: min(room, characters)]
            yield from stretches(part)
            if (characters := characters - len(part)) <= 0:
                return
            room -= min(room, len(text)) if is_text else 0
        begins = not item.more
        number += begins
