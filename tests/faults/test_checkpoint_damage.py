"""Each file of a checkpoint flipped, cut off, deleted, or swapped: detected, and an older one is
chosen.
"""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from saving import GRID, check, prepared, save_all, step_seen, tally

import hf_fixtures
from helpers import refused, write_ledger
from windlass.checkpoint import choose
from windlass.checkpoint.base import identify, open_base
from windlass.checkpoint.commit import recover
from windlass.checkpoint.format import Base
from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.run import Run

FILES = ("rank-00000.safetensors", "state.json", "manifest.json", "manifest.sha256")


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "first bit": lambda p: flip(p, 0),
    "middle bit": lambda p: flip(p, p.stat().st_size // 2),
    "last bit": lambda p: flip(p, p.stat().st_size - 2),
    "cut by one": lambda p: os.truncate(p, p.stat().st_size - 1),
    "cut in half": lambda p: os.truncate(p, p.stat().st_size // 2),
    "empty": lambda p: os.truncate(p, 0),
    "longer": lambda p: os.truncate(p, p.stat().st_size + 1),
    "deleted": lambda p: p.unlink(),
    "a directory": lambda p: (p.unlink(), p.mkdir()),
    "another checkpoint's": lambda p: shutil.copyfile(
        p.parent.parent / "step-00000001" / p.name, p
    ),
}


@pytest.fixture
def world() -> int:
    return 1


FROZEN = Base(name="base", commit="", files={}, weights=("model/frozen",))


@pytest.fixture
def run(scratch: Path, world: int) -> Path:
    return prepared(scratch / "run", 1, 2, 3, keep=5, world=world, base=FROZEN)


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize(
    ("world", "name"),
    [*((1, name) for name in FILES), (GRID, "rank-00002.safetensors"), (GRID, "manifest.json")],
)
def test_an_older_one_is_chosen(run: Path, world: int, name: str, kind: str) -> None:
    newest = run / "checkpoints" / "step-00000003"
    DAMAGE[kind](newest / name)
    choice = choose.choose_checkpoint(run)
    assert choice is not None and choice.step == 2 and choice.manifest.base == FROZEN
    check(choice.path, 2)
    if choice.passed_over:  # otherwise it has no digest, and is temporary
        assert [c.path for c in choice.passed_over] == [
            newest
        ] and "step 3 is damaged" in choice.notes[0]
    else:
        assert name == "manifest.sha256"
    with pytest.raises(UserError):
        choose.choose_checkpoint(run, "3")
    # the step can be saved again
    assert not save_all(run / "checkpoints", 3, world=world, attempt="1").error
    assert step_seen(run) == 3
    tally("a file flipped, cut off, emptied, lengthened, deleted, or another checkpoint's", 1)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_base_is_refused_until_it_is_whole_again(scratch: Path, kind: str) -> None:
    """The files of frozen weights, to which a checkpoint refers."""
    place = hf_fixtures.save("llama", scratch / "base")
    hf_fixtures.save("llama", scratch / "step-00000001", initializer_range=0.1)
    files = identify(place)
    base = Base(name=str(place), commit="", files=files, weights=("model/frozen",))
    recipe = Recipe.from_dict({"model.kind": "hf", "model.name": str(place)})
    assert len(files) > 2 and open_base(base, recipe) == place
    for name in (min(files), max(files)):
        whole = (place / name).read_bytes()
        DAMAGE[kind](place / name)
        with pytest.raises(UserError, match=re.escape(name)):
            open_base(base, recipe)
        if (place / name).is_dir():
            (place / name).rmdir()
        (place / name).write_bytes(whole)
        assert open_base(base, recipe) == place
    tally("a base's file flipped, cut off, emptied, lengthened, deleted, or another base's", 1)


def test_best_passes_over_a_damaged_one_and_where_all_are_the_run_is_refused(run):
    write_ledger(Run(run), *({"kind": "eval", "step": step, "loss": step} for step in (1, 2, 3)))
    assert choose.choose_checkpoint(run, "best").step == 1  # type: ignore[union-attr]
    flip(run / "checkpoints" / "step-00000001" / "rank-00000.safetensors", -1)
    choice = choose.choose_checkpoint(run, "best")
    assert choice is not None and choice.step == 2 and "step 1 is damaged" in choice.notes[0]
    for step in (2, 3):
        flip(run / "checkpoints" / f"step-{step:08d}" / "state.json", 3)
    with refused(*(f"step {step} is damaged" for step in (1, 2, 3))):
        choose.choose_checkpoint(run)


def test_strange_neighbours_do_no_harm_and_a_removal_that_was_cut_off_is_completed(run):
    directory = run / "checkpoints"
    (directory / "step-00000009").mkdir()
    (directory / "step-00000010").write_text("a file")
    (directory / "step-abc").mkdir()
    (directory / "notes.txt").write_text("mine")
    (directory / "step-00000002" / "extra.pkl").write_bytes(b"anything")
    (directory / "step-00000003" / "manifest.sha256").unlink()
    assert step_seen(run) == 2
    recover(directory)
    assert step_seen(run) == 2 and (directory / "notes.txt").exists()
    assert not (directory / "step-00000009").exists() and not (directory / "step-00000003").exists()
