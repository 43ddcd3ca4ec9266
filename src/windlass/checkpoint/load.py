"""A checkpoint of a run: whether it is whole, and its tensors, whole or by box."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.checkpoint.format import (
    DTYPES,
    STATE,
    STEP_DIR,
    Chunk,
    Damaged,
    Manifest,
    TensorInfo,
    is_whole,
    names_in,
    read_manifest,
    verify_files,
)
from windlass.errors import UserError, argument

if TYPE_CHECKING:
    import torch

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
    def meta(self) -> dict[str, Any]:
        return self.manifest.meta

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
        try:
            if self.content is not None:
                verify_files(self.path, self.content, rank, world)
        except Damaged as error:
            return str(error)
        return self.problem

    def names(self, prefix: str = "") -> list[str]:
        """The names of the tensors, without the aliases of tied ones."""
        return [n for n in self.manifest.tensors if n.startswith(prefix)]

    def with_weights(self, weights: str) -> Checkpoint:
        """This checkpoint, or with `average` one whose model has the averaged weights.

        UserError if it lacks them. Frozen weights are not averaged.
        """
        if weights not in WEIGHTS:
            raise UserError(f"{argument('weights', weights)}: write {' or '.join(WEIGHTS)}")
        if weights == "raw":
            return self
        tensors, kind = self.manifest.tensors, self.meta.get("average", "none")
        inside = {MODEL + n.removeprefix(AVERAGE): tensors[n] for n in self.names(AVERAGE)}
        if not inside:
            problem = f"{self.path} has no averaged weights (train.average.kind = {kind})"
            later = "name a later checkpoint, or " * (kind != "none")
            raise UserError(f"{problem}: {later}leave {argument('weights', weights)} out")
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
        """Fill a tensor, on any device, with the box of its shape that begins at `offsets`.

        Raises Damaged if a file is too short or cannot be read.
        """
        target = target.detach()
        stops = [offset + size for offset, size in zip(offsets, target.shape, strict=True)]
        for chunk in self.info(name).chunks:
            # The shared box, in indices of the whole tensor.
            low, high = [*map(max, offsets, chunk.offsets)], [*map(min, stops, chunk.ends)]
            if all(map(operator.lt, low, high)):
                box = self._box(chunk, target.dtype)
                target[_window(low, high, offsets)].copy_(box[_window(low, high, chunk.offsets)])

    def _box(self, chunk: Chunk, dtype: torch.dtype) -> torch.Tensor:
        """The box of a chunk, mapped from its file: only pages that are used are read."""
        import numpy as np
        import torch

        count = math.prod(chunk.sizes) * dtype.itemsize
        path = self.path / chunk.file
        try:
            # Copy-on-write, because torch lacks read-only tensors.
            numbers = np.memmap(path, np.uint8, "c", chunk.at, (count,))
        except (OSError, ValueError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from None
        return torch.from_numpy(numbers).view(dtype).view(chunk.sizes)


def _window(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """A box as an index of a tensor that begins at `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint under its final name, checked by its manifest and the sizes of its files."""
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        match = STEP_DIR.match(path.name)
        return Checkpoint(path, int(match[1]) if match else 0, None, str(error))
    return Checkpoint(path, manifest.step, manifest)


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
