"""What a checkpoint is on the disk: its names, its manifest, and whether its files are what the manifest says. No torch.

A checkpoint is a directory `step-00000250` with

- `rank-00000.safetensors` ...: rows of the weights and of the optimizer's state, in the safetensors layout;
- `state.json`: the counters;
- `manifest.json`: step, world, digests of recipe and data; which rows of each tensor lie where; size and SHA-256 of the
  files above;
- `manifest.sha256`: the SHA-256 of manifest.json, as the tool `sha256sum` writes it.

A directory is *whole* when `manifest.sha256` is there: every byte was on the disk before the directory got its name, in
one rename. Else it is *temporary* (being written, being removed, or left by a kill): no reader looks at it, and recovery
removes it. Whole is not undamaged: every byte is hashed before it is used.

Two names besides: `step-00000250.replaced` is a whole checkpoint while a new one of the same step takes its name;
`bad-step-00000250` was damaged and set aside, and nothing reads, counts or deletes it. Nothing in a checkpoint is code,
and nothing that a manifest names is opened unless it is a plain name inside the directory.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

MANIFEST, DIGEST, STATE = "manifest.json", "manifest.sha256", "state.json"
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
}
"""The types of safetensors that can be saved: their names in torch, and bytes of a number."""
STEP_DIR = re.compile(r"^step-(\d{8,})(\.replaced)?$")
READ_BYTES = 8 * 2**20
THREADS = 4  # files that are hashed at once: one core hashes slower than many disks read

Count = Annotated[int, Field(ge=0, strict=True)]
FileName = Annotated[str, Field(pattern=r"^(rank-\d{5,}\.safetensors|state\.json)$")]


class Damaged(ValueError):
    """A checkpoint that is not as it was written; the message says which file, and how."""


class Chunk(NamedTuple):
    """Consecutive rows of a tensor (along its first dimension; a scalar is one row) and where their bytes lie."""

    file: FileName
    offset: Count
    start: Count
    rows: Count


class TensorInfo(BaseModel):
    """A tensor's type (a key of DTYPES), whole shape, and its rows in the order of `start`; a scalar is one row."""

    model_config = ConfigDict(frozen=True)
    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * DTYPES[self.dtype][1]


class FileInfo(BaseModel):
    """Size in bytes and SHA-256 of a file."""

    model_config = ConfigDict(frozen=True)
    size: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """Everything about a checkpoint but the numbers themselves; checked when it is read."""

    model_config = ConfigDict(frozen=True)
    format: Literal["windlass-checkpoint"] = "windlass-checkpoint"
    version: Literal[2] = 2
    step: Count
    serial: Count  # of its commit in the run: higher is newer, also after the run went back to an earlier step
    save_id: str
    time: str
    world: Count
    meta: dict[str, Any]  # the trainer's: `reason` (see retention), hashes of recipe and data, ...
    tensors: dict[str, TensorInfo]
    aliases: dict[str, str]  # names of tied weights, and the name under which each is written
    files: dict[FileName, FileInfo]

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files.values())

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        """Each tensor's rows are there exactly once, inside files that the manifest names."""
        if STATE not in self.files:
            raise ValueError(f"no {STATE} among the files")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{tensor.dtype!r} is no type of a tensor")
            row = 0
            for chunk in tensor.chunks:
                if chunk.start != row:
                    raise ValueError(
                        f"rows {row} to {chunk.start} of {name} are missing or written twice"
                    )
                row += chunk.rows
                info = self.files.get(chunk.file)
                if info is None or chunk.offset + chunk.rows * tensor.row_bytes > info.size:
                    raise ValueError(f"rows of {name} lie outside of {chunk.file}")
            rows = tensor.shape[0] if tensor.shape else 1
            if row != (rows if tensor.row_bytes else 0):
                raise ValueError(f"rows {row} to {rows} of {name} are missing")
        for alias, name in self.aliases.items():
            if name not in self.tensors or alias in self.tensors:
                raise ValueError(
                    f"{alias} is an alias of {name}, which is not there, or is there itself"
                )
        return self


