"""Time of a step by phase, wall time of a run, throughput, device hours, MFU: against numbers by
hand.
"""

import gzip
import json
import time
from typing import Any

import pytest

from helpers import each_step, refused, tiny_recipe
from windlass import train
from windlass.study.numbers import RunNumbers
from windlass.telemetry.summary import (
    Scores,
    averages,
    device_hours,
    evaluation_speed,
    mfu,
    scores_by_step,
    throughput,
    wall_time,
)
from windlass.telemetry.timing import Goodput, StepTimer

NAN, INF = float("nan"), float("inf")


class FakeDevice:
    """A device with its own time line: work is queued at once and done later, as on a GPU."""

    queued_ms, done_ms, waits = 0.0, 0.0, 0

    def step(self, timer, forward, backward, micro=1):
        passes = [("forward", forward), ("backward", backward)]
        for phase, ms in [*passes * micro, ("optimizer", 1)]:
            with timer.phase(phase):
                self.queued_ms += ms


class FakeEvent:
    def __init__(self, device):
        self.device = device

    def record(self):
        self.at = self.device.queued_ms

    def synchronize(self):
        self.device.waits += 1
        self.device.done_ms = max(self.device.done_ms, self.at)

    def query(self):
        return self.at <= self.device.done_ms

    def elapsed_time(self, other):
        assert max(self.at, other.at) <= self.device.done_ms, "the device has not reached it"
        return other.at - self.at


def test_phases_of_the_devices_own_time_a_step_each():
    device = FakeDevice()
    timer = StepTimer("cuda", new_event=lambda: FakeEvent(device))
    for _ in range(4):
        device.step(timer, 3, 5, micro=2)
        device.queued_ms += 2  # between the phases
    assert timer.read() == {"step_ms": 19, "forward_ms": 6, "backward_ms": 10, "optimizer_ms": 1}
    device.step(timer, 30, 50)
    assert timer.read() == {"step_ms": 81, "forward_ms": 30, "backward_ms": 50, "optimizer_ms": 1}
    assert timer.read() == {}
    device.waits = 0
    for _ in range(300):
        device.step(timer, 1, 1)
    with timer.phase("outside"):  # an evaluation
        device.queued_ms += 1000
    assert device.waits == 0, "nothing waits for the device between two logs"
    assert timer.read()["step_ms"] == 3 and device.waits == 1


def test_waiting_for_data_is_host_time_and_counts_in_the_goodput(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "perf_counter_ns", lambda: int(now[0] * 1e9))
    goodput = Goodput(time.time())
    goodput.enter("train")
    timer = StepTimer("cpu", goodput)
    with timer.phase("data"):
        now[0] += 0.25
    with timer.phase("optimizer"):
        now[0] += 1
    assert timer.read() == {"step_ms": 1250, "data_ms": 250, "optimizer_ms": 1000}
    assert goodput.seconds().items() >= {"data": 0.25, "train": 1.0}.items()


def test_the_parts_of_the_goodput_sum_to_the_whole():
    begin, goodput = time.perf_counter(), Goodput(time.time() - 60)
    (before,) = goodput.seconds().values()
    assert before == pytest.approx(60, abs=0.5)
    goodput.enter("train")
    for _ in range(50):
        with goodput.phase("data"):
            pass
    with goodput.phase("eval"), goodput.phase("save"):
        pass
    with pytest.raises(ValueError), goodput.phase("sample"):
        raise ValueError
    seconds = goodput.seconds()
    assert sum(seconds.values()) == pytest.approx(time.perf_counter() - begin + before, abs=0.01)
    assert seconds["startup"] >= before
    assert set(seconds) <= {"startup", "train", "data", "eval", "save", "sample"}


def line(attempt, step, event=None, world=None, **seconds):
    fields = {"step": step, "attempt": attempt, "seconds": seconds}
    fields |= {"kind": "event", "event": event} if event else {"kind": "train"}
    return fields | ({"world": world} if world else {})


KILLED = [
    line(0, 0, "started", world=2, startup=4.0),
    line(0, 10, startup=4.0, train=5.0),
    line(0, 10, "checkpoint", startup=4.0, train=5.5, save=1.0),
    line(0, 20, startup=4.0, train=10.5, save=1.0),
    line(1, 10, "resumed", world=4, startup=3.0),
    line(1, 30, startup=3.0, train=10.0),
]


