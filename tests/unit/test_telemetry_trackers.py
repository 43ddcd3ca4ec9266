"""From the ledger to a tracker: names, each step once, W&B online, and the verb `track`."""

import json
import os
import sys
import types
from pathlib import Path

import pytest

from helpers import refused, windlass, write_ledger
from windlass.fileio import locked
from windlass.ledger import Ledger
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.telemetry.backends import WandB
from windlass.telemetry.exporter import Follower, point
from windlass.telemetry.trackers import track

TIME = "2026-01-01T00:00:00.000Z"
KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def run(tmp_path):
    run = Run(tmp_path / "run")
    run.path.mkdir()
    run.recipe_path.write_text(Recipe().toml())
    return run


def write(run, attempt, first, last, event=None):
    ledger = Ledger(run.metrics_path, attempt)
    ledger.write("event", first, event="resumed" if attempt else "started")
    for step in range(first + 1, last + 1):
        ledger.write("train", step, loss=float(step))
        if step == 7 and attempt:
            ledger.write("eval", step, suite="loss", loss=2.0)
    if event:
        ledger.write("event", last, event=event)
    ledger.close()


@pytest.mark.parametrize(
    ("stream", "scalars", "line"),
    [
        (
            "train",
            {"train/loss": 0.1, "throughput/tokens_per_s": 5, "time/step_ms": 7.5},
            {"loss": 0.1, "tokens_per_s": 5, "step_ms": 7.5, "seconds": {"a": 2.0}},
        ),
        ("train", {"train/source/web/loss": 2.0}, {"source.web.loss": 2.0}),
        (
            "eval/loss",
            {"eval/loss": 1.5, "eval/samples_per_s": 3.0},
            {"suite": "loss", "loss": 1.5, "samples": 9, "samples_per_s": 3.0},
        ),
        ("eval/squad", {"eval/squad/f1": 0.3}, {"suite": "squad", "f1": 0.3}),
        ("log", {"log/tokens": 9.0, "log/epoch": 8.0}, {"log.tokens": 9.0, "log.epoch": 8.0}),
    ],
)
def test_names_are_grouped_and_kinds_have_streams_of_their_own(stream, scalars, line):
    shown = point({"kind": stream.partition("/")[0], "step": 5, "time": TIME} | line)
    assert (shown.step, shown.time, shown.stream) == (5, 1767225600.0, stream)
    assert shown.scalars == scalars


class FakeTracker:
    """A tracker that stores what it was sent; it can neither change nor forget a point, as most."""

    hint = "look here"

    def __init__(self):
        self.points, self.stored, self.ids, self.ended, self.fails = [], {}, [], [], 0
        self.settings = []

    def connect(self, run, id, settings, started):
        self.ids.append(id)
        self.settings.append(settings)
        self.marks = self.stored
        return self

    def write(self, points):
        for number, sent in enumerate(points):
            if self.fails and number == 2:
                self.fails -= 1
                raise ConnectionError("500")
            self.points.append(sent)
            self.stored[sent.stream] = sent.step

    def close(self, state, ended):
        self.ended.append(state)

    @property
    def steps(self):
        return [sent.step for sent in self.points if "train/loss" in sent.scalars]


def test_where_the_run_goes_back_the_tracker_is_opened_again(run):
    tracker = FakeTracker()
    live = Follower(run, tracker.connect)
    live.flush()
    write(run, 0, 0, 4)
    live.flush()
    write(run, 1, 2, 6)
    live.flush()
    first, again = tracker.ids
    assert first == again, "one run in the tracker for all attempts"
    assert tracker.steps == [1, 2, 3, 4, 5, 6]
    live.flush(last=True)
    assert tracker.ended == ["running", "failed"], "no ending was written, and nobody trains"


