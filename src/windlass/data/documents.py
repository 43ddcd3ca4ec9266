"""A corpus of documents -> tokenizer -> token shards: in parallel, committed shard by shard, resumed where it was killed.

The result is a pure function of the corpus and the settings: the number of workers, and any number of kills, change no
byte of it. Workers are threads, because the tokenizers release Python's lock: nothing is forked, nothing outlives us.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data import vocabulary
from windlass.data.shards import EVAL, MAIN, Index, Shard, ShardWriter, Split, Stream, file_states, remember, scan
from windlass.data.sources import Corpus, find_files, open_corpora
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.fileio import Files, read_json, to_json
from windlass.processes import usable_cores
from windlass.recipe import DataSettings, Recipe

PROGRESS = "progress.json"  # what an interrupted preparation has committed, of each stream, and of what work
BPE_CHARACTERS = 200_000_000  # of the corpus, that byte pairs are learned from at most
BATCH_CHARACTERS = 1 << 18  # that a worker gets at once: enough that the hand-over costs nothing
LINE_SECONDS = 10.0
FEW_DOCUMENTS = 100  # fewer than these are split by their tokens
# The name of a shard of another tool that is for validation, as `val.bin`, `edufineweb_val_000000.npy`.
VALIDATION_NAME = r"(^|[^a-z])val(idation)?([^a-z]|$)"


class Progress:
    """What long work shows on stderr: a bar of `rich` in a terminal, a line every ten seconds elsewhere."""

    def __init__(self, name: str = "data") -> None:
        self._name = name
        self._bar: Any = None
        self._next_line = time.monotonic() + LINE_SECONDS

    def note(self, text: str) -> None:
        print(f"{self._name}: {text}", file=sys.stderr, flush=True)  # above the bar: rich redirects stderr

    def update(self, stage: str, share: float, tokens: int = 0) -> None:
        """So far: the stage, its share that is done (0: not known), and tokens written."""
        text = f"{stage}, {tokens:,} tokens" if tokens else stage
        if sys.stderr.isatty() and self._bar is None:
            from rich import console, progress
            from rich.table import Column

            # the bar takes the columns that the text leaves; a long text wraps
            text_column = progress.TextColumn("{task.description}", table_column=Column(overflow="fold"))
            columns = text_column, progress.BarColumn(None), progress.TaskProgressColumn()
            self._bar = progress.Progress(*columns, console=console.Console(stderr=True), transient=True)
            self._bar.start()
            self._bar.add_task(text)
        if self._bar is not None:
            self._bar.update(0, description=text, total=1.0 if share else None, completed=share)
        elif time.monotonic() >= self._next_line:
            self.note(f"{text}, {share:.0%}" if share else text)
            self._next_line = time.monotonic() + LINE_SECONDS

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


# A stream of documents on its way into shards: its name, where it comes from, and how many tokens are enough (0: all).
Part = tuple[str, Corpus, Fraction]


def prepare_text(recipe: Recipe, settings: dict[str, Any], directory: Path, progress: Progress) -> Index:
    """Write shards and tokenizer; returns the index, not written yet."""
    data, kind, resumed = recipe.data, vocabulary.kind_of(recipe.data.tokenizer), False
    state, source, streams = read_json(directory / PROGRESS), dict[str, Any](), dict[str, list[Shard]]()
    if data.sources[0].startswith("shards:"):
        tokenizer = vocabulary.load_tokenizer(recipe)
        tokenizer.save(directory)
        source[MAIN] = {"name": ", ".join(data.sources)}
        streams = _scan_shards(data, tokenizer, progress)
    else:
        stream_parts = _parts(data, progress)
        single_text = all(corpus.single_text for _, corpus, _ in stream_parts)
        for stem, corpus, _ in stream_parts:
            source[stem] = {"name": corpus.name, "single_text": corpus.single_text, **corpus.description}
        named = None if kind in ("char", "bpe") else vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
        work = {"settings": settings, "source": source, "tokenizer": named.fingerprint if named else ""}
        if state.get("work") != work:  # of another corpus or tokenizer: start over
            for file in [*directory.glob(f"{MAIN}-[0-9]*"), *directory.glob(f"{EVAL}-[0-9]*")]:
                file.unlink()
            state = {"work": work, "streams": {}}
        if named is None and state["streams"]:
            tokenizer = vocabulary.load_tokenizer(recipe, directory)
        else:
            tokenizer = named or _learn_tokenizer(data, stream_parts, single_text, progress)
            tokenizer.save(directory)
        if tokenizer.eot is None and not single_text:
            raise UserError(f"data.tokenizer: {data.tokenizer} has no token that ends a document; use another")
        resumed = bool(state["streams"])
        for part in stream_parts:
            streams[part[0]] = _write(data, directory, part, tokenizer, state, progress)
    if not resumed:  # else files that an earlier process wrote are read once before they are used
        remember(directory, file_states(directory, [shard for shards in streams.values() for shard in shards]))
    splits = _splits(data, directory, streams, tokenizer.eot, progress)
    return Index(settings=settings, source=source, tokenizer=tokenizer.describe(), streams=streams, splits=splits)


def _parts(data: DataSettings, progress: Progress) -> list[Part]:
    """What is to be written: the training corpus, and the validation corpus where it is one of its own."""
    share, held_out = Fraction(str(data.val_fraction)), data.val_shards * data.shard_tokens
    main = open_corpora(data, data.sources, sha256=data.sha256, split=data.split, notify=progress.note)
    main.limit = data.max_documents or None
    most = Fraction(data.max_tokens)
    own_split = data.eval_split and data.sources[0].startswith("hf:")  # files have no splits
    if separate := data.eval_sources or (data.sources if own_split else []):
        held = open_corpora(data, separate, split=data.eval_split or data.split, notify=progress.note)
        held.limit = max(1, int(data.max_documents * share)) if data.max_documents and share else None
        return [(MAIN, main, most), (EVAL, held, Fraction(max(1, int(most * share)) if most and share else 0))]
    if main.single_text and share and not data.val_shards:

        def half(first: bool) -> Corpus:  # nanoGPT's split: between two characters, each half encoded for itself
            def read(start: int) -> Iterator[tuple[str, float]]:
                text = next(main.documents())
                cut = int(len(text) * (1 - share))
                yield from [(text[:cut] if first else text[cut:], 0.0)][start:]

            return Corpus(main.name, read, main.description, single_text=True)

        return [(MAIN, half(True), most), (EVAL, half(False), Fraction(0))]
    return [(MAIN, main, most and most / (1 if data.val_shards else 1 - share) + held_out)]


def _learn_tokenizer(data: DataSettings, stream_parts: list[Part], single_text: bool, progress: Progress) -> Tokenizer:
    """The tokenizer that is made from the corpus: its characters, or byte pairs."""
    main = stream_parts[0][1]
    if data.tokenizer == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from {main.name}")
        return vocabulary.train_bpe(main.documents(), data.tokenizer_vocab, BPE_CHARACTERS)
    characters: set[str] = set()
    for _, corpus, enough in stream_parts:
        tokens = 0
        for text in corpus.documents():
            characters |= set(text)
            tokens += len(text) + 1
            if 0 < enough <= tokens:
                break
    if not characters:
        raise UserError(f"data.source: there is no text in {main.name}")
    return vocabulary.char_tokenizer(characters, with_eot=not single_text)


def _write(
    data: DataSettings, directory: Path, part: Part, tokenizer: Tokenizer, state: dict[str, Any], progress: Progress
) -> list[Shard]:
    """Write a stream's shards, those that are not committed yet; returns all of them."""
    stem, corpus, enough = part
    before = state["streams"].get(stem, {"shards": [], "resume": (0, 0), "done": False})
    shards = [Shard.model_validate(shard) for shard in before["shards"]]
    if before["done"]:
        return shards
    if shards:
        committed = sum(s.tokens for s in shards)
        progress.note(f"resuming after {len(shards)} committed shards, {committed:,} tokens")

    def commit(writer: ShardWriter) -> None:
        done = [shard.model_dump() for shard in writer.shards]
        state["streams"][stem] = {"shards": done, "resume": writer.resume, "done": writer.finished}
        Files().replace(directory / PROGRESS, to_json(state))

    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    writer = ShardWriter(directory, stem, dtype, data.shard_tokens, shards, before["resume"], commit)
    # A single text has no document's end to stop at: it is cut.
    eot, cut, tokens_read = (None, int(enough), 0) if corpus.single_text else (tokenizer.eot, 0, 0)
    first, stage = before["resume"][0], "validation data" if stem == EVAL else "training data"
    batches = encode_documents(corpus.documents(first), first, tokenizer, eot, data.workers or usable_cores())
    with contextlib.closing(batches):
        for batch in batches:
            for number, tokens, last in batch:
                writer.add(tokens[: max(0, cut - tokens_read)] if cut else tokens, number)
                tokens_read += len(tokens)
                if (last or cut) and 0 < enough <= writer.tokens:
                    return writer.finish()
            share = max(corpus.share, float(writer.tokens / enough) if enough else 0.0)
            progress.update(stage, share, writer.tokens)
        if not writer.tokens:
            raise UserError(f"data: there is no text in {corpus.name}")
        return writer.finish()


