import json
import os
import time

import pytest

from helpers import curve, refused
from windlass.ledger import effective, last_start
from windlass.recipe import Recipe
from windlass.run import ALIVE_SECONDS, Run


def line(kind, step, attempt=0, **fields):
    time = "2026-01-01T00:00:00Z"
    return {"kind": kind, "step": step, "attempt": attempt, "time": time, **fields}


def event(name, step, attempt=0):
    return line("event", step, attempt, event=name)


def trained(steps, attempt=0, plus=0.0):
    return [line("train", step, attempt, loss=step + plus) for step in steps]


@pytest.fixture
def run(tmp_path):
    (tmp_path / "recipe.toml").write_text(Recipe.load("quickstart").toml())
    return Run.open(tmp_path)


def write(run, *lines, torn=""):
    run.metrics_path.write_text("".join(json.dumps(x) + "\n" for x in lines) + torn)


def test_a_killed_and_resumed_ledger_reads_as_if_nothing_had_happened(run):
    first = [event("started", 0), *trained(range(1, 9))]
    again = [event("resumed", 5, 1), *trained(range(6, 11), 1, plus=0.5)]
    evals = [line("eval", 6, attempt, loss=9.0 - attempt, suite="loss") for attempt in (0, 1)]
    write(run, *first, evals[0], *again, evals[1], torn='{"kind": "train", "step": 11, "lo')
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 6.5, 7.5, 8.5, 9.5, 10.5]
    assert curve(run, "loss") == list(zip(range(1, 11), losses, strict=True))
    assert [x["loss"] for x in run.lines("eval")] == [8.0]
    assert [x["event"] for x in run.events] == ["started", "resumed"]


def test_the_last_start_is_the_newest_attempt_also_where_it_begins_earlier():
    """A WSD run was resumed at step 250 of 300, then extended from before its decay, from step 200."""
    first = event("started", 0) | {"steps": 300, "world": 2}
    resumed = event("resumed", 250, 1) | {"steps": 300}
    extended = event("resumed", 200, 2) | {"steps": 320}
    assert last_start(effective([first, resumed, extended])) == {**extended, "world": 2}
    assert last_start([]) == {}


def test_what_counts_of_a_ledger(run):
    # a line torn in the middle costs only itself
    write(run, line("train", 1), torn='{"kind": "st\n' + json.dumps(line("train", 2)) + "\n")
    assert curve(run, "attempt") == [(1, 0), (2, 0)]
    # steps past the checkpoint are void
    write(run, event("started", 0), *trained(range(1, 9)), event("resumed", 3, 1), *trained([4], 1))
    assert curve(run, "attempt") == [(1, 0), (2, 0), (3, 0), (4, 1)]
    lines = [line("eval", 5, suite=suite) for suite in ("loss", "hellaswag")]
    lines += [line("sample", 5, index=index) for index in (0, 1)]
    assert effective(lines) == effective([*lines, *lines]) == lines


def test_states(run):
    assert run.state == "new"
    write(run, event("started", 0))
    assert run.state == "failed"
    run.heartbeat_path.touch()
    assert run.state == "running"
    os.utime(run.heartbeat_path, (time.time() - 2 * ALIVE_SECONDS,) * 2)
    for ending in ("preempted", "finished", "failed"):
        write(run, event("started", 0), event("checkpoint", 3), event(ending, 3))
        assert run.state == ending
    write(run, event("started", 0), event("preempted", 3), event("resumed", 3, 1))
    assert run.state == "failed"
    (run.path / "recipe.toml").unlink()
    with refused("recipe.toml", "windlass runs"):
        Run.open(run.path)
