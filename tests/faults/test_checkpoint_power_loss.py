"""The power goes at every operation of a save, on a disk that keeps only what was synced, or any
part of the rest.

A kill leaves everything that was written; a power cut leaves what had reached the disk. The model
of a disk is strict: a file's bytes are safe after its own fsync, a name (a new file, a rename, a
removal) after the fsync of its directory. What was not synced may be there or not, each change by
itself and in any order.
"""

import copy
import random
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from saving import GRID, SCENES, hidden, prepared, save, save_all, step_seen, tally

from windlass.checkpoint.choose import choose_checkpoint
from windlass.checkpoint.commit import recover
from windlass.checkpoint.format import Checkpoint, checkpoints_in
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.training.directory import write_start
from windlass.training.start import LEFT_OVER, Start


@dataclass
class File:
    data: bytearray = field(default_factory=bytearray)
    safe: bytes = b""


@dataclass
class Folder:
    now: "dict[str, File | Folder]" = field(default_factory=dict)
    safe: "dict[str, File | Folder]" = field(default_factory=dict)
    # Changes since the last sync, in order: name, and what it stands for from then on.
    pending: "list[tuple[str, File | Folder | None]]" = field(default_factory=list)

    def put(self, name: str, thing: "File | Folder | None") -> None:
        self.pending.append((name, thing))
        if thing is None:
            self.now.pop(name, None)
        else:
            self.now[name] = thing

    def sync(self) -> None:
        self.safe, self.pending = dict(self.now), []


class Disk(Files):
    """Does what it is told, and keeps a model of what of it a power cut would leave, copied before
    each operation. Several ranks, each in a thread, may share it.
    """

    def __init__(self, root: Path):
        self.base, self.root, self.lock = root, Folder(), threading.RLock()
        self.moments: list[tuple[str, Folder]] = []

    def adopt(self, folder: Path) -> None:
        """Take a folder and what is under it as safe."""
        for path in (folder, *sorted(folder.rglob("*"))):
            parent = self._at(path.parent)
            data = None if path.is_dir() else path.read_bytes()
            parent.put(path.name, Folder() if data is None else File(bytearray(data), data))
            parent.sync()

    def _at(self, path: Path) -> Folder:
        here = self.root
        for part in path.relative_to(self.base).parts:
            step = here.now[part]
            assert isinstance(step, Folder)
            here = step
        return here

    def about_to(self, operation, path, output=None, data=None):
        with self.lock:
            self.moments.append((f"{operation} {path.name}", copy.deepcopy(self.root)))
            self._note(operation, path, data)

    def _note(self, operation: str, path: Path, data: bytes | None) -> None:
        parent, name = self._at(path.parent), path.name
        thing = parent.now.get(name)
        if operation == "write":
            assert isinstance(thing, File) and data is not None
            thing.data += data
        elif operation == "fsync":
            assert isinstance(thing, File)
            thing.safe = bytes(thing.data)
        elif operation == "fsync_dir":
            self._at(path).sync()
        elif operation == "mkdir" and thing is None:
            parent.put(name, Folder())
        elif operation == "create":
            parent.put(name, File())
        elif operation in ("unlink", "rmdir"):
            parent.put(name, None)

    def rename(self, source: Path, target: Path) -> None:
        with self.lock:  # no rank acts on the new name before it is in the model
            super().rename(source, target)
            old, new = self._at(source.parent), self._at(target.parent)
            thing = old.now[source.name]
            new.put(target.name, thing)
            old.put(source.name, None)
            if old is new:  # one change, not two: they are on the disk together or not at all
                old.pending[-2:] = [(f"{source.name}\0{target.name}", thing)]


def image(folder: Folder, place: Path, dice: random.Random | None, everything: bool) -> None:
    """Write what a power cut may leave: only what is safe, all names with the safe bytes, or a part
    as the dice fall.
    """
    place.mkdir(exist_ok=True)
    entries: dict[str, File | Folder | None] = dict(folder.safe)
    for name, thing in folder.pending:
        if everything or (dice and dice.random() < 0.5):
            old, _, new = name.rpartition("\0")
            entries.pop(old, None)
            entries[new] = thing
    for name, thing in entries.items():
        if isinstance(thing, Folder):
            image(thing, place / name, dice, everything)
        elif thing is not None:
            data = thing.safe
            if dice and len(thing.data) > len(data):
                data = bytes(thing.data[: dice.randint(len(data), len(thing.data))])
            (place / name).write_bytes(data)


def images_of(disk: Disk, place: Path, images: int) -> Iterator[str]:
    """What each power cut may leave, written to `place` in turn; yields the name of the operation
    it came before.
    """
    for moment, (name, state) in enumerate([*disk.moments, ("the end", disk.root)]):
        for number in range(images):
            dice = random.Random(1000 * moment + number) if number > 1 else None
            image(state, place, dice, everything=number == 1)
            yield name
            shutil.rmtree(place)


def cuts(scratch: Path, scene: str, images: int, disk: Disk, world: int = 1) -> int:
    """The power goes at each moment of a save; the number of images that were looked at."""
    there, step = SCENES[scene]
    old, run = max(there, default=0), prepared(scratch / "run", *there, keep=1, world=world)
    disk.adopt(run)
    assert not save_all(run / "checkpoints", step, disk, world, keep=1).error
    assert step_seen(run) == step
    tried = 0
    for name in images_of(disk, scratch / "image", images):
        left = scratch / "image" / "run"
        seen = step_seen(left)
        possible = {old, step} if tried >= images else {old}
        assert seen in ({step} if name == "the end" else possible), name
        recover(left / "checkpoints")
        assert step_seen(left) == seen and not hidden(left / "checkpoints"), name
        assert all(not e.problem for e in checkpoints_in(left / "checkpoints")), name
        tried += 1
    return tried


