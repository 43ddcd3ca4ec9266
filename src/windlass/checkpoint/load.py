"""From a run to a checkpoint that is whole and undamaged, and from a checkpoint to tensors. No file is run as code.

Choosing has two parts, so that ranks can share the hashing: `candidates` lists what may be used, in order of
preference, from manifests alone (one rank does this); `first_undamaged` hashes one after the other until one is good.
Nothing here changes the disk but `recover`, `discard` and `rename_damaged`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.checkpoint import format as format_
from windlass.checkpoint.format import DTYPES, STATE, STEP_DIR, Damaged, Entry, Manifest, TensorInfo
from windlass.checkpoint.retention import (
    Lineage,
    committed,
    policy_of,
    ranked,
    read_lineage,
    retain,
    scores_by_step,
)
from windlass.errors import UserError, argument
from windlass.fileio import Files
from windlass.recipe import Horizon
from windlass.recipe.settings import LOSS_SUITE
from windlass.run import Run, last_start

if TYPE_CHECKING:
    import torch

    from windlass.parallel.dist import Ranks

PIECE_BYTES = 2**26  # read of a tensor at a time


class Checkpoint:
    """A whole checkpoint, read a tensor or some rows at a time; `step` and `meta` are the manifest's."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest
        self.step, self.meta = manifest.step, manifest.meta

    @cached_property
    def counters(self) -> dict[str, Any]:
        """What a resume needs besides tensors."""
        counters: dict[str, Any] = json.loads((self.path / STATE).read_bytes())
        return counters

    def names(self, prefix: str = "") -> list[str]:
        """The names of the tensors, without the aliases of tied ones."""
        return [n for n in self.manifest.tensors if n.startswith(prefix)]

    def info(self, name: str) -> TensorInfo:
        """Type, shape and chunks of a tensor; KeyError where there is none."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def dtype(self, name: str) -> torch.dtype:
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.info(name).dtype][0])
        return dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        import torch

        tensor = torch.empty(self.info(name).shape, dtype=self.dtype(name))
        self.read_into(name, 0, tensor)
        return tensor

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill a tensor, on any device, with the rows from `start` on; raises Damaged where a file is cut off."""
        import torch

        info = self.info(name)
        stop = start + (target.shape[0] if info.shape else 1)
        in_place = target.device.type == "cpu" and target.is_contiguous()
        host = target.detach() if in_place else torch.empty(target.shape, dtype=target.dtype)
        if not host.numel():
            return
        raw = memoryview(host.reshape(-1).view(torch.uint8).numpy())
        for chunk in info.chunks:
            first, last = max(start, chunk.start), min(stop, chunk.start + chunk.rows)
            if last > first:
                path = self.path / chunk.file
                rows = raw[(first - start) * info.row_bytes : (last - start) * info.row_bytes]
                try:
                    with open(path, "rb", buffering=0) as source:
                        source.seek(chunk.offset + (first - chunk.start) * info.row_bytes)
                        while rows:
                            if not (count := source.readinto(rows[:PIECE_BYTES])):
                                raise Damaged(f"{path} ends too early")
                            rows = rows[count:]
                except OSError as error:
                    raise Damaged(f"{path} cannot be read: {error.strerror}") from None
        if not in_place:
            target.copy_(host)


