"""From a run to a checkpoint without damage, and from a checkpoint to tensors.

One rank calls `candidates`, which lists the possible checkpoints in order of preference. All ranks
call `first_undamaged`, which shares the hashing and stops at the first good one. Only `recover`,
`discard` and `rename_damaged` change the disk.
"""

from __future__ import annotations

import itertools
import json
import math
import operator
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.checkpoint.format import (
    DIGEST,
    DTYPES,
    MANIFEST,
    STATE,
    STEP_DIR,
    Chunk,
    Damaged,
    Entry,
    Manifest,
    TensorInfo,
    is_whole,
    list_entries,
    names_in,
    read_entry,
    read_manifest,
    verify_files,
)
from windlass.checkpoint.retention import (
    Lineage,
    committed,
    policy_of,
    read_lineage,
    retain,
    scores_by_step,
)
from windlass.errors import UserError, argument
from windlass.fileio import PIECE_BYTES, Files
from windlass.recipe import Horizon
from windlass.recipe.settings import LOSS_SUITE
from windlass.run import Run, last_start

if TYPE_CHECKING:
    import torch

    from windlass.parallel.dist import Ranks

MODEL, AVERAGE = "model/", "average/"
"""The beginning of the names of weights and of averaged weights (`train.average`)."""
WEIGHTS = ("raw", "average")
SHORT_BYTES = 2**16  # it is quicker to read more than to read pieces shorter than this


class Checkpoint:
    """A whole checkpoint, read by tensor or box; `step` and `meta` are the manifest's."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self.step, self.meta = manifest.step, manifest.meta

    @cached_property
    def counters(self) -> dict[str, Any]:
        """The numbers that a resume needs in addition to the tensors."""
        counters: dict[str, Any] = json.loads((self.path / STATE).read_bytes())
        return counters

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
        return Checkpoint(self.path, self.manifest.model_copy(update=update))

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


def open_checkpoint(path: str | Path, deep: bool = True) -> Checkpoint:
    """The checkpoint in a directory; `deep` hashes every byte. UserError if it is damaged."""
    path = Path(path)
    try:
        manifest = read_manifest(path)
        if deep:
            verify_files(path, manifest)
    except Damaged as error:
        raise UserError(f"checkpoint {path} cannot be used: {error}") from None
    return Checkpoint(path, manifest)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from or to read, and the damaged ones that were preferred to it."""

    path: Path
    step: int
    notes: list[str] = field(default_factory=list)  # for the user, one per damaged checkpoint
    damaged: list[Path] = field(default_factory=list)