def _scan_shards(data: DataSettings, tokenizer: Tokenizer, progress: Progress) -> dict[str, list[Shard]]:
    """Shards that other tools wrote are read once, and stay where they are."""
    main, held = [path for source in data.sources for path in find_files(source.removeprefix("shards:"))], list[Path]()
    if data.eval_sources:
        if not all(source.startswith("shards:") for source in data.eval_sources):
            raise UserError("data.eval_source: where data.source is token shards, so is it: write shards:GLOB")
        held = [p for s in data.eval_sources for p in find_files(s.removeprefix("shards:"), "data.eval_source")]
    elif not data.val_shards:
        held = [path for path in main if re.search(VALIDATION_NAME, path.name.lower())]
        held = held if len(held) < len(main) else []
    taken = {path.resolve() for path in held}
    main = [path for path in main if path.resolve() not in taken]
    if not main:
        raise UserError("data.source: no shard is left for training: data.eval_source names them all")
    shards: list[Shard] = []
    with ThreadPoolExecutor(data.workers or None) as pool:
        for shard in pool.map(lambda path: scan(path, tokenizer.vocab), main + held):
            shards.append(shard)
            progress.update("reading shards", len(shards) / len(main + held))
    return {MAIN: shards[: len(main)], **({EVAL: shards[len(main) :]} if held else {})}


