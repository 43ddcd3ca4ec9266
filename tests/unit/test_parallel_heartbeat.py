"""The watching thread, with a store in this process."""

import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.parallel import heartbeat
from windlass.parallel.env import DistEnv
from windlass.parallel.heartbeat import Beat, Heartbeat
from windlass.processes import RankStatus


class Ended(BaseException):
    """Instead of the end of the process."""


def watching(rank: int, **calls: Any) -> Heartbeat:
    """The heartbeat of a rank of 2, without its thread; after its first beat the store has `calls`."""
    store: Any = SimpleNamespace(set=lambda *_: None, check=lambda _: False)
    store.clone = lambda: store
    watch = Heartbeat(RankStatus(rank), DistEnv(rank, 2, addr="there"), store, 0.01)
    vars(store).update(calls)
    return watch


def test_a_store_that_fails_before_the_first_beat_ends_the_rank(monkeypatch) -> None:
    def end(code: int) -> None:
        raise Ended

    def silent(*_: Any) -> None:
        raise RuntimeError("rank 0 is gone")

    watch = watching(1, set=silent, check=silent)
    monkeypatch.setattr(heartbeat.os, "_exit", end)
    monkeypatch.setattr(heartbeat, "EXIT_SECONDS", 0.0)
    with pytest.raises(Ended):
        watch._run()
    assert watch.failure is not None
    assert watch.failure.rank == 0 and "did not answer" in watch.failure.error


def test_rank_0_judges_its_own_progress_too() -> None:
    judged: list[Any] = []
    other = json.dumps(asdict(Beat(1, "there", 7, "forward")))
    watch = watching(0, multi_get=lambda _: [other])
    watch._judge_progress = judged.extend  # type: ignore[method-assign]
    watch._poll(True)
    assert [beat.rank for beat in judged] == [0, 1]