def test_a_resumed_run_by_hand():
    """Device hours count each start with its own ranks."""
    parts = {"startup": 7.0, "train": 15.5, "save": 1.0, "lost": 5.0}
    wall = wall_time(KILLED)
    assert {name: seconds for name, seconds in wall.items() if seconds} == parts | {"total": 28.5}
    assert device_hours(KILLED) == pytest.approx((15.5 * 2 + 13.0 * 4) / 3600)


def train_line(step, step_ms, tokens, attempt=0, **more):
    """A `train` line of a window in which a step took `step_ms` and had so many tokens."""
    rates = {"tokens_per_s": tokens / step_ms * 1e3, "samples_per_s": 4 / step_ms * 1e3}
    return {"kind": "train", "step": step, "attempt": attempt, "step_ms": step_ms} | rates | more


def test_throughput_is_work_divided_by_time():
    """Short samples make fast steps of few tokens: the mean of the rates would be 76 % too high on
    such a run.
    """
    ledger = [
        {"kind": "event", "event": "started", "step": 0},
        train_line(1, 9000, 10),  # caches, compilation
        train_line(11, 100, 4000),  # ten steps of 40,000 tokens/s
        train_line(21, 1000, 5000),  # ten steps of 5,000 tokens/s
        train_line(25, 500, 1000),  # the last four steps
    ]
    speed = throughput(ledger)
    tokens, seconds = 10 * 4000 + 10 * 5000 + 4 * 1000, 10 * 0.1 + 10 * 1.0 + 4 * 0.5
    assert speed.tokens_per_s == pytest.approx(tokens / seconds)
    assert speed.steps_per_s == pytest.approx(24 / seconds)
    assert speed.samples_per_s == pytest.approx(4 * 24 / seconds)
    assert speed.mfu is None
    assert throughput(ledger[:2]).tokens_per_s == pytest.approx(10 / 9), "better than nothing"
    assert throughput([]) is None


def test_throughput_after_a_resume_counts_each_step_that_was_made():
    """The first line after a resume from step 15 is of five steps, not of ten, and is left out: it
    waits for caches too.
    """
    ledger = [
        {"kind": "event", "event": "started", "step": 0},
        train_line(1, 1000, 100, mfu=0.1),
        train_line(10, 100, 100, mfu=0.4),
        {"kind": "event", "event": "resumed", "step": 15, "attempt": 1},
        train_line(20, 900, 100, attempt=1, mfu=0.05),
        train_line(30, 200, 100, attempt=1, mfu=0.2),
    ]
    speed = throughput(ledger)
    seconds = 9 * 0.1 + 10 * 0.2
    assert speed.steps_per_s == pytest.approx(19 / seconds)
    assert speed.tokens_per_s == pytest.approx(1900 / seconds)
    assert speed.mfu == pytest.approx((0.4 * 0.9 + 0.2 * 2.0) / seconds)


def read(lines):
    """The numbers of a report."""
    return RunNumbers(lines, lines).values()


def test_the_speed_of_evaluations():
    first, place = train_line(1, 9000, 10), {"kind": "eval", "suite": "loss", "loss": 2.0}
    ledger = [
        first,
        place | {"step": 5, "samples": 8, "samples_per_s": 4.0, "runtime_s": 2.0},
        # of several passes: training data, averaged weights
        place | {"step": 13, "samples": 8, "samples_per_s": 8.0, "runtime_s": 6.0},
        place | {"suite": "squad", "step": 13, "items": 3, "runtime_s": 100.0},
    ]
    assert averages(ledger)["eval_samples_per_s"] == evaluation_speed(ledger) == 56 / 8
    assert averages([]) == {} and evaluation_speed([first]) is None
    event = {"kind": "event", "event": "first_step"}
    starts = [event | {"step": 1, "startup_s": 9.0}, event | {"step": 8, "startup_s": 4.0}]
    assert averages(starts) == {"startup_s": 4.0} == {"startup_s": read(starts)["startup_s"]}


def test_mfu_by_the_numbers_of_a_known_run():
    # 124M at context 1,024: 855 MFLOP a token; 150,000 tokens/s on an A100
    for devices in (1, 8):
        reached = mfu(devices * 150_000, 855e6, 312e12, devices)
        assert reached == pytest.approx(0.411, abs=1e-3)
    assert mfu(150_000, 855e6, None, 1) is None


