"""Shared by the fault tests: a tiny state whose every number tells its step, saves of it, and file
layers that fail.
"""

import errno
import functools
import itertools
import json
import math
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import tensor as dtensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from windlass.checkpoint import choose, commit
from windlass.checkpoint.commit import Save
from windlass.checkpoint.format import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.state_dict import Box, Shard, shard_of
from windlass.fileio import Files
from windlass.model.sharding import Cut, Peers, with_cut
from windlass.recipe.settings import CheckpointSettings

SHAPES = {
    "model/a": (12, 4),  # rows of queries, keys and values
    "model/b": (3,),
    "model/c": (4, 6),
    "model/d": (7, 2),
    "optim/a/step": (),
    "optim/a/exp_avg": (12, 4),
}
TENSOR, GRID = 2, 4
"""Four ranks are two of `tp` times two of `dp_shard`; other numbers of ranks hold replicas."""
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


def state(step: int, rank: int = 0, world: int = 1) -> Shard:
    """A rank's share of the numbers of a step."""
    tensors, aliases = numbers(step), {"model/tied": "model/a"}
    if world != GRID:
        return shard_of(tensors, aliases, rank, world)
    flat = {name: tensor.flatten() for name, tensor in tensors.items()}
    slices = [
        Box(box.name, flat[box.name][box.tensor], box.shape, box.offsets) for box in places()[rank]
    ]
    return Shard(slices, aliases)


def cut(name: str, peers: Peers) -> Cut | None:
    """By heads (three ranges), by columns, by rows of unequal numbers, or not at all."""
    match name.rpartition("/")[2], SHAPES[name]:
        case "a" | "exp_avg", (rows, _):
            each = rows // 3 // peers.size
            starts = (part * rows // 3 + peers.rank * each for part in range(3))
            return Cut(0, rows, tuple(range(start, start + each) for start in starts), peers)
        case "c", (_, columns):
            return Cut(1, columns, (peers.own_range(columns),), peers)
        case "d", (rows, _):
            return Cut(0, rows, (peers.own_range(rows),), peers)
    return None


@functools.cache
def places() -> list[list[Box]]:
    """The boxes that each rank of GRID writes under `full_shard`; their numbers are places in the
    flattened whole.
    """
    return [places_of(rank) for rank in range(GRID)]


def places_of(rank: int) -> list[Box]:
    dist.init_process_group("fake", rank=rank, world_size=GRID, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (GRID // TENSOR, TENSOR), mesh_dim_names=("dp_shard", "tp"))
        peers, tensors = Peers("", rank % TENSOR, TENSOR), dict[str, torch.Tensor]()
        for name, shape in SHAPES.items():
            tensor, own = torch.arange(math.prod(shape)).reshape(shape), cut(name, peers)
            if shape:
                part = own.take(tensor) if own else tensor
                tensor = dtensor.distribute_tensor(
                    part, mesh["dp_shard"], [dtensor.Shard(0)], src_data_rank=None
                )
            tensors[name] = with_cut(tensor, own)
        return shard_of(tensors, None, rank, GRID).boxes
    finally:
        dist.destroy_process_group()


def prepared(run: Path, *steps: int, **options: Any) -> Path:
    """A run with the checkpoints of these steps."""
    run.mkdir()
    for step in steps:
        assert not save_all(run / "checkpoints", step, **options).error
    return run


def save_all(directory: Path, step: int, files: Any = None, world: int = 1, **options: Any) -> Save:
    """One save by all ranks, each in a thread, with `files` for all or for each; the outcome of rank
    0.
    """
    outcomes = dict[int, Save]()

    def rank(number: int) -> None:
        own = files[number] if isinstance(files, list) else files
        outcomes[number] = save(directory, step, own, number, world, **options)

    places()  # here, because it sets up process groups
    others = [threading.Thread(target=rank, args=[n], daemon=True) for n in range(1, world)]
    for thread in others:
        thread.start()
    rank(0)
    for thread in others:
        thread.join()
    assert len({bool(outcome.error) for outcome in outcomes.values()}) == 1, outcomes
    return outcomes[0]


def save(
    directory: Path, step: int, files: Any = None, rank: int = 0, world: int = 1, **options: Any
) -> Save:
    """One save from begin to end, in this thread; raises nothing."""
    # 2048: a tenth of the operations, for each rank
    commit.PIECE_BYTES = 128 if world < GRID else 2048
    settings = CheckpointSettings(keep_last=options.pop("keep", 2), background=False)
    writer = Writer(directory, rank, world, files=files or Files(), settings=settings, **options)
    writer.write(step, state(step, rank, world), {"step": step}, {"data": "x"})
    [outcome] = writer.poll()
    return outcome


def step_seen(run: Path) -> int:
    """What a reader finds: the step of the newest checkpoint, every number of it compared; 0 for
    none.
    """
    choice = choose.choose_checkpoint(run)
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
        self.count, self.failed = itertools.count(), 0

    def about_to(self, operation, path, output=None, data=None):
        number = next(self.count)
        hit = number >= self.at if self.lasting else number == self.at
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


def each_rank(
    directory: Path, step: int, files: Callable[[int], Files], world: int = 2, **options: Any
) -> list[int]:
    """Process ids of ranks that save; the outcome's error of each goes to `error-RANK` beside the
    directory.
    """

    def rank(number: int) -> None:
        outcome = save(directory, step, files(number), number, world, **options)
        (directory.parent / f"error-{number}").write_text(outcome.error)

    return [forked(lambda n=n: rank(n)) for n in range(world)]


def count_of_ranks(folder: Path, world: int = 2) -> list[int]:
    """The operations of each rank: they depend on nothing but the save."""
    run, recorders = prepared(folder / "count", 1, world=world), [Recorder() for _ in range(world)]
    assert not save_all(run / "checkpoints", 2, recorders, world, deadline=20).error
    return [len(recorder.log) for recorder in recorders]
