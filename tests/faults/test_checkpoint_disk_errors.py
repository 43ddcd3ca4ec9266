"""A full disk and an I/O error at every operation of a save: an outcome that says so, nothing lost,
nothing left.
"""

import errno
from pathlib import Path

import pytest
import saving
from saving import Failer, Recorder, check, ended, hidden, prepared, save, step_seen, tally

from windlass.checkpoint.commit import recover
from windlass.fileio import Files

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
def test_one_of_two_ranks(scratch: Path, victim: int, every: int) -> None:
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
