"""A source that is larger than the disk: its files as one endless stream of tokens.

The documents come in the order of files, row groups and rows, end to end, and start again after the
last one. A `Place` names a token of this stream by its document, so reading can begin at any place
whose file and row group are known, without the files before it.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import numpy as np

from windlass import hub
from windlass.data import vocabulary
from windlass.data.division import TextSource, stream_name
from windlass.data.documents import (
    BPE_CHARACTERS,
    Encoded,
    Written,
    encode_documents,
    first_characters,
    write_shards,
)
from windlass.data.files import (
    JSON_LINES,
    document,
    find_files,
    other_keys,
    read_records,
    suffixes,
)
from windlass.data.progress import Progress
from windlass.data.shards import (
    EVAL,
    MAIN,
    Index,
    Range,
    Shard,
    ShardWriter,
    SourceFile,
    Split,
    Stream,
    StreamedSource,
)
from windlass.data.sources import Corpus, explained, open_corpora
from windlass.data.tokenizer import Tokenizer
from windlass.errors import RunFailed, UserError, first_line, require
from windlass.processes import usable_cores
from windlass.recipe import DataSettings, Recipe

RETRY_SECONDS = (1.0, 4.0, 15.0, 60.0)  # pauses before the next attempt to read from a network
END_BYTES = 1 << 16  # of a local file, which are hashed; a Parquet file has its footer there
ROWS = 1024  # decoded at once


class Place(NamedTuple):
    """A token of a stream."""

    epoch: int = 0  # passes over the source before it
    file: int = 0
    group: int = 0  # of rows, in a Parquet file
    row: int = 0  # its document, in the group
    token: int = 0  # in the document


# -- files


def list_files(data: DataSettings, split: str, revision: str = "") -> tuple[list[SourceFile], str]:
    """The files of `data.source` in order, and the commit of the Hub or "".

    `revision`: a commit, tag or branch; empty: the newest commit. UserError if the source does not
    exist or has other files than Parquet and JSON lines.
    """
    source, commit = data.sources[0], ""
    if source.startswith("hf:"):
        paths, commit = _hub_files(source[3:], split, revision)
    else:
        paths = list(map(str, find_files(source)))
    endings = {suffixes(Path(path))[0] for path in paths}
    if others := sorted(endings - {".parquet", ".json", *JSON_LINES}):
        problem = f"{source} has files of {', '.join(others)}"
        advice = "only Parquet and JSON lines are read in parts: write data.disk_tokens=0"
        raise UserError(f"data.disk_tokens: {problem}; {advice}")
    require("pyarrow", f"data.disk_tokens: {source}")
    with explained(f"data.source: {source} cannot be listed", UserError):
        return list(map(describe_file, paths)), commit


def _hub_files(place: str, split: str, revision: str) -> tuple[list[str], str]:
    """The files of a data set of `datasets`, by its own rules, and its commit."""
    folder, commit = Path(place).expanduser(), ""
    what = f"data.source: hf:{place}{f', revision {revision}' if revision else ''}"
    require("datasets", what)
    name, _, config = (str(folder), "", "") if folder.is_dir() else place.partition(":")
    if not folder.is_dir():
        hub.prepare()
    with explained(f"{what} cannot be loaded", UserError), hub.explained(what):
        import datasets

        if not folder.is_dir():
            from huggingface_hub import HfApi

            commit = str(HfApi().dataset_info(name, revision=revision or None).sha)
        builder = datasets.load_dataset_builder(name, config or None, revision=commit or None)
    files = builder.config.data_files or {}
    if split not in files:
        shown = ", ".join(map(str, files)) or "no files"
        raise UserError(f"{what} has no split {split!r}; it has {shown}: set data.split")
    return list(map(str, files[split])), commit


def describe_file(path: str) -> SourceFile:
    """A local file with its size and the SHA-256 of its end; a commit pins a file of the Hub."""
    if "://" in path:
        return SourceFile(file=path)
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - END_BYTES))
        return SourceFile(file=path, bytes=size, sha256=hashlib.sha256(file.read()).hexdigest())


def open_file(path: str) -> BinaryIO:
    """A file of this machine or, by its URL, of the Hub; reads only what is asked for."""
    if "://" not in path:
        return open(path, "rb")
    import fsspec

    return cast(BinaryIO, fsspec.open(path, "rb").open())


def read_rows(path: str, at: Place, text_key: str) -> Iterator[tuple[Place, str]]:
    """The documents of a file from a place on. Of Parquet, only their row groups are read."""
    with open_file(path) as raw:
        if suffixes(Path(path))[0] != ".parquet":
            records = read_records(Path(path), raw, text_key, lines=True)
            for row, (where, record) in enumerate(records):
                if row >= at.row:
                    here = at if row == at.row else at._replace(row=row, token=0)
                    yield here, document(record, True, where, text_key)
            return
        import pyarrow.parquet as pq

        table = pq.ParquetFile(raw)
        names = table.schema_arrow.names
        if text_key not in names:
            raise UserError(f"{path} has no column {text_key!r}; {other_keys(names)}")
        for group in range(at.group, table.num_row_groups):
            first, row = at.row if group == at.group else 0, 0
            for batch in table.iter_batches(ROWS, row_groups=[group], columns=[text_key]):
                begin = max(0, first - row)
                for number, value in enumerate(batch.column(0)[begin:].to_pylist(), row + begin):
                    here = Place(at.epoch, at.file, group, number)
                    here = at if here[:4] == at[:4] else here
                    yield here, document(value, False, path, text_key)
                row += len(batch)


# -- documents and tokens


class Source:
    """The endless stream of documents and tokens of some files."""

    def __init__(
        self,
        files: Sequence[SourceFile],
        text_key: str,
        tokenizer: Tokenizer | None = None,  # None: for documents alone
        workers: int = 1,
        start: Place | None = None,  # where each pass begins; the tokens before are held out
        notify: Callable[[str], None] = print,
    ):
        self.files, self.text_key, self.tokenizer = list(files), text_key, tokenizer
        self.workers, self.start, self.notify = workers, start or Place(), notify

    def documents(self, at: Place) -> Iterator[tuple[Place, str]]:
        """The documents from a place on, without end; each place has the tokens to leave out.

        UserError if there is no text, or a file is damaged or has changed; RunFailed if a file
        cannot be read.
        """
        empty = 0  # passes, or parts of one, without text
        while empty < 2:
            empty += 1
            for number in range(at.file, len(self.files)):
                for place, text in self._read(at if number == at.file else Place(at.epoch, number)):
                    empty = 0 if text else empty
                    yield place, text
            at = self.start._replace(epoch=at.epoch + 1)
        first = self.files[0].file
        raise UserError(
            f"data.source: there is no text for training in {first} and the files after"
        )

    def one_pass(self, start: int = 0) -> Iterator[tuple[str, float]]:
        """The documents of one pass from number `start` on, as `Corpus.read`."""
        first = (text for place, text in self._first_pass())
        return ((text, 0.0) for text in itertools.islice(first, start, None))

    def _first_pass(self) -> Iterator[tuple[Place, str]]:
        return itertools.takewhile(lambda item: not item[0].epoch, self.documents(self.start))

    def _read(self, at: Place) -> Iterator[tuple[Place, str]]:
        """The documents of a file from a place on; tries again if a network fails."""
        file = self.files[at.file]
        path, is_local = file.file, "://" not in file.file
        pauses, failed_at = list[float](), None
        while True:
            try:
                if is_local and describe_file(path) != file:
                    advice = "bring the old file back, or prepare the data again"
                    raise UserError(f"{path} has changed since the run began: {advice}")
                for place, text in read_rows(path, at, self.text_key):
                    yield place, text
                    at = place._replace(row=place.row + 1, token=0)
                return
            except (UserError, RunFailed):
                raise
            except Exception as error:  # of pyarrow, fsspec, the Hub's client or its HTTP library
                reason = f"{type(error).__name__}: {first_line(error)}"
                if is_local:
                    problem = "is damaged, cut short or cannot be read"
                    raise UserError(f"{path} {problem}: {reason}") from None
                if problem := hub.problem_of(error):
                    raise UserError(f"{path} {problem}") from None
                if at != failed_at:  # it has read something since the last failure
                    pauses, failed_at = list(RETRY_SECONDS), at
                if not pauses:
                    problem = f"reading {path} broke off ({reason})"
                    raise RunFailed(f"{problem}; start again to resume") from None
                self.notify(f"reading {path} broke off ({reason}); again in {pauses[0]:.0f} s")
                time.sleep(pauses.pop(0))

    def tokens(self, at: Place) -> Generator[tuple[Place, Encoded], None, None]:
        """The tokens from a place on, without end: parts of documents, each with its place."""
        assert self.tokenizer is not None
        places, number, done = deque[Place](), -1, 0

        def read(start: int) -> Iterator[tuple[str, float]]:
            for place, text in self.documents(at):
                places.append(place)
                yield text, 0.0

        corpus = TextSource(MAIN, Corpus("", read, {}))
        batches = encode_documents(corpus, 0, self.tokenizer, self.workers)
        with contextlib.closing(batches):
            for piece in itertools.chain.from_iterable(batches):
                number, done = piece.number, done if piece.number == number else 0
                place = places.popleft() if piece.last else places[0]
                passed = min(max(0, place.token - done), len(piece.tokens))
                if passed < len(piece.tokens):
                    own = piece._replace(tokens=piece.tokens[passed:])
                    yield place._replace(token=done + passed), own
                done += len(piece.tokens)

    def shards(
        self, at: Place, size: int
    ) -> Generator[tuple[Place, Place, np.ndarray], None, None]:
        """Shards of `size` tokens and the one after, from a place on, without end.

        Yields the places of a shard and of the next one, and a buffer [size + 1] that is filled
        again afterwards.
        """
        assert self.tokenizer is not None
        buffer, filled, begin = np.empty(size + 1, self.tokenizer.dtype), 0, at
        with contextlib.closing(self.tokens(at)) as pieces:
            for place, piece in pieces:
                tokens = piece.tokens
                while len(tokens):
                    part = tokens[: len(buffer) - filled]
                    buffer[filled : filled + len(part)] = part
                    filled += len(part)
                    tokens = tokens[len(part) :]
                    if filled == len(buffer):
                        passed = len(piece.tokens) - len(tokens)
                        last = place._replace(token=place.token + passed - 1)
                        yield begin, last, buffer
                        begin, filled, buffer[0] = last, 1, buffer[-1]


def open_source(data: DataSettings, index: Index, tokenizer: Tokenizer) -> Source:
    """The training data of an index."""
    assert index.stream is not None
    start = Place(*index.stream.start)
    # Training computes meanwhile, so half of the cores are enough.
    workers = data.workers or max(1, usable_cores() // 2)
    return Source(index.stream.files, data.text_key, tokenizer, workers, start)


# -- preparation


def prepare_stream(
    recipe: Recipe,
    settings: dict[str, Any],
    directory: Path,
    progress: Progress,
    pinned: str = "",
) -> Index:
    """List the files, and write tokenizer and validation data; returns the index, not written yet.

    `pinned`: the commit of the Hub that a run has recorded.
    """
    data = recipe.data
    files, commit = list_files(data, data.split, pinned or data.revision)
    if vocabulary.kind_of(data.tokenizer) == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from the first documents")
        texts = (text for text, _ in Source(files, data.text_key).one_pass())
        first = first_characters(texts, BPE_CHARACTERS)
        tokenizer = vocabulary.train_bpe(first, data.tokenizer_vocab)
    else:
        tokenizer = vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
    if tokenizer.eot is None:
        problem = f"{data.tokenizer} has no token that ends a document"
        raise UserError(f"data.tokenizer: {problem}; use another")
    tokenizer.save(directory)
    workers = data.workers or usable_cores()
    source = Source(files, data.text_key, tokenizer, workers, notify=progress.note)
    streams, origins, start = dict[str, list[Shard]](), dict[str, Any](), Place()
    if data.eval_sources or data.eval_split:
        work = {"settings": settings, "tokenizer": tokenizer.fingerprint, "commit": commit}
        written = Written(directory, work)
        for held in _separate(data, source, commit, progress):
            origins[held.stream] = held.origin
            streams[held.stream] = write_shards(data, directory, held, tokenizer, written, progress)
    elif data.val_shards:
        streams[MAIN], start = _first_shards(data, source, directory, progress)
    else:
        next(source.tokens(start))  # an error of the source shows now
    origins[MAIN] = {"name": data.sources[0], "revision": commit}
    return Index(
        settings=settings,
        source=origins,
        tokenizer=tokenizer.describe(),
        streams=streams,
        splits=_validation(directory, streams),
        stream=StreamedSource(
            files=files, revision=commit, start=list(start), shard_tokens=data.shard_tokens
        ),
    )


def _separate(
    data: DataSettings, source: Source, commit: str, progress: Progress
) -> Iterator[TextSource]:
    """The validation data of `data.eval_source`, or of the split `data.eval_split`."""
    if data.eval_sources:
        split = data.eval_split or data.split
        corpora = open_corpora(data, data.eval_sources, split, progress.note)
    else:
        files, _ = list_files(data, data.eval_split, commit)
        own = Source(files, source.text_key, notify=source.notify)
        corpora = [Corpus(f"{data.sources[0]}, {data.eval_split}", own.one_pass, {})]
    for number, corpus in enumerate(corpora):
        yield TextSource(stream_name(EVAL, number), corpus)


def _first_shards(
    data: DataSettings, source: Source, directory: Path, progress: Progress
) -> tuple[list[Shard], Place]:
    """Hold out the first `data.val_shards` shards; returns them, and the place after them."""
    assert source.tokenizer is not None
    enough = data.val_shards * data.shard_tokens
    new = ShardWriter(directory, MAIN, source.tokenizer.dtype, data.shard_tokens)
    update = partial(progress.update, "validation data")
    with contextlib.closing(source.tokens(source.start)) as pieces, new as writer:
        for place, piece in pieces:
            if place.epoch:
                break
            rest = enough - writer.tokens
            writer.add(piece.tokens[:rest], piece.number, piece.size, piece.text)
            update(writer.tokens / enough, writer.tokens)
            if rest < len(piece.tokens):
                return writer.finish(), place._replace(token=place.token + rest)
        problem = f"the source has only {writer.tokens:,} tokens, and {enough:,} are held out"
        raise UserError(f"data.val_shards: {problem}: lower it or data.shard_tokens")


def _validation(directory: Path, streams: dict[str, list[Shard]]) -> dict[str, Split]:
    """The split `val` of all prepared shards; none without any."""
    ranges, texts = list[Range](), list[np.ndarray]()
    for name, shards in streams.items():
        stream = Stream(directory, shards)
        ranges.append(Range(stream=name, start=0, stop=len(stream)))
        texts.append(stream.column("text"))
    if not ranges:
        return {}
    hashes = np.concatenate(texts)
    text = hashlib.sha256(hashes.tobytes()).hexdigest()[:16]
    return {"val": Split(ranges=ranges, documents=len(hashes), text=text)}