def open_checkpoint(path: str | Path, deep: bool = True) -> Checkpoint:
    """The checkpoint in a directory, every byte of it hashed (`deep`), or else its manifest and sizes; UserError."""
    path = Path(path)
    try:
        manifest = format_.read_manifest(path)
        if deep:
            format_.verify(path, manifest)
    except Damaged as error:
        raise UserError(f"checkpoint {path} cannot be used: {error}") from None
    return Checkpoint(path, manifest)


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from or to read, and what to tell the user about it."""

    path: Path
    step: int
    notes: list[str] = field(
        default_factory=list
    )  # newer or better ones that were passed over, and why
    damaged: list[Path] = field(default_factory=list)  # where those lie


def candidates(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> list[Path]:
    """The checkpoints that `checkpoint.resume` means, in the order in which they are tried; empty: there is none.

    `latest` is the newest commit of the run's current lineage (see retention.py), then the next older ones, then the
    checkpoint that the lineage started from. `best` is the one with the best score in the ledger, then the next best.
    Both pass over damaged checkpoints; of a step or a path that is damaged nothing else is tried.

    `measure` is that of `best`, by default the recipe's `checkpoint.best`; with `up_to` `latest` means only checkpoints up
    to this step. UserError: the checkpoint that was asked for is not there, or there is one and `resume` is `never`.
    """
    run = Run(run_dir)
    entries = format_.list_entries(run.checkpoints_dir)
    if resume == "never":
        if not entries:
            return []
        problem = f"{run.path} holds a checkpoint of step {entries[0].step}, and checkpoint.resume is never"
        raise UserError(
            f"{problem}; use {argument('fresh')} to set the run aside, or resume from it"
        )
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
        write = "write latest, best, a step, a checkpoint's path, or never"
        raise UserError(f"checkpoint.resume is {resume!r}: there is no such checkpoint; {write}")
    return candidates(path) if (path / "recipe.toml").is_file() else [path]


def _latest(run: Run, entries: list[Entry], up_to: int | None) -> list[Path]:
    lineage, limit = read_lineage(run.path) or Lineage(), float("inf") if up_to is None else up_to
    origin = run.path / lineage.checkpoint if lineage.checkpoint else None
    # Damaged ones, whose serial cannot be read, may belong to the lineage: they are tried, and reported.
    ours = (e for e in entries if e.manifest is None or e.serial > lineage.serial)
    paths = [e.path for e in ours if e.step <= limit and e.path != origin]
    if origin is None or lineage.step > limit:
        return paths
    if not paths and not origin.is_dir():
        gone = (
            f"{run.path} has no checkpoint yet since it started from {origin}, and that one is gone"
        )
        raise UserError(
            f"{gone}: restore it, or name another one to resume from (checkpoint.resume=STEP)"
        )
    return [*paths, *([origin] if origin.is_dir() else [])]


def _best(run: Run, entries: list[Entry], measure: str) -> list[Path]:
    if not measure:
        measure = run.recipe.checkpoint.best if run.recipe_path.is_file() else LOSS_SUITE
    lineage, scores = read_lineage(run.path), scores_by_step(run.ledger(), measure)
    if (
        lineage is not None
    ):  # abandoned steps have no score: the ledger may have that of another model there
        entries = [
            e
            for e in entries
            if e.manifest is None or e.serial > lineage.serial or e.step <= lineage.step
        ]
    scored = [e for step in ranked(scores, measure) for e in entries if e.step == step]
    return [e.path for e in (*scored, *(e for e in entries if e.step not in scores))]


def first_undamaged(paths: Sequence[Path], ranks: Ranks | None = None) -> Choice | None:
    """The first checkpoint of which every byte is as it was written; None where `paths` is empty.

    Collective over `ranks`, each of which gives the same paths, reads every manifest and hashes its share of the files.
    Raises UserError where all are damaged.
    """
    notes: list[str] = []
    for number, path in enumerate(paths):
        entry = format_.read_entry(path)
        problem = entry.verify(*((ranks.rank, ranks.world) if ranks else (0, 1)))
        problems = ranks.all_gather_object("verified", problem) if ranks else [problem]
        problem = next(filter(None, problems), "")
        if not problem:
            return Choice(path, entry.step, notes, list(paths[:number]))
        notes.append(f"the checkpoint of step {entry.step} is damaged and passed over: {problem}")
    if not notes:
        return None
    advice = f"use {argument('fresh')} to set the run aside and start over, or name another checkpoint (checkpoint.resume=STEP)"
    raise UserError("\n  ".join(["no checkpoint can be used:", *notes]) + f"\n{advice}")


def choose_checkpoint(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> Choice | None:
    """`candidates`, and the `first_undamaged` of them; None where there is none to resume from."""
    return first_undamaged(candidates(run_dir, resume, measure=measure, up_to=up_to))


def find_checkpoint(source: str | Path, ranks: Ranks | None = None) -> Choice:
    """The checkpoint that a user names: `RUN` (its newest), `RUN@STEP`, `RUN@best`, or a path; every byte verified.

    Collective over `ranks`, which share the hashing. Raises UserError where there is none, or it is damaged.
    """
    text, at, which = os.fspath(source).rpartition("@")
    run, which = (text, which) if at and Path(text).is_dir() else (os.fspath(source), "latest")
    if not Path(run).is_dir():
        raise UserError(
            f"there is no run and no checkpoint at {source}; by default the runs lie in runs/"
        )
    paths = [Path(run)] if (Path(run) / format_.MANIFEST).is_file() else candidates(run, which)
    if choice := first_undamaged(paths, ranks):
        return choice
    raise UserError(f"{run} has no checkpoint yet")


def recover(directory: Path, files: Files | None = None) -> list[str]:
    """Remove every temporary directory from a run's `checkpoints`, before anything is saved; returns a note on each.

    A checkpoint whose replacement was cut off gets its name back.
    """
    files, notes = files or Files(), list[str]()
    for name in format_.names_in(directory):
        path = directory / name
        if name.startswith("."):
            files.remove_tree(path)
            if name.startswith(".saving-"):
                notes.append(
                    f"removed what an interrupted save of step {int(name.split('-')[1])} had left"
                )
        elif STEP_DIR.match(name) and path.is_dir() and not format_.is_whole(path):
            files.remove_tree(path)
            notes.append(f"removed {name}, whose removal had been interrupted")
    for name in format_.names_in(directory):
        if name.endswith(".replaced") and STEP_DIR.match(name):
            successor = directory / name.removesuffix(".replaced")
            if format_.is_whole(successor) and not format_.read_entry(successor).problem:
                discard(directory / name, files)
            else:
                discard(successor, files)
                files.rename(directory / name, successor)
                files.sync_dir(directory)
                notes.append(
                    f"{successor.name} is back: the save that was to replace it was interrupted"
                )
    return notes


def discard(path: Path, files: Files) -> None:
    """Remove a checkpoint. Its digest goes first, durably: a kill or power cut leaves a temporary directory."""
    if format_.is_whole(path):
        files.unlink(path / format_.DIGEST)
        files.sync_dir(path)
    files.remove_tree(path)


def rename_damaged(choice: Choice, run: Path) -> None:
    """Rename the damaged checkpoints of a run that a choice passed over to `bad-...`, which nothing reads."""
    for path in choice.damaged:
        if not path.resolve().is_relative_to(run.resolve()):
            continue  # another run's, which is not ours to change
        files, number = Files(), 0
        while (
            target := path.with_name(f"bad-{path.name}" + (f".{number}" if number else ""))
        ).exists():
            number += 1
        files.rename(path, target)
        files.sync_dir(path.parent)


@dataclass(frozen=True)
class CheckpointStatus:
    """A checkpoint of a run as `windlass checkpoints` lists it."""

    step: int
    path: Path
    time: (
        str | None
    )  # when it was committed (UTC, ISO 8601); None, as the next two, where it is damaged
    bytes: int | None
    world: int | None
    scores: dict[
        str, float | None
    ]  # of its step, by the ledger: `loss`, and the recipe's `checkpoint.best`
    kept: list[str]  # why retention keeps it: `last`, `best`, `final`, `every`, `start`
    problem: str  # what is damaged; empty: it is good, as far as it was read


@dataclass(frozen=True)
class CheckpointList:
    """What is in a run's `checkpoints`."""

    run: Path
    verified: bool  # every byte was hashed, not just sizes compared
    measure: str  # the recipe's `checkpoint.best`
    checkpoints: list[CheckpointStatus]
    temporary: list[str]  # directories that are being written or removed, or were left by a kill
    bad: list[str]  # damaged ones, renamed to `bad-...`


