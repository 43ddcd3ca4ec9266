"""A checkpoint on disk: its names, its manifest, and whether its files match it. No torch.

A checkpoint is a directory `step-00000250` with these files:

- `rank-00000.safetensors` and so on: parts of the weights and of the optimizer state;
- `state.json`: the counters;
- `manifest.json`: step, world size, the data's fingerprint; the place of each part of each
  tensor; size and SHA-256 of the files above;
- `manifest.sha256`: the SHA-256 of manifest.json, as the tool `sha256sum` writes it.

A part of a tensor is a box: consecutive indices in every dimension, row-major in one file. The
boxes of a tensor hold each of its elements exactly once.

A directory is *whole* if it has `manifest.sha256`, else *temporary*: a save or a removal is in
progress or was interrupted; readers ignore it, and recovery removes it. `step-00000250.replaced` is
a whole checkpoint while a new one of the same step takes its name.
"""

from __future__ import annotations

import hashlib
import json
import math
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from windlass.errors import UserError, argument
from windlass.fileio import sha256_of

if TYPE_CHECKING:
    import torch


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
    "U16": ("uint16", 2),
    "U32": ("uint32", 4),
    "U64": ("uint64", 8),
    "BOOL": ("bool", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E8M0": ("float8_e8m0fnu", 1),
}
"""By the name of a type in the manifest: its name in torch, and bytes per number."""
STEP_DIR = re.compile(r"^step-(\d{8,})(\.replaced)?$")
THREADS = 4  # that hash files: one core hashes slower than many disks read

Count = Annotated[int, Field(ge=0, strict=True)]
FileName = Annotated[str, Field(pattern=r"^(rank-\d{5,}\.safetensors|state\.json)$")]


class Damaged(ValueError):
    """A checkpoint has changed since its commit; the message names the file and the difference."""


class Chunk(NamedTuple):
    """A box of a tensor and the place of its bytes; `offsets` and `sizes` of a scalar are empty."""

    file: FileName
    at: Count  # of its first byte in the file
    offsets: tuple[Count, ...]
    sizes: tuple[Count, ...]


class TensorInfo(BaseModel):
    """Type (a key of DTYPES) and shape of a whole tensor, and the boxes that hold it."""

    model_config = ConfigDict(frozen=True)
    dtype: str
    shape: tuple[Count, ...]
    chunks: tuple[Chunk, ...]


class FileInfo(BaseModel):
    model_config = ConfigDict(frozen=True)
    size: Count  # bytes
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Base(BaseModel):
    """The files of frozen weights, to which a checkpoint refers instead of holding the weights."""

    model_config = ConfigDict(frozen=True)
    name: str  # as `model.name`: a directory, or a name on the Hub
    commit: str  # of the Hub; empty for a directory
    files: dict[Annotated[str, Field(pattern=r"^[^/\\]+\.safetensors$")], FileInfo]
    weights: tuple[str, ...]  # the names of the tensors

    @property
    def title(self) -> str:
        return f"{self.name}@{self.commit[:12]}" if self.commit else self.name

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files.values())


class Manifest(BaseModel):
    """Everything about a checkpoint except its numbers; validated when it is read."""

    model_config = ConfigDict(frozen=True)
    format: Literal["windlass-checkpoint"] = "windlass-checkpoint"
    version: Literal[3] = 3
    step: Count
    # The number of its commit in the run: higher is newer, even after a return to an earlier step.
    serial: Count
    save_id: str
    time: str
    world: Count
    meta: dict[str, Any]  # the trainer's: `reason` (see choose.py), the data's fingerprint, ...
    tensors: dict[str, TensorInfo]
    aliases: dict[str, str]  # of tied weights: a name, and the name under which it is saved
    files: dict[FileName, FileInfo]
    base: Base | None = None  # of weights that are not among the tensors

    @property
    def reason(self) -> str:
        return str(self.meta.get("reason", ""))

    @property
    def bytes(self) -> int:
        return sum(f.size for f in self.files.values())

    @model_validator(mode="after")
    def _check(self) -> Manifest:
        """The named files hold as many elements of each tensor as it has."""
        if STATE not in self.files:
            raise ValueError(f"{STATE} is not among the files")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in DTYPES:
                raise ValueError(f"{name} has the unknown type {tensor.dtype!r}")
            if sum(math.prod(c.sizes) for c in tensor.chunks) != math.prod(tensor.shape):
                raise ValueError(f"{name}: its chunks do not hold each element once")
            for chunk in tensor.chunks:
                info, numbers = self.files.get(chunk.file), math.prod(chunk.sizes)
                if info is None or chunk.at + numbers * DTYPES[tensor.dtype][1] > info.size:
                    raise ValueError(f"a chunk of {name} lies outside of {chunk.file}")
        for alias, name in self.aliases.items():
            if name not in self.tensors or alias in self.tensors:
                raise ValueError(f"{alias} cannot be an alias of {name}")
        return self


