"""SIGKILL, a full disk and an I/O error at every operation of a save, and SIGKILL at random moments: a
reader sees the previous checkpoint or the new one, and nothing is left over.
"""

import errno
import os
import random
import signal
import time
from pathlib import Path

import pytest
import saving
from saving import (
    GRID,
    KILLED,
    SCENES,
    Failer,
    Killer,
    Recorder,
    check,
    ended,
    forked,
    hidden,
    prepared,
    save,
    save_all,
    state,
    step_seen,
    tally,
)

from helpers import wait_for
from windlass.checkpoint.commit import recover
from windlass.checkpoint.save import Writer
from windlass.fileio import Files
from windlass.recipe.settings import CheckpointSettings

# -- SIGKILL


def operations(folder: Path, scene: str, world: int = 1) -> list[tuple[str, str]]:
    there, step = SCENES[scene]
    run, recorder = prepared(folder / "traced", *there, world=world), Recorder()
    assert not save_all(run / "checkpoints", step, recorder, world).error
    return recorder.log


def killed(run: Path, scene: str, at: int, world: int = 1) -> None:
    """A run whose save was killed, with all ranks, at its operation `at`."""
    there, step = SCENES[scene]
    prepared(run, *there, world=world)
    saving = forked(lambda: save_all(run / "checkpoints", step, Killer(at), world) and None)
    assert ended(saving) == KILLED, at


def recovers(run: Path, there: list[int], step: int, world: int = 1) -> int:
    """After a kill: what a reader sees before and after the tidying up; then the same step is saved
    again.
    """
    directory = run / "checkpoints"
    before = step_seen(run)
    assert before in (max(there, default=0), step)
    recover(directory)
    assert step_seen(run) == before
    assert not hidden(directory), hidden(directory)
    assert not save_all(directory, step, world=world, attempt="1").error
    assert step_seen(run) == step and not hidden(directory)
    return before


