"""A rank that raises, dies, is suspended, loops or never comes: the others end, soon, and say who, where and why."""

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

from helpers import process_state
from windlass.errors import RunFailed, Stopped
from windlass.launch.local import launch
from windlass.parallel.collectives import sum_async
from windlass.parallel.dist import Ranks, init_process_group, init_store
from windlass.parallel.env import DistEnv

pytestmark = pytest.mark.dist
HOST = socket.gethostname()


@dataclass
class Ended:
    """How a rank's process ended; `code` is None where it had to be killed (it was suspended, or hung)."""

    code: int | None
    text: str
    seconds: float


def end(
    fn: Callable[[Ranks], None],
    world: int,
    folder: Path,
    missing: int | None = None,
    alone: bool = False,
    **settings: float,
) -> list[Ended]:
    """Run `fn` on forked ranks, as a worker does, and see how each of them ends.

    `alone`: before the process group is made; `missing`: this rank never comes.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=16)
    port = listening.getsockname()[1]

    def worker(rank: int) -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w")
        fd = listening.detach() if rank == 0 else None
        store = dist.TCPStore("127.0.0.1", port, world, rank == 0, wait_for_workers=False, master_listen_fd=fd)
        code, quick = 0, recipe(**settings)
        try:
            if rank == missing:
                time.sleep(60)
            with init_store(DistEnv(rank, world, rank, world, addr="127.0.0.1", port=port), quick, store) as ranks:
                if alone:
                    fn(ranks)
                init_process_group(ranks, quick)
                if not alone:
                    fn(ranks)
        except Stopped:
            code = 75
        except BaseException:
            traceback.print_exc()
            code = 1
        sys.stderr.flush()
        os._exit(code)

    processes = [FORK.Process(target=worker, args=(rank,), daemon=True) for rank in range(world)]
    began, times = time.monotonic(), dict[int, float]()
    for process in processes:
        process.start()
    listening.close()
    while len(times) < world and time.monotonic() < began + 30:
        for rank, process in enumerate(processes):
            if process.exitcode is not None or (
                len(times) == world - 1 and (rank == missing or process_state(process.pid) == "T")
            ):
                times.setdefault(rank, time.monotonic() - began)
        time.sleep(0.02)
    ended = []
    for rank, process in enumerate(processes):
        code = process.exitcode
        process.kill()
        process.join()
        ended.append(Ended(code, (folder / f"{rank}.txt").read_text(), times.get(rank, 30.0)))
    return ended


def collective(ranks: Ranks) -> None:
    dist.all_reduce(torch.ones(3))


def stopped(ranks: Ranks) -> None:
    raise Stopped("all saved")


@pytest.mark.parametrize(("fn", "code"), [(collective, 0), (stopped, 75)])
def test_ending_or_stopping_together_is_no_failure(tmp_path: Path, fn: Callable[[Ranks], None], code: int):
    assert [(e.code, e.text) for e in end(fn, 2, tmp_path)] == [(code, "")] * 2


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
            assert "ValueError: a shape is wrong" in one.text and "RunFailed" not in one.text
        else:
            assert f"RunFailed: rank {rank} on {HOST} at step 12, phase backward: it lost the others" in one.text
            assert f"rank {culprit} on {HOST} at step 12, phase backward: ValueError: a shape is wrong" in one.text


@pytest.mark.parametrize("culprit", [0, 1])
def test_a_failure_before_the_groups_are_joined_ends_the_others(tmp_path: Path, culprit: int):
    """Whether they wait for an answer over the store, or already for the process group."""

    def fn(ranks: Ranks) -> None:
        ranks.mark(0, "load")
        if ranks.rank == culprit:
            time.sleep(0.5)  # the others wait by now
            raise FileNotFoundError("no such corpus")
        if ranks.rank == 2:
            ranks.all_gather_object("data", 1)

    ended = end(fn, 3, tmp_path, alone=True, parallel__startup_timeout_seconds=600)
    assert [e.code for e in ended] == [1, 1, 1]
    for one in (e for rank, e in enumerate(ended) if rank != culprit):
        assert f"rank {culprit} on {HOST} at step 0, phase load: FileNotFoundError: no such corpus" in one.text
        assert one.seconds < 15


def test_a_rank_that_never_comes_is_named(tmp_path: Path):
    for one in end(collective, 3, tmp_path, missing=1, parallel__startup_timeout_seconds=2)[::2]:
        assert one.code == 1 and "waited 2 s for rank 1" in one.text


def test_a_killed_rank_ends_the_others(tmp_path: Path):
    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.mark(3, "forward")
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(5, 7))

    ended = end(fn, 2, tmp_path)
    assert [e.code for e in ended] == [1, -signal.SIGKILL]
    assert f"RunFailed: rank 0 on {HOST} at step 3, phase forward: it lost the others" in ended[0].text
    assert f"last seen: rank 1 on {HOST}" in ended[0].text


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_suspended_rank_is_named_by_the_others(tmp_path: Path, culprit: int):
    def fn(ranks: Ranks) -> None:
        ranks.mark(7, "save")
        ranks.all_gather_object("here", 1)
        time.sleep(0.25)  # a heartbeat, so that the others know where it is
        if ranks.rank == culprit:
            os.kill(os.getpid(), signal.SIGSTOP)
        collective(ranks)

    ended = end(fn, 3, tmp_path, parallel__heartbeat_seconds=0.1)
    others = [one for rank, one in enumerate(ended) if rank != culprit]
    assert ended[culprit].code is None
    for one in others:
        assert one.code == 1
        assert f"the run lost rank {culprit} on {HOST} at step 7, phase save: " in one.text, one.text
    assert any(("no heartbeat for" if culprit else "its store did not answer") in one.text for one in others)


def test_a_rank_that_does_not_come_to_the_collective_ends_the_run_after_the_time_limit(tmp_path: Path):
    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.set_timeout(1.0)
        ranks.mark(9, "evaluation" if ranks.rank == 1 else "step")
        time.sleep(0.3)
        while ranks.rank == 1:
            time.sleep(0.05)
        collective(ranks)

    ended = end(fn, 2, tmp_path, parallel__timeout_seconds=1.0, parallel__heartbeat_seconds=0.1)
    assert [e.code for e in ended] == [1, 1]
    assert f"RunFailed: rank 0 on {HOST} at step 9, phase step: it lost the others" in ended[0].text
    assert f"rank 1 on {HOST} at step 9, phase evaluation: for" in ended[0].text


def test_a_failed_rank_ends_even_if_something_holds_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("windlass.parallel.dist.EXIT_SECONDS", 0.3)

    def fn(ranks: Ranks) -> None:
        ranks.fail(RunFailed("over"))
        time.sleep(60)

    assert [e.code for e in end(fn, 2, tmp_path)] == [1, 1]


WORKER = """
import torch, torch.distributed as dist
from windlass.parallel.env import detect_env
from windlass.parallel.dist import init_ranks
from windlass.recipe import Recipe
env = detect_env()
recipe = Recipe.model_validate({"parallel": {"device": "cpu", "strategy": "full_shard"}})
with init_ranks(env, recipe) as ranks:
    dist.all_reduce(torch.ones(2))
    ranks.mark(5, "forward")
    if ranks.rank == 1 and env.attempt == 0:
        raise ValueError("a shape is wrong")
    if env.attempt == 0:
        dist.all_reduce(torch.ones(2))
    assert ranks.all_gather_object("who", ranks.rank) == [0, 1]
"""


def test_workers_of_the_launcher_end_by_themselves_and_a_restart_meets_anew(capfd: pytest.CaptureFixture[str]):
    logged: list[str] = []
    code = launch([sys.executable, "-W", "error::ResourceWarning", "-c", WORKER], 2, max_restarts=1, log=logged.append)
    printed, text = capfd.readouterr().err, "\n".join(logged)
    assert code == 0, text + printed
    assert f"rank 1 of 2 on {HOST} failed with exit code 1 at step 5, phase forward" in text
    assert "last error: ValueError: a shape is wrong" in text
    assert "  [rank 1] [rank1]: ValueError: a shape is wrong" in text
    assert "restart 1 of 1, with 2 ranks" in text
    assert f"the first failure was that of rank 1 on {HOST} at step 5, phase forward" in printed
