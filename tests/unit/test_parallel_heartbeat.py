"""The watching thread, with a store in this process."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from windlass.parallel import heartbeat
from windlass.parallel.heartbeat import Heartbeat


class Ended(BaseException):
    """Instead of the end of the process."""


def watching(store: Any, **more: Any) -> Any:
    """A heartbeat of rank 0 of 2, without its thread."""
    own = {"rank": 0, "host": "here", "step": 7, "phase": "forward", "place": "", "since": 0.0}
    status = SimpleNamespace(
        step=7, since=0.0, fields=lambda: own, failure=lambda text: text, write=lambda failure: None
    )
    made = object.__new__(Heartbeat)
    made.__dict__ |= {"store": store, "status": status, "interval": 0.01, "failure": None}
    made.__dict__ |= {"_seen": {}, "_still": {}, "_count": 0, "_watched": [1]} | more
    return made


def test_a_store_that_fails_before_the_first_beat_ends_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def end(code: int) -> None:
        raise Ended

    def silent(*_: Any) -> None:
        raise RuntimeError("rank 0 is gone")

    store = SimpleNamespace(set=silent, check=silent)
    env = SimpleNamespace(rank=1, world=2, addr="there")
    over = SimpleNamespace(wait=lambda seconds: False, is_set=lambda: False)
    watch = watching(store, env=env, _over=over)
    monkeypatch.setattr(heartbeat.os, "_exit", end)
    with pytest.raises(Ended):
        watch._run()
    assert watch.failure.rank == 0 and "did not answer" in watch.failure.error


def test_rank_0_judges_its_own_progress_too() -> None:
    judged: list[Any] = []
    other = {"rank": 1, "count": 1, "host": "there", "step": 7, "phase": "forward"}
    other |= {"place": "", "since": 0.0}
    store = SimpleNamespace(
        set=lambda *_: None, check=lambda _: False, multi_get=lambda _: [json.dumps(other)]
    )
    watch = watching(store, env=SimpleNamespace(rank=0, world=2, addr="here"))
    watch._judge_progress = judged.extend
    watch._poll(True)
    assert [beat["rank"] for beat in judged] == [0, 1]
