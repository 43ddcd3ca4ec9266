"""Text: sources -> documents -> tokens -> shards -> hold-out, in parallel and resumable.

The result is a pure function of the corpus and the settings: neither the number of workers nor any
number of kills changes a byte. Workers are threads, because the tokenizers release Python's lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import re
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.data import vocabulary
from windlass.data.division import Limit, TextSource, divide, stream_name, text_size, text_sources
from windlass.data.files import find_files
from windlass.data.progress import Progress
from windlass.data.shards import EVAL, MAIN, Index, Shard, ShardWriter, file_states, remember, scan
from windlass.data.tokenizer import STRETCH, Tokenizer
from windlass.errors import UserError, plural
from windlass.fileio import Files, read_json, to_json
from windlass.processes import usable_cores
from windlass.recipe import DataSettings, Recipe

PROGRESS = "progress.json"  # what an interrupted preparation has committed
BPE_CHARACTERS = 200_000_000  # of the corpus at most, from which byte pairs are learned
BATCH_CHARACTERS = 1 << 18  # for a worker at once: enough that the hand-over costs nothing
NO_TOKENS = np.zeros(0, np.int64)
# Another tool's validation shard, for example `val.bin` or `edufineweb_val_000000.npy`.
VALIDATION_NAME = r"(^|[^a-z])val(idation)?([^a-z]|$)"


def prepare_text(
    recipe: Recipe, settings: dict[str, Any], directory: Path, progress: Progress
) -> Index:
    """Write shards and tokenizer; returns the index, not written yet."""
    data, sources, resumed = recipe.data, list[TextSource](), False
    if data.sources[0].startswith("shards:"):
        tokenizer = vocabulary.load_tokenizer(recipe)
        tokenizer.save(directory)
        streams, origins = dict[str, list[Shard]](), dict[str, Any]()
        for number in range(len(data.mix) or 1):
            found = _scan_shards(data.part(number), tokenizer, progress)
            for every, own in zip((streams, origins), found, strict=True):
                # A mixture's source is scanned as if it were the only one.
                every |= {stream_name(k, number) if data.mix else k: v for k, v in own.items()}
    else:
        sources = text_sources(data, progress.note)
        origins, named = {source.stream: source.origin for source in sources}, None
        if vocabulary.kind_of(data.tokenizer) not in ("char", "bpe"):
            named = vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
        fingerprint = named.fingerprint if named else ""
        work = {"settings": settings, "source": origins, "tokenizer": fingerprint}
        written = Written(directory, work)
        resumed = bool(written.streams)
        if named is None and resumed:
            tokenizer = vocabulary.load_tokenizer(recipe, directory)
        else:
            tokenizer = named or _learn_tokenizer(data, sources, progress)
            tokenizer.save(directory)
        if tokenizer.eot is None and not all(source.corpus.single_text for source in sources):
            raise UserError(
                f"data.tokenizer: {data.tokenizer} has no token that ends a document; use another"
            )
        streams = {
            source.stream: write_shards(data, directory, source, tokenizer, written, progress)
            for source in sources
        }
        for kind in (MAIN, EVAL):
            names = [s.corpus.name for s in sources if s.stream.startswith(kind)]
            if names and not any(streams[name] for name in streams if name.startswith(kind)):
                raise UserError(f"data: there is no text in {', '.join(names)}")
    if not resumed:  # else files of an earlier process are read once before they are used
        shards = [shard for stream in streams.values() for shard in stream]
        remember(directory, file_states(directory, shards))
    splits = divide(data, directory, streams, {s.stream: s for s in sources}, progress.note)
    made = {"settings": settings, "source": origins, "tokenizer": tokenizer.describe()}
    return Index(**made, streams=streams, splits=splits)


class Written:
    """The committed shards of an interrupted preparation; nothing if its `work` was another."""

    def __init__(self, directory: Path, work: dict[str, Any]):
        self._path, self._work = directory / PROGRESS, work
        self.streams: dict[str, dict[str, Any]] = {}
        stored = read_json(self._path)
        if stored.get("work") == work:
            self.streams = stored["streams"]
        else:
            for file in [*directory.glob(f"{MAIN}*-[0-9]*"), *directory.glob(f"{EVAL}*-[0-9]*")]:
                file.unlink()

    def save(self, writer: ShardWriter, limit: Limit) -> None:
        # without the document that the shard ends in, which is read again
        self.streams[writer.stream] = {
            "shards": [shard.model_dump() for shard in writer.shards],
            "resume": writer.resume,
            "done": writer.finished,
            "read": (limit.bytes_read, limit.text_tokens),
        }
        Files().replace(self._path, to_json({"work": self._work, "streams": self.streams}))


def _learn_tokenizer(
    data: DataSettings, sources: list[TextSource], progress: Progress
) -> Tokenizer:
    """The tokenizer made from the corpus: its characters, or byte pairs of its training text."""
    train = [source.corpus for source in sources if source.stream.startswith(MAIN)]
    names = ", ".join(corpus.name for corpus in train)
    if data.tokenizer == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from {names}")
        each = BPE_CHARACTERS // len(train)
        texts = (text for corpus in train for text in first_characters(corpus.documents(), each))
        return vocabulary.train_bpe(texts, data.tokenizer_vocab)
    characters: set[str] = set()
    for source in sources:
        tokens, limit = 0, replace(source.limit)
        for text in source.corpus.documents():
            characters |= set(text)
            tokens += len(text) + 1 if text else 0
            if limit.add(text_size(text), tokens):
                break
    if not characters:
        raise UserError(f"data.source: there is no text in {names}")
    single_text = all(source.corpus.single_text for source in sources)
    return vocabulary.char_tokenizer(characters, with_eot=not single_text)


def first_characters(texts: Iterator[str], characters: int) -> Iterator[str]:
    """Texts of `characters` characters together, the last one cut."""
    for text in texts:
        yield text[:characters]
        if (characters := characters - len(text)) <= 0:
            return


def write_shards(
    data: DataSettings,
    directory: Path,
    source: TextSource,
    tokenizer: Tokenizer,
    written: Written,
    progress: Progress,
) -> list[Shard]:
    """All shards of a source; writes the ones that are not committed yet."""
    name, corpus, limit = source.stream, source.corpus, replace(source.limit)
    before = written.streams.get(name, {})
    shards = [Shard.model_validate(shard) for shard in before.get("shards", ())]
    if before.get("done"):
        return shards
    limit.bytes_read, limit.text_tokens = before.get("read", (0, 0))
    resume = before.get("resume", (0, 0))
    commit = partial(written.save, limit=limit)
    shape = tokenizer.dtype, data.shard_tokens
    new = ShardWriter(directory, name, *shape, shards, resume, commit)
    if shards:
        progress.note(
            f"resuming after {plural(len(shards), 'committed shard')}, {new.tokens:,} tokens"
        )
    stage = "validation data" if name.startswith(EVAL) else "training data"
    # A single text is cut at its limit, and documents are kept whole.
    cut, tokens_read = int(limit.tokens) if corpus.single_text else 0, 0
    enough = float(limit.tokens)
    batches = encode_documents(source, resume[0], tokenizer, data.workers or usable_cores())
    with contextlib.closing(batches), new as writer:
        for batch in batches:
            for piece in batch:
                tokens_kept = piece.tokens[: max(0, cut - tokens_read)] if cut else piece.tokens
                writer.add(tokens_kept, piece.number, piece.size, piece.text)
                tokens_read += len(piece.tokens)
                full = 0 < cut <= writer.tokens
                if full or (piece.last and not cut and limit.add(piece.size, writer.tokens)):
                    return writer.finish()
            fraction = max(corpus.fraction_read, writer.tokens / enough if enough else 0.0)
            progress.update(stage, fraction, writer.tokens)
        return writer.finish()


def _scan_shards(
    data: DataSettings, tokenizer: Tokenizer, progress: Progress
) -> tuple[dict[str, list[Shard]], dict[str, Any]]:
    """The streams of another tool's shards, which stay in place, and the source of each."""
    files = {
        stream_name(MAIN, number): find_files(source.removeprefix("shards:"))
        for number, source in enumerate(data.sources)
    }
    origins = {name: {"name": source} for name, source in zip(files, data.sources, strict=True)}
    paths, held = [path for part in files.values() for path in part], list[Path]()
    for source in data.eval_sources:
        held += find_files(source.removeprefix("shards:"), "data.eval_source")
    if not data.eval_sources and not data.val_shards:
        held = [path for path in paths if re.search(VALIDATION_NAME, path.name.lower())]
        held = held if len(held) < len(paths) else []
    excluded = {path.resolve() for path in held}
    for name, part in files.items():
        files[name] = [path for path in part if path.resolve() not in excluded]
    if not any(files.values()):
        raise UserError(
            "data.source: no shard is left for training, because data.eval_source has them all"
        )
    if held:
        files[EVAL] = held
        origins[EVAL] = {"name": ", ".join(data.eval_sources or data.sources)}
    work = [(name, path) for name, part in files.items() for path in part]
    streams: dict[str, list[Shard]] = {name: [] for name in files}
    with ThreadPoolExecutor(data.workers or None) as pool:
        shards = pool.map(lambda item: scan(item[1], tokenizer.vocab), work)
        for done, ((name, _), shard) in enumerate(zip(work, shards, strict=True), 1):
            streams[name].append(shard)
            progress.update("reading shards", done / len(work))
    return streams, origins


