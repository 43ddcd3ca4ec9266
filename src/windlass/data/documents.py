"""A corpus of documents -> tokenizer -> token shards: in parallel, committed shard by shard, resumed where it was killed.

The result is a pure function of the corpus and the settings: the number of workers, and any number of kills, change no
byte of it. Workers are threads, because the tokenizers release Python's lock: nothing is forked, nothing outlives us.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ValidationError

from windlass.data import foreign, vocabulary
from windlass.data.shards import EVAL, MAIN, Index, Shard, ShardWriter, Split, Stream, parts
from windlass.data.sources import Corpus, find_files, open_corpus
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import DataSettings, Recipe

PROGRESS = "progress.json"
BPE_CHARACTERS = 200_000_000
"""Characters of the corpus that a byte-pair vocabulary is learned from, at most."""
BATCH_CHARACTERS = 1 << 18
"""Text that a worker gets at once: enough that the hand-over costs nothing."""
LINE_SECONDS = 10.0


class Progress:
    """What a long preparation shows on stderr: a bar of `rich` in a terminal, a line every ten seconds elsewhere."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._next_line = time.monotonic() + LINE_SECONDS

    def note(self, text: str) -> None:
        """A line; above the bar, where there is one, since rich redirects stderr meanwhile."""
        print(f"data: {text}", file=sys.stderr, flush=True)

    def update(self, stage: str, fraction: float | None, tokens: int = 0) -> None:
        """So far: the stage, its share that is done (None where nobody knows), and tokens written."""
        counted = f"{tokens:,} tokens" if tokens else ""
        if self._bar is None and not sys.stderr.isatty():
            if time.monotonic() >= self._next_line:
                share = "" if fraction is None else f"{fraction:.0%}"
                self.note(f"{stage}: {', '.join(part for part in (share, counted) if part)}")
                self._next_line = time.monotonic() + LINE_SECONDS
            return
        if self._bar is None:
            from rich import progress
            from rich.console import Console

            columns = (*progress.Progress.get_default_columns(), progress.TextColumn("{task.fields[tokens]}"))
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(stage, tokens="")
        task = self._bar.tasks[0]
        if stage != task.description:
            self._bar.reset(task.id, description=stage)
        total = None if fraction is None else 1.0
        self._bar.update(task.id, total=total, completed=fraction or 0.0, tokens=counted)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class Committed(BaseModel):
    """What is on disk of a stream; `resume` as in `ShardWriter`."""

    shards: list[Shard] = []
    resume: tuple[int, int] = (0, 0)
    done: bool = False


class State(BaseModel):
    """`progress.json`: what an interrupted preparation has committed, and of what work."""

    settings: dict[str, Any]
    source: dict[str, Any]
    tokenizer: str = ""
    """Its fingerprint."""
    streams: dict[str, Committed] = {}


@dataclass
class Part:
    """One stream of documents on its way into shards."""

    stem: str
    corpus: Corpus
    enough: Callable[[int], bool] = lambda tokens: False
    """Whether so many tokens are enough."""
    cut: int = 0
    """With a single text, which has no document's end to stop at: keep so many tokens; 0: all."""