def test_after_a_failure_it_resumes_from_what_the_tracker_has(run):
    tracker = FakeTracker()
    live = Follower(run, tracker.connect)
    write(run, 0, 0, 5)
    live.flush()
    with open(run.metrics_path, "a") as ledger:
        ledger.write('{"kind": "tra')  # is being written
    live.flush()
    tracker.fails = 1
    write(run, 0, 5, 9)  # after a kill: the line stays torn
    with pytest.raises(ConnectionError):
        live.flush()
    live.backend = None
    live.flush()
    assert tracker.steps == list(range(1, 10))


class Server:
    """What the service remembers of one run, as the library's `init` and its run."""

    url, settings = "https://example.org/run", types.SimpleNamespace(_offline=False)

    def __init__(self):
        self.rows, self.summary, self.starts, self.ended = [], {}, [], []

    def init(self, **arguments):
        self.starts.append(arguments)
        self.resumed, self.step = bool(self.rows), len(self.rows) and self.rows[-1][0] + 1
        return self

    def define_metric(self, *_, **__):
        pass

    def log(self, row, step=None):
        assert step is None or step >= self.step, "the service drops rows that go back"
        self.step = self.step if step is None else step
        self.rows.append((self.step, row))
        self.summary |= {key: value for key, value in row.items() if key != "_timestamp"}

    def finish(self, exit_code):
        self.ended.append(exit_code)


@pytest.fixture
def server(monkeypatch):
    server, module = Server(), types.ModuleType("wandb")
    module.init, module.teardown, module.Settings = server.init, lambda: None, dict
    users = types.SimpleNamespace(mode="online", project="of-the-user", run_name=None)
    module.setup = lambda: types.SimpleNamespace(settings=users)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return server


def test_wandb_resumes_the_same_run_from_what_the_server_has(server, run):
    write(run, 0, 0, 8)
    Follower(run, WandB).flush(last=True)
    write(run, 1, 5, 10, "finished")
    Follower(run, WandB).flush(last=True)
    Follower(run, WandB).flush(last=True)
    first, second, _ = server.starts
    assert first["id"] == second["id"]
    assert (second["resume"], second["mode"]) == ("allow", "online")
    assert KEY not in str(server.starts)
    train = [(row["step"], row["train/loss"]) for _, row in server.rows if "train/loss" in row]
    assert train == [(step, step) for step in range(1, 11)]
    # the evaluation of step 7, which the kill had left undone, comes after step 8 and is not lost
    assert [row["step"] for _, row in server.rows if "eval/loss" in row] == [7]
    assert server.ended == [1, 0, 0] and server.summary["state"] == "finished"


@pytest.mark.parametrize(("written", "sent"), [("windlass", None), ("mine", "mine")])
def test_a_project_that_the_recipe_changes_wins_over_the_users(server, run, written, sent):
    """W&B itself puts the user's project for None."""
    run.recipe_path.write_text(Recipe.load("quickstart", [f"telemetry.project={written}"]).toml())
    write(run, 0, 0, 1)
    Follower(run, WandB).flush()
    assert server.starts[0]["project"] == sent


def test_what_is_wrong_with_a_replay_is_reported(run, monkeypatch):
    with refused("ledger"):
        track(run, "wandb")
    with refused("tensorboard, mlflow, wandb"):
        track(run, "neptune")
    monkeypatch.setattr("windlass.errors.installed", lambda package: False)
    with refused("pip install mlflow"):
        track(run, "mlflow")


def test_a_replay_does_not_wait_for_the_exporter_of_a_live_run(run):
    write(run, 0, 0, 1)
    (run.path / "trackers").mkdir()
    held = locked(run.lock_path), locked(run.path / "trackers" / "tensorboard.lock")
    with held[0], held[1], refused("sends it to tensorboard", "wait for the end"):
        track(run, "tensorboard")


