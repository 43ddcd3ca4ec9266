"""A corpus of documents -> tokenizer -> token shards: in parallel, committed shard by shard, resumed where it was killed.

The result is a pure function of the corpus and the settings: the number of workers, and any number of kills, change no
byte of it. Workers are threads, because the tokenizers release Python's lock: nothing is forked, nothing outlives us.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
import sys
import time
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.data import vocabulary
from windlass.data.division import Part, parts_of, splits_of, stem_of, text_size
from windlass.data.shards import EVAL, MAIN, Index, Shard, ShardWriter, file_states, remember, scan
from windlass.data.sources import find_files
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.fileio import Files, read_json, to_json
from windlass.processes import usable_cores
from windlass.recipe import DataSettings, Recipe

PROGRESS = "progress.json"  # what an interrupted preparation has committed, of each stream, and of what work
BPE_CHARACTERS = 200_000_000  # of the corpus, that byte pairs are learned from at most
BATCH_CHARACTERS = 1 << 18  # that a worker gets at once: enough that the hand-over costs nothing
LINE_SECONDS = 10.0
# The name of a shard of another tool that is for validation, as `val.bin`, `edufineweb_val_000000.npy`.
VALIDATION_NAME = r"(^|[^a-z])val(idation)?([^a-z]|$)"


class Progress:
    """What long work shows on stderr: a bar of `rich` in a terminal, a line every ten seconds elsewhere."""

    def __init__(self, name: str = "data") -> None:
        self._name = name
        self._bar: Any = None
        self._next_line = time.monotonic() + LINE_SECONDS

    def note(self, text: str) -> None:
        print(
            f"{self._name}: {text}", file=sys.stderr, flush=True
        )  # above the bar: rich redirects stderr

    def update(self, stage: str, share: float, tokens: int = 0) -> None:
        """So far: the stage, its share that is done (0: not known), and tokens written."""
        text = f"{stage}, {tokens:,} tokens" if tokens else stage
        if sys.stderr.isatty() and self._bar is None:
            from rich import console, progress
            from rich.table import Column

            # the bar takes the columns that the text leaves; a long text wraps
            text_column = progress.TextColumn(
                "{task.description}", table_column=Column(overflow="fold")
            )
            columns = text_column, progress.BarColumn(None), progress.TaskProgressColumn()
            self._bar = progress.Progress(
                *columns, console=console.Console(stderr=True), transient=True
            )
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


def prepare_text(
    recipe: Recipe, settings: dict[str, Any], directory: Path, progress: Progress
) -> Index:
    """Write shards and tokenizer; returns the index, not written yet."""
    data, kind, resumed = recipe.data, vocabulary.kind_of(recipe.data.tokenizer), False
    state, source, streams = (
        read_json(directory / PROGRESS),
        dict[str, Any](),
        dict[str, list[Shard]](),
    )
    parts = list[Part]()
    if data.sources[0].startswith("shards:"):
        tokenizer = vocabulary.load_tokenizer(recipe)
        tokenizer.save(directory)
        streams, source = _scan_shards(data, tokenizer, progress)
    else:
        parts = parts_of(data, progress.note)
        single_text = all(part.corpus.single_text for part in parts)
        for part in parts:
            corpus = part.corpus
            kind_of_text = {"single_text": corpus.single_text, "divided": part.rest >= 0}
            source[part.stem] = {"name": corpus.name, **kind_of_text, **corpus.description}
        named = (
            None
            if kind in ("char", "bpe")
            else vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
        )
        work = {
            "settings": settings,
            "source": source,
            "tokenizer": named.fingerprint if named else "",
        }
        if state.get("work") != work:  # of another corpus or tokenizer: start over
            for file in [*directory.glob(f"{MAIN}*-[0-9]*"), *directory.glob(f"{EVAL}*-[0-9]*")]:
                file.unlink()
            state = {"work": work, "streams": {}}
        if named is None and state["streams"]:
            tokenizer = vocabulary.load_tokenizer(recipe, directory)
        else:
            tokenizer = named or _learn_tokenizer(data, parts, single_text, progress)
            tokenizer.save(directory)
        if tokenizer.eot is None and not single_text:
            raise UserError(
                f"data.tokenizer: {data.tokenizer} has no token that ends a document; use another"
            )
        resumed = bool(state["streams"])
        for part in parts:
            streams[part.stem] = _write(data, directory, part, tokenizer, state, progress)
        for stream in (MAIN, EVAL):
            own = [part for part in parts if part.stem.startswith(stream)]
            if own and not any(streams[part.stem] for part in own):
                raise UserError(
                    f"data: there is no text in {', '.join(part.corpus.name for part in own)}"
                )
    if not resumed:  # else files that an earlier process wrote are read once before they are used
        remember(
            directory,
            file_states(directory, [shard for shards in streams.values() for shard in shards]),
        )
    splits = splits_of(data, directory, streams, {part.stem: part for part in parts}, progress.note)
    return Index(
        settings=settings,
        source=source,
        tokenizer=tokenizer.describe(),
        streams=streams,
        splits=splits,
    )


def _learn_tokenizer(
    data: DataSettings, parts: list[Part], single_text: bool, progress: Progress
) -> Tokenizer:
    """The tokenizer that is made from the corpus: its characters, or byte pairs."""
    main = [part.corpus for part in parts if part.stem.startswith(MAIN)]
    names = ", ".join(corpus.name for corpus in main)
    if data.tokenizer == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from {names}")
        each = BPE_CHARACTERS // len(main)  # of every source alike
        texts = (text for corpus in main for text in first_characters(corpus.documents(), each))
        return vocabulary.train_bpe(texts, data.tokenizer_vocab)
    characters: set[str] = set()
    for part in parts:
        tokens, limit = 0, replace(part.limit)
        for text in part.corpus.documents():
            characters |= set(text)
            tokens += len(text) + 1 if text else 0
            if limit.add(text_size(text), tokens):
                break
    if not characters:
        raise UserError(f"data.source: there is no text in {names}")
    return vocabulary.char_tokenizer(characters, with_eot=not single_text)


def first_characters(texts: Iterator[str], characters: int) -> Iterator[str]:
    """The texts up to so many characters, the last one cut."""
    for text in texts:
        yield text[:characters]
        if (characters := characters - len(text)) <= 0:
            return


def _write(
    data: DataSettings,
    directory: Path,
    part: Part,
    tokenizer: Tokenizer,
    state: dict[str, Any],
    progress: Progress,
) -> list[Shard]:
    """Write a source's shards, those that are not committed yet; returns all of them."""
    stem, corpus, limit = part.stem, part.corpus, replace(part.limit)
    before = state["streams"].get(
        stem, {"shards": [], "resume": (0, 0), "done": False, "read": (0, 0)}
    )
    shards = [Shard.model_validate(shard) for shard in before["shards"]]
    if before["done"]:
        return shards
    if shards:
        committed = sum(s.tokens for s in shards)
        progress.note(f"resuming after {len(shards)} committed shards, {committed:,} tokens")
    limit.read, limit.first = before["read"]

    def commit(writer: ShardWriter) -> None:
        done = [shard.model_dump() for shard in writer.shards]
        read = (
            limit.read,
            limit.first,
        )  # without the document that the shard ends in: it is read again
        state["streams"][stem] = {
            "shards": done,
            "resume": writer.resume,
            "done": writer.finished,
            "read": read,
        }
        Files().replace(directory / PROGRESS, to_json(state))

    dtype = "uint16" if tokenizer.vocab <= 1 << 16 else "uint32"
    writer = ShardWriter(
        directory, stem, dtype, data.shard_tokens, shards, before["resume"], commit
    )
    # A single text has no document's end to stop at: it is cut.
    eot, cut, tokens_read = (None, part.most, 0) if corpus.single_text else (tokenizer.eot, 0, 0)
    first, stage = (
        before["resume"][0],
        "validation data" if stem.startswith(EVAL) else "training data",
    )
    texts, enough = corpus.documents(first), cut or float(limit.tokens)
    batches = encode_documents(
        texts, first, tokenizer, eot, data.workers or usable_cores(), part.rest
    )
    with contextlib.closing(batches):
        for batch in batches:
            for piece in batch:
                tokens = piece.tokens[: max(0, cut - tokens_read)] if cut else piece.tokens
                writer.add(tokens, piece.number, piece.size, piece.text)
                tokens_read += len(piece.tokens)
                if 0 < cut <= writer.tokens or (
                    piece.last and not cut and limit.add(piece.size, writer.tokens)
                ):
                    return writer.finish()
            progress.update(
                stage, max(corpus.share, writer.tokens / enough if enough else 0.0), writer.tokens
            )
        return writer.finish()