def digest_line(manifest: bytes) -> bytes:
    """The content of `manifest.sha256` for a manifest."""
    return f"{hashlib.sha256(manifest).hexdigest()}  {MANIFEST}\n".encode()


def is_whole(path: Path) -> bool:
    return (path / DIGEST).is_file()


def hash_files(
    path: Path, sizes: Mapping[str, int], rank: int = 0, world: int = 1
) -> Iterator[tuple[str, str]]:
    """The SHA-256 of each file in this rank's share; the ranks take turns, largest files first."""
    mine = sorted(sizes, key=lambda name: (-sizes[name], name))[rank::world]
    with ThreadPoolExecutor(THREADS) as pool:
        yield from zip(mine, pool.map(lambda name: sha256_of(path / name), mine), strict=True)


def step_dir(directory: Path, step: int) -> Path:
    return directory / f"step-{step:08d}"


def names_in(directory: Path) -> list[str]:
    """The names in a directory, sorted; none if it does not exist. Ask it for a single name too:
    NFS may report a new name as missing for a minute."""
    try:
        return sorted(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        return []


MODEL, AVERAGE = "model/", "average/"
"""The beginning of the names of weights and of averaged weights (`train.average`)."""
WEIGHTS = ("raw", "average")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint under its final name. If it is damaged, `problem` says how."""

    path: Path
    step: int
    content: Manifest | None  # None: damaged
    problem: str = ""
    passed_over: tuple[Checkpoint, ...] = ()  # damaged ones that a choice preferred to this one

    @property
    def manifest(self) -> Manifest:
        assert self.content is not None, f"{self.path}: {self.problem}"
        return self.content

    @property
    def serial(self) -> int:
        """The number of its commit in the run: higher is newer; 0 if the manifest is damaged."""
        return self.content.serial if self.content else 0

    @property
    def notes(self) -> list[str]:
        """For the user, one for each damaged checkpoint that was passed over."""
        text = "the checkpoint of step {0.step} is damaged and not used: {0.problem}"
        return [text.format(other) for other in self.passed_over]

    @cached_property
    def counters(self) -> dict[str, Any]:
        """The numbers that a resume needs in addition to the tensors."""
        counters: dict[str, Any] = json.loads((self.path / STATE).read_bytes())
        return counters

    def verify(self, rank: int = 0, world: int = 1) -> str:
        """Hash this rank's share of the files, of `world` ranks; the damage, or an empty string."""
        files = self.content.files if self.content else {}
        sizes = {name: info.size for name, info in files.items()}
        try:
            for name, digest in hash_files(self.path, sizes, rank, world):
                if digest != (expected := files[name].sha256):
                    return f"{name} was changed: its SHA-256 is not {expected[:12]}…"
        except OSError as error:
            return f"{error.filename or self.path} cannot be read: {error.strerror}"
        return self.problem

    def names(self, prefix: str = "") -> list[str]:
        """The names of the tensors, without the aliases of tied ones."""
        return [n for n in self.manifest.tensors if n.startswith(prefix)]

    def with_weights(self, weights: str) -> Checkpoint:
        """This checkpoint, or with `average` one whose model has the averaged weights."""
        if weights not in WEIGHTS:
            raise UserError(f"{argument('weights', weights)}: write {' or '.join(WEIGHTS)}")
        if weights == "raw":
            return self
        tensors = self.manifest.tensors
        inside = {MODEL + n.removeprefix(AVERAGE): tensors[n] for n in self.names(AVERAGE)}
        if not inside:
            problem = f"{self.path} lacks averaged weights (train.average was 0)"
            raise UserError(f"{problem}: leave {argument('weights', weights)} out")
        update = {"tensors": {**tensors, **inside}}
        return replace(self, content=self.manifest.model_copy(update=update))

    def info(self, name: str) -> TensorInfo:
        """Type, shape and chunks of a tensor or alias; KeyError if it does not exist."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def dtype(self, name: str) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.info(name).dtype][0])
        return dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        import torch

        tensor = torch.empty(self.info(name).shape, dtype=self.dtype(name))
        self.read_into(name, (0,) * tensor.dim(), tensor)
        return tensor

    def read_into(self, name: str, offsets: Sequence[int], target: torch.Tensor) -> None:
        """Fill a tensor, on any device, with the box of its shape that begins at `offsets`; Damaged
        if a file is too short or cannot be read."""
        import numpy as np
        import torch

        target = target.detach()
        stops = [offset + size for offset, size in zip(offsets, target.shape, strict=True)]
        for chunk in self.info(name).chunks:
            ends = [*map(operator.add, chunk.offsets, chunk.sizes)]
            # The shared box, in indices of the whole tensor.
            low, high = [*map(max, offsets, chunk.offsets)], [*map(min, stops, ends)]
            if not all(map(operator.lt, low, high)):
                continue
            count, path = math.prod(chunk.sizes) * target.itemsize, self.path / chunk.file
            try:
                # Only pages that are used are read. Copy-on-write: torch lacks read-only tensors.
                numbers = np.memmap(path, np.uint8, "c", chunk.at, (count,))
            except (OSError, ValueError) as error:
                raise Damaged(f"{path} cannot be read: {error}") from None
            box = torch.from_numpy(numbers).view(target.dtype).view(chunk.sizes)
            target[_window(low, high, offsets)].copy_(box[_window(low, high, chunk.offsets)])


def _window(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """A box as an index of a tensor that begins at `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint under its final name, checked by its manifest and the sizes of its files."""
    match = STEP_DIR.match(path.name)
    step = int(match[1]) if match else 0
    try:
        digest, data = (path / DIGEST).read_bytes(), (path / MANIFEST).read_bytes()
        if digest != digest_line(data):
            raise Damaged(f"{MANIFEST} changed after the commit: {DIGEST} has another SHA-256")
        manifest = Manifest.model_validate_json(data)
        for name, info in manifest.files.items():
            if (size := (path / name).stat().st_size) != info.size:
                raise Damaged(f"{name} has {size:,} bytes instead of {info.size:,}")
        if match and step != manifest.step:
            raise Damaged(f"it is the checkpoint of step {manifest.step} under another name")
        return Checkpoint(path, manifest.step, manifest)
    except Damaged as error:
        problem = str(error)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        problem = f"{MANIFEST} is malformed: {place}: {first['msg']}"
    except OSError as error:
        problem = f"{Path(error.filename or MANIFEST).name} cannot be read: {error.strerror}"
    return Checkpoint(path, step, None, problem)


def checkpoints_in(directory: Path) -> list[Checkpoint]:
    """Every whole checkpoint of a run: damaged ones first, then by commit, newest first."""
    paths = [directory / name for name in names_in(directory) if STEP_DIR.match(name)]
    whole = [read_checkpoint(path) for path in paths if is_whole(path)]
    return sorted(whole, key=lambda c: (-c.serial if c.content else -math.inf, -c.step))


def open_checkpoint(path: str | Path, deep: bool = True) -> Checkpoint:
    """The checkpoint in a directory; `deep` hashes every byte. UserError if it is damaged."""
    checkpoint = read_checkpoint(Path(path))
    if problem := checkpoint.verify() if deep else checkpoint.problem:
        raise UserError(f"checkpoint {path} cannot be used: {problem}")
    return checkpoint