@pytest.mark.parametrize(
    ("scene", "world"),
    [
        *((scene, 1) for scene in SCENES),
        *(pytest.param(scene, GRID, marks=pytest.mark.full) for scene in SCENES),
    ],
)
@pytest.mark.parametrize("images", [3, pytest.param(30, marks=pytest.mark.full)])
def test_power_cut_at_every_operation(scratch: Path, scene: str, world: int, images: int) -> None:
    tried = cuts(scratch, scene, images, Disk(scratch), world)
    ranks = "" if world == 1 else ", tensor 2 x data 2"
    tally(f"power cut at every operation, model of a strict disk{ranks}", tried)


def beginnings(scratch: Path, scene: str, images: int, disk: Disk) -> int:
    """The power goes at each moment in which a run is begun, branched or extended; the number of
    images.

    A directory without a whole recipe is not a run and blocks nobody; with one it tells where it
    begins.
    """
    run = Run(scratch / "home" / "runs" / "run")
    recipe = Recipe.load("quickstart", {"run.dir": run.path, "train.steps": 12})
    old = Start(recipe, run, resuming=False)
    (scratch / "home").mkdir()
    disk.adopt(scratch / "home")
    if scene == "extension":
        write_start(old, None)
        for step in (1, 2):
            assert not save(run.checkpoints_dir, step).error
        disk.adopt(scratch / "home")
        longer = recipe.replace("train.steps=24")
        choice = Checkpoint(run.checkpoints_dir / "step-00000001", 1, None)
        plan = Start(longer, run, resuming=True, finished=False, extends_from=12)
        write_start(plan, choice, disk)
    elif scene == "branch":
        assert not save(scratch / "origin" / "checkpoints", 3).error
        choice = Checkpoint(scratch / "origin" / "checkpoints" / "step-00000003", 3, None)
        write_start(replace(old, branch_from=choice.path), choice, disk)
    else:
        write_start(old, None, disk)
    end = {"new": (12, None), "branch": (12, 3), "extension": (24, 1)}[scene]
    before = ((12, 2),) if scene == "extension" else (None,)
    tried = 0
    for name in images_of(disk, scratch / "image", images):
        seen = begun(scratch / "image" / "home" / "runs" / "run")
        assert seen == end or (seen in before and name != "the end"), name
        tried += 1
    return tried


def begun(path: Path) -> tuple[int, int | None] | None:
    """The steps of the run that is there and the step that it begins at; None: no run, and a new
    one may begin.
    """
    run = Run(path)
    if not run.exists:
        names = [p.name for p in path.iterdir()] if path.is_dir() else []
        assert all(map(LEFT_OVER.fullmatch, names)), names
        return None
    choice, recipe = choose_checkpoint(path), Recipe.load(path)
    assert recipe == run.recipe, "an older file counts as no edit, and a torn one not at all"
    return int(recipe.train.steps), choice.step if choice is not None else None


@pytest.mark.parametrize("scene", ["new", "branch", "extension"])
@pytest.mark.parametrize("images", [3, pytest.param(30, marks=pytest.mark.full)])
def test_power_cut_while_a_run_begins(scratch: Path, scene: str, images: int) -> None:
    """New: no recipe, or all of it. A branch: never without its origin; an extension: never without
    its checkpoint.
    """
    tried = beginnings(scratch, scene, images, Disk(scratch))
    tally("power cut while a run begins, is branched or extended, model of a strict disk", tried)


class Forgetful(Disk):
    """Does not do one of the syncs, though it says so."""

    def __init__(self, root: Path, operation: str, name: str):
        super().__init__(root)
        self.forgets, self.forgotten = (operation, name), 0

    def about_to(self, operation, path, output=None, data=None):
        name = path.name if not path.name.startswith(".saving") else "saving"
        if (operation, name) == self.forgets:
            self.forgotten += 1
        else:
            super().about_to(operation, path, output, data)


COMMIT = [
    ("fsync", "rank-00000.safetensors"),
    ("fsync", "state.json"),
    ("fsync", "manifest.json"),
    ("fsync", "manifest.sha256"),
    ("fsync_dir", "saving"),
    ("fsync_dir", "checkpoints"),
    ("fsync_dir", "run"),
]


@pytest.mark.parametrize(
    ("scene", "operation", "name"),
    [
        *(pytest.param("first", *sync, marks=pytest.mark.full) for sync in COMMIT),
        *(("branch", "fsync", name) for name in (".recipe.toml.new", ".lineage.json.new")),
        *(("extension", "fsync", name) for name in (".recipe.toml.new", ".lineage.json.new")),
        *(("new", "fsync_dir", name) for name in ("run", "runs", "home")),
        ("extension", "fsync_dir", "run"),
    ],
)
def test_no_sync_can_be_left_out(scratch: Path, scene: str, operation: str, name: str) -> None:
    """The proof of the proof: without any one of the syncs of a commit or a beginning, some power
    cut loses something.
    """
    disk = Forgetful(scratch, operation, name)
    with pytest.raises((AssertionError, UserError)):
        (cuts if scene in SCENES else beginnings)(scratch, scene, 12, disk)
    assert disk.forgotten
