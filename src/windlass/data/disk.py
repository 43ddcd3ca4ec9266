"""Training data of which only a part is on the disk: shards, made ahead and deleted after use.

Shard `k` of a run has `window` samples, `k * window` and the ones after, so the shard of a sample is
arithmetic. A shard and its place in the source give the place of the next shard. A checkpoint stores
the place of the shard that the next step reads. So a resume makes only the shards from there on,
also in an empty directory, and nothing before that place is read.

One process of a file system makes the shards, in a thread beside the training:

- `shard-00012.bin` ...: the tokens of a shard; it appears when it is complete.
- `shards.jsonl`: the places of the shards that were made, and their SHA-256.
- `failed.txt`: why no further shard will come.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.files import sha256_of
from windlass.data.samples import Batch, PackedSamples
from windlass.data.shards import Shard, Stream, on_disk
from windlass.data.stream import Place, Source
from windlass.errors import RunFailed, UserError
from windlass.fileio import Files, locked, read_jsonl, to_json

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

LOCK, TABLE, FAILED = ".lock", "shards.jsonl", "failed.txt"
POLL_SECONDS = 0.05
JOIN_SECONDS = 5.0  # for a thread that may be in a read of the network


class StreamSamples:
    """The endless training set of a stream, packed end to end."""

    def __init__(
        self,
        directory: Path,
        source: Source,
        context: int,
        shard_tokens: int,
        disk_tokens: int,
        document_mask: bool = False,
    ):
        """`directory` holds the shards of one run, at most `disk_tokens` tokens.

        With `document_mask` batches number the documents of a row.
        """
        assert source.tokenizer is not None
        self.directory, self.source, self.context = directory, source, context
        # A shard ends with the last label of its last sample, which the next shard begins with.
        self.window = (shard_tokens - 1) // context  # samples of a shard
        self.size = self.window * context  # tokens from a shard to the next
        self.limit = disk_tokens // shard_tokens  # shards on the disk
        self.dtype, self.document_mask = source.tokenizer.dtype, document_mask
        self._places = {0: source.start}  # of shards
        self._open: tuple[int, PackedSamples] | None = None
        self._maker: ShardMaker | None = None
        self._closed = threading.Event()

    def __len__(self) -> int:
        raise TypeError("a streamed source has no known number of samples")

    def path(self, number: int) -> Path:
        return self.directory / f"shard-{number:05d}.bin"

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        """The rows of samples; waits for their shards."""
        numbers, inside = np.divmod(indices, self.window)
        parts = list[Batch[np.ndarray]]()
        for number in np.unique(numbers).tolist():
            parts.append(self._shard(number).read(inside[numbers == number]))
        back = np.argsort(np.argsort(numbers, kind="stable"), kind="stable")
        fields = zip(*parts, strict=True)
        joined: list[Any] = [None if f[0] is None else np.concatenate(f)[back] for f in fields]
        return Batch(*joined)

    def _shard(self, number: int) -> PackedSamples:
        if self._open is None or self._open[0] != number:
            path, failed, closed = self.path(number), self.directory / FAILED, self._closed
            while not path.exists():
                if self._maker and self._maker.error:
                    raise self._maker.error
                if not self._maker and failed.exists() and (text := failed.read_text("utf-8")):
                    raise RunFailed(text)
                if closed.wait(POLL_SECONDS):
                    raise ValueError("the samples are closed")
            tokens = self.size + 1
            shard = Shard(file=path.name, tokens=tokens, sha256="", dtype=self.dtype)
            masked: dict[str, Any] = {}
            if self.document_mask:
                # A document's first token is the only end-of-text token in it.
                assert self.source.tokenizer is not None
                eot = self.source.tokenizer.eot
                starts = np.flatnonzero(np.fromfile(path, on_disk(self.dtype)) == eot)
                masked = {"starts": starts, "eot": eot}
            # The shard before is closed, because an open file keeps its space on the disk.
            stream = Stream(self.directory, [shard])
            self._open = number, PackedSamples(stream, self.context, **masked)
        return self._open[1]

    def place(self, sample: int) -> list[int]:
        """The shard of a sample, or the last one before it with a known place, and the place."""
        number = sample // self.window
        if number not in self._places:
            self._places |= read_places(self.directory, self.size)
        number = max(known for known in self._places if known <= number)
        return [number, *self._places[number]]

    def follow(self, ranks: Ranks, place: Sequence[int], following: Callable[[int], int]) -> None:
        """Make shards for a training, from a `place` on (empty: the first). All ranks call this.

        `following(n)` is the first sample from number `n` on that the training has still to read.
        """
        self.close()
        self._closed, self._open = threading.Event(), None
        self._places = {0: self.source.start}
        if place:
            self._places[place[0]] = Place(*place[1:])
        if is_maker(ranks, self.directory):
            self._maker = ShardMaker(self, self._places, following)
        # Nobody reads before the maker has removed what an earlier process left.
        ranks.all_gather_object("stream", self._maker is not None)
        if self._maker:
            self._maker.start()

    def prefill(self, tick: Callable[[int], None]) -> None:
        """Make the first shards for a run that has not begun, as far as there is room.

        `tick` gets the number of shards after each one.
        """
        if not self.directory.exists():
            self.directory.mkdir(parents=True)
            maker = ShardMaker(self, self._places, lambda sample: sample, tick)
            maker.run()
            if maker.error:
                raise maker.error

    def close(self) -> None:
        """Stop making and reading shards; the files stay for a resume."""
        self._closed.set()
        if self._maker is not None:
            self._maker.stop.set()
            self._maker.join(JOIN_SECONDS)
            self._maker = None

    def remove(self) -> None:
        """Delete the shards of a finished run, on the rank that made them."""
        is_maker = self._maker is not None
        self.close()
        with contextlib.suppress(OSError):
            if is_maker:
                Files().remove_tree(self.directory)


class ShardMaker(threading.Thread):
    """Makes one shard after another, and deletes those that the training has read."""

    def __init__(
        self,
        samples: StreamSamples,
        places: dict[int, Place],
        following: Callable[[int], int],
        tick: Callable[[int], None] | None = None,
    ):
        """Remove what is of no use in the directory, once its lock is free.

        With `tick`, which is called after each shard, the work ends when there is no room.
        """
        super().__init__(name="windlass-stream", daemon=True)
        self.samples, self.directory, self.tick = samples, samples.directory, tick
        self.following, self.stop = following, threading.Event()
        self.error: Exception | None = None
        self._places = dict(places)
        self._lock: AbstractContextManager[Any] = contextlib.nullcontext()
        with self._recorded():
            self._lock = locked(self.directory / LOCK)
            self._next = self._tidy(following(0) // samples.window)

    def run(self) -> None:
        with self._recorded(), self._lock:
            if not self.error:
                self._make(self._next)

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        """Turn an error into `error`, and into a file for the ranks of other processes."""
        try:
            yield
        except OSError as error:
            problem = f"{self.directory}: {error.strerror or error}"
            remedy = "start again to resume"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                remedy = f"lower data.disk_tokens, or free some space, and {remedy}"
            self.error = RunFailed(f"{problem}; {remedy}")
        except Exception as error:
            self.error = error
        if self.error:
            with contextlib.suppress(OSError):
                (self.directory / FAILED).write_text(str(self.error), encoding="utf-8")

    def needed(self, number: int) -> bool:
        """Whether the training has samples of a shard to read."""
        window = self.samples.window
        return self.following(number * window) < (number + 1) * window

    def _make(self, number: int) -> None:
        """Make shards from a number on until it is stopped."""
        source, size = self.samples.source, self.samples.size
        for begin, after, tokens in source.shards(self._places[number], size):
            while self.needed(number) and not self._has_room():
                if self.tick or self.stop.wait(POLL_SECONDS):
                    return
            if self.stop.is_set():
                return
            raw = tokens.astype(on_disk(self.samples.dtype), copy=False).data.cast("B")
            line = {"shard": number, "begin": begin, "after": after, "size": size}
            with (self.directory / TABLE).open("ab") as table:
                table.write(to_json(line | {"sha256": hashlib.sha256(raw).hexdigest()}))
            if self.needed(number):
                Files().replace(self.samples.path(number), raw)
            number += 1
            if self.tick:
                self.tick(number)

    def _tidy(self, first: int) -> int:
        """Keep the good shards from `first` on that an earlier process left; the next to make."""
        lines = read_table(self.directory, self.samples.size)
        places = read_places(self.directory, self.samples.size) | self._places
        self._places = places
        number = max(known for known in places if known <= first)
        good = set[Path]()
        while number >= first and number in lines and number + 1 in places:
            path = self.samples.path(number)
            if len(good) == self.samples.limit or not path.exists():
                break
            if sha256_of(path) != lines[number]["sha256"]:
                break
            good.add(path)
            number += 1
        for path in (*self.directory.glob("shard-*.bin"), *self.directory.glob(".*.new")):
            if path not in good:
                path.unlink(missing_ok=True)
        kept = (lines[known] for known in sorted(lines) if known < number)
        Files().replace(self.directory / TABLE, b"".join(map(to_json, kept)))
        return number

    def _has_room(self) -> bool:
        """Delete shards that the training has read; whether another one may be written."""
        paths = list(self.directory.glob("shard-*.bin"))
        unread = [path for path in paths if self.needed(int(path.stem.partition("-")[2]))]
        for path in set(paths) - set(unread):
            path.unlink(missing_ok=True)
        return len(unread) < self.samples.limit


def read_table(directory: Path, size: int) -> dict[int, dict[str, Any]]:
    """The lines of the table by the number of the shard, of shards of this size."""
    lines = read_jsonl(directory / TABLE)
    return {line["shard"]: line for line in lines if line.get("size") == size}


def read_places(directory: Path, size: int) -> dict[int, Place]:
    """The places of shards by number: of those that were made, and of the ones after them."""
    places = dict[int, Place]()
    for number, line in read_table(directory, size).items():
        places |= {number: Place(*line["begin"]), number + 1: Place(*line["after"])}
    return places


def is_maker(ranks: Ranks, directory: Path) -> bool:
    """Whether this rank makes shards: rank 0, and the first one of a host with another disk."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"{directory} cannot be written ({error.strerror})"
        raise UserError(f"{problem}; give another data.dir") from None
    mark = ""
    if ranks.env.local_rank == 0:
        (directory / FAILED).unlink(missing_ok=True)
    if ranks.main:  # a new name, which is in no cache of NFS
        descriptor, mark = tempfile.mkstemp(prefix=".seen-", dir=directory)
        os.close(descriptor)
    sees = Path(ranks.broadcast_object("stream", mark)).exists()
    ranks.all_gather_object("stream", sees)  # the file stays until everyone has looked
    if ranks.main:
        Path(mark).unlink(missing_ok=True)
    return ranks.main or (ranks.env.local_rank == 0 and not sees)