class Encoded(NamedTuple):
    """Some tokens of a document."""

    number: int  # of the document
    tokens: np.ndarray  # int64 [n]
    last: bool  # whether they are its last
    size: int  # of the whole document, by `text_size`
    text: int  # a hash of its text


def encode_documents(
    source: TextSource, first: int, tokenizer: Tokenizer, workers: int
) -> Generator[list[Encoded], None, None]:
    """The tokens of documents from number `first` on; a long document comes in several parts.

    An end-of-text token stands before each document that is not empty and does not continue the one
    before it, but not before a single text. Two batches for each worker are read ahead.
    """
    eot = None if source.corpus.single_text else tokenizer.eot

    def batches() -> Iterator[list[tuple[str, bool, Encoded]]]:
        batch, size = [], 0
        for number, text in enumerate(source.corpus.documents(first), first):
            head, hashed = text != "" and number != source.rest, hashlib.blake2b(digest_size=8)
            length = int(head)
            for start in range(0, len(text), STRETCH):  # a long text is not copied whole
                raw = text[start : start + STRETCH].encode("utf-8", "replace")
                hashed.update(raw)
                length += len(raw)
            digest = int.from_bytes(hashed.digest(), "little")
            stretches = iter(tokenizer.stretches(text))
            stretch: str | None = next(stretches, "")
            while stretch is not None:
                following = next(stretches, None)
                piece = Encoded(number, NO_TOKENS, following is None, length, digest)
                batch.append((stretch, head, piece))
                size += len(stretch) + 64
                if size >= BATCH_CHARACTERS:
                    yield batch
                    batch, size = [], 0
                stretch, head = following, False
        yield batch

    def encode(batch: list[tuple[str, bool, Encoded]]) -> list[Encoded]:
        end = np.array([] if eot is None else [eot], dtype=np.int64)
        return [
            piece._replace(tokens=np.concatenate([end[:head], tokenizer.encode(text)]))
            for text, head, piece in batch
        ]

    ahead = batches()
    with ThreadPoolExecutor(workers) as pool:
        waiting = deque(pool.submit(encode, b) for b in itertools.islice(ahead, 2 * workers))
        try:
            while waiting:
                yield waiting.popleft().result()
                waiting += [pool.submit(encode, batch) for batch in itertools.islice(ahead, 1)]
        finally:
            for future in waiting:
                future.cancel()
