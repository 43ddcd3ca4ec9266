"""The present line of a run: which commits belong to it, what is kept for it, and which job began it."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "faults"))

from saving import save

from windlass.checkpoint.lineage import BEGINNING, Lineage, lineage_at, read_lineage, write_lineage
from windlass.checkpoint.load import latest_on_lineage, open_checkpoint
from windlass.checkpoint.retention import Kept, Policy, retain
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.training.start import LEFT_OVER, acquire_run_lock, is_restart, job_id, resolve_start

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a",
}  # fmt: skip


def made(run: Path, *steps: int) -> Path:
    for step in steps:
        assert not save(run / "checkpoints", step, keep=9).error
    return run


def at(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:08d}"


def back_to(run: Path, step: int) -> Lineage:
    write_lineage(run, lineage_at(run, at(run, step), step, {}), Files())
    found = read_lineage(run)
    assert found is not None
    return found


def test_only_later_commits_or_the_beginning_itself(tmp_path):
    run = made(tmp_path, 3, 6, 9)
    assert latest_on_lineage(run, None).step == 9
    fork = back_to(run, 3)
    assert (fork.checkpoint, fork.step, fork.serial) == ("checkpoints/step-00000003", 3, 3)
    assert latest_on_lineage(run, fork).step == 3
    made(run, 5, 6)
    assert latest_on_lineage(run, fork).step == 6
    assert latest_on_lineage(run, fork, up_to=5).step == 5
    assert latest_on_lineage(run, fork, up_to=4).step == 3
    assert latest_on_lineage(run, fork, up_to=2) is None


def test_a_commit_belongs_to_the_line_though_those_of_the_left_line_were_deleted_by_hand(tmp_path):
    run = made(tmp_path, 3, 6, 9)
    fork = back_to(run, 3)
    for step in (6, 9):
        shutil.rmtree(at(run, step))
    made(run, 4)
    assert open_checkpoint(at(run, 4)).manifest.serial == 4
    assert latest_on_lineage(run, fork).step == 4


def test_where_all_of_a_line_is_damaged_its_beginning_is_left_and_that_is_said(tmp_path):
    run = made(tmp_path, 3, 6)
    fork = back_to(run, 3)
    made(run, 4)
    [shard] = at(run, 4).glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    choice = latest_on_lineage(run, fork)
    assert choice.step == 3 and choice.damaged == [at(run, 4)] and "step 4 is damaged" in choice.notes[0]
    shutil.rmtree(at(run, 3))
    with pytest.raises(UserError, match="that one is gone"):
        latest_on_lineage(run, fork)


def test_a_beginning_that_cannot_be_read_is_not_guessed(tmp_path):
    assert read_lineage(tmp_path) is None
    for text in ("", "[]", '{"version": 1}', '{"version": 9, "checkpoint": null, "step": 0, "serial": 0, "job": {}}'):
        (tmp_path / BEGINNING).write_text(text)
        with pytest.raises(UserError, match=BEGINNING):
            read_lineage(tmp_path)


def test_what_a_line_goes_on_from_is_kept():
    rows = [Kept(serial, step) for serial, step in ((1, 3), (2, 6), (3, 9))]
    assert retain(rows, Policy(last=1, best=False, start=3)) == {3: ["last"], 2: [], 1: ["start"]}


def test_a_restart_by_torchrun_is_one_of_the_same_job(tmp_path):
    run = Run(tmp_path)
    again = TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "1"}
    assert not is_restart(run, again), "nothing was begun yet"
    write_lineage(tmp_path, Lineage(job=job_id(TORCHRUN)), Files())
    assert not is_restart(run, TORCHRUN)
    assert is_restart(run, again)
    assert not is_restart(run, again | {"TORCHELASTIC_RUN_ID": "b"})


def test_what_a_failed_start_leaves_is_no_hindrance_but_anything_else_is(tmp_path):
    recipe = Recipe.load("quickstart", [f"run.dir='{tmp_path}'"])
    for name in LEFT_OVER:
        (tmp_path / name).touch()
    assert not resolve_start(recipe).resuming
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(UserError, match="is not empty and holds no run"):
        resolve_start(recipe)


def test_who_waited_for_a_lock_holds_that_of_the_directory_of_the_name(tmp_path, monkeypatch):
    """`--fresh` renames the directory while another training waits for its lock."""
    run = tmp_path / "run"
    run.mkdir()
    first = acquire_run_lock(run)
    got: list[object] = []
    waits, pause = threading.Event(), time.sleep
    monkeypatch.setattr("windlass.training.start.time.sleep", lambda seconds: (waits.set(), pause(seconds)))
    waiting = threading.Thread(target=lambda: got.append(acquire_run_lock(run, seconds=30)))
    waiting.start()
    assert waits.wait(30)
    run.rename(tmp_path / "aside")
    assert first is not None
    first.close()
    waiting.join()
    with pytest.raises(UserError, match="another process trains in"):
        acquire_run_lock(run, seconds=0)
    aside = acquire_run_lock(tmp_path / "aside", seconds=0)
    assert aside is not None
    for file in (aside, *got):
        file.close()