def test_track_fails_where_the_tracker_does_not_take_it(run, tmp_path, monkeypatch):
    write(run, 0, 0, 1)
    (tmp_path / "mlflow").mkdir()
    (tmp_path / "mlflow" / "__init__.py").write_text("raise RuntimeError('broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    done = windlass("track", run.path, "--to", "mlflow", code=1)
    assert "trackers/mlflow.log" in done.stderr and "broken" in done.stderr
    assert "windlass track" not in done.stderr, "that is what failed"


def test_a_studys_runs_are_sent_too(tmp_path, monkeypatch):
    from windlass.cli.runs import track
    from windlass.study.study import Study

    sent = list[str]()
    replay = "windlass.telemetry.trackers.track"
    monkeypatch.setattr(replay, lambda run, *_: sent.append(Path(run).name) or [])
    study = Study.create(Recipe.load("quickstart"), ["run.seed=1,2,3"], tmp_path / "study")
    for cell in study.cells[1:]:
        write(study.run_of(cell), 0, 0, 1)
    names = [Path(cell.directory).name for cell in study.cells]
    track(str(study.path), "wandb")
    assert sent == names[1:]


def at(second):
    return {"time": f"2026-01-01T00:00:{second:04.1f}00Z"}


def test_each_rank_s_memory_and_utilisation_come_with_the_train_lines(run):
    """Allocated memory of rank r in second s: 100 r + s; utilisation 90 + r, and 5 in the
    evaluation of the third second. Of many ranks the first 8 count."""
    tracker = FakeTracker()
    live = Follower(run, tracker.connect)
    write_ledger(
        run, {"kind": "event", "event": "started"} | at(0), {"kind": "train", "step": 1} | at(1.5)
    )
    live.flush()
    run.devices_dir.mkdir()
    for rank in range(9):
        samples = []
        for s in range(1, 7):
            use = ("eval", 5.0) if s == 3 else ("train", 90.0 + rank)
            samples.append(at(s) | {"phase": use[0], "util_pct": use[1], "attempt": 0})
            samples[-1] |= {"mem_alloc_mb": 100.0 * rank + s, "mem_reserved_mb": 500.0}
        later = at(6) | {"phase": "train", "mem_alloc_mb": 9e9, "attempt": 1}  # of a later start
        text = "\n".join(map(json.dumps, [*samples, later]))
        (run.devices_dir / f"rank-{rank:05d}.jsonl").write_text(f'{{"torn\n{text}\n{{"is being wr')
    for second in (2, 3, 4, 9):
        write_ledger(run, {"kind": "train", "step": second} | at(second + 0.5))
    live.flush()
    sent = [point.scalars for point in tracker.points]
    assert [scalars.pop("run/attempt") for scalars in sent] == [0.0] * 5
    early, second, third, fourth, last = sent
    assert early == {}, "the files are not there yet"
    names = ("util_pct", "mem_alloc_mb", "mem_reserved_mb")
    assert second == {
        f"device/rank{rank}/{name}": value
        for rank in range(8)
        for name, value in zip(names, (90.0 + rank, 100.0 * rank + 1.5, 500.0), strict=True)
    }
    assert third["device/rank0/mem_alloc_mb"] == 3.0 and "device/rank0/util_pct" not in third
    assert fourth["device/rank0/mem_alloc_mb"] == 4.0, "each sample counts once"
    assert last["device/rank1/mem_alloc_mb"] == 105.5, "without the sample of the later start"


def test_a_tracker_is_opened_when_the_parameters_are_known(run):
    """A warning of the start-up comes before the event that has them."""
    tracker = FakeTracker()
    live = Follower(run, tracker.connect)
    ledger = Ledger(run.metrics_path, 0)
    ledger.write("event", 0, event="warning", reason="the clock is slow")
    live.flush()
    assert not tracker.settings
    facts = {"world": 2, "parameters": 28_952_064, "device": "NVIDIA A100", "precision": "bf16"}
    facts |= {"steps": 4400, "strategy": "ddp"}
    ledger.write("event", 0, event="started", **facts)
    ledger.close()
    live.flush()
    (settings,) = tracker.settings
    assert facts.items() <= settings.items()
    assert settings["optim.lr"] == 1e-3 and "trained" not in settings