def _splits(
    data: DataSettings, directory: Path, streams: dict[str, list[Shard]], eot: int | None, progress: Progress
) -> dict[str, Split]:
    """Which tokens are for training and which for validation.

    A stream of its own is for validation as a whole; else the first `val_shards` shards, or the last `val_fraction` of the
    documents. Where they are few and that is far from `val_fraction` of the tokens, or documents are not known, the tokens
    are divided: between two documents where that is near, else inside one.
    """
    main, share = streams[MAIN], Fraction(str(data.val_fraction))
    edges = [0, *itertools.accumulate(s.tokens for s in main)]
    counts = [0, *itertools.accumulate(s.documents for s in main)]
    end, documents = edges[-1], counts[-1]
    train, val, held_out = (0, end), (end, end), 0  # documents
    if EVAL in streams:
        val = (0, sum(s.tokens for s in streams[EVAL]))
    elif data.val_shards:
        if data.val_shards >= len(main):
            raise UserError(f"data.val_shards = {data.val_shards} of {len(main)}: lower it or data.shard_tokens")
        train, val = (edges[data.val_shards], end), (0, edges[data.val_shards])
        held_out = counts[data.val_shards]
    elif share:
        cut = wanted = end - max(1, int(end * share))
        near = (end - wanted) / 4
        if documents > 1:
            held_out = min(documents - 1, max(1, round(documents * share)))
            document = documents - held_out
            place = bisect.bisect_right(counts, document) - 1  # of the shard that the document starts in
            cut = int(Stream(directory, main).document_starts(eot or 0, [place])[document - counts[place]])
        if 0 < documents < FEW_DOCUMENTS and abs(cut - wanted) > near:
            starts = Stream(directory, main).document_starts(eot or 0)
            cut = int(min(starts[1:], key=lambda start: abs(start - wanted), default=wanted))
            cut = cut if abs(cut - wanted) <= near else wanted  # inside a document
            held_out = int((starts >= cut).sum())
        train, val = (0, cut), (cut, end)
        if not share / 2 < Fraction(end - cut, end) < share * 3 / 2:
            progress.note(
                f"{(end - cut) / end:.1%} of the tokens are held out, data.val_fraction = {data.val_fraction} was asked for: "
                "documents differ in length and are not cut; data.eval_source names a validation set of your own"
            )
    if data.max_tokens and (tokens := train[1] - train[0]) > 1.5 * data.max_tokens:
        asked = f"data.max_tokens = {data.max_tokens:,} were asked for"
        progress.note(f"{tokens:,} training tokens, {asked}: it stops at a document's end, and they are long")
    splits = {"train": Split(stream=MAIN, start=train[0], stop=train[1], documents=documents - held_out)}
    if EVAL in streams:
        splits["val"] = Split(stream=EVAL, start=0, stop=val[1], documents=sum(s.documents for s in streams[EVAL]))
    elif val[0] < val[1]:
        splits["val"] = Split(stream=MAIN, start=val[0], stop=val[1], documents=held_out)
    return splits


# Number of the document, tokens of a part of it (int64 [n]), whether it is its last part.
Encoded = tuple[int, np.ndarray, bool]


def encode_documents(
    texts: Iterator[str], first: int, tokenizer: Tokenizer, eot: int | None, workers: int
) -> Generator[list[Encoded], None, None]:
    """The tokens of documents, numbered from `first` on, in their order, some at a time; a long one in several parts.

    `eot` is put before the tokens of each document that has any. About two batches a worker are read ahead.
    """

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
        yield batch

    def encode(batch: list[tuple[int, str, bool, bool]]) -> list[Encoded]:
        head = np.array([] if eot is None else [eot], dtype=np.int64)
        return [
            (number, np.concatenate([head[: begins and text != ""], tokenizer.encode(text)]), ends)
            for number, text, begins, ends in batch
        ]

    source = batches()
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque(pool.submit(encode, batch) for batch in itertools.islice(source, 2 * workers))
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting += [pool.submit(encode, batch) for batch in itertools.islice(source, 1)]
        finally:
            for future in waiting:
                future.cancel()