def _scan_shards(
    data: DataSettings, tokenizer: Tokenizer, progress: Progress
) -> tuple[dict[str, list[Shard]], dict[str, Any]]:
    """Shards that other tools wrote are read once, and stay where they are. The streams, and where each comes from."""
    main = [find_files(source.removeprefix("shards:")) for source in data.sources]
    paths, held = [path for files in main for path in files], list[Path]()
    if data.eval_sources:
        if not all(source.startswith("shards:") for source in data.eval_sources):
            raise UserError(
                "data.eval_source: where data.source is token shards, so is it: write shards:GLOB"
            )
        held = [
            p
            for s in data.eval_sources
            for p in find_files(s.removeprefix("shards:"), "data.eval_source")
        ]
    elif not data.val_shards:
        held = [path for path in paths if re.search(VALIDATION_NAME, path.name.lower())]
        held = held if len(held) < len(paths) else []
    taken = {path.resolve() for path in held}
    files = {
        stem_of(MAIN, i): [p for p in part if p.resolve() not in taken]
        for i, part in enumerate(main)
    }
    if not any(files.values()):
        raise UserError(
            "data.source: no shard is left for training: data.eval_source names them all"
        )
    names = {stem_of(MAIN, i): source for i, source in enumerate(data.sources)}
    if held:
        files[EVAL], names[EVAL] = held, ", ".join(data.eval_sources or data.sources)
    work, scanned = (
        [(stem, path) for stem, part in files.items() for path in part],
        dict[str, list[Shard]](),
    )
    with ThreadPoolExecutor(data.workers or None) as pool:
        shards = pool.map(lambda item: scan(item[1], tokenizer.vocab), work)
        for done, ((stem, _), shard) in enumerate(zip(work, shards, strict=True), 1):
            scanned.setdefault(stem, []).append(shard)
            progress.update("reading shards", done / len(work))
    return {stem: scanned.get(stem, []) for stem in files}, {
        stem: {"name": name} for stem, name in names.items()
    }


