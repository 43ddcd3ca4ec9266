"""Turn the items of a source into rows of tokens, in parallel, and write them as shards. The shards
are a pure function of source, tokenizer, template and `shard_tokens`, also after a kill.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import pickle
import re
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np

from windlass.data.chat import Template
from windlass.data.items import QUESTION, Item, Pair, Question, example_of, prompt_end, text_of
from windlass.data.progress import Progress
from windlass.data.recipe_sources import SourceSpec
from windlass.data.shards import Corpus, Index, Need, Row, ShardWriter
from windlass.data.sources import Source
from windlass.data.tokenizer import FOLDER, Tokenizer, stretches
from windlass.data.tokenizer_kinds import load_tokenizer
from windlass.errors import RunFailed, UserError
from windlass.fileio import write_atomic

BATCH_CHARACTERS = 1 << 18  # for a worker at once: enough that the hand-over costs nothing
BATCH_ITEMS = 256
LEFT_OUT = "left-out.txt"
SPECIAL = re.compile(r"<\|[^\s<>{}|]+\|>")  # looks like a special token
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
    writer = ShardWriter(directory, index)
    index = writer.index  # without a shard that may grow
    listing = directory / LEFT_OUT
    lines = listing.read_text("utf-8").split("\n") if index.left_out else []
    write_atomic(listing, "".join(f"{line}\n" for line in lines[: index.left_out]))
    if index.shards:
        progress.note(f"{spec.name}: going on after {index.tokens:,} committed tokens")
    need = Need(Corpus(directory, index, spec, encoder.tokenizer))
    index.items = index.resume.item
    unread = dict[str, None]()  # keys of all items
    batches = encode(source, directory, encoder, index.resume.item, workers, progress.note)
    with contextlib.closing(batches), writer, listing.open("a", encoding="utf-8") as left_out:
        for rows, items in batches:
            keys = dict.fromkeys(key for row in rows for key in row.unread)
            if new := [key for key in keys if key not in unread]:
                unread |= keys
                progress.note(f"{spec.name}: not read: {', '.join(new)}")
            for row in rows:
                if row.problem:
                    if spec.on_bad_item == "stop":
                        advice = 'data.on_bad_item="skip" leaves such items out'
                        raise UserError(f"{row.problem} ({advice})")
                    left_out.write(" ".join(row.problem.split()) + "\n")
                    left_out.flush()
                if writer.add(row) and need.is_met(row, writer.tokens):
                    writer.index.items = row.item + 1
                    return writer.finish(complete=False)
            last = items[-1]
            writer.index.items = last.number + (not last.more)
            progress.update(f"tokens of {spec.name}", last.fraction, writer.tokens)
        return writer.finish(complete=True)


def encode(
    source: Source,
    directory: Path,
    encoder: Encoder,
    first: int,
    workers: int,
    note: Callable[[str], None],
) -> Generator[tuple[list[Row], list[Item]], None, None]:
    """The rows of a source from item `first` on, in order, with the items that gave them.

    Threads encode texts, because tokenizers release Python's lock; processes encode examples,
    because their templates are Python code.
    """
    ahead = batches_of(source, first)
    head = list(itertools.islice(ahead, 2))
    for remark in encoder.remarks(head[0] if head else []):
        note(remark)
    use_processes = len(head) == 2 and workers > 1 and source.spec.format != "text"
    waiting = deque[tuple[Future[list[Row]], list[Item]]]()
    with (
        worker_processes(directory, source.spec, workers)
        if use_processes
        else contextlib.nullcontext(encoder.rows) as work,
        ThreadPoolExecutor(workers) as pool,
    ):
        try:
            for items in itertools.chain(head, ahead):
                waiting.append((pool.submit(work, items), items))
                if len(waiting) > 2 * workers:
                    future, done = waiting.popleft()
                    yield future.result(), done
            for future, done in waiting:
                yield future.result(), done
        finally:
            for future, _ in waiting:
                future.cancel()


def batches_of(source: Source, number: int) -> Iterator[list[Item]]:
    """The items of a source from a number on, as many as a worker takes at once."""
    items, size = list[Item](), 0
    for item in parts_of(source, number):
        items.append(item)
        value = item.value
        size += len(value if isinstance(value, str | bytes) else str(value))
        if size >= BATCH_CHARACTERS or len(items) >= BATCH_ITEMS:
            yield items
            items, size = [], 0
    if items:
        yield items


def parts_of(source: Source, number: int = 0) -> Iterator[Item]:
    """The items of a source from a number on, texts in parts of at most `STRETCH` characters."""
    rest, continues, hashed = "", False, hashlib.blake2b(digest_size=8)  # of the text so far
    for item in source.items(number):
        value = item.value
        if source.spec.format == "text":
            try:
                text = text_of(item, source.spec)
                hashed.update(text.encode("utf-8", "replace"))
                *parts, rest = list(stretches(rest + text)) or [""]
                value = rest
            except UserError as error:
                if continues:  # the parts of the text before it are written
                    raise
                parts, value = [], error
            for part in parts:
                yield item._replace(value=part, more=True, number=number, continues=continues)
                continues = True
        if not item.more:
            digest = int.from_bytes(hashed.digest(), "little")
            yield item._replace(value=value, number=number, continues=continues, digest=digest)
            number += 1
            rest, continues, hashed = "", False, hashlib.blake2b(digest_size=8)


@contextlib.contextmanager
def worker_processes(
    directory: Path, spec: SourceSpec, count: int
) -> Iterator[Callable[[list[Item]], list[Row]]]:
    """Gives a function that encodes in one of `count` processes, which end with this one."""
    words = [sys.executable, "-P", "-c", f"from {__name__} import serve; serve()"]
    free = SimpleQueue[Any]()

    def encode_in_process(items: list[Item]) -> list[Row]:
        process = free.get()
        try:
            process.stdin.write(pickle.dumps(items))
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

    def rows(self, items: list[Item]) -> list[Row]:
        """The rows of items; one with a `problem` if an item cannot be read."""
        encode = self.text_rows if self.spec.format == "text" else self.example_rows
        rows = list[Row]()
        for item in items:
            try:
                rows += encode(item)
            except UserError as error:
                if item.continues or item.more:  # other parts of the text are written
                    raise
                rows.append(Row(item.number, np.zeros(0, np.int64), problem=str(error)))
        return rows

    def text_rows(self, item: Item) -> list[Row]:
        """A text, or a part of one, as a row; none of an empty text."""
        tokenizer, more, text = self.tokenizer, item.more, text_of(item, self.spec)
        if not text and not item.continues:
            return []
        if self.spec.special_tokens:
            head, *rest = list(tokenizer.pieces(text)) or [""]
            begin = [head] if isinstance(head, int) else tokenizer.encode(head, item.continues)
            ids = np.append(begin, tokenizer.encode_marked([(piece, 0) for piece in rest])[0])
            ids = ids.astype(np.int64)
        else:
            ids = tokenizer.encode(text, item.continues)
        first = () if item.continues else tokenizer.first
        last = () if more else tokenizer.last
        if tuple(ids[: len(first)].tolist()) != first:  # the text may have its edges
            ids = np.append(first, ids)
        if tuple(ids[len(ids) - len(last) :].tolist()) != last:
            ids = np.append(ids, last)
        return [Row(item.number, ids, text=item.digest, characters=len(text), more=more)]

    def example_rows(self, item: Item) -> list[Row]:
        """The tokens of an example, in one row or a row for each answer; UserError if it is bad."""
        spec, tokenizer, place = self.spec, self.tokenizer, item.place
        example = example_of(item, spec)
        if isinstance(example, Question):
            return [self._question_row(item.number, example)]
        try:
            if isinstance(example, Pair):
                has_completion = bool(example.completion.strip())
                encoded = [self._encode_pair(*example.texts)] if has_completion else []
            else:
                trained = example.trained(spec.answers)
                is_completion = spec.answers == "auto" and example.prompt > 0
                rendered = self.template.rows(
                    example.messages, tokenizer, example.variables, trained, is_completion
                )
                encoded = [tokenizer.encode_marked(pieces) for pieces in rendered]
        except UserError as error:
            raise UserError(f"{place}: {error}") from None
        rows, group = list[Row](), example.group
        for ids, counted in encoded:
            marks = np.array(counted, bool) | (spec.answers == "everything")
            marks[:1] = False  # no token predicts the first one
            if marks.any():
                tokens, reach = np.array(ids, np.int64), int(marks.argmax()) + 1
                rows.append(Row(item.number, tokens, marks, group, group=group, reach=reach))
        if not rows:
            problem = "there is nothing to learn, because its answers are empty or do not count"
            raise UserError(f"{place}: {problem}; remove the item")
        characters = sum(map(len, example.texts))  # of the whole item
        rows[-1] = rows[-1]._replace(characters=characters, unread=example.unread)
        return rows

    def _encode_pair(self, prompt: str, completion: str) -> tuple[list[int], list[int]]:
        """Prompt, completion and the end-of-text token, with marks on all after the prompt."""
        tokenizer = self.tokenizer
        if self.spec.special_tokens and self.spec.format == "chat":
            pieces = [(piece, 0) for piece in tokenizer.pieces(prompt)]
            pieces += [(piece, 1) for piece in tokenizer.pieces(completion)]
            ids, marks = tokenizer.encode_marked(pieces)
            if tuple(ids[: len(tokenizer.begin)]) != tokenizer.begin:
                ids, marks = [*tokenizer.begin, *ids], [0] * len(tokenizer.begin) + marks
        else:
            ids, start = tokenizer.encode_pair(prompt, completion)
            marks = [0] * start + [1] * (len(ids) - start)
        if tokenizer.eot is not None and ids[-1:] != [tokenizer.eot]:
            ids, marks = [*ids, tokenizer.eot], [*marks, 1]
        return ids, marks

    def _question_row(self, number: int, question: Question) -> Row:
        tokenizer, answer = self.tokenizer, question.answers[0]
        ids, marks = self._encode_pair(question.prompt, f" {answer}")
        context = question.context[: question.context.index(answer) + len(answer)]
        reached = QUESTION.format(question=question.question, context=context)
        return Row(
            number,
            np.array(ids, np.int64),
            marks=np.array(marks, bool),
            text=question.hash,
            characters=sum(map(len, question.texts)),
            group=question.group,
            tail=sum(marks) + prompt_end(tokenizer),
            reach=len(tokenizer.prompt(reached)),
            unread=question.unread,
        )

    def remarks(self, items: Sequence[Item]) -> Iterator[str]:
        """Warnings about special tokens in the first items that Windlass takes as text."""
        spec, tokenizer, texts = self.spec, self.tokenizer, list[tuple[str, str]]()  # with places
        for item in items:
            with contextlib.suppress(UserError):
                if spec.format == "text":
                    texts.append((item.place, text_of(item, spec)))
                    continue
                example = example_of(item, spec)
                if isinstance(example, Pair):
                    texts.append((item.place, "".join(example.texts)))
        template = self.template.source if spec.format == "chat" else ""
        special = dict.fromkeys(SPECIAL.findall(template))
        if unknown := [text for text in special if text not in tokenizer.special]:
            problem = f"the chat template writes {', '.join(unknown)}, which the tokenizer lacks"
            yield f"{problem}: data.add_tokens='{','.join(unknown)}' makes each one token"
        if spec.special_tokens or spec.separator:
            return
        for place, text in texts:
            tokens = (*SEPARATORS, *tokenizer.special)
            if seen := next((token for token in tokens if token in text), ""):
                remedy = "data.special_tokens=true makes it a token"
                if spec.format == "text":
                    separator = json.dumps(seen)
                    remedy += f", and in a text file data.separator={separator} begins a document"
                yield f"{place} has {seen} in it, which is plain text to the model: {remedy}"
                return