def test_scores_are_the_finite_values_in_the_ledger() -> None:
    lines = [
        {"kind": "eval", "step": 0, "suite": "loss", "loss": 2.0},  # without a checkpoint
        {"kind": "eval", "step": 1, "suite": "loss", "loss": 3.0},
        {"kind": "eval", "step": 2, "loss": NAN},
        {"kind": "eval", "step": 1, "suite": "squad", "f1": 10.0, "loss": 9.0},
        {"kind": "train", "step": 3, "loss": 1.0},
    ]
    wanted = {"loss": {1: 3.0}, "squad.f1": {1: 10.0}, "hellaswag.acc": {}}
    assert {measure: scores_by_step(lines, measure) for measure in wanted} == wanted


def test_the_best_is_the_first_of_equal_values() -> None:
    assert (Scores().best_step, Scores().best) == (None, None)
    first = Scores({2: 1.0, 1: 1.0, 0: NAN})
    assert (first.best_step, first.best) == (1, 1.0)
    highest = Scores({1: 3.0, 2: 2.0, 3: INF}, lower=False)
    assert (highest.best_step, highest.best) == (1, 3.0)
    assert Scores({1: 3.0, 2: 2.0, 3: -INF}).best_step == 2


def test_a_suite_of_ones_own_says_whether_less_is_better() -> None:
    lines: list[dict[str, Any]] = [
        {"kind": "eval", "step": 1, "suite": "own:x", "error": 0.1, "right": 0.1},
        {"kind": "eval", "step": 2, "suite": "own:x", "error": 0.2, "right": 0.2},
    ]
    assert scores_by_step(lines, "own:x.error").best_step == 2, "more is better by default"
    lines = [line | {"lower": ["error"]} for line in lines]
    assert scores_by_step(lines, "own:x.error").best_step == 1
    assert scores_by_step(lines, "own:x.right").best_step == 2
    numbers = RunNumbers(lines, lines, "own:x.error")
    assert (numbers.score, numbers.scores.lower) == (0.1, True), "a study has the same best score"


def test_scores_of_other_items_are_left_out() -> None:
    lines = [
        {"kind": "eval", "step": step, "loss": loss, "samples": samples}
        for step, loss, samples in ((1, 1.0, 8), (2, 3.0, 16), (3, 2.0, 16), (4, 2.5, 16))
    ]
    scores = scores_by_step(lines, "loss")
    assert (scores.best_step, scores.best) == (3, 2.0)
    numbers = RunNumbers(lines, lines)
    assert numbers.score == numbers.best_loss == 2.0


def test_a_profile_is_in_the_run_and_its_ledger(corpus, tmp_path):
    settings = {"train__steps": 6, "telemetry__profile": "3:2", "telemetry__every": 2}
    run = train(tiny_recipe(corpus, tmp_path / "run", **settings))
    [event] = [e for e in run.events if e["event"] == "profile"]
    trace, table = (run.path / name for name in event["files"])
    assert event["step"] == 4 and trace.name == "steps-3-4.json.gz"
    with gzip.open(trace) as file:
        names = [e.get("name") for e in json.load(file)["traceEvents"]]
    per_step = names.count("aten::embedding")
    assert per_step and per_step % 2 == 0, "two steps"
    assert "aten::addmm" in table.read_text() or "aten::mm" in table.read_text()
    # the end of the run ends a profile
    late = train(tiny_recipe(corpus, tmp_path / "late", train__steps=3, telemetry__profile="3:9"))
    assert (late.path / "profile" / "steps-3-3.txt").is_file()


def test_a_profile_that_cannot_be_written_does_not_end_the_run(corpus, tmp_path):
    block = each_step(lambda now: (tmp_path / "run" / "profile").touch())
    recipe = tiny_recipe(corpus, tmp_path / "run", train__steps=3, telemetry__profile="2:1")
    run = train(recipe, callbacks=[block])
    assert run.state == "finished" and "was not written" in run.log_path.read_text()


def test_a_wrong_profile_is_refused(corpus, tmp_path):
    with refused("telemetry.profile", "100:3"):
        tiny_recipe(corpus, tmp_path / "run", telemetry__profile="0:5")
