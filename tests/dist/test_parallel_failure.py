"""A rank that raises, dies, is suspended, loops or never comes: the others end, soon, and say who,
where and why.
"""

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from harness import FORK, recipe, tcp_store

from helpers import process_state
from windlass.errors import RunFailed, Stopped
from windlass.parallel import heartbeat
from windlass.parallel.collectives import sum_async
from windlass.parallel.env import DistEnv
from windlass.parallel.heartbeat import Beat, behind
from windlass.parallel.ranks import Ranks, init_store

pytestmark = pytest.mark.dist
HOST = socket.gethostname()


class Ended(NamedTuple):
    code: int | None  # None: it is suspended
    text: str


def end(
    fn: Callable[[Ranks], None],
    world: int,
    folder: Path,
    joined=True,
    missing=-1,
    **settings: float,
) -> list[Ended]:
    """How each forked rank ends that runs `fn`, `joined` in a process group or before.

    The rank `missing` never comes.
    """
    listening = socket.create_server(("127.0.0.1", 0), backlog=16)
    port = listening.getsockname()[1]

    def worker(rank: int) -> None:
        torch.set_num_threads(1)
        os.dup2(os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
        sys.stderr = os.fdopen(2, "w")
        env = DistEnv(rank, world, rank, world, addr="127.0.0.1", port=port)
        store, code, quick = tcp_store(env, listening), 0, recipe(**settings)
        if rank == missing:
            os.kill(os.getpid(), signal.SIGSTOP)
        try:
            with init_store(env, quick, store) as ranks:
                if joined:
                    ranks.connect(quick)
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
    until, ended = time.monotonic() + 30, []
    for process in processes:
        while process.exitcode is None and process_state(process.pid) != "T":
            assert time.monotonic() < until
            time.sleep(0.02)
    for rank, process in enumerate(processes):
        ended.append(Ended(process.exitcode, (folder / f"{rank}.txt").read_text()))
        process.kill()
        process.join()
    return ended


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks look for a failure more often than a user's, who do not wait for a test."""
    monkeypatch.setattr(heartbeat, "POLL_SECONDS", 0.2)


def collective(ranks: Ranks) -> None:
    dist.all_reduce(torch.ones(3))


def stopped(ranks: Ranks) -> None:
    raise Stopped("all saved")


@pytest.mark.parametrize(("fn", "code"), [(collective, 0), (stopped, 75)])
def test_ending_or_stopping_together_is_no_failure(
    tmp_path: Path, fn: Callable[[Ranks], None], code: int
):
    assert [(e.code, e.text) for e in end(fn, 2, tmp_path)] == [(code, "")] * 2


@pytest.mark.parametrize("culprit", [0, 1])
def test_an_exception_ends_the_others_with_its_rank_step_and_phase(tmp_path: Path, culprit: int):
    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.mark(12, "backward")
        if ranks.rank == culprit:
            raise ValueError("a shape is wrong")
        sum_async([1], ranks.mesh).wait()

    ended = end(fn, 3, tmp_path)
    assert [e.code for e in ended] == [1, 1, 1]
    for rank, one in enumerate(ended):
        if rank == culprit:
            assert "ValueError: a shape is wrong" in one.text and "RunFailed" not in one.text
        else:
            place = f"on {HOST} at step 12, phase backward"
            assert f"RunFailed: rank {rank} {place}: it lost the others" in one.text
            assert f"rank {culprit} {place}: ValueError: a shape is wrong" in one.text


def test_a_killed_rank_is_seen_last_where_it_was_and_nobody_else_is_blamed(tmp_path: Path):
    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.mark(12, "backward")
        time.sleep(1.5)  # a heartbeat
        if ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        sum_async([1], ranks.mesh).wait()

    for one in end(fn, 3, tmp_path, parallel__heartbeat_seconds=1)[::2]:
        assert one.code == 1 and "it lost the others" in one.text
        assert f"rank 1 on {HOST} at step 12, phase backward: for" in one.text
        assert "the first failure was" not in one.text


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
        ranks.connect(recipe(**patient))

    began, patient = time.monotonic(), {"parallel__startup_timeout_seconds": 600}
    ended = end(fn, 3, tmp_path, joined=False, **patient)
    assert [e.code for e in ended] == [1, 1, 1] and time.monotonic() - began < 15
    place = f"rank {culprit} on {HOST} at step 0, phase load"
    for one in (e for rank, e in enumerate(ended) if rank != culprit):
        assert f"{place}: FileNotFoundError: no such corpus" in one.text


def test_a_rank_that_never_comes_is_named(tmp_path: Path):
    for one in end(collective, 3, tmp_path, missing=1, parallel__startup_timeout_seconds=1)[::2]:
        assert one.code == 1 and "waited 1 s for rank 1" in one.text


def test_a_store_that_ends_before_the_first_look_ends_the_others(tmp_path: Path):
    def fn(ranks: Ranks) -> None:
        if ranks.rank == 0:
            os._exit(3)  # the store is in this process
        time.sleep(60)

    ended = end(fn, 2, tmp_path, joined=False)
    assert [e.code for e in ended] == [3, 1]
    assert f"the run lost rank 0 on {HOST}" in ended[1].text
    assert "its store did not answer" in ended[1].text


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
    place = f"the run lost rank {culprit} on {HOST} at step 7, phase save: "
    for one in others:
        assert one.code == 1 and place in one.text, one.text
    why = "no heartbeat for" if culprit else "its store did not answer"
    assert any(why in one.text for one in others)


def test_a_rank_that_misses_a_collective_ends_the_run_after_the_time_limit(tmp_path: Path):
    def fn(ranks: Ranks) -> None:
        collective(ranks)
        ranks.set_timeout(1.0)
        ranks.mark(9, "evaluation" if ranks.rank == 1 else "step")
        time.sleep(0.3)
        while ranks.rank == 1:
            time.sleep(0.05)
        collective(ranks)

    ended = end(fn, 3, tmp_path, parallel__timeout_seconds=1.0, parallel__heartbeat_seconds=0.1)
    assert [e.code for e in ended] == [1, 1, 1]
    failed = f"RunFailed: rank 0 on {HOST} at step 9, phase step: it lost the others"
    texts = [e.text for e in ended if "last seen" in e.text]  # of the first one to give up
    assert failed in ended[0].text and texts
    assert all(f"rank 1 on {HOST} at step 9, phase evaluation: for" in text for text in texts)


@pytest.mark.parametrize("culprit", [0, 1])
def test_ranks_that_hang_in_a_kernel_are_ended_and_the_one_behind_is_named(
    tmp_path: Path, culprit: int
):
    """As under NCCL: no collective of the host raises, and every heartbeat goes on."""

    def fn(ranks: Ranks) -> None:
        ranks.device = torch.device("cuda", 0)
        ranks.mark(12, "backward" if ranks.rank == culprit else "step")
        ranks.set_timeout(1.0)
        time.sleep(60)

    ended = end(fn, 3, tmp_path, parallel__heartbeat_seconds=0.1)
    assert [e.code for e in ended] == [1, 1, 1]
    place = f"lost rank {culprit} on {HOST} at step 12, phase backward"
    for one in ended:
        assert f"{place}: no progress for 1 s" in one.text, one.text
        assert "parallel.timeout_seconds" in one.text


@pytest.mark.parametrize(
    ("places", "still", "named"),
    [
        ([(5, "step"), (5, "step"), (5, "step")], [90, 99, 95], 1),  # the first to stand still
        # the one that is a step behind
        ([(6, "forward"), (5, "step"), (6, "forward")], [99, 95, 99], 1),
        # it looks for data again and again
        ([(6, "forward"), (6, "data"), (6, "backward")], [99, 1, 99], 1),
        ([(5, "evaluation"), (5, "step")], [99, 95], 1),
        ([(6, "data"), (6, "data")], [999, 999], None),  # nobody waits in a collective
        ([(5, "callback"), (5, "callback")], [999, 999], None),
        ([(0, "load"), (0, "start")], [999, 999], None),
        ([(6, "forward"), (6, "backward")], [80, 10], None),
    ],
)
def test_the_rank_that_is_behind_is_found_once_a_rank_has_waited_long(places, still, named):
    beats = [Beat(rank, HOST, *place) for rank, place in enumerate(places)]
    assert behind(beats, still, 90) == named


def test_a_failed_rank_ends_even_if_something_holds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("windlass.parallel.ranks.EXIT_SECONDS", 0.3)

    def fn(ranks: Ranks) -> None:
        ranks.fail(RunFailed("over"))
        time.sleep(60)

    assert [e.code for e in end(fn, 2, tmp_path)] == [1, 1]