@dataclass(frozen=True)
class Entry:
    """A whole checkpoint in a run. `manifest` is None where it is damaged, and `problem` says how."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str = ""

    @property
    def serial(self) -> int:
        """The number of its commit in the run; 0 where that cannot be read."""
        return self.manifest.serial if self.manifest else 0

    def verify(self, rank: int = 0, world: int = 1) -> str:
        """What is damaged once the files that fall to `rank` of `world` are hashed; empty: nothing."""
        try:
            if self.manifest is not None:
                verify(self.path, self.manifest, rank, world)
        except Damaged as error:
            return str(error)
        return self.problem


def parse(data: bytes) -> Manifest:
    """A manifest from its bytes; raises Damaged."""
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Damaged(
            f"{MANIFEST} is malformed: {where + ': ' if where else ''}{first['msg']}"
        ) from None


def digest_line(manifest: bytes) -> bytes:
    """What `manifest.sha256` holds for a manifest's bytes."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def is_whole(path: Path) -> bool:
    return (path / DIGEST).is_file()


def read_manifest(path: Path) -> Manifest:
    """The manifest of a whole checkpoint, unchanged since the commit, and its files of the right size; or Damaged."""
    try:
        digest, data = (path / DIGEST).read_bytes(), (path / MANIFEST).read_bytes()
        if digest != digest_line(data):
            raise Damaged(
                f"{MANIFEST} was changed after the commit: its SHA-256 is not the one in {DIGEST}"
            )
        manifest = parse(data)
        for name, info in manifest.files.items():
            if (size := (path / name).stat().st_size) != info.size:
                raise Damaged(f"{name} has {size:,} bytes instead of {info.size:,}")
    except OSError as error:
        raise Damaged(
            f"{Path(error.filename or MANIFEST).name} cannot be read: {error.strerror}"
        ) from None
    return manifest


def verify(path: Path, manifest: Manifest, rank: int = 0, world: int = 1) -> None:
    """Hash every byte of the files that fall to `rank` of `world`; raises Damaged with the first not as written.

    They are divided by size: all ranks hash about as much. With `read_manifest` on every rank all bytes are verified.
    """
    load, mine = [0] * world, []
    for name, info in sorted(manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
        lightest = load.index(min(load))
        load[lightest] += info.size
        if lightest == rank:
            mine.append(name)
    stop = threading.Event()  # an exception here (Ctrl-C) ends the threads at their next piece

    def sha256(name: str) -> str:
        digest, buffer = hashlib.sha256(), memoryview(bytearray(READ_BYTES))
        with open(path / name, "rb", buffering=0) as file:
            while (count := file.readinto(buffer)) and not stop.is_set():
                digest.update(buffer[:count])
        return digest.hexdigest()

    with ThreadPoolExecutor(THREADS) as pool:
        try:
            for name, digest in zip(mine, pool.map(sha256, mine), strict=True):
                if digest != (expected := manifest.files[name].sha256):
                    raise Damaged(
                        f"{name} is not what was written: its SHA-256 is not {expected[:12]}…"
                    )
        except OSError as error:
            raise Damaged(f"{error.filename or path} cannot be read: {error.strerror}") from None
        finally:
            stop.set()


def step_dir(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def names_in(directory: Path) -> list[str]:
    """The names in a directory, sorted; empty where there is none.

    A whole listing, even to ask for one name: on NFS a listing is fresh, while a name that was once missing may stay so
    for a minute.
    """
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


def read_entry(path: Path) -> Entry:
    """One whole checkpoint, judged by its manifest and the sizes of its files; no byte of the files is read."""
    match = STEP_DIR.match(path.name)
    step = int(match[1]) if match else 0
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        return Entry(path, step, None, str(error))
    if match and manifest.step != step:
        return Entry(
            path, step, None, f"it is the checkpoint of step {manifest.step} under another name"
        )
    return Entry(path, manifest.step, manifest)


def list_entries(directory: Path) -> list[Entry]:
    """Every whole checkpoint in a run's `checkpoints`: damaged ones first, then the newest commit first."""
    paths = [directory / name for name in names_in(directory) if STEP_DIR.match(name)]
    entries = [read_entry(path) for path in paths if is_whole(path)]
    return sorted(entries, key=lambda e: (-e.serial if e.manifest else -math.inf, -e.step))