@pytest.mark.parametrize(
    ("world", "every"),
    [
        (1, 4),
        (GRID, 9),
        pytest.param(1, 1, marks=pytest.mark.full),
        pytest.param(GRID, 1, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("scene", SCENES)
def test_killed_at_every_operation(scratch: Path, scene: str, world: int, every: int) -> None:
    there, step = SCENES[scene]
    log = operations(scratch, scene, world)
    assert len(log) > 25
    seen = []
    for k in range(0, len(log), every):
        killed(scratch / f"{scene}-{k}", scene, k, world)
        seen.append(recovers(scratch / f"{scene}-{k}", there, step, world))
    ranks = "one rank" if world == 1 else "all ranks of tensor 2 x data 2"
    tally(f"SIGKILL at every operation of a save, {ranks} ({scene})", len(seen))
    if scene == "next" and every == 1 and world == 1:
        # from one operation on, and for good, it is the new one
        assert seen == sorted(seen) and set(seen) == {2, 3}
        assert log[seen.index(3) - 1] == ("rename", f"step-{step:08d}")


@pytest.mark.full
def test_the_tidying_up_may_be_killed_too(scratch: Path) -> None:
    """A save is killed at its renames and removals, and then the recovery at each of its own
    operations.
    """
    _, step = SCENES["again"]
    log, tried = operations(scratch, "again"), 0
    on_names = ("rename", "unlink", "rmdir", "fsync_dir")
    for k in [k for k, (operation, _) in enumerate(log) if operation in on_names]:
        for j in range(40):
            run = scratch / f"run-{k}-{j}"
            killed(run, "again", k)
            before, directory = step_seen(run), run / "checkpoints"
            code = ended(forked(lambda j=j, d=directory: recover(d, Killer(j)) and None))
            assert step_seen(run) in (before, step)
            recover(directory)
            assert step_seen(run) in (before, step) and not hidden(directory)
            tried += 1
            if code == 0:
                break
    tally("SIGKILL in a save, then again at every operation of the recovery", tried)


@pytest.mark.parametrize(
    ("world", "victim", "every"),
    [
        (2, 0, 5),
        (2, 1, 5),
        (GRID, 3, 4),
        *(pytest.param(2, victim, 1, marks=pytest.mark.full) for victim in range(2)),
        *(pytest.param(GRID, victim, 1, marks=pytest.mark.full) for victim in range(GRID)),
    ],
)
def test_one_of_several_ranks_is_killed(scratch: Path, world: int, victim: int, every: int) -> None:
    """One rank is killed at any of its operations; the others come to an end by themselves."""
    moments = range(0, saving.count_of_ranks(scratch, world)[victim], every)
    for at in moments:
        run = prepared(scratch / f"run-{at}", 1, world=world)
        directory = run / "checkpoints"
        children = saving.each_rank(
            directory,
            2,
            lambda n, at=at: Killer(at) if n == victim else Files(),
            world,
            deadline=0.3,
        )
        if victim == 0:
            assert ended(children[0]) in (KILLED, 0)
            for other in children[1:]:
                # a rank that waits for rank 0 is ended by whoever watches the run
                os.kill(other, signal.SIGKILL)
                ended(other)
        else:
            codes = [ended(child) for child in children]
            assert codes == [KILLED if n == victim else 0 for n in range(world)]
        recovers(run, [1], 2, world)
    tally(f"SIGKILL of rank {victim} of {world} at every operation of its part", len(moments))


@pytest.mark.parametrize("kills", [25, pytest.param(220, marks=pytest.mark.full)])
def test_killed_at_random_moments_under_load(scratch: Path, kills: int) -> None:
    """Saves one after another in the background, of growing steps and of the same ones again,
    killed somewhere.
    """
    run, dice = prepared(scratch / "run"), random.Random(7)
    committed, begun = scratch / "committed", scratch / "begun"

    def train(first: int, attempt: int) -> None:
        settings = CheckpointSettings(keep_last=3)
        writer = Writer(run / "checkpoints", attempt=str(attempt), settings=settings)
        recover(run / "checkpoints")
        begun.touch()
        for step in range(first, first + 1000):
            for turn in range(1 + step % 2):
                writer.write(step, state(step), {"step": step})
                for outcome in writer.wait():
                    assert not outcome.error
                    note = committed.with_suffix(f".{attempt}.{outcome.step}.{turn}")
                    os.symlink(str(outcome.step), note)

    last, pace = 0, 0.0
    for attempt in range(kills):
        begun.unlink(missing_ok=True)
        child = forked(lambda first=last + 1, attempt=attempt: train(first, attempt))
        wait_for(begun.exists)
        if not pace:  # the first one tells how long a save takes here and now
            began = time.monotonic()
            wait_for(lambda: any(scratch.glob("committed.0.*.1")))
            pace = (time.monotonic() - began) / 3
        time.sleep(dice.uniform(0.0, 4 * pace))
        os.kill(child, signal.SIGKILL)
        assert ended(child) == KILLED
        notes = scratch.glob(f"committed.{attempt}.*")
        reported = max((int(os.readlink(note)) for note in notes), default=0)
        before, last = last, step_seen(run)
        assert last >= max(reported, before), "a checkpoint that was reported as committed is lost"
    assert last > 0
    tally("SIGKILL at random moments, saves one after another", kills)


# -- errors of the disk

CODES = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO}


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize(
    ("there", "lasting"), [((), False), ((1,), False), ((1, 2), False), ((1, 2), True)]
)
def test_an_operation_fails(
    scratch: Path, there: tuple[int, ...], lasting: bool, code: str
) -> None:
    """It alone, or for good every write, create and sync from there on; removing still works, as on
    a full disk.
    """
    for_good = ("write", "create", "mkdir", *(("fsync", "fsync_dir") if code == "EIO" else ()))
    recorder = Recorder()
    save(prepared(scratch / "traced", *there) / "checkpoints", 2, recorder)
    for k, operation in enumerate(recorder.log):
        run = prepared(scratch / f"run-{k}", *there)
        files = Failer(k, CODES[code], lasting, for_good if lasting else ())
        outcome = save(run / "checkpoints", 2, files)
        assert lasting or files.failed == 1
        seen = step_seen(run)
        if outcome.error:
            assert seen == max(there, default=0), operation
            assert not outcome.warning
            assert "No space" in outcome.error or "Input/output" in outcome.error
            assert not hidden(run / "checkpoints"), operation
        else:  # what failed is tidying up after the commit, or does not matter
            assert seen == 2, operation
        recover(run / "checkpoints")
        assert not hidden(run / "checkpoints") and step_seen(run) == seen
        assert not save(run / "checkpoints", 3).error  # the next save is tried, and works
        check(run / "checkpoints" / "step-00000003", 3)
        assert not hidden(run / "checkpoints"), operation
    what = "from every operation on, for good" if lasting else "at every operation of a save"
    tally(f"{code} {what}", len(recorder.log))


@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("victim", [0, 1])
def test_an_operation_of_one_of_two_ranks_fails(scratch: Path, victim: int, every: int) -> None:
    """Both ranks come to the same outcome, at once, though only one had the error."""
    moments = range(0, saving.count_of_ranks(scratch)[victim], every)
    for k in moments:
        run = prepared(scratch / f"run-{k}", 1)
        directory = run / "checkpoints"
        children = saving.each_rank(
            directory, 2, lambda n, k=k: Failer(k) if n == victim else Files(), deadline=30
        )
        assert [ended(child) for child in children] == [0, 0]
        errors = [(run / f"error-{n}").read_text() for n in range(2)]
        assert bool(errors[0]) == bool(errors[1]), (k, errors)
        assert step_seen(run) == (1 if errors[0] else 2)
        if errors[0]:
            assert "No space" in errors[0]
            assert "No space" in errors[1] or "gave the save up" in errors[1]
            assert (victim == 1) == ("rank 1" in errors[0])
        assert all(name.startswith(".failed-") for name in hidden(directory)), hidden(directory)
        assert not save(directory, 3, attempt="1").error
        assert not hidden(directory)
    tally("ENOSPC at every operation of one rank of two", len(moments))


def test_a_rank_that_does_not_deliver_and_comes_late(scratch: Path) -> None:
    """Rank 1 begins after rank 0 has given up, and is told."""
    run = prepared(scratch / "run", 1)
    outcome = save(run / "checkpoints", 2, None, 0, 2, deadline=0.05)
    assert "no part came from rank 1 within 0.05 s" in outcome.error and step_seen(run) == 1
    outcome = save(run / "checkpoints", 2, None, 1, 2, deadline=20)
    assert "gave the save up" in outcome.error
    assert not save(run / "checkpoints", 3, attempt="1").error
    assert not hidden(run / "checkpoints") and step_seen(run) == 3


def test_retention_that_fails_is_a_warning(scratch: Path) -> None:
    run = prepared(scratch / "run", 1, 2)
    files = Failer(0, errno.EIO, lasting=True, only=("rmdir",))
    outcome = save(run / "checkpoints", 3, files, keep=1)
    assert not outcome.error and "could not be removed" in outcome.warning and step_seen(run) == 3
    assert not save(run / "checkpoints", 4).error and step_seen(run) == 4
