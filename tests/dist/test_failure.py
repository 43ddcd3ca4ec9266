"""A rank that raises, dies, is suspended or loops: the others end, soon, and say who, where and why."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import FORK, recipe

from windlass.errors import RunFailed, Stopped
from windlass.launch.local import launch
from windlass.parallel.env import DistEnv
from windlass.parallel.dist import Ranks, init_ranks
from windlass.parallel.collectives import sum_async

pytestmark = pytest.mark.dist
HOST = socket.gethostname()


@dataclass
class Ended:
    """How a rank's process ended; `code` is None where it had to be killed (it was suspended, or hung)."""

    code: int | None
    text: str


def end(fn: Callable[[Ranks], None], world: int, folder: Path, limit: float = 30.0, **settings: float) -> list[Ended]:
    """Run `fn` on forked ranks, as a worker does, and see how each of them ends."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=16)
    port = listening.getsockname()[1]

    def worker(rank: int) -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w")
        fd = listening.detach() if rank == 0 else None
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, wait_for_workers=False, master_listen_fd=fd)
        code = 0
        try:
            with init_ranks(
                DistEnv(rank, world, rank, world, addr="127.0.0.1", port=port), recipe(**settings), store
            ) as ranks:
                fn(ranks)
        except Stopped:
            code = 75
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)

    processes = [FORK.Process(target=worker, args=(rank,), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    listening.close()
    until, ended = time.monotonic() + limit, []
    codes: dict[int, int | None] = {}
    while len(codes) < world and time.monotonic() < until:
        codes |= {r: p.exitcode for r, p in enumerate(processes) if p.exitcode is not None}
        if len(codes) == world - 1:
            (last,) = set(range(world)) - set(codes)
            if Path(f"/proc/{processes[last].pid}/stat").read_text().rpartition(")")[2].split()[0] == "T":
                break
        time.sleep(0.02)
    for rank, process in enumerate(processes):
        codes.setdefault(rank, process.exitcode)
        process.kill()
        process.join()
        ended.append(Ended(codes[rank], (folder / f"{rank}.txt").read_text()))
    return ended


def collective(ranks: Ranks) -> None:
    dist.all_reduce(torch.ones(3))


def test_a_clean_end(tmp_path: Path):
    assert [e.code for e in end(collective, 2, tmp_path)] == [0, 0]


def test_stopping_together_is_no_failure(tmp_path: Path):
    def stop(ranks: Ranks) -> None:
        raise Stopped("all saved")

    assert [(e.code, e.text) for e in end(stop, 2, tmp_path)] == [(75, "")] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_ends_the_others_with_its_rank_step_and_phase(tmp_path: Path, culprit: int):
    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.mark(12, "backward")
        if ranks.rank == culprit:
            raise ValueError("a shape is wrong")
        sum_async([1], ranks).wait()

    ended = end(fn, 3, tmp_path)
    assert [e.code for e in ended] == [1, 1, 1]
    for rank, one in enumerate(ended):
        if rank == culprit:
            assert "ValueError: a shape is wrong" in one.text
            assert "RunFailed" not in one.text
        else:
            assert (
                f"RunFailed: rank {rank} at step 12, phase backward lost the others; first there was rank {culprit} "
                in one.text
            )
            assert f"on {HOST} at step 12, phase backward: ValueError: a shape is wrong" in one.text


def test_a_killed_rank_ends_the_others_and_the_last_collective_is_named(tmp_path: Path):
    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.mark(3, "forward")
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(5, 7))

    ended = end(fn, 2, tmp_path)
    assert [e.code for e in ended] == [1, -signal.SIGKILL]
    assert "RunFailed: rank 0 at step 3, phase forward lost the others" in ended[0].text
    assert "all_reduce of [[5, 7]]" in ended[0].text


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_suspended_rank_is_named_and_the_others_show_their_stacks(tmp_path: Path, culprit: int):
    def waiting_for_the_others(ranks: Ranks) -> None:
        collective(ranks)

    def fn(ranks: Ranks) -> None:
        ranks.mark(7, "save")
        ranks.all_gather_object("here", 1)
        time.sleep(0.25)  # a heartbeat, so that the others know the place
        if ranks.rank == culprit:
            os.kill(os.getpid(), signal.SIGSTOP)
        waiting_for_the_others(ranks)

    ended = end(fn, 3, tmp_path, parallel__heartbeat_seconds=0.1)
    for rank, one in enumerate(ended):
        if rank == culprit:
            assert one.code is None
            continue
        assert one.code == 1
        assert f"the run lost rank {culprit} on {HOST} at step 7" in one.text, one.text
        assert "waiting_for_the_others" in one.text
    others = "".join(one.text for rank, one in enumerate(ended) if rank != culprit)
    assert ("no sign of life for" if culprit else "its store does not answer") in others


def test_a_rank_that_does_not_come_to_the_collective_ends_the_run_after_the_time_limit(tmp_path: Path):
    def looping(ranks: Ranks) -> None:
        while True:
            time.sleep(0.05)

    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.set_timeout(1.0)
        ranks.mark(9, "evaluation" if ranks.rank == 1 else "step")
        time.sleep(0.3)
        if ranks.rank == 1:
            looping(ranks)
        collective(ranks)

    ended = end(fn, 2, tmp_path, parallel__timeout_seconds=1.0, parallel__heartbeat_seconds=0.1)
    assert [e.code for e in ended] == [1, 1]
    assert "RunFailed: rank 0 at step 9, phase step lost the others" in ended[0].text
    assert f"rank 1 on {HOST} at step 9, phase evaluation, for" in ended[0].text
    assert "in looping" in ended[1].text  # and the one that looped shows where


def test_a_failed_rank_ends_even_if_something_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("windlass.parallel.dist.EXIT_SECONDS", 0.3)

    def fn(ranks: Ranks) -> None:
        try:
            raise RunFailed("over")
        except RunFailed as error:
            ranks.fail(error)
        time.sleep(60)

    assert [e.code for e in end(fn, 2, tmp_path)] == [1, 1]


WORKER = """
import os, sys
import torch.distributed as dist, torch
from windlass.errors import RunFailed
from windlass.parallel.env import detect_env
from windlass.parallel.dist import init_ranks
from windlass.recipe import Recipe
place = detect_env()
recipe = Recipe.model_validate({"parallel": {"device": "cpu", "strategy": "full_shard"}})
with init_ranks(place, recipe) as ranks:
    dist.all_reduce(torch.ones(2))
    ranks.mark(5, "forward")
    ranks.set_timeout(60.0)
    if ranks.rank == 1 and place.attempt == 0:
        raise ValueError("a shape is wrong")
    if place.attempt == 0:
        dist.all_reduce(torch.ones(2))
    assert ranks.all_gather_object("who", ranks.rank) == [0, 1]
"""


def test_workers_of_the_launcher_end_by_themselves_and_a_restart_meets_anew(capfd: pytest.CaptureFixture[str]):
    said: list[str] = []
    code = launch([sys.executable, "-W", "error::ResourceWarning", "-c", WORKER], 2, max_restarts=1, say=said.append)
    printed = capfd.readouterr().err
    assert code == 0, "\n".join([*said, printed])
    assert f"rank 1 of 2 on {HOST} failed with exit code 1 at step 5, phase forward" in said[0]
    assert "last error: ValueError: a shape is wrong" in said[0]
    assert "  [rank 1] [rank1]: ValueError: a shape is wrong" in said[0]
    assert "restart 1 of 1, with 2 ranks" in said[1]
    assert "lost the others; first there was rank 1" in printed
