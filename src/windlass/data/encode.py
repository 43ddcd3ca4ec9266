"""Items of a source -> tokens -> shards, in parallel and resumable: a pure function of source,
tokenizer and `shard_tokens`. Threads encode text, because tokenizers release Python's lock;
processes encode conversations, because their templates are Python code.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from windlass.data.chat import Template
from windlass.data.corpus import Need, Table
from windlass.data.examples import encode_example, hash64, pair_text, unread_keys
from windlass.data.progress import Progress
from windlass.data.recipe_sources import SourceSpec
from windlass.data.records import MARKS, Item, text_of
from windlass.data.shards import Index, Row, ShardWriter
from windlass.data.sources import Source
from windlass.data.tokenizer import FOLDER, Tokenizer, stretches
from windlass.data.tokenizer_kinds import load_tokenizer
from windlass.errors import RunFailed, UserError
from windlass.fileio import write_atomic

BATCH_CHARACTERS = 1 << 18  # for a worker at once: enough that the hand-over costs nothing
BATCH_ITEMS = 256
BEFORE = 256  # characters of the text before a part, for the tokenizer
LEFT_OUT = "left-out.txt"


class Job(NamedTuple):
    number: int
    item: Item
    before: str | None = None  # the end of the text that it continues; None: it begins a text
    text: int | None = None  # hash of the whole text up to here; None: of this item alone


class Encoder:
    """Turns items into rows; one with a `problem` if an item cannot be read."""

    def __init__(self, spec: SourceSpec, tokenizer: Tokenizer, template: Template):
        self.spec, self.tokenizer, self.template = spec, tokenizer, template

    def __call__(self, jobs: list[Job]) -> list[Row]:
        rows = list[Row]()
        for job in jobs:
            try:
                if self.spec.format == "text":
                    rows += self._text_rows(job)
                else:
                    own = encode_example(job.item, self.spec, self.tokenizer, self.template)
                    rows += [row._replace(item=job.number) for row in own]
            except UserError as error:  # the end of the text, if its other blocks can be read
                end = np.array(self.tokenizer.last, np.int64)
                row = Row(job.number, end, text=job.text or 0, more=job.item.more)
                rows.append(row._replace(problem=str(error)))
        return rows

    def _text_rows(self, job: Job) -> list[Row]:
        """A text as rows of at most `STRETCH` characters; none of an empty text."""
        tokenizer, text = self.tokenizer, text_of(job.item, self.spec)
        digest = hash64(text) if job.text is None else job.text
        begins, before = job.before is None, job.before or ""
        rows, parts = list[Row](), list(stretches(text))
        if not parts and not begins and not job.item.more:
            parts = [""]  # the end of a text, after its last block
        for number, part in enumerate(parts):
            if self.spec.special_tokens and tokenizer.special_pattern.search(part):
                head, *rest = tokenizer.pieces(part)
                begin = [head] if isinstance(head, int) else tokenizer.encode(head, before).tolist()
                marked, _ = tokenizer.encode_marked([(one, 0) for one in rest])
                ids = np.array([*begin, *marked], np.int64)
            else:
                ids = tokenizer.encode(part, before)
            last = number == len(parts) - 1 and not job.item.more
            first, end = tokenizer.first * (begins and not number), tokenizer.last * last
            if tuple(ids[: len(first)].tolist()) != first:
                ids = np.concatenate([np.array(first, np.int64), ids])
            if tuple(ids[len(ids) - len(end) :].tolist()) != end:
                ids = np.concatenate([ids, np.array(end, np.int64)])
            row = Row(job.number, ids, text=digest if last else 0)
            rows.append(row._replace(characters=len(part), more=not last))
            before = (before + part)[-BEFORE:]
        return rows

    def remarks(self, items: Sequence[Item]) -> Iterator[str]:
        """Warnings about content of the first items that Windlass ignores or reads as plain text."""
        spec, tokenizer = self.spec, self.tokenizer
        if spec.format != "text" and (keys := unread_keys(items, spec)):
            yield f"{spec.name}: not read: {', '.join(keys)}"
        if spec.format == "chat" and (unknown := self.template.unknown_tokens(tokenizer)):
            problem = f"the chat template writes {', '.join(unknown)}, which the tokenizer lacks"
            yield f"{problem}: data.add_tokens='{','.join(unknown)}' makes each one token"
        if spec.special_tokens or spec.separator:
            return
        marks = (*MARKS, *tokenizer.special)
        for item in items:
            with contextlib.suppress(UserError):
                text = text_of(item, spec) if spec.format == "text" else pair_text(item, spec)
                if seen := next((mark for mark in marks if mark in text), ""):
                    more = (
                        f", and in a text file data.separator={json.dumps(seen)} begins a document"
                    )
                    yield (
                        f"{item.place} has {seen} in it, which is plain text to the model: "
                        f"data.special_tokens=true makes it a token{more * (spec.format == 'text')}"
                    )
                    return


@contextlib.contextmanager
def worker_processes(
    directory: Path, spec: SourceSpec, count: int
) -> Iterator[Callable[[list[Job]], list[Row]]]:
    """Gives a function that encodes in one of `count` processes, which end with this one."""
    words = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
    free = SimpleQueue[Any]()

    def encode_in_process(jobs: list[Job]) -> list[Row]:
        process = free.get()
        try:
            process.stdin.write(pickle.dumps(jobs))
            process.stdin.flush()
            rows: list[Row] = pickle.load(process.stdout)
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
        encoder = Encoder(spec, load_tokenizer(folder), Template.of_directory(folder))
        while True:
            out.write(pickle.dumps(encoder(pickle.load(source))))
            out.flush()


class Batch(NamedTuple):
    """Items for a worker at once."""

    jobs: list[Job]
    after: int  # the number of the item that follows, which may be the rest of the last text
    fraction: float  # of the source that is read


def batches_of(source: Source, number: int) -> Iterator[Batch]:
    """The items of a source from a number on; the last batch may be empty."""
    jobs, size, before = list[Job](), 0, ""
    hashed, begins = hashlib.blake2b(digest_size=8), True  # of a text; whether an item begins one
    item = Item("", None)
    for item in source.items(number):
        job = Job(number, item)
        if item.more or not begins:  # a block of a long text
            text = str(item.value)
            hashed.update(text.encode("utf-8", "replace"))
            digest = int.from_bytes(hashed.copy().digest(), "little")
            job = job._replace(before=None if begins else before, text=digest)
            before = (before + text)[-BEFORE:]
        jobs.append(job)
        begins = not item.more
        if begins:
            number, before, hashed = number + 1, "", hashlib.blake2b(digest_size=8)
        value = item.value
        size += len(value if isinstance(value, str | bytes) else str(value))
        if size >= BATCH_CHARACTERS or len(jobs) >= BATCH_ITEMS:
            yield Batch(jobs, number, item.fraction)
            jobs, size = [], 0
    yield Batch(jobs, number, item.fraction)


def encode(
    source: Source,
    directory: Path,
    encoder: Encoder,
    first: int,
    workers: int,
    note: Callable[[str], None],
) -> Generator[tuple[list[Row], Batch], None, None]:
    """The rows of a source from item `first` on, in order, with their batch."""
    ahead = batches_of(source, first)
    head = list(itertools.islice(ahead, 2))
    for remark in encoder.remarks([job.item for job in head[0].jobs]):
        note(remark)
    use_processes = len(head) == 2 and workers > 1 and source.spec.format != "text"
    waiting = deque[tuple[Future[list[Row]], Batch]]()
    with (
        worker_processes(directory, source.spec, workers)
        if use_processes
        else contextlib.nullcontext(encoder) as work,
        ThreadPoolExecutor(workers) as pool,
    ):
        try:
            for batch in itertools.chain(head, ahead):
                waiting.append((pool.submit(work, batch.jobs), batch))
                if len(waiting) > 2 * workers:
                    future, done = waiting.popleft()
                    yield future.result(), done
            for future, done in waiting:
                yield future.result(), done
        finally:
            for future, _ in waiting:
                future.cancel()


def write_source(
    source: Source,
    directory: Path,
    index: Index,
    encoder: Encoder,
    workers: int,
    progress: Progress,
) -> Index:
    """Write the shards of a source after the full ones of `index`, as far as its limit."""
    spec, writer = source.spec, ShardWriter(directory, index, encoder.tokenizer.dtype)
    index = writer.index
    listing = directory / LEFT_OUT
    lines = listing.read_text("utf-8").split("\n") if index.left_out else []
    write_atomic(listing, "".join(f"{line}\n" for line in lines[: index.left_out]))
    if index.shards:
        progress.note(f"{spec.name}: going on after {index.tokens:,} committed tokens")
    need, characters = Need(spec, Table(directory, index)), 0  # of the document so far
    batches = encode(source, directory, encoder, index.resume.item, workers, progress.note)
    with contextlib.closing(batches), writer, listing.open("a", encoding="utf-8") as left_out:
        for rows, batch in batches:
            for row in rows:
                if row.problem:
                    if spec.on_bad_item == "stop":
                        advice = 'data.on_bad_item="skip" leaves such items out'
                        raise UserError(f"{row.problem} ({advice})")
                    left_out.write(" ".join(row.problem.split()) + "\n")
                    left_out.flush()
                writer.add(row)
                characters += row.characters
                if row.more or (row.problem and not characters):
                    continue
                if need.is_met(row.group or row.text, characters, writer.tokens):
                    writer.index.items = row.item + 1
                    return writer.finish(complete=False)
                characters = 0
            writer.index.items = batch.after
            progress.update(f"tokens of {spec.name}", batch.fraction, writer.tokens)
        return writer.finish(complete=True)