def list_checkpoints(run_dir: str | Path, verify: bool = False) -> CheckpointList:
    """The checkpoints of a run by step: sizes compared, or with `verify` every byte hashed. UserError: there is no run."""
    run = Run.open(run_dir)
    recipe, ledger, directory = run.recipe, run.ledger(), run.checkpoints_dir
    entries, names = format_.list_entries(directory), format_.names_in(directory)
    began = last_start(ledger)
    horizons = (
        [Horizon(began["steps"], began["samples_per_epoch"], recipe.train.global_batch)]
        if began
        else []
    )
    policy = policy_of(recipe.checkpoint, horizons, read_lineage(run.path))
    scores = {measure: scores_by_step(ledger, measure) for measure in (LOSS_SUITE, policy.measure)}
    why = retain(committed(directory).values(), policy, scores[policy.measure])
    rows = []
    for e in sorted(entries, key=lambda e: e.step):
        measured = {measure: values.get(e.step) for measure, values in scores.items()}
        time, size, world = (
            (e.manifest.time, e.manifest.bytes, e.manifest.world)
            if e.manifest
            else (None, None, None)
        )
        problem = e.verify() if verify else e.problem
        rows.append(
            CheckpointStatus(
                e.step, e.path, time, size, world, measured, why.get(e.serial, []), problem
            )
        )
    cut_off = {n for n in names if STEP_DIR.match(n) and not format_.is_whole(directory / n)}
    temporary = [n for n in names if n.startswith(".saving-") or n in cut_off]
    return CheckpointList(
        run.path,
        verify,
        policy.measure,
        rows,
        temporary,
        [n for n in names if n.startswith("bad-")],
    )
