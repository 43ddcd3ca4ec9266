"""What a start finds in a run directory: a restart of the same job, leftovers of a failed start, the lock."""

from __future__ import annotations

import threading
import time

import pytest

from windlass.checkpoint.lineage import Lineage, write_lineage
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.training.start import LEFT_OVER, acquire_run_lock, is_restart, job_id, resolve_start

TORCHRUN = {
    "RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "a",
}  # fmt: skip


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
