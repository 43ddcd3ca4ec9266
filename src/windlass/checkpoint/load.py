"""From a run to a checkpoint that is whole and undamaged, and from a checkpoint to tensors. No file is ever run
as code.

Choosing has two parts, so that many ranks can share the hashing: `candidates` lists what may be used, in order of
preference, from manifests alone (one rank does this); `first_undamaged` hashes one after the other until one is good
(each rank hashes its share of the files, and all agree). `choose` does both in one process. Nothing here changes the
disk but `recover` and `set_aside`, which rank 0 calls at the start of a training, before anything is saved.
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
from windlass.checkpoint.lineage import Lineage, read_lineage
from windlass.checkpoint.retention import LOSS, best, scores_by_step
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.run import Run

if TYPE_CHECKING:
    import torch

    from windlass.parallel.dist import Ranks

PIECE_BYTES = 2**26
"""How much is read of a tensor at a time."""
RESUME_HELP = "latest, best, a step, a checkpoint's path, or never"


class Checkpoint:
    """A whole checkpoint, read a tensor or some rows at a time."""

    def __init__(self, path: Path, manifest: Manifest):
        self.path, self.manifest = path, manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        """What the trainer gave with the save: reason, hashes of recipe and data, samples, ..."""
        return self.manifest.meta

    @cached_property
    def counters(self) -> dict[str, Any]:
        """What a resume needs besides tensors."""
        counters = json.loads((self.path / STATE).read_bytes())
        if not isinstance(counters, dict):
            raise Damaged(f"{STATE} holds no JSON object")
        return counters

    def names(self, prefix: str = "") -> list[str]:
        """The names of the tensors, without the aliases of tied ones."""
        return [n for n in self.manifest.tensors if n.startswith(prefix)]

    def has(self, name: str) -> bool:
        """Whether there is such a tensor, or an alias of one."""
        return name in self.manifest.tensors or name in self.manifest.aliases

    def info(self, name: str) -> TensorInfo:
        """Type, shape and chunks of a tensor; KeyError where there is none."""
        return self.manifest.tensors[self.manifest.aliases.get(name, name)]

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole shape of a tensor."""
        return self.info(name).shape

    def dtype(self, name: str) -> torch.dtype:
        """The type of a tensor."""
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.info(name).dtype][0])
        return dtype

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        import torch

        tensor = torch.empty(self.shape(name), dtype=self.dtype(name))
        self.read_into(name, 0, tensor)
        return tensor

    def read_into(self, name: str, start: int, target: torch.Tensor) -> None:
        """Fill a tensor, on any device, with the rows from `start` on; raises Damaged where a file is cut off."""
        import torch

        info = self.info(name)
        rows = target.shape[0] if info.shape else 1
        in_place = target.device.type == "cpu" and target.is_contiguous()
        host = target.detach() if in_place else torch.empty(target.shape, dtype=target.dtype)
        if not host.numel():
            return
        raw = memoryview(host.reshape(-1).view(torch.uint8).numpy())
        for chunk in info.chunks:
            first, last = max(start, chunk.start), min(start + rows, chunk.start + chunk.rows)
            if last > first:
                self._read(
                    chunk.file,
                    chunk.offset + (first - chunk.start) * info.row_bytes,
                    raw[(first - start) * info.row_bytes : (last - start) * info.row_bytes],
                )
        if not in_place:
            target.copy_(host)

    def _read(self, file: str, offset: int, target: memoryview) -> None:
        try:
            with open(self.path / file, "rb", buffering=0) as source:
                source.seek(offset)
                done = 0
                while done < len(target):
                    count = source.readinto(target[done : done + PIECE_BYTES])
                    if not count:
                        raise Damaged(f"{self.path / file} ends too early")
                    done += count
        except OSError as error:
            raise Damaged(f"{self.path / file} cannot be read: {error.strerror}") from None


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


# -- choosing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The checkpoint to resume from or to read, and what to tell the user about it."""

    path: Path
    step: int
    notes: list[str] = field(default_factory=list)
    """Newer or better checkpoints that were passed over, and why."""
    damaged: list[Path] = field(default_factory=list)
    """Where those lie."""