class TextPreparation:
    """Makes the shards of one data directory, in the process that holds its lock."""

    def __init__(
        self, recipe: Recipe, settings: dict[str, Any], directory: Path, workers: int, progress: Progress
    ) -> None:
        self.recipe, self.data, self.settings = recipe, recipe.data, settings
        self.directory, self.workers, self.progress = directory, workers, progress
        self.state = State(settings=settings, source={})
        self.inherited: set[str] = set()
        """Files that an earlier, interrupted preparation committed: their SHA-256 is read again before they are used."""

    def run(self) -> Index:
        """Write the shards and the tokenizer; returns the index, which is not written yet."""
        if self.data.source.startswith("shards:"):
            tokenizer, source, streams = self._scan_foreign()
        else:
            stream_parts = self._parts()
            source = {
                p.stem: {"name": p.corpus.name, "single_text": p.corpus.single_text, **p.corpus.description}
                for p in stream_parts
            }
            self._resume(source)
            tokenizer = self._make_tokenizer(stream_parts)
            if self.state.tokenizer not in ("", tokenizer.fingerprint):
                self.state, self.inherited = State(settings=self.settings, source=source), set()
            self.state.tokenizer = tokenizer.fingerprint
            if tokenizer.eot is None and not all(part.corpus.single_text for part in stream_parts):
                raise UserError(
                    f"data.tokenizer: {self.data.tokenizer} has no end-of-text token to separate documents with; use "
                    "another, or a source that is one text"
                )
            streams = {part.stem: self._write(part, tokenizer) for part in stream_parts}
        return Index(
            settings=self.settings,
            source=source,
            tokenizer=tokenizer.describe(),
            tokenizer_files=vocabulary.tokenizer_files(self.data.tokenizer),
            streams=streams,
            splits=make_splits(self.data, self.directory, streams),
        )

    def _parts(self) -> list[Part]:
        """What is to be written: the training corpus, and the validation corpus where it is one of its own."""
        d, note = self.data, self.progress.note
        share = Fraction(str(d.val_fraction))
        main = open_corpus(d, d.source, sha256=d.sha256, split=d.split, notify=note)
        main.limit = d.max_documents
        if separate := d.eval_source or (d.eval_split and d.source):
            held = open_corpus(d, separate, split=d.eval_split or d.split, notify=note)
            held.limit = max(1, int(d.max_documents * share)) if d.max_documents and share else 0
            few = max(1, int(d.max_tokens * share)) if d.max_tokens and share else 0
            return [
                Part(MAIN, main, lambda tokens: 0 < d.max_tokens <= tokens, d.max_tokens * main.single_text),
                Part(EVAL, held, lambda tokens: 0 < few <= tokens, few * held.single_text),
            ]
        if main.single_text and share and not d.val_shards:
            # nanoGPT's split: between two characters, each half encoded for itself
            return [Part(MAIN, _half(main, share, True), cut=d.max_tokens), Part(EVAL, _half(main, share, False))]
        held_out = d.val_shards * d.shard_tokens
        train_share = Fraction(1) if d.val_shards else 1 - share

        def enough(tokens: int) -> bool:
            return bool(d.max_tokens) and (tokens - held_out) * train_share >= d.max_tokens

        return [Part(MAIN, main, enough, d.max_tokens + held_out if main.single_text and d.max_tokens else 0)]

    def _resume(self, source: dict[str, Any]) -> None:
        """Take over what an earlier preparation committed, if it was the same work and its files are there."""
        self.state.source = source
        try:
            state = State.model_validate_json((self.directory / PROGRESS).read_bytes())
            files = parts(shard for stream in state.streams.values() for shard in stream.shards)
            whole = all((self.directory / file).stat().st_size == size for file, size, _ in files)
        except (OSError, ValidationError):
            return
        if whole and (state.settings, state.source) == (self.settings, source):
            self.state, self.inherited = state, {file for file, _, _ in files}

    def _make_tokenizer(self, stream_parts: list[Part]) -> Tokenizer:
        """The tokenizer: saved before the interruption, named, or made from the corpus; saved beside the shards."""
        kind, corpus = vocabulary.kind_of(self.data.tokenizer), stream_parts[0].corpus
        if kind not in ("char", "bpe"):
            tokenizer = vocabulary.named_tokenizer(self.recipe.tokenizer)
        elif self.state.tokenizer:
            return vocabulary.load_tokenizer(self.recipe, self.directory)
        elif kind == "char":
            characters: set[str] = set()
            for part in stream_parts:
                tokens = 0
                for text in part.corpus.documents():
                    characters |= set(text)
                    tokens += len(text) + 1
                    if part.enough(tokens):
                        break
            if not characters:
                raise UserError(f"data.source: there is no text in {corpus.name}")
            with_eot = not all(part.corpus.single_text for part in stream_parts)
            tokenizer = vocabulary.char_tokenizer(characters, with_eot)
        else:
            self.progress.note(f"learning {self.data.tokenizer_vocab:,} byte pairs from {corpus.name}")
            tokenizer = vocabulary.train_bpe(_first(corpus.documents(), BPE_CHARACTERS), self.data.tokenizer_vocab)
        tokenizer.save(self.directory)
        return tokenizer

    def _write(self, part: Part, tokenizer: Tokenizer) -> list[Shard]:
        before = self.state.streams.get(part.stem, Committed())
        if before.done:
            return before.shards
        if before.shards:
            tokens = sum(s.tokens for s in before.shards)
            self.progress.note(f"resuming after {len(before.shards)} committed shards, {tokens:,} tokens")

        def commit(writer: ShardWriter, done: bool = False) -> None:
            self.state.streams[part.stem] = Committed(shards=writer.shards, resume=writer.resume, done=done)
            Files().replace(self.directory / PROGRESS, self.state.model_dump_json(indent=1).encode())

        dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
        size = self.data.shard_tokens
        writer = ShardWriter(self.directory, part.stem, dtype, size, before.shards, before.resume, commit)
        try:
            shards = writer.finish(self._write_documents(part, tokenizer, writer))
        finally:
            writer.close()
        if not shards:
            raise UserError(f"data: there is no text in {part.corpus.name}")
        commit(writer, done=True)
        return shards

    def _write_documents(self, part: Part, tokenizer: Tokenizer, writer: ShardWriter) -> int:
        """Write the documents' tokens in order; returns the number of documents of the source that were used."""
        stage = "validation data" if part.stem == EVAL else "training data"
        number, committed = writer.resume
        if not committed and part.enough(writer.tokens):
            return number
        eot = None if part.corpus.single_text else tokenizer.eot
        tokens_read = 0
        with contextlib.closing(
            encode_documents(part.corpus.documents(number), number, tokenizer, eot, self.workers)
        ) as batches:
            for batch in batches:
                for number, tokens, last in batch:
                    writer.add(tokens[: max(0, part.cut - tokens_read)] if part.cut else tokens, number)
                    tokens_read += len(tokens)
                    if last and part.enough(writer.tokens):
                        return number + 1
                shares = [part.corpus.fraction if not part.corpus.limit else None]
                if self.data.max_tokens and part.stem == MAIN:
                    shares.append(min(1.0, writer.tokens / self.data.max_tokens))
                fraction = max((share for share in shares if share is not None), default=None)
                self.progress.update(stage, fraction, writer.tokens)
        return number + 1

    def _scan_foreign(self) -> tuple[Tokenizer, dict[str, Any], dict[str, list[Shard]]]:
        """Shards that others wrote are read once, and stay where they are."""
        d = self.data
        tokenizer = vocabulary.load_tokenizer(self.recipe)
        main = find_files(d.source.removeprefix("shards:"))
        held: list[Path] = []
        if d.eval_source:
            if not d.eval_source.startswith("shards:"):
                raise UserError("data.eval_source: where data.source is token shards, so is it: write shards:GLOB")
            held = find_files(d.eval_source.removeprefix("shards:"), "data.eval_source")
        elif not d.val_shards:
            held = [path for path in main if foreign.VALIDATION.search(path.name.lower())]
            held = held if len(held) < len(main) else []
        taken = {path.resolve() for path in held}
        main = [path for path in main if path.resolve() not in taken]
        if not main:
            raise UserError("data.source: no shard is left for training: data.eval_source names them all")
        tokenizer.save(self.directory)
        shards = foreign.scan_all(
            main + held, tokenizer.vocab, self.workers, lambda n, total: self.progress.update("reading shards", n / total, n)
        )  # fmt: skip
        streams = {MAIN: shards[: len(main)], **({EVAL: shards[len(main) :]} if held else {})}
        return tokenizer, {MAIN: {"kind": "shards", "name": d.source}}, streams


