import json
import math

import pytest

from windlass.recipe import Recipe
from windlass.run import Run
from windlass.telemetry.ledger import Ledger
from windlass.telemetry.trackers import exporter, points
from windlass.telemetry.trackers.exporter import DeviceFiles, Exporter

TIME = "2026-01-01T00:00:00.000Z"


def test_names_are_grouped():
    line = {
        "kind": "train", "step": 3, "time": TIME, "attempt": 1, "loss": 0.1, "lr": 1e-3, "grad_norm": "NaN", "tokens_per_s": 5,
        "samples_per_s": 2, "mfu": 0.4, "step_ms": 7.5, "epoch": 0.5, "seconds": {"train": 2.0}, "loss_scale": 65536.0,
    }  # fmt: skip
    found = points.point(line, {"device/util_pct/rank_0": 99.0})
    assert found.step == 3 and found.stream == "train" and found.time == 1767225600.0
    assert math.isnan(found.scalars.pop("train/grad_norm"))
    assert found.scalars == {
        "train/loss": 0.1, "train/lr": 1e-3, "throughput/tokens_per_s": 5, "throughput/samples_per_s": 2, "throughput/mfu": 0.4,
        "time/step_ms": 7.5, "train/epoch": 0.5, "goodput/train_s": 2.0, "train/loss_scale": 65536.0, "run/attempt": 1.0,
        "device/util_pct/rank_0": 99.0,
    }  # fmt: skip


def test_suites_samples_and_the_summary_have_streams_of_their_own():
    base = {"step": 5, "time": TIME, "attempt": 0}
    loss = points.point(base | {"kind": "eval", "suite": "loss", "loss": 1.5, "perplexity": "Infinity"})
    assert loss.scalars == {"eval/loss": 1.5, "eval/perplexity": math.inf} and loss.stream == "eval/loss"
    other = points.point(base | {"kind": "eval", "suite": "hellaswag", "acc_norm": 0.3})
    assert other.scalars == {"eval/hellaswag/acc_norm": 0.3} and other.stream == "eval/hellaswag"
    sample = points.point(base | {"kind": "sample", "index": 1, "prompt": "a", "text": "ab"})
    assert sample.texts == {"samples/1": "ab"} and sample.stream == "sample/1"
    summary = points.point(
        base | {"kind": "summary", "loss": 1, "best": "step-5", "by_rank": {"rank_0": {"util": 2.5}}}
    )
    assert points.scalars_of(summary.summary)["summary/by_rank/rank_0/util"] == 2.5
    assert points.scalars_of(summary.summary)["summary/loss"] == 1.0
    assert points.texts_of(summary.summary)["summary/best"] == "step-5"
    assert points.stream(base | {"kind": "event", "event": "checkpoint"}) is None


def test_seams_are_where_the_ledger_went_back():
    line = {"kind": "train", "step": 1, "attempt": 0}
    resumed = {"kind": "event", "event": "resumed", "step": 4, "attempt": 1}
    rewound = {"kind": "event", "event": "rewound", "step": 2, "attempt": 3}
    assert points.seams([line, line]) == []
    assert points.seams([line, resumed, {**line, "attempt": 1}, rewound]) == [4, 2]


def test_a_run_is_named_by_the_first_line_it_ever_had():
    assert points.run_id({"a": 1, "b": 2}) == points.run_id({"b": 2, "a": 1}) != points.run_id({"a": 1, "b": 3})


# -- the feeder -----------------------------------------------------------------------------------------------------


class FakeTracker:
    """A tracker that keeps what it was sent; it can neither change nor forget a point, as most."""

    hint = "look here"

    def __init__(self):
        self.rows, self.marks, self.opened, self.ended, self.fails = [], {}, 0, [], 0

    def open(self, source):
        self.opened += 1
        return dict(self.marks)

    def write(self, batch, marks):
        if self.fails:
            self.fails -= 1
            raise ConnectionError("500")
        self.rows += [(point.step, point.stream, point.scalars.get("train/loss")) for point in batch]
        self.device = batch[-1].scalars
        self.marks = marks

    def finish(self, source, state, figures, marks):
        self.ended.append((state, sorted(figures)))


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(Recipe().toml())
    return Run(tmp_path / "run")


def write(run, attempt, first, last, event=None, value=1.0):
    ledger = Ledger(run.metrics_path, attempt)
    ledger.write("event", first, event="resumed" if attempt else "started")
    for step in range(first + 1, last + 1):
        ledger.write("train", step, loss=step * value)
    if event:
        ledger.write("event", last, event=event)
    ledger.close()