def candidates(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> list[Path]:
    """The checkpoints that `checkpoint.resume` means, in the order in which they are tried; empty: there is none.

    `latest` is the newest commit of the run's current lineage (see lineage.py), then the next older ones, then the
    checkpoint that the lineage started from. `best` is the one with the best score in the ledger, then the next best.
    Both pass over damaged checkpoints; of a step or a path that is damaged nothing else is tried.

    Args:
        run_dir: the run.
        resume: `latest`, `best`, a step, a path of a checkpoint or run, or `never`.
        measure: of `best`; by default the recipe's `checkpoint.best`.
        up_to: of `latest`: only checkpoints up to this step.

    Raises:
        UserError: the checkpoint that was asked for is not there, or there is one and `resume` is `never`.
    """
    run = Path(run_dir)
    entries = list_run(run)
    if resume == "never" and entries:
        raise UserError(
            f"{run} holds a checkpoint of step {entries[0].step}, and checkpoint.resume is never; use --fresh to set "
            "the run aside, or resume from it"
        )
    if resume == "never":
        return []
    if resume == "latest":
        return _latest(run, entries, read_lineage(run), up_to)
    if resume == "best":
        return _best(run, entries, read_lineage(run), measure)
    if resume.isdigit():
        of_step = [e.path for e in entries if e.step == int(resume)]
        if not of_step:
            steps = ", ".join(str(s) for s in sorted({e.step for e in entries})) or "none"
            raise UserError(f"{run} has no checkpoint of step {int(resume)}; there are: {steps}")
        return of_step
    path = Path(resume)
    if not path.is_dir():
        raise UserError(f"checkpoint.resume is {resume!r}: there is no such checkpoint; write {RESUME_HELP}")
    if (path / "recipe.toml").is_file():
        return candidates(path)
    return [path]


def list_run(run: Path) -> list[Entry]:
    """Every whole checkpoint of a run, the newest commit first."""
    return format_.list_entries(run / "checkpoints")


def _latest(run: Path, entries: list[Entry], lineage: Lineage | None, up_to: int | None) -> list[Path]:
    origin = lineage.origin(run) if lineage is not None else None
    since = lineage.serial if lineage is not None else 0
    # Damaged ones, whose serial is not known, may belong to the lineage: they are tried, and reported.
    paths = [
        e.path
        for e in entries
        if (e.manifest is None or e.serial > since) and (up_to is None or e.step <= up_to) and not _same(e.path, origin)
    ]
    if lineage is None or origin is None or (up_to is not None and lineage.step > up_to):
        return paths
    if not paths and not origin.is_dir():
        raise UserError(
            f"{run} has no checkpoint yet since it started from {origin}, and that one is gone: restore it, or name "
            "another one to resume from (checkpoint.resume=STEP)"
        )
    return [*paths, *([origin] if origin.is_dir() else [])]


def _same(path: Path, origin: Path | None) -> bool:
    return origin is not None and path.name == origin.name and origin.exists() and path.samefile(origin)


def _best(run: Path, entries: list[Entry], lineage: Lineage | None, measure: str) -> list[Path]:
    opened = Run(run)
    if not measure:
        measure = opened.recipe.checkpoint.best if opened.recipe_path.is_file() else LOSS
    scores = scores_by_step(opened.ledger(), measure)
    if lineage is not None:  # steps that were given up have no score: the ledger may have that of another model there
        entries = [e for e in entries if e.manifest is None or e.serial > lineage.serial or e.step <= lineage.step]
    order: list[Path] = []
    while (step := best({e.step: scores[e.step] for e in entries if e.step in scores}, measure)) is not None:
        order += [e.path for e in entries if e.step == step]
        del scores[step]
    return order + [e.path for e in entries if e.path not in order]


def first_undamaged(paths: Sequence[Path], ranks: Ranks | None = None) -> Choice | None:
    """The first checkpoint of which every byte is as it was written; None where `paths` is empty.

    Collective over `ranks`, each of which gives the same paths, reads every manifest and hashes its share of the files.

    Raises:
        UserError: there are some, and all are damaged.
    """
    notes: list[str] = []
    for number, path in enumerate(paths):
        entry = format_.read_entry(path)
        problem = entry.problem
        if entry.manifest is not None:
            try:
                format_.verify(path, entry.manifest, ranks.rank if ranks else 0, ranks.world if ranks else 1)
            except Damaged as error:
                problem = str(error)
        problems = ranks.all_gather_object("verified", problem) if ranks else [problem]
        problem = next(filter(None, problems), "")
        if not problem:
            return Choice(path, entry.step, notes, list(paths[:number]))
        notes.append(f"the checkpoint of step {entry.step} is damaged and passed over: {problem}")
    if notes:
        raise UserError(
            "no checkpoint can be used:\n  "
            + "\n  ".join(notes)
            + "\nuse --fresh to set the run aside and start over, or name another checkpoint (checkpoint.resume=STEP)"
        )
    return None


def choose(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> Choice | None:
    """`candidates`, and the `first_undamaged` of them; None where there is none to resume from."""
    return first_undamaged(candidates(run_dir, resume, measure=measure, up_to=up_to))


def latest_step(run_dir: str | Path) -> int:
    """The step that a restart would resume from, going by manifests alone; -1 where there is no checkpoint."""
    entries = map(format_.read_entry, candidates(run_dir))
    return next((e.step for e in entries if not e.problem), -1)


def find(source: str | Path, ranks: Ranks | None = None) -> Choice:
    """The checkpoint that a user names: `RUN` (its newest), `RUN@STEP`, `RUN@best`, or a path; every byte verified.

    Collective over `ranks`, which share the hashing. Raises UserError where there is none, or it is damaged.
    """
    text, at, which = os.fspath(source).rpartition("@")
    run, which = (text, which) if at and Path(text).is_dir() else (os.fspath(source), "latest")
    if not Path(run).is_dir():
        raise UserError(f"there is no run and no checkpoint at {source}; `windlass runs` lists the runs")
    paths = [Path(run)] if (Path(run) / format_.MANIFEST).is_file() else candidates(run, which)
    choice = first_undamaged(paths, ranks)
    if choice is None:
        raise UserError(f"{run} has no checkpoint yet")
    return choice


# -- after a kill -----------------------------------------------------------------------------------------------------


def recover(directory: Path, files: Files | None = None) -> list[str]:
    """Remove every temporary directory from a run's `checkpoints`, and say what was removed.

    By one process, at the start of a training, before anything is saved. A checkpoint whose replacement was cut off
    gets its name back.
    """
    files = files or Files()
    notes: list[str] = []
    for name in format_.names_in(directory):
        path = directory / name
        if name.startswith("."):
            files.remove_tree(path)
            if name.startswith(".saving-"):
                notes.append(f"removed what an interrupted save of step {int(name.split('-')[1])} had left")
        elif STEP_DIR.match(name) and path.is_dir() and not format_.is_whole(path):
            files.remove_tree(path)
            notes.append(f"removed {name}, whose removal had been interrupted")
    for name in format_.names_in(directory):
        if name.endswith(".replaced") and (match := STEP_DIR.match(name)):
            successor = format_.step_dir(directory, int(match.group(1)))
            if format_.is_whole(successor) and not format_.read_entry(successor).problem:
                discard(directory / name, files)
            else:
                discard(successor, files)
                files.rename(directory / name, successor)
                files.sync_dir(directory)
                notes.append(f"{successor.name} is back: the save that was to replace it was interrupted")
    return notes


def discard(path: Path, files: Files) -> None:
    """Remove a checkpoint. Its digest goes first, durably: a kill or power cut leaves a temporary directory."""
    if (path / format_.DIGEST).is_file():
        files.unlink(path / format_.DIGEST)
        files.sync_dir(path)
    files.remove_tree(path)


def set_aside(choice: Choice, run: Path, files: Files | None = None) -> list[Path]:
    """Rename the damaged checkpoints of a run that a choice passed over to `bad-...`, which nothing reads."""
    files, aside = files or Files(), []
    for path in choice.damaged:
        if not path.resolve().is_relative_to(run.resolve()):
            continue  # another run's, which is not ours to change
        number = 0
        while (target := path.with_name(f"bad-{path.name}" + (f".{number}" if number else ""))).exists():
            number += 1
        files.rename(path, target)
        files.sync_dir(path.parent)
        aside.append(target)
    return aside
