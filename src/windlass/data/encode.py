"""Turn the items of a source into rows of tokens, in parallel, and write them as shards. The shards
are a pure function of source, tokenizer, template and `shard_tokens`, also after a kill.
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
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from windlass.data.chat import Template
from windlass.data.items import (
    QUESTION,
    Conversation,
    Item,
    Pair,
    Question,
    example_of,
    hash64,
    prompt_end,
    text_of,
)
from windlass.data.progress import Progress
from windlass.data.recipe_sources import SourceSpec
from windlass.data.shards import Index, Row, ShardWriter, Table
from windlass.data.sources import Source
from windlass.data.split import Need
from windlass.data.tokenizer import FOLDER, Tokenizer, stretches
from windlass.data.tokenizer_kinds import load_tokenizer
from windlass.errors import RunFailed, UserError
from windlass.fileio import write_atomic

BATCH_CHARACTERS = 1 << 18  # for a worker at once: enough that the hand-over costs nothing
BATCH_ITEMS = 256
BEFORE = 256  # characters of the text before a part, for the tokenizer
LEFT_OUT = "left-out.txt"
SEPARATORS = ("<|endoftext|>", "<|end_of_text|>")  # between the documents of some text files


def write_source(
    source: Source,
    directory: Path,
    index: Index,
    encoder: Encoder,
    workers: int,
    progress: Progress,
) -> Index:
    """Write the shards of a source after the full ones of `index`, as far as its limit."""
    spec = source.spec
    writer = ShardWriter(directory, index, encoder.tokenizer.dtype)
    index = writer.index  # without a shard that may grow
    listing = directory / LEFT_OUT
    lines = listing.read_text("utf-8").split("\n") if index.left_out else []
    write_atomic(listing, "".join(f"{line}\n" for line in lines[: index.left_out]))
    if index.shards:
        progress.note(f"{spec.name}: going on after {index.tokens:,} committed tokens")
    need = Need(spec, Table(directory, index))
    characters = 0  # of the document so far
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
                if row.more or row.problem:
                    continue
                if need.is_met(row.group or row.text, characters, writer.tokens):
                    writer.index.items = row.item + 1
                    return writer.finish(complete=False)
                characters = 0
            writer.index.items = batch.after
            progress.update(f"tokens of {spec.name}", batch.fraction, writer.tokens)
        return writer.finish(complete=True)


class Job(NamedTuple):
    number: int
    item: Item
    before: str | None = None  # the end of the text that it continues; None: it begins a text
    text: int | None = None  # hash of the whole text up to here; None: of this item alone


class Batch(NamedTuple):
    """Items for a worker at once."""

    jobs: list[Job]
    after: int  # the number of the item that follows, which may be the rest of the last text
    fraction: float  # of the source that is read


def encode(
    source: Source,
    directory: Path,
    encoder: Encoder,
    first: int,
    workers: int,
    note: Callable[[str], None],
) -> Generator[tuple[list[Row], Batch], None, None]:
    """The rows of a source from item `first` on, in order, with their batch.

    Threads encode texts, because tokenizers release Python's lock; processes encode examples,
    because their templates are Python code.
    """
    ahead = batches_of(source, first)
    head = list(itertools.islice(ahead, 2))
    for remark in encoder.remarks([job.item for job in head[0].jobs]):
        note(remark)
    use_processes = len(head) == 2 and workers > 1 and source.spec.format != "text"
    waiting = deque[tuple[Future[list[Row]], Batch]]()
    with (
        worker_processes(directory, source.spec, workers)
        if use_processes
        else contextlib.nullcontext(encoder.rows) as work,
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
            out.write(pickle.dumps(encoder.rows(pickle.load(source))))
            out.flush()


@dataclass(frozen=True)
class Encoder:
    """Turns the items of a source into rows."""

    spec: SourceSpec
    tokenizer: Tokenizer
    template: Template

    def rows(self, jobs: list[Job]) -> list[Row]:
        """The rows of items; one with a `problem` if an item cannot be read."""
        rows = list[Row]()
        for job in jobs:
            try:
                is_text = self.spec.format == "text"
                rows += self.text_rows(job) if is_text else self.example_rows(job)
            except UserError as error:
                if job.text is not None:  # a block of a long text, whose other blocks are written
                    raise
                rows.append(Row(job.number, np.zeros(0, np.int64), problem=str(error)))
        return rows

    def text_rows(self, job: Job) -> list[Row]:
        """A text as rows of at most `STRETCH` characters; none of an empty text."""
        tokenizer = self.tokenizer
        text = text_of(job.item, self.spec)
        digest = hash64(text) if job.text is None else job.text
        begins, before = job.before is None, job.before or ""
        parts = list(stretches(text))
        if not parts and not begins and not job.item.more:
            parts = [""]  # the end of a text, after its last block
        rows = list[Row]()
        for number, part in enumerate(parts, 1):
            is_last = number == len(parts) and not job.item.more
            encode = tokenizer.encode_special if self.spec.special_tokens else tokenizer.encode
            ids = tokenizer.with_edges(encode(part, before), begins and number == 1, is_last)
            row = Row(job.number, ids, text=digest if is_last else 0)
            rows.append(row._replace(characters=len(part), more=not is_last))
            before = (before + part)[-BEFORE:]
        return rows

    def example_rows(self, job: Job) -> list[Row]:
        """The tokens of an example, in one row or a row for each answer; UserError if it is bad."""
        place = job.item.place
        example = example_of(job.item, self.spec)
        if isinstance(example, Question):
            return [self._question_row(job.number, example)]
        rows, group = list[Row](), example.group
        try:
            for tokens, marks in self._encoded(example):
                marks[:1] = False  # no token predicts the first one
                if marks.any():
                    reach = int(marks.argmax()) + 1
                    rows.append(Row(job.number, tokens, marks, group, group=group, reach=reach))
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        if not rows:
            problem = "there is nothing to learn, because its answers are empty or do not count"
            raise UserError(f"{place}: {problem}; remove the item")
        rows[-1] = rows[-1]._replace(characters=sum(map(len, example.texts)))  # of the whole item
        return rows

    def _encoded(self, example: Conversation | Pair) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Tokens (int64) and marks (bool) of each row of an example."""
        spec, learns_all = self.spec, self.spec.answers == "everything"
        if isinstance(example, Pair):
            tokens, marks = self._encoded_pair(example)
            yield tokens, (marks | learns_all) & bool(example.completion.strip())
            return
        trained = example.trained(spec.answers)
        is_completion = spec.answers == "auto" and example.prompt > 0
        how = example.variables, trained, is_completion
        for pieces in self.template.rows(example.messages, self.tokenizer, *how):
            ids, counted = self.tokenizer.encode_marked(pieces)
            yield np.array(ids, np.int64), np.array(counted, bool) | learns_all

    def _encoded_pair(self, pair: Pair) -> tuple[np.ndarray, np.ndarray]:
        """Two texts, then the end-of-text token."""
        tokenizer = self.tokenizer
        if self.spec.special_tokens:
            texts = enumerate(pair.texts)
            pieces = [(piece, mark) for mark, text in texts for piece in tokenizer.pieces(text)]
            ids, marks = tokenizer.encode_marked(pieces)
            completion = sum(marks)
            if tuple(ids[: len(tokenizer.begin)]) != tokenizer.begin:
                ids = [*tokenizer.begin, *ids]
            prompt = len(ids) - completion
        else:
            ids, prompt = tokenizer.encode_pair(pair.prompt, pair.completion)
        if tokenizer.eot is not None and ids[-1:] != [tokenizer.eot]:
            ids = [*ids, tokenizer.eot]
        return np.array(ids, np.int64), np.arange(len(ids)) >= prompt

    def _question_row(self, number: int, question: Question) -> Row:
        tokenizer = self.tokenizer
        if tokenizer.eot is None:
            problem = "data.tokenizer lacks an end-of-text token to end an answer"
            raise UserError(f"{problem}; use byte, bpe, gpt2 or hf:")
        answer = question.answers[0]
        both, prompt = tokenizer.encode_pair(question.prompt, f" {answer}")
        ids = np.array([*both, tokenizer.eot], np.int64)
        context = question.context[: question.context.index(answer) + len(answer)]
        reached = QUESTION.format(question=question.question, context=context)
        return Row(
            number,
            ids,
            marks=np.arange(len(ids)) >= prompt,
            text=question.hash,
            characters=sum(map(len, question.texts)),
            group=question.group,
            tail=len(ids) - prompt + prompt_end(question, tokenizer),
            reach=len(tokenizer.prompt(reached)),
        )

    def remarks(self, items: Sequence[Item]) -> Iterator[str]:
        """Warnings about content of the first items that Windlass ignores or takes as text."""
        spec, tokenizer = self.spec, self.tokenizer
        unread, texts = dict[str, None](), list[tuple[str, str]]()  # texts with their places
        for item in items:
            with contextlib.suppress(UserError):
                if spec.format == "text":
                    texts.append((item.place, text_of(item, spec)))
                    continue
                example = example_of(item, spec)
                unread |= dict.fromkeys(example.unread)
                if isinstance(example, Pair):
                    texts.append((item.place, "".join(example.texts)))
        if unread:
            yield f"{spec.name}: not read: {', '.join(unread)}"
        if spec.format == "chat" and (unknown := self.template.unknown_tokens(tokenizer)):
            problem = f"the chat template writes {', '.join(unknown)}, which the tokenizer lacks"
            yield f"{problem}: data.add_tokens='{','.join(unknown)}' makes each one token"
        if spec.special_tokens or spec.separator:
            return
        special = (*SEPARATORS, *tokenizer.special)
        for place, text in texts:
            if seen := next((token for token in special if token in text), ""):
                problem = f"{place} has {seen} in it, which is plain text to the model"
                remedy = "data.special_tokens=true makes it a token"
                if spec.format == "text":
                    separator = json.dumps(seen)
                    remedy += f", and in a text file data.separator={separator} begins a document"
                yield f"{problem}: {remedy}"
                return