def candidates(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> list[Path]:
    """The checkpoints to which `checkpoint.resume` refers, in order of preference.

    - `latest`: the run's current lineage (see retention.py), newest commit first, then the
      one that the lineage started from; with `up_to`, only up to this step.
    - `best`: by their scores of `measure` (by default `checkpoint.best`) in the ledger.
    - a step or a path: this checkpoint alone.

    UserError if the checkpoint does not exist, or if one exists and `resume` is `never`.
    """
    run = Run(run_dir)
    entries = list_entries(run.checkpoints_dir)
    if resume == "never":
        if not entries:
            return []
        held = f"{run.path} holds a checkpoint of step {entries[0].step}"
        advice = f"use {argument('fresh')} to set the run aside, or resume from it"
        raise UserError(f"{held}, and checkpoint.resume is never; {advice}")
    if resume == "latest":
        return _latest(run, entries, up_to)
    if resume == "best":
        return _best(run, entries, measure)
    if resume.isdigit():
        if of_step := [e.path for e in entries if e.step == int(resume)]:
            return of_step
        steps = ", ".join(str(s) for s in sorted({e.step for e in entries})) or "none"
        raise UserError(f"{run.path} has no checkpoint of step {int(resume)}; there are: {steps}")
    path = Path(resume)
    if not path.is_dir():
        instead = "write latest, best, a step, a checkpoint's path, or never"
        raise UserError(f"checkpoint.resume: there is no checkpoint {resume!r}; {instead}")
    return candidates(path) if Run(path).exists else [path]


def _latest(run: Run, entries: list[Entry], up_to: int | None) -> list[Path]:
    lineage, limit = read_lineage(run.path) or Lineage(), float("inf") if up_to is None else up_to
    origin = run.path / lineage.checkpoint if lineage.checkpoint else None
    # A damaged one without a serial may belong to the lineage, so it is tried and reported.
    ours = (e for e in entries if e.manifest is None or e.serial > lineage.serial)
    paths = [e.path for e in ours if e.step <= limit and e.path != origin]
    if origin is None or lineage.step > limit:
        return paths
    if not paths and not origin.is_dir():
        problem = f"{run.path} has no checkpoint since it started from {origin}, which is gone"
        raise UserError(f"{problem}: restore it, or name another one (checkpoint.resume=STEP)")
    return [*paths, *([origin] if origin.is_dir() else [])]


def _best(run: Run, entries: list[Entry], measure: str) -> list[Path]:
    if not measure:
        measure = run.recipe.checkpoint.best if run.exists else LOSS_SUITE
    lineage, scores = read_lineage(run.path), scores_by_step(run.ledger(), measure)
    if lineage is not None:  # the ledger's scores of abandoned steps may be of other weights
        oldest, last = lineage.serial, lineage.step
        entries = [e for e in entries if not e.manifest or e.serial > oldest or e.step <= last]
    scored = [e for step in scores.ranked() for e in entries if e.step == step]
    return [e.path for e in (*scored, *(e for e in entries if e.step not in scores))]


def first_undamaged(paths: Sequence[Path], ranks: Ranks | None = None) -> Choice | None:
    """The first checkpoint without damage; None if `paths` is empty, UserError if all are damaged.

    Collective over `ranks`, which pass the same paths: each hashes its share of the files.
    """
    notes: list[str] = []
    for number, path in enumerate(paths):
        entry = read_entry(path)
        problem = entry.verify(*((ranks.rank, ranks.world) if ranks else (0, 1)))
        problems = ranks.all_gather_object("verified", problem) if ranks else [problem]
        problem = next(filter(None, problems), "")
        if not problem:
            return Choice(path, entry.step, notes, list(paths[:number]))
        notes.append(f"the checkpoint of step {entry.step} is damaged and not used: {problem}")
    if not notes:
        return None
    advice = f"use {argument('fresh')} to start over, or name another (checkpoint.resume=STEP)"
    raise UserError("\n  ".join(["no checkpoint can be used:", *notes]) + f"\n{advice}")


def choose_checkpoint(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> Choice | None:
    """The `first_undamaged` of the `candidates`; None if the run has no checkpoint."""
    return first_undamaged(candidates(run_dir, resume, measure=measure, up_to=up_to))


def find_checkpoint(source: str | Path, ranks: Ranks | None = None) -> Choice:
    """The checkpoint that a user names: `RUN` (the newest), `RUN@STEP`, `RUN@best` or a path.

    Collective over `ranks`, which hash every byte. UserError if it does not exist or is damaged.
    """
    text, at, which = os.fspath(source).rpartition("@")
    run, which = (text, which) if at and Path(text).is_dir() else (os.fspath(source), "latest")
    if not Path(run).is_dir():
        raise UserError(f"there is no run or checkpoint at {source}; by default runs lie in runs/")
    paths = [Path(run)] if (Path(run) / MANIFEST).is_file() else candidates(run, which)
    if choice := first_undamaged(paths, ranks):
        return choice
    raise UserError(f"{run} has no checkpoint yet")


def recover(directory: Path, files: Files | None = None) -> list[str]:
    """Remove temporary directories from a run's `checkpoints`; returns a note on each.

    A checkpoint gets its name back if the save in its place was interrupted.
    """
    files, notes = files or Files(), list[str]()
    for name in names_in(directory):
        path = directory / name
        if name.startswith("."):
            files.remove_tree(path)
            if name.startswith(".saving-"):
                step = int(name.split("-")[1])
                notes.append(f"removed the files of an interrupted save of step {step}")
        elif STEP_DIR.match(name) and path.is_dir() and not is_whole(path):
            files.remove_tree(path)
            notes.append(f"removed the rest of {name}: its removal had been interrupted")
    for name in names_in(directory):
        if name.endswith(".replaced") and STEP_DIR.match(name):
            successor = directory / name.removesuffix(".replaced")
            if is_whole(successor) and not read_entry(successor).problem:
                discard(directory / name, files)
            else:
                discard(successor, files)
                files.rename(directory / name, successor)
                files.sync_dir(directory)
                notes.append(f"restored {successor.name}: a save in its place was interrupted")
    return notes


def discard(path: Path, files: Files) -> None:
    """Remove a checkpoint: first its digest, durably, so that a kill leaves it temporary."""
    if is_whole(path):
        files.unlink(path / DIGEST)
        files.sync_dir(path)
    files.remove_tree(path)


def rename_damaged(choice: Choice, run: Path) -> None:
    """Rename the run's own damaged checkpoints of a choice to `bad-...`, which nothing reads."""
    files = Files()
    for path in choice.damaged:
        if path.resolve().is_relative_to(run.resolve()):
            bad, number = path.with_name(f"bad-{path.name}"), 0
            while bad.exists():
                number += 1
                bad = path.with_name(f"bad-{path.name}.{number}")
            files.rename(path, bad)
            files.sync_dir(path.parent)


@dataclass(frozen=True)
class CheckpointStatus:
    """A checkpoint of a run as `windlass checkpoints` lists it."""

    step: int
    path: Path
    time: str | None  # of the commit (UTC, ISO 8601); None, like the next two, if it is damaged
    bytes: int | None
    world: int | None
    scores: dict[str, float | None]  # of its step in the ledger: `loss`, and `checkpoint.best`
    kept: list[str]  # why retention keeps it: `last`, `best`, `final`, `every`, `start`
    problem: str  # the damage; empty if none was found


@dataclass(frozen=True)
class CheckpointList:
    """The content of a run's `checkpoints`."""

    run: Path
    verified: bool  # every byte was hashed; otherwise sizes were compared
    measure: str  # the recipe's `checkpoint.best`
    checkpoints: list[CheckpointStatus]
    temporary: list[str]  # directories of a save or removal that is in progress or interrupted
    bad: list[str]  # damaged ones, renamed to `bad-...`


def list_checkpoints(run_dir: str | Path, verify: bool = False) -> CheckpointList:
    """The checkpoints of a run by step; `verify` hashes every byte. UserError: no such run."""
    run = Run.open(run_dir)
    recipe, ledger, directory = run.recipe, run.ledger(), run.checkpoints_dir
    names, horizons = names_in(directory), list[Horizon]()
    if began := last_start(ledger):
        horizons = [recipe.horizon(began["steps"], began["samples_per_epoch"])]
    policy = policy_of(recipe.checkpoint, horizons, read_lineage(run.path))
    scores = {measure: scores_by_step(ledger, measure) for measure in (LOSS_SUITE, policy.measure)}
    why = retain(committed(directory).values(), policy, scores[policy.measure])
    rows = []
    for e in sorted(list_entries(directory), key=lambda e: e.step):
        m = e.manifest
        facts: tuple[Any, Any, Any] = (m.time, m.bytes, m.world) if m else (None, None, None)
        measured = {measure: values.get(e.step) for measure, values in scores.items()}
        problem, kept = e.verify() if verify else e.problem, why.get(e.serial, [])
        rows.append(CheckpointStatus(e.step, e.path, *facts, measured, kept, problem))
    cut_off = {n for n in names if STEP_DIR.match(n) and not is_whole(directory / n)}
    temporary = [n for n in names if n.startswith(".saving-") or n in cut_off]
    bad = [n for n in names if n.startswith("bad-")]
    return CheckpointList(run.path, verify, policy.measure, rows, temporary, bad)
