"""The online way of W&B, against a library that stands in for it: there is no server to test against."""

import sys
import types

import pytest

from windlass.recipe import Recipe
from windlass.run import Run
from windlass.telemetry.ledger import Ledger
from windlass.telemetry.trackers import wandb as to_wandb
from windlass.telemetry.trackers.exporter import Exporter
from windlass.telemetry.trackers.wandb import WandB

KEY = "0123456789abcdef0123456789abcdef01234567"


class Server:
    """What the service remembers of one run."""

    def __init__(self):
        self.rows, self.summary, self.starts, self.ended = [], {}, [], []
        self.refuses = False


class FakeRun:
    def __init__(self, server, arguments):
        self.server, self.summary, self.url = server, server.summary, "https://example.org/run"
        self.resumed, self.step = bool(server.rows), len(server.rows) and server.rows[-1][0] + 1
        self.settings = types.SimpleNamespace(_offline=arguments["mode"] == "offline", sync_dir="wandb/offline-run-1")

    def define_metric(self, *_, **__):
        pass

    def log(self, row, step=None):
        assert step is None or step >= self.step, "the service drops rows that go back"
        self.step = self.step if step is None else step
        self.server.rows.append((self.step, row))
        self.server.summary.update({key: value for key, value in row.items() if key != "_timestamp"})

    def finish(self, exit_code):
        self.server.ended.append(exit_code)


@pytest.fixture
def server(monkeypatch):
    found = Server()
    module = types.ModuleType("wandb")

    def init(**arguments):
        found.starts.append(arguments)
        if found.refuses and arguments["mode"] == "online":
            raise ConnectionError("permission denied")
        return FakeRun(found, arguments)

    module.init, module.teardown = init, lambda: None
    module.Settings = lambda **settings: settings
    module.Html = lambda text, inject: ("html", text)
    module.Image = lambda path: ("image", path)
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(
        to_wandb.socket, "create_connection", lambda *_, **__: types.SimpleNamespace(close=lambda: None)
    )
    return found


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text(Recipe().toml())
    return Run(tmp_path / "run")


def write(run, attempt, first, last, event=None):
    ledger = Ledger(run.metrics_path, attempt)
    ledger.write("event", first, event="resumed" if attempt else "started")
    for step in range(first + 1, last + 1):
        ledger.write("train", step, loss=1 / step)
        if step == 7 and attempt:
            ledger.write("eval", step, suite="loss", loss=2.0)
    if event:
        ledger.write("event", last, event=event)
    ledger.close()


def test_a_resume_goes_on_in_the_same_run_from_what_the_server_has(server, run):
    write(run, 0, 0, 8)
    Exporter(run, WandB, live=True, attempt=0).finish()
    write(run, 1, 5, 10, "finished")
    Exporter(run, WandB, live=True, attempt=1).finish()
    first, second = server.starts
    assert first["id"] == second["id"] and second["resume"] == "allow" and second["mode"] == "online"
    assert KEY not in str(server.starts)
    train = [(row["step"], row["train/loss"]) for _, row in server.rows if "train/loss" in row]
    assert train == [(step, 1 / step) for step in range(1, 11)]
    # the evaluation of step 7, which the kill had left undone, comes after step 8 and is not lost
    assert [row["step"] for _, row in server.rows if "eval/loss" in row] == [7]
    assert server.ended == [1, 0] and server.summary["state"] == "finished"
    figures = [row for _, row in server.rows if any(key.startswith("figures/") for key in row)]
    assert len(figures) == 1


def test_a_replay_sends_nothing_again(server, run):
    write(run, 0, 0, 8, "finished")
    for _ in range(2):
        Exporter(run, WandB, live=False).finish()
    assert len([row for _, row in server.rows if "train/loss" in row]) == 8
    assert len([row for _, row in server.rows if "figures/loss" in row]) == 1


def test_where_the_server_does_not_let_us_in_it_goes_offline_and_says_why(server, run):
    server.refuses = True
    write(run, 0, 0, 3)
    feeder = Exporter(run, WandB, live=True, attempt=0)
    feeder.pump()
    assert [start["mode"] for start in server.starts] == ["online", "offline"]
    assert feeder.hint.startswith("wandb sync ") and "permission denied" in feeder.hint


def test_a_user_who_wants_no_wandb_gets_none(server, run, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    write(run, 0, 0, 3)
    with pytest.raises(RuntimeError, match="WANDB_MODE=disabled"):
        Exporter(run, WandB, live=True, attempt=0).pump()
    assert not server.starts