class Encoded(NamedTuple):
    """Some tokens of a document."""

    number: int  # of the document
    tokens: np.ndarray  # int64 [n]
    last: bool  # whether they are its last
    size: int  # of the whole document, by `text_size`
    text: int  # a hash of its text


def encode_documents(
    texts: Iterator[str],
    first: int,
    tokenizer: Tokenizer,
    eot: int | None,
    workers: int,
    rest: int = -1,
) -> Generator[list[Encoded], None, None]:
    """The tokens of documents, numbered from `first` on, in their order, some at a time; a long one in several parts.

    `eot` is put before the tokens of each document that has any, but not before number `rest`, which goes on with the one
    before it. About two batches a worker are read ahead.
    """

    def batches() -> Iterator[list[tuple[str, bool, Encoded]]]:
        batch, size = [], 0
        for number, text in enumerate(texts, first):
            stretches, raw = (
                list(tokenizer.stretches(text)) or [""],
                text.encode("utf-8", "replace"),
            )
            head = text != "" and number != rest
            digest = int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")
            for place, stretch in enumerate(stretches, 1):
                piece = Encoded(
                    number, np.zeros(0, np.int64), place == len(stretches), len(raw) + head, digest
                )
                batch.append((stretch, head and place == 1, piece))
                size += len(stretch) + 64
                if size >= BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
        yield batch

    def encode(batch: list[tuple[str, bool, Encoded]]) -> list[Encoded]:
        end = np.array([] if eot is None else [eot], dtype=np.int64)
        return [
            piece._replace(tokens=np.concatenate([end[:head], tokenizer.encode(text)]))
            for text, head, piece in batch
        ]

    source = batches()
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque(
            pool.submit(encode, batch) for batch in itertools.islice(source, 2 * workers)
        )
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting += [pool.submit(encode, batch) for batch in itertools.islice(source, 1)]
        finally:
            for future in waiting:
                future.cancel()
