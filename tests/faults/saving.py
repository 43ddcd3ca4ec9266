"""Shared by the fault tests: a tiny state whose every number tells its step, saves of it, and file
layers that fail.
"""

import errno
import json
import math
import os
import re
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from windlass.checkpoint import load
from windlass.checkpoint.commit import Save
from windlass.checkpoint.load import open_checkpoint
from windlass.checkpoint.retention import Policy
from windlass.checkpoint.save import Saver
from windlass.checkpoint.state_dict import State, state_of
from windlass.fileio import Files

SHAPES = {"model/a": (6, 4), "model/b": (3,), "optim/a/step": (), "optim/a/exp_avg": (6, 4)}
KILLED = -signal.SIGKILL
# By name: the steps that are there already, and the step whose save is cut off (`again`: a save in
# place of another).
SCENES = {"first": ([], 3), "next": ([1, 2], 3), "again": ([1, 3], 3)}


def numbers(step: int) -> dict[str, torch.Tensor]:
    """All numbers are functions of step, tensor and place, so that a mixture of two saves cannot go
    unnoticed.
    """
    starts = {name: float(1000 * step + 100 * index) for index, name in enumerate(SHAPES)}
    return {
        name: torch.arange(start, start + math.prod(SHAPES[name])).reshape(SHAPES[name])
        for name, start in starts.items()
    }


def state(step: int, rank: int = 0, world: int = 1) -> State:
    """A rank's share of the numbers of a step."""
    return state_of(numbers(step), {"model/tied": "model/a"}, rank, world)


def prepared(run: Path, *steps: int, **options: Any) -> Path:
    """A run with the checkpoints of these steps."""
    run.mkdir()
    for step in steps:
        assert not save(run / "checkpoints", step, **options).error
    return run


def save(
    directory: Path, step: int, files: Any = None, rank: int = 0, world: int = 1, **options: Any
) -> Save:
    """One save from begin to end, in this thread; raises nothing."""
    options = {"background": False, "piece_bytes": 128, **options}
    policy = Policy(last=options.pop("keep", 2))
    saver = Saver(directory, rank, world, files=files or Files(), policy=policy, **options)
    saver.save(step, state(step, rank, world), {"step": step}, {"data": "x"})
    [outcome] = saver.poll()
    return outcome


def step_seen(run: Path) -> int:
    """What a reader finds: the step of the newest checkpoint, every number of it compared; 0 for
    none.
    """
    choice = load.choose_checkpoint(run)
    if choice is None:
        return 0
    assert not choice.notes, f"a kill damaged a committed checkpoint: {choice.notes}"
    check(choice.path, choice.step)
    return choice.step


def check(path: Path, step: int) -> None:
    """The checkpoint is whole, and all of it is of this step."""
    checkpoint, expected = open_checkpoint(path), numbers(step)
    assert checkpoint.step == step and checkpoint.counters == {"step": step}
    for name, tensor in {**expected, "model/tied": expected["model/a"]}.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name


def hidden(directory: Path) -> list[str]:
    """What is in a checkpoint directory besides checkpoints."""
    paths = directory.iterdir() if directory.is_dir() else ()
    return sorted(p.name for p in paths if not re.fullmatch(r"step-\d+", p.name))


class Recorder(Files):
    """Counts the operations of a save and lists them."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def about_to(self, operation, path, output=None, data=None):
        self.log.append((operation, path.name))


class Failer(Files):
    """Fails at operation number `at`, at every operation from there on, or at all of one kind; a
    write is half done.
    """

    def __init__(
        self, at: int, code: int = errno.ENOSPC, lasting: bool = False, only: tuple[str, ...] = ()
    ):
        self.at, self.code, self.lasting, self.only = at, code, lasting, only
        self.count = self.failed = 0

    def about_to(self, operation, path, output=None, data=None):
        hit = self.count >= self.at if self.lasting else self.count == self.at
        self.count += 1
        if hit and (not self.only or operation in self.only):
            self.failed += 1
            if output is not None and data is not None:
                os.write(output.descriptor, data[: len(data) // 2])
            self.fail(path)

    def fail(self, path: Path) -> None:
        raise OSError(self.code, os.strerror(self.code), str(path))


class Killer(Failer):
    """Kills the process at its operation number `at`."""

    def fail(self, path: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)


def tally(what: str, tried: int, **more: float) -> None:
    """Count faults that were tried and survived, for docs/evidence/reliability.md (WINDLASS_FAULTS names the
    file).
    """
    if name := os.environ.get("WINDLASS_FAULTS"):
        with open(name, "a", encoding="utf-8") as file:
            file.write(json.dumps({"what": what, "tried": tried, **more}) + "\n")


def forked(function: Callable[[], None]) -> int:
    """Run a function in a process of its own, which may be killed; returns its process id."""
    child = os.fork()
    if child:
        return child
    try:
        function()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def ended(child: int) -> int:
    """Wait for a process; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def two_ranks(
    directory: Path, step: int, files: Callable[[int], Files], **options: Any
) -> list[int]:
    """Process ids of two ranks that save; the outcome's error of each goes to `error-RANK` beside
    the directory.
    """

    def rank(number: int) -> None:
        outcome = save(directory, step, files(number), number, 2, **options)
        (directory.parent / f"error-{number}").write_text(outcome.error)

    return [forked(lambda n=n: rank(n)) for n in range(2)]


def count_of_two(folder: Path) -> list[int]:
    """The operations of each rank of two, at most: rank 0's depend on nothing but the save, nor do
    rank 1's.
    """
    run = prepared(folder / "count", 1)

    class Counter(Files):
        def __init__(self, rank: int):
            self.path = run / f"count-{rank}"

        def about_to(self, operation, path, output=None, data=None):
            with self.path.open("a") as file:
                file.write(operation[0])

    for child in two_ranks(run / "checkpoints", 2, Counter, deadline=20):
        assert ended(child) == 0
    assert not (run / "error-0").read_text() and not (run / "error-1").read_text()
    return [(run / f"count-{rank}").stat().st_size for rank in range(2)]
