"""The checkpoints of a run: names on the disk, what is there, the index, and tidying up after a kill. Needs no torch.

- `step-00000250`: a checkpoint, once it has its commit marker;
- `.saving-00000250-...`: being written, or left by a kill;
- `.failed-00000250-...`: given up, a sign for the other ranks;
- `.old-00000250-...`: a committed one whose successor of the same step is just taking its place;
- `.trash-...`: being deleted;
- `bad-step-00000250`: found damaged and set aside; nothing reads, counts or deletes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.checkpoint import format as format_
from windlass.checkpoint.format import MARKER, Damaged, Manifest
from windlass.checkpoint.retention import LOSS, Kept, Policy, best, retain
from windlass.fileio import Files

INDEX, INDEX_VERSION = "index.json", 1
STEP_DIR = re.compile(r"^step-(\d{8,})$")
OLD_DIR = re.compile(r"^\.old-(\d{8,})-")
SAVE_DIR = re.compile(r"^\.(?:saving|failed|trash-saving)-(\d+-\w+-\d+)$")
LEFT_OVER = re.compile(r"^\.(saving|failed|trash)-|^\..*\.new$")


@dataclass(frozen=True)
class Entry:
    """A checkpoint on the disk. `manifest` is None where it is damaged, and `problem` says how."""

    path: Path
    step: int
    manifest: Manifest | None
    problem: str = ""
    noted: Mapping[str, float] = field(default_factory=dict)
    """What was measured at its step after the save: `loss`, and others by names as `squad.f1`."""

    @property
    def serial(self) -> int:
        """The number of its commit in the run; 0 where that cannot be read."""
        return self.manifest.serial if self.manifest else 0

    @property
    def loss(self) -> float | None:
        """Validation loss at its step, where it was measured, before the save or after it."""
        return self.noted.get(LOSS, self.manifest.loss if self.manifest else None)

    @property
    def scores(self) -> dict[str, float]:
        """What else was measured at its step."""
        return {name: value for name, value in self.noted.items() if name != LOSS}

    @property
    def kept(self) -> Kept:
        """What retention must know of it."""
        assert self.manifest is not None
        return Kept(self.serial, self.step, self.loss, str(self.manifest.meta.get("reason", "periodic")), self.scores)


def step_dir(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step:08d}"


def names(directory: Path) -> list[str]:
    """The entries of a directory, empty where there is none.

    A whole listing, even to ask for one name: on NFS a listing is fresh, while a name that was once missing may stay so
    for a minute.
    """
    try:
        return sorted(p.name for p in directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def entry(path: Path, deep: bool = False) -> Entry:
    """Look at one checkpoint: marker, manifest and sizes, or with `deep` every byte."""
    found = STEP_DIR.match(path.name) or OLD_DIR.match(path.name)
    step = int(found.group(1)) if found else 0
    try:
        manifest = format_.verify(path) if deep else format_.read(path)
        format_.check_sizes(path, manifest)
    except Damaged as error:
        return Entry(path, step, None, str(error))
    if found and manifest.step != step:
        return Entry(path, step, None, f"it is the checkpoint of step {manifest.step} under another name")
    return Entry(path, manifest.step, manifest, noted=_noted(path, manifest.save_id))


def note(directory: Path, step: int, scores: Mapping[str, float], files: Files) -> None:
    """Give the checkpoint of a step, if there is one, what was measured after its save: `loss` and others, all finite."""
    path = step_dir(directory, step)
    one = entry(path)
    if one.manifest is not None:
        others = {name: value for name, value in scores.items() if name != LOSS}
        tree = {"save_id": one.manifest.save_id, "loss": scores.get(LOSS, one.loss)}
        files.replace_json(path / format_.LOSS, tree | ({"scores": others} if others else {}))


def _noted(path: Path, save_id: str) -> dict[str, float]:
    try:
        found = json.loads((path / format_.LOSS).read_bytes())
        if found["save_id"] != save_id:
            return {}
        values = {LOSS: found["loss"], **found.get("scores", {})}
        return {str(name): float(value) for name, value in values.items() if value is not None}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def entries(directory: Path, deep: bool = False) -> list[Entry]:
    """Every committed checkpoint, the newest commit first, damaged ones among them by their step.

    Those that a save of the same step was just replacing when it was killed count too.
    """
    paths = [directory / n for n in names(directory) if STEP_DIR.match(n) or OLD_DIR.match(n)]
    found = [entry(p, deep) for p in paths if format_.committed(p)]
    return sorted(found, key=_newest_first)


def _newest_first(one: Entry) -> tuple[float, int]:
    return (-one.serial if one.manifest else -float("inf"), -one.step)


def index_of(found: Iterable[Entry], policy: Policy) -> tuple[dict[str, Any], list[Entry]]:
    """The index of what is to be kept, and the checkpoints that may go. Damaged ones are in neither."""
    good = [e for e in found if e.manifest is not None and STEP_DIR.match(e.path.name)]
    why = retain([e.kept for e in good], policy)
    stay = sorted((e for e in good if why[e.serial]), key=lambda e: e.serial)
    first = best((e.kept for e in stay), policy.measure)
    tree = {
        "version": INDEX_VERSION,
        "latest": stay[-1].step if stay else None,
        "best": first.step if first else None,
        "best_by": policy.measure,
        "checkpoints": [_row(e, why[e.serial]) for e in stay],
    }
    return tree, [e for e in good if not why[e.serial]]


def _row(one: Entry, why: list[str]) -> dict[str, Any]:
    assert one.manifest is not None
    return {
        "step": one.step, "path": one.path.name, "serial": one.serial, "time": one.manifest.time,
        "bytes": one.manifest.bytes, "world": one.manifest.world, "loss": one.loss, "scores": one.scores, "reason": one.kept.reason,
        "kept": why,
    }  # fmt: skip


def publish(directory: Path, policy: Policy, files: Files) -> list[Path]:
    """Write the index of what stays, then delete what may go; returns what was deleted.

    The order matters: the newest checkpoint is committed before this begins, and the index stops naming a checkpoint
    before it goes.
    """
    tree, leaving = index_of(entries(directory), policy)
    files.replace_json(directory / INDEX, tree)
    for one in leaving:
        discard(one.path, files)
    return [one.path for one in leaving]


def discard(path: Path, files: Files) -> None:
    """Delete a directory so that a kill on the way leaves nothing that looks like a checkpoint.

    Its name goes first, for readers, and then its marker: after a power cut the old name may be back.
    """
    if not path.exists():
        return
    trash = path.with_name(f".trash-{path.name.lstrip('.')}")
    with contextlib.suppress(FileNotFoundError):
        if trash.exists():
            files.remove_tree(trash)
        files.rename(path, trash)
        if (trash / MARKER).is_file():
            files.unlink(trash / MARKER)
            with contextlib.suppress(OSError):  # a disk that cannot do this has worse troubles
                files.sync_dir(trash)
        files.remove_tree(trash)


def recover(directory: Path, policy: Policy, files: Files) -> list[str]:
    """Make a run's directory tidy after a kill, before anything else is done in it; says what was done.

    By one process only, while no other one saves. Leftovers of saves go. A checkpoint that was being replaced comes back
    where its successor was not committed; one that lacks nothing but its marker is committed.
    """
    done: list[str] = []
    for name in names(directory):
        path = directory / name
        if LEFT_OVER.match(name):
            files.remove_tree(path)
            if name.startswith(".saving-"):
                done.append(f"removed what an interrupted save of step {int(name.split('-')[1])} had left")
    for name in names(directory):
        if STEP_DIR.match(name) and (directory / name).is_dir() and not format_.committed(directory / name):
            done.append(_finish(directory / name, files))
    for name in names(directory):
        if old := OLD_DIR.match(name):
            place = step_dir(directory, int(old.group(1)))
            if format_.committed(place) and not entry(place).problem:
                discard(directory / name, files)
            else:
                discard(place, files)
                files.rename(directory / name, place)
                files.sync_dir(directory)
                done.append(f"{place.name} is back: the save that was to replace it was interrupted")
    if directory.is_dir():
        try:
            publish(directory, policy, files)
        except OSError as problem:
            done.append(f"the index of {directory} could not be written: {problem.strerror}")
    return done


def sweep(directory: Path, attempt: str, number: int, files: Files) -> None:
    """Remove what is left of saves that are over: of other attempts, and of this one up to save `number`."""
    for name in names(directory):
        if left := SAVE_DIR.match(name):
            *_, of, count = left.group(1).split("-")
            if of != attempt or int(count) <= number:
                files.remove_tree(directory / name)


def _finish(path: Path, files: Files) -> str:
    """Commit a checkpoint that was cut off just before its marker, if every byte is there, else remove it."""
    data = path / format_.MANIFEST
    try:
        manifest = format_.parse(data.read_bytes())
        if step_dir(path.parent, manifest.step) != path:
            raise Damaged("it is of another step")
        if gone := [name for name in manifest.files if not (path / name).exists()]:  # it was just being removed
            raise FileNotFoundError(f"{gone[0]} is missing")
        format_.verify(path, manifest)
    except FileNotFoundError as error:
        discard(path, files)
        return f"removed {path.name}, which was never committed ({error})"
    except (OSError, Damaged) as error:  # its bytes were on the disk before it had this name: the disk is at fault
        return f"{path.name} was never committed and is damaged ({error}); set aside as {set_aside(path, files).name}"
    write_marker(path, files)
    return f"{path.name} was whole but for its marker, and is committed now"


def write_marker(path: Path, files: Files) -> None:
    """Make a whole directory a checkpoint: the last write of a commit."""
    digest = hashlib.sha256((path / format_.MANIFEST).read_bytes()).hexdigest()
    files.replace(path / MARKER, f"{digest}\n".encode())


def set_aside(path: Path, files: Files) -> Path:
    """Give a damaged checkpoint a name under which it is neither loaded nor counted, nor in the way of a save."""
    number = 0
    while (aside := path.with_name(f"bad-{path.name.lstrip('.')}" + (f".{number}" if number else ""))).exists():
        number += 1
    files.rename(path, aside)
    files.sync_dir(path.parent)
    return aside
