"""A checkpoint of a run: whether it is whole, and its tensors, whole or by box."""

from __future__ import annotations

import itertools
import json
import math
import operator
from collections.abc import Iterator, Sequence
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
from windlass.fileio import PIECE_BYTES

if TYPE_CHECKING:
    import torch

MODEL, AVERAGE = "model/", "average/"
"""The beginning of the names of weights and of averaged weights (`train.average`)."""
WEIGHTS = ("raw", "average")
SHORT_BYTES = 2**16  # it is quicker to read more than to read pieces shorter than this


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

        UserError if it has none. Weights that are not trained have no average.
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
        import torch

        if not target.numel():
            return
        in_place = target.device.type == "cpu" and target.is_contiguous() and not target.is_conj()
        host = target.detach() if in_place else torch.empty(target.shape, dtype=target.dtype)
        stops = [offset + size for offset, size in zip(offsets, host.shape, strict=True)]
        for chunk in self.info(name).chunks:
            # The shared box, in indices of the whole tensor.
            low, high = [*map(max, offsets, chunk.offsets)], [*map(min, stops, chunk.ends)]
            if all(map(operator.lt, low, high)):
                shared = host[_window(low, high, offsets)]
                self._read_shared(chunk, [*map(operator.sub, low, chunk.offsets)], shared)
        if not in_place:
            target.copy_(host)

    def _read_shared(self, chunk: Chunk, low: Sequence[int], target: torch.Tensor) -> None:
        """Fill `target`, a view on the CPU, with the box of a chunk that begins at index `low`."""
        import torch

        high, item = [*map(operator.add, low, target.shape)], target.element_size()
        path = self.path / chunk.file
        try:
            with open(path, "rb", buffering=0) as source:
                for skipped, first, sizes in strips(chunk.sizes, low, high, item):
                    last = [*map(operator.add, first, sizes)]
                    begin, end = [*map(max, low, first)], [*map(min, high, last)]
                    wanted = target[_window(begin, end, low)]
                    in_place = wanted.is_contiguous() and tuple(wanted.shape) == sizes
                    strip = wanted if in_place else target.new_empty(sizes)
                    source.seek(chunk.at + skipped * item)
                    flat = strip.as_strided((strip.numel(),), (1,))
                    rest = memoryview(flat.view(torch.uint8).numpy())
                    while rest:
                        if not (count := source.readinto(rest)):
                            raise Damaged(f"{path} ends too early")
                        rest = rest[count:]
                    if not in_place:
                        wanted.copy_(strip[_window(begin, end, first)])
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}") from None


def _window(low: Sequence[int], high: Sequence[int], origin: Sequence[int]) -> tuple[slice, ...]:
    """A box as an index of a tensor that begins at `origin`."""
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def strips(
    sizes: Sequence[int], low: Sequence[int], high: Sequence[int], itemsize: int
) -> Iterator[tuple[int, list[int], tuple[int, ...]]]:
    """Boxes of consecutive numbers of an array that together hold the box from `low` to `high`.

    Yields for each the numbers before it, its first index and its sizes. A strip is wider than
    necessary if the exact one would be short. Whole rows need one strip per PIECE_BYTES.
    """
    if not sizes:
        yield 0, [], ()
        return
    low, high = list(low), list(high)
    inner = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]  # numbers per index
    cut = max((d for d in range(len(sizes)) if high[d] - low[d] < sizes[d]), default=0)
    while cut and (high[cut] - low[cut]) * inner[cut] * itemsize < SHORT_BYTES:
        low[cut], high[cut] = 0, sizes[cut]
        cut -= 1
    step = max(1, PIECE_BYTES // (inner[cut] * itemsize))
    for outer in itertools.product(*map(range, low[:cut], high[:cut])):
        for at in range(low[cut], high[cut], step):
            first = [*outer, at, *[0] * (len(sizes) - cut - 1)]
            shape = (*[1] * cut, min(step, high[cut] - at), *sizes[cut + 1 :])
            yield sum(map(operator.mul, first, inner)), first, shape


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
    found = [read_checkpoint(path) for path in paths if is_whole(path)]
    return sorted(found, key=lambda c: (-c.serial if c.content else -math.inf, -c.step))


def open_checkpoint(path: str | Path, deep: bool = True) -> Checkpoint:
    """The checkpoint in a directory; `deep` hashes every byte. UserError if it is damaged."""
    checkpoint = read_checkpoint(Path(path))
    if problem := checkpoint.verify() if deep else checkpoint.problem:
        raise UserError(f"checkpoint {path} cannot be used: {problem}")
    return checkpoint