def _half(main: Corpus, val_share: Fraction, first: bool) -> Corpus:
    def read(start: int, _: Corpus) -> Iterator[str]:
        if start == 0:
            text = next(main.documents())
            cut = int(len(text) * (1 - val_share))
            yield text[:cut] if first else text[cut:]

    return Corpus(main.name, read, main.description, single_text=True)


def _first(texts: Iterable[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return


def make_splits(data: DataSettings, directory: Path, streams: dict[str, list[Shard]]) -> dict[str, Split]:
    """Which tokens are for training and which for validation.

    A stream of its own is for validation as a whole; else the first `val_shards` shards, or the last `val_fraction` of the
    documents (of the tokens, where documents are not known).
    """

    def size(shards: list[Shard]) -> tuple[int, int]:
        return sum(s.tokens for s in shards), sum(s.documents for s in shards)

    def split(stream: str, start: tuple[int, int], stop: tuple[int, int]) -> Split:
        return Split(stream=stream, start=start[0], stop=stop[0], first_document=start[1], last_document=stop[1])

    main, share = streams[MAIN], Fraction(str(data.val_fraction))
    tokens, documents = end = size(main)
    if EVAL in streams:
        return {"train": split(MAIN, (0, 0), end), "val": split(EVAL, (0, 0), size(streams[EVAL]))}
    if data.val_shards:
        if data.val_shards >= len(main):
            raise UserError(
                f"data.val_shards = {data.val_shards}, and the data have {len(main)} shards: none is left for training; "
                "hold out fewer, or make data.shard_tokens smaller"
            )
        cut = size(main[: data.val_shards])
        return {"train": split(MAIN, cut, end), "val": split(MAIN, (0, 0), cut)}
    if not share:
        return {"train": split(MAIN, (0, 0), end)}
    if not documents:
        cut = (tokens - max(1, int(tokens * share)), 0)
    elif documents < 2:
        raise UserError(
            "data.val_fraction: the corpus is one document, of which none can be held out; give data.eval_source, or "
            "data.val_fraction = 0"
        )
    else:
        document = documents - min(documents - 1, max(1, round(documents * share)))
        cut = (int(Stream(directory, main).document_starts()[document]), document)
    return {"train": split(MAIN, (0, 0), cut), "val": split(MAIN, cut, end)}


Encoded = tuple[int, np.ndarray, bool]
"""Number of the document, tokens of a part of it (int64 [n]), whether it is its last part."""


def encode_documents(
    texts: Iterator[str], first: int, tokenizer: Tokenizer, eot: int | None, workers: int
) -> Generator[list[Encoded], None, None]:
    """The tokens of documents, numbered from `first` on, in their order, some at a time; a long one in several parts.

    `eot` is put before the tokens of each document that has any. About two batches a worker are read ahead.
    """
    start = np.array([] if eot is None else [eot], dtype=np.int64)

    def batches() -> Iterator[list[tuple[int, str, bool, bool]]]:
        batch, size = [], 0
        for number, text in enumerate(texts, first):
            stretches = list(tokenizer.stretches(text)) or [""]
            for place, stretch in enumerate(stretches, 1):
                batch.append((number, stretch, place == 1, place == len(stretches)))
                size += len(stretch) + 64
                if size >= BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def encode(batch: list[tuple[int, str, bool, bool]]) -> list[Encoded]:
        encoded = []
        for number, text, begins, ends in batch:
            tokens = tokenizer.encode(text)
            encoded.append((number, np.concatenate([start, tokens]) if begins and text else tokens, ends))
        return encoded

    source = batches()
    with ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[list[Encoded]]] = deque()
        try:
            while True:
                while len(waiting) < 2 * workers and (batch := next(source, None)) is not None:
                    waiting.append(pool.submit(encode, batch))
                if not waiting:
                    return
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()
