"""Shared by the fault tests: a tiny state whose every number tells its step, saves of it, and file layers that fail."""

from __future__ import annotations

import errno
import json
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
from windlass.checkpoint.load import Choice, open_checkpoint
from windlass.checkpoint.reshard import Slice, State, divide_rows
from windlass.checkpoint.retention import Policy
from windlass.checkpoint.save import Outcome, Saver
from windlass.fileio import Files

SHAPES = {"model/a": (6, 4), "model/b": (3,), "optim/a/step": (), "optim/a/exp_avg": (6, 4)}
KILLED = -signal.SIGKILL


def state(step: int, rank: int = 0, world: int = 1) -> State:
    """All numbers are functions of step, tensor and place, so that a mixture of two saves cannot go unnoticed."""
    whole = {n: _numbers(step, i, shape) for i, (n, shape) in enumerate(SHAPES.items())}
    sizes = [(n, t.shape[0] if t.dim() else 1, t[0].numel() * 4 if t.dim() else 4) for n, t in whole.items()]
    mine = divide_rows(sizes, rank, world)
    slices = {n: Slice(whole[n][a:b] if whole[n].dim() else whole[n], SHAPES[n], a) for n, (a, b) in mine.items()}
    return State(slices, {"model/tied": "model/a"}, sum(t.numel() * 4 for t in whole.values()))


def _numbers(step: int, index: int, shape: tuple[int, ...]) -> torch.Tensor:
    count = 1
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float32) + 1000 * step + 100 * index).reshape(shape)


def save(
    directory: Path, step: int, files: Files | None = None, rank: int = 0, world: int = 1, **options: Any
) -> Outcome:
    """One save from begin to end, in this thread; raises nothing."""
    keep = Policy(last=options.pop("keep", 2))
    attempt = options.pop("attempt", "0")
    saver = Saver(
        directory, rank, world, attempt, keep, files=files or Files(), background=False, piece_bytes=128, **options
    )
    saver.save(step, state(step, rank, world), {"step": step}, {"data": "x"})
    [outcome] = saver.poll()
    return outcome


def step_seen(run: Path) -> int:
    """What a reader finds: the step of the newest checkpoint, every number of it compared; 0 for none."""
    choice: Choice | None = load.choose(run)
    if choice is None:
        return 0
    assert not choice.notes, f"a kill damaged a committed checkpoint: {choice.notes}"
    check(choice.path, choice.step)
    return choice.step


def check(path: Path, step: int) -> None:
    """The checkpoint is whole, and all of it is of this step."""
    checkpoint = open_checkpoint(path)
    expected = [(n, _numbers(step, i, shape)) for i, (n, shape) in enumerate(SHAPES.items())]
    assert checkpoint.step == step and checkpoint.counters == {"step": step}
    for name, tensor in expected:
        assert torch.equal(checkpoint.tensor(name), tensor), name
    assert torch.equal(checkpoint.tensor("model/tied"), expected[0][1])


def hidden(directory: Path) -> list[str]:
    """Whatever is in a checkpoint directory besides checkpoints."""
    return sorted(p.name for p in directory.iterdir() if not re.fullmatch(r"step-\d+", p.name))


class Recorder(Files):
    """Counts the operations of a save and lists them."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def about_to(self, operation, path, output=None, data=None):
        self.log.append((operation, path.name))


class Killer(Files):
    """Kills the process at its operation number `at`; a write is torn, half of it done."""

    def __init__(self, at: int):
        self.at, self.count = at, 0

    def about_to(self, operation, path, output=None, data=None):
        if self.count == self.at:
            if output is not None and data is not None:
                os.write(output.descriptor, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        self.count += 1


class Failer(Files):
    """Raises an error at operation number `at`, at every operation from there on, or at all of one kind."""

    def __init__(self, at: int, code: int = errno.ENOSPC, lasting: bool = False, only: tuple[str, ...] = ()):
        self.at, self.code, self.lasting, self.only, self.count = at, code, lasting, only, 0
        self.failed = 0

    def about_to(self, operation, path, output=None, data=None):
        hit = self.count >= self.at if self.lasting else self.count == self.at
        self.count += 1
        if hit and (not self.only or operation in self.only):
            self.failed += 1
            if output is not None and data is not None:
                os.write(output.descriptor, data[: len(data) // 2])
            raise OSError(self.code, os.strerror(self.code), str(path))


def tally(what: str, tried: int, **more: float) -> None:
    """Count faults that were tried and survived, for the tables in docs/reliability.md (WINDLASS_FAULTS names the
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
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a process; its exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def count_of_two(folder: Path) -> list[int]:
    """The operations of each rank of two, at most: rank 0's depend on nothing but the save, nor do rank 1's."""
    (folder / "count").mkdir()
    assert not save(folder / "count" / "checkpoints", 1).error
    pipe_in, pipe_out = os.pipe()

    def rank(number: int) -> None:
        recorder = Recorder()
        assert not save(folder / "count" / "checkpoints", 2, recorder, number, 2, deadline=20).error
        os.write(pipe_out, f"{number} {len(recorder.log)}\n".encode())

    children = [forked(lambda n=n: rank(n)) for n in range(2)]
    assert [ended(c) for c in children] == [0, 0]
    lines = dict(line.split() for line in os.read(pipe_in, 100).decode().splitlines())
    os.close(pipe_in), os.close(pipe_out)
    return [int(lines["0"]), int(lines["1"])]