def test_each_line_once_through_batches_a_resume_and_a_second_time(run, monkeypatch):
    monkeypatch.setattr(exporter, "BATCH", 3)
    tracker = FakeTracker()
    write(run, 0, 0, 8)
    first = Exporter(run, lambda: tracker, live=True, attempt=0)
    assert first.pump() and first.pump()
    assert first.finish() == "look here" and tracker.ended == [("failed", [])]
    write(run, 1, 5, 12, "preempted", value=2.0)
    second = Exporter(run, lambda: tracker, live=True, attempt=1)
    second.pump()
    second.finish()
    assert [step for step, _, _ in tracker.rows] == list(range(1, 13))
    assert [loss for step, _, loss in tracker.rows if step > 8] == [18, 20, 22, 24]
    assert tracker.ended[-1] == ("preempted", [])
    Exporter(run, lambda: tracker, live=False).finish()
    assert len(tracker.rows) == 12


def test_a_replay_sends_the_effective_ledger(run):
    write(run, 0, 0, 8)
    write(run, 1, 5, 10, "finished", value=2.0)
    tracker = FakeTracker()
    Exporter(run, lambda: tracker, live=False).finish()
    assert [loss for _, _, loss in tracker.rows] == [1, 2, 3, 4, 5, 12, 14, 16, 18, 20]
    assert tracker.ended == [("finished", ["loss"])]


def test_lines_wait_for_the_attempt_that_makes_earlier_ones_void(run):
    write(run, 0, 0, 8)
    tracker = FakeTracker()
    live = Exporter(run, lambda: tracker, live=True, attempt=1)
    assert not live.pump() and tracker.opened == 0
    write(run, 1, 5, 6, value=2.0)
    assert live.pump()
    assert [loss for _, _, loss in tracker.rows] == [1, 2, 3, 4, 5, 12]


def test_a_start_that_never_wrote_still_sends_what_there_is_at_its_end(run):
    write(run, 0, 0, 2)
    tracker = FakeTracker()
    live = Exporter(run, lambda: tracker, live=True, attempt=1)
    live.pump()
    live.finish()
    assert [step for step, _, _ in tracker.rows] == [1, 2]


def test_a_rewind_within_a_process_connects_anew(run):
    tracker = FakeTracker()
    live = Exporter(run, lambda: tracker, live=True, attempt=0)
    write(run, 0, 0, 4)
    live.pump()
    write(run, 1, 2, 6)
    live.pump()
    assert tracker.opened == 2 and tracker.ended == [("running", [])]
    assert [step for step, _, _ in tracker.rows] == [1, 2, 3, 4, 5, 6]


def test_after_a_trouble_it_goes_on_from_what_the_tracker_has(run, monkeypatch):
    monkeypatch.setattr(exporter, "BATCH", 3)
    tracker = FakeTracker()
    write(run, 0, 0, 5)
    live = Exporter(run, lambda: tracker, live=True, attempt=0)
    live.pump()
    tracker.fails = 1
    write(run, 0, 5, 9)
    with pytest.raises(ConnectionError):
        live.pump()
    live.again()
    live.pump()
    assert [step for step, _, _ in tracker.rows] == list(range(1, 10))


def test_an_empty_run_is_nothing_to_do(run):
    tracker = FakeTracker()
    assert Exporter(run, lambda: tracker, live=False).finish() == "" and tracker.opened == 0


def stamp(second):
    return f"2026-01-01T00:{second // 60:02d}:{second % 60:02d}.000Z"


def sampled(run, rank, seconds):
    run.devices_dir.mkdir(exist_ok=True)
    with open(run.devices_dir / f"rank-{rank:05d}.jsonl", "a") as file:
        file.write(json.dumps({"time": stamp(seconds[0]), "rank": rank, "kind": "start", "cores": 2}) + "\n")
        for second in seconds:
            sample = {"time": stamp(second), "rank": rank, "attempt": 0, "phase": "train", "util_pct": float(second)}
            file.write(json.dumps(sample) + "\n")


def test_samples_are_joined_by_time_each_once(run):
    sampled(run, 0, range(10))
    sampled(run, 1, range(100, 110))
    files = DeviceFiles(run.devices_dir)
    assert points.device_means(files.until(stamp(3))) == {"device/util_pct/rank_0": 1.5}
    assert points.device_means(files.until(stamp(3))) == {}
    late = points.device_means(files.until(stamp(104)))
    assert late == {"device/util_pct/rank_0": 6.5, "device/util_pct/rank_1": 102.0}


def test_seeking_in_a_long_file_finds_the_first_sample_after_a_time(run):
    sampled(run, 0, range(1200))
    for second in (-1, 0, 1, 599, 600, 1198, 1199):
        files = DeviceFiles(run.devices_dir)
        files.seek(stamp(second) if second >= 0 else "")
        found = [sample["util_pct"] for sample in files.until(stamp(1300))]
        assert found == [float(x) for x in range(second + 1, 1200)]
