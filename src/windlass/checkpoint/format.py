"""The format of a checkpoint: what its manifest says, and whether the files are what it says. Needs no torch.

A checkpoint is a directory of

- `rank-00000.safetensors` ...: rows of the weights and the optimizer's moments, in the safetensors layout;
- `state.json`: the counters;
- `manifest.json`: step, world, digests; where each tensor's rows lie; size and SHA-256 of each file above;
- `COMMITTED`: the SHA-256 of manifest.json, written last: without it there is no checkpoint;
- `loss.json`, perhaps: the validation loss and other measures, where they were measured only after the save.

Nothing in it is code, and nothing that it names is opened unless it is a plain name inside the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT, VERSION = "windlass-checkpoint", 1
MANIFEST, MARKER, STATE, LOSS = "manifest.json", "COMMITTED", "state.json", "loss.json"
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""The types of safetensors that can be saved, with their size."""
FILE_NAME = re.compile(r"^(rank-\d{5,}\.safetensors|state\.json)$")
LARGEST_JSON = 2**30
"""Bytes of manifest or counters above which they are not read."""
READ_BYTES = 8 * 2**20
REMEMBERED = 64
"""Manifests that are kept parsed, by their digest."""


class Damaged(ValueError):
    """A checkpoint that is not whole; the message says what is wrong with which file."""


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of a tensor (along its first dimension; a scalar is one row) and where their bytes lie."""

    file: str
    offset: int
    start: int
    rows: int


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's type (a key of ITEM_BYTES), whole shape, and its rows in the order of `start`."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def rows(self) -> int:
        """Rows along the first dimension; 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return math.prod(self.shape[1:]) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileInfo:
    """Size in bytes and SHA-256 of a file."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """All that is known of a checkpoint but the numbers themselves."""

    step: int
    serial: int
    save_id: str
    time: str
    world: int
    meta: dict[str, Any]
    tensors: dict[str, TensorInfo]
    aliases: dict[str, str]
    files: dict[str, FileInfo]
    version: int = field(default=VERSION)

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(f.size for f in self.files.values())

    @property
    def loss(self) -> float | None:
        """Validation loss at this step, where it was measured."""
        found = self.meta.get("loss")
        return float(found) if isinstance(found, int | float) else None

    def to_json(self) -> dict[str, Any]:
        """The manifest as it is written."""
        tensors = {
            name: {
                "dtype": t.dtype,
                "shape": list(t.shape),
                "chunks": [[c.file, c.offset, c.start, c.rows] for c in t.chunks],
            }
            for name, t in self.tensors.items()
        }
        return {
            "format": FORMAT, "version": self.version, "step": self.step, "serial": self.serial, "save_id": self.save_id,
            "time": self.time, "world": self.world, "meta": self.meta, "aliases": self.aliases, "tensors": tensors,
            "files": {name: {"size": f.size, "sha256": f.sha256} for name, f in self.files.items()},
        }  # fmt: skip


def parse(data: bytes) -> Manifest:
    """A manifest from its bytes, every field checked; raises Damaged."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{MANIFEST} is no JSON: {error}") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise Damaged(f"{MANIFEST} is not of a Windlass checkpoint")
    if tree.get("version") != VERSION:
        raise Damaged(f"{MANIFEST} has format version {tree.get('version')!r}; this Windlass reads version {VERSION}")
    try:
        manifest = Manifest(
            step=_count(tree["step"]), serial=_count(tree["serial"]), save_id=_text(tree["save_id"]),
            time=_text(tree["time"]), world=_count(tree["world"]), meta=_mapping(tree["meta"]),
            tensors={_text(n): _tensor(t) for n, t in _mapping(tree["tensors"]).items()},
            aliases={_text(n): _text(t) for n, t in _mapping(tree["aliases"]).items()},
            files={_file_name(n): _file(f) for n, f in _mapping(tree["files"]).items()},
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Damaged(f"{MANIFEST} is malformed: {type(error).__name__}: {error}") from None
    _check_chunks(manifest)
    return manifest


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return value


def _file_name(name: str) -> str:
    if not FILE_NAME.match(name):
        raise ValueError(f"{name!r} is no name of a checkpoint's file")
    return name


def _file(value: dict[str, Any]) -> FileInfo:
    digest = _text(value["sha256"])
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise ValueError(f"{digest!r} is no SHA-256")
    return FileInfo(_count(value["size"]), digest)


def _tensor(value: dict[str, Any]) -> TensorInfo:
    if value["dtype"] not in ITEM_BYTES:
        raise ValueError(f"{value['dtype']!r} is no type of a tensor")
    chunks = [Chunk(_file_name(f), _count(o), _count(s), _count(r)) for f, o, s, r in value["chunks"]]
    ordered = tuple(sorted(chunks, key=lambda c: c.start))
    return TensorInfo(value["dtype"], tuple(_count(n) for n in value["shape"]), ordered)


def _check_chunks(manifest: Manifest) -> None:
    """Each tensor's rows are there exactly once, inside files that the manifest names."""
    if STATE not in manifest.files:
        raise Damaged(f"{MANIFEST} names no {STATE}")
    for name, tensor in manifest.tensors.items():
        at = 0
        for chunk in tensor.chunks:
            if chunk.start != at:
                raise Damaged(f"{MANIFEST}: rows {at} to {chunk.start} of {name} are missing or written twice")
            at += chunk.rows
            info = manifest.files.get(chunk.file)
            if info is None or chunk.offset + chunk.rows * tensor.row_bytes > info.size:
                raise Damaged(f"{MANIFEST}: rows of {name} lie outside of {chunk.file}")
        if at != (tensor.rows if tensor.row_bytes else 0):
            raise Damaged(f"{MANIFEST}: rows {at} to {tensor.rows} of {name} are missing")
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            raise Damaged(f"{MANIFEST}: {alias} stands for {name}, which is not there, or is there itself")


def committed(path: Path) -> bool:
    """Whether a directory has its commit marker."""
    return (path / MARKER).is_file()


def read(path: Path) -> Manifest:
    """The manifest of a committed checkpoint, itself unchanged since the commit; raises Damaged."""
    marker, data = _small(path / MARKER, "it was never committed"), _small(path / MANIFEST)
    digest = hashlib.sha256(data).hexdigest()
    if marker != f"{digest}\n".encode():
        raise Damaged(f"{MANIFEST} was changed after the commit: its SHA-256 is not the one in {MARKER}")
    if digest not in _parsed:  # a save looks at all checkpoints; parsing them each time would cost the training more
        while len(_parsed) >= REMEMBERED:
            _parsed.pop(next(iter(_parsed)), None)
        _parsed[digest] = parse(data)
    return _parsed[digest]


_parsed: dict[str, Manifest] = {}


def _small(path: Path, meaning: str = "") -> bytes:
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise Damaged(f"{path.name} is larger than any manifest")
        return path.read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{path.name} is missing" + (f": {meaning}" if meaning else "")) from None
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None


def check_sizes(path: Path, manifest: Manifest) -> None:
    """Every file is there with its size; raises Damaged."""
    for name, info in manifest.files.items():
        try:
            size = (path / name).stat().st_size
        except OSError as error:
            raise Damaged(
                f"{name} is missing" if isinstance(error, FileNotFoundError) else f"{name}: {error}"
            ) from None
        if size != info.size:
            raise Damaged(f"{name} has {size:,} bytes instead of {info.size:,}")


def verify(path: Path, manifest: Manifest | None = None, threads: int = 4) -> Manifest:
    """Read every byte of a checkpoint and compare: the manifest, or Damaged with the first thing that is wrong.

    An exception in the calling thread, as a signal's handler may raise it, ends the reading at once.
    """
    manifest = manifest or read(path)
    check_sizes(path, manifest)
    over = threading.Event()
    with ThreadPoolExecutor(max(1, min(threads, len(manifest.files)))) as pool, _set_after(over):
        digests = pool.map(lambda name: _digest(path / name, over), manifest.files)
        for (name, info), digest in zip(manifest.files.items(), digests, strict=True):
            if digest != info.sha256:
                raise Damaged(f"{name} is not what was written: its SHA-256 is {digest[:12]}…, not {info.sha256[:12]}…")
    return manifest


@contextlib.contextmanager
def _set_after(event: threading.Event) -> Iterator[None]:
    try:
        yield
    finally:
        event.set()


def _digest(path: Path, over: threading.Event) -> str:
    digest, buffer = hashlib.sha256(), bytearray(READ_BYTES)
    view = memoryview(buffer)
    try:
        with open(path, "rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not over.is_set():
                digest.update(view[:count])
    except OSError as error:
        raise Damaged(f"{path.name} cannot be read: {error.strerror}") from None
    return digest.hexdigest()
