"""A signal in every phase: all ranks stop with what there is to save, with exit code 75, the message and the ledger saying so."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from test_resume import corpus, curve, settings

from windlass.checkpoint.commit import RESERVE_BYTES
from windlass.checkpoint.save import Saver
from windlass.errors import RunFailed, Stopped
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.training import train
from windlass.training.guard import Signals
from windlass.training.session import Session

__all__ = ["corpus"]

STRUCK = Path(__file__).parent.parent / "faults" / "struck.py"
SLOW = {
    "data.val_fraction": 0.4, "eval.every": 4, "eval.sample_every": 4, "eval.sample_tokens": 60, "eval.sample_count": 1,
    "checkpoint.every": 3, "model.context": 8,
}  # fmt: skip


def signalled(
    folder: Path, overrides: list[str], phase: str, world: int = 1, number: int = signal.SIGTERM,
    alone: int | None = None, slow: int = -1,
) -> str:  # fmt: skip
    """What a training says that is signalled while it is in `phase`, where it would stay long; it must exit with 75.

    `alone`: this rank gets the signal, and no other; `slow`: the rank that stays in the phase, -1 for all.
    """
    rank = [sys.executable, str(STRUCK), "wait", phase, str(slow), "train", "quickstart", *overrides]
    through = f"import sys; from windlass.launch.local import launch; sys.exit(launch(sys.argv[1:], {world}))"
    here = folder / "here"
    process = subprocess.Popen(
        rank if world == 1 else [sys.executable, "-c", through, *rank],
        env={**os.environ, "STRUCK_HERE": str(here)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    deadline = time.monotonic() + 90
    while not here.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    if alone is None:
        process.send_signal(number)
    else:
        ranks = psutil.Process(process.pid).children()
        next(p for p in ranks if p.environ().get("RANK") == str(alone)).send_signal(number)
    said, _ = process.communicate(timeout=90)
    assert process.returncode == 75, said
    assert "Traceback" not in said and "the same command goes on from there" in said
    return said


@pytest.mark.dist
@pytest.mark.parametrize(
    ("phase", "world"),
    [("start", 1), ("evaluation", 2), ("data@4", 1)]
    + [pytest.param("evaluation", 1, marks=pytest.mark.full), pytest.param("start", 2, marks=pytest.mark.full)]
    + [pytest.param("sample@2", world, marks=pytest.mark.full) for world in (1, 2)]
    + [pytest.param("forward@5", 2, marks=pytest.mark.full), pytest.param("data@4", 2, marks=pytest.mark.full)],
)
def test_in_every_phase(corpus, tmp_path, phase, world):
    overrides = settings(corpus, tmp_path / "run", **SLOW)
    overrides = [*overrides, f"data.dir='{tmp_path / 'data'}'"]
    said = signalled(tmp_path, overrides, phase, world)
    run = Run(tmp_path / "run")
    if phase == "start":
        assert "stopped by SIGTERM before step 1 of this start;" in said
        return
    assert run.state == "preempted"
    assert next(e for e in run.events if e["event"] == "preempted")["saved"]
    last = max((x["step"] for x in run.lines("train")), default=0)
    if phase == "evaluation":  # that of step 0 was cut short: no line, no step, and nothing to save
        assert "stopped by SIGTERM before step 1;" in said
        assert last == 0 and not run.lines("eval") and not list(run.checkpoints_dir.glob("step-*"))
    else:
        assert f"stopped by SIGTERM after step {last}, all saved" in said
        assert (run.checkpoints_dir / f"step-{last:08d}" / "manifest.sha256").exists()
    if phase.startswith("sample"):  # it is cut, and made up by the next start
        assert last == 4 and not run.lines("sample")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("phase", "world", "alone", "slow"),
    [("read@3", 2, 1, 0)]
    + [
        pytest.param(*case, marks=pytest.mark.full)
        for case in [
            ("choose", 1, None, -1), ("choose", 2, None, -1), ("choose", 2, 1, 0), ("choose", 2, 0, 0),
            ("read@3", 1, None, -1), ("read@3", 2, None, -1), ("read@3", 2, 1, 1), ("read@3", 2, 0, 1),
        ]
    ],
)  # fmt: skip
def test_while_a_checkpoint_is_read_all_ranks_stop_and_nothing_half_loaded_goes_on(
    corpus, tmp_path, phase, world, alone, slow
):
    """Also where one rank is signalled alone, and another one is the one that reads: none waits for a time limit."""
    overrides = settings(corpus, tmp_path / "run", **{"train.steps": 5})
    recipe, run = Recipe.load("quickstart", overrides), Run(tmp_path / "run")
    with pytest.raises(Stopped):
        train(recipe, stop_at=3)
    before = {p: p.read_bytes() for p in run.checkpoints_dir.rglob("*") if p.is_file()}
    said = signalled(tmp_path, overrides, phase, world, signal.SIGUSR1, alone, slow)
    assert "stopped by SIGUSR1 before step 1 of this start;" in said
    assert {p: p.read_bytes() for p in run.checkpoints_dir.rglob("*") if p.is_file()} == before
    assert run.state == "preempted" and run.events[-1]["reason"] == "SIGUSR1"
    assert [line["step"] for line in run.lines("train")] == [1, 2, 3]
    assert train(recipe).state == "finished"
    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"))
    assert curve(run.path) == curve(whole.path)


@pytest.mark.dist
@pytest.mark.parametrize(("alone", "slow"), [(1, 0), pytest.param(0, 0, marks=pytest.mark.full)])
def test_one_rank_signalled_alone_before_the_ranks_have_met_stops_all(corpus, tmp_path, alone, slow):
    """Rank 0 is at its data for two minutes, and rank 1 waits for it."""
    overrides = [*settings(corpus, tmp_path / "run"), f"data.dir='{tmp_path / 'data'}'"]
    said = signalled(tmp_path, overrides, "start", 2, signal.SIGTERM, alone, slow)
    assert "stopped by SIGTERM before step 1 of this start;" in said


SLEEPY = """
import sys, time
from pathlib import Path
import numpy as np
from windlass.cli import main
from windlass.data.dataset import Data
from windlass.errors import Stopped
from windlass.recipe import Recipe
from windlass.training import train

class Sleepy:
    given = 0

    def __len__(self):
        return 64

    def __getitem__(self, i):
        self.given += 1
        if self.given > 3 * 8:  # after three steps
            here.touch()
            time.sleep(600)
        return np.arange(16) % 7, np.arange(1, 17) % 7

    def read(self, indices):
        tokens, labels = zip(*(self[int(i)] for i in indices))
        return np.stack(tokens), np.stack(labels)

here = Path(sys.argv[1])
data = Data(Sleepy(), None, None, "sleepy", 7)
try:
    train(Recipe.load("quickstart", sys.argv[2:]), data=data)
except Stopped as stop:
    sys.exit(f"{stop}")
"""


def test_a_stop_does_not_wait_for_a_source_that_sleeps(tmp_path):
    """A source of the user's own that takes ten minutes for a sample; the process ends all the same."""
    here = tmp_path / "here"
    overrides = settings(tmp_path, tmp_path / "run", **{"eval.every": 0})
    process = subprocess.Popen(
        [sys.executable, "-c", SLEEPY, str(here), *overrides],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 90
    while not here.exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    run = Run(tmp_path / "run")
    while not run.lines("train", step=3) and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "stopped by SIGTERM after step 3, all saved" in said, said
    assert "Traceback" not in said and "FATAL" not in said, said


def test_a_run_stopped_before_step_1_goes_on_as_if_nothing_had_happened(corpus, tmp_path):
    overrides = settings(corpus, tmp_path / "run", **{"train.steps": 3, "eval.every": 1})
    recipe = Recipe.load("quickstart", overrides)
    opened = Session.open

    def open_and_ask(self: Session, *things: object) -> Session:
        opened(self, *things)  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGUSR1)
        return self

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped, match="SIGUSR1 before step 1"):
        patch.setattr(Session, "open", open_and_ask)
        train(recipe)
    assert Run(tmp_path / "run").state == "preempted"
    whole = train(recipe.with_overrides(f"run.dir='{tmp_path / 'whole'}'"))
    assert curve(train(recipe).path) == curve(whole.path)


@pytest.mark.parametrize(("takes", "saved"), [(50.0, True), (70.0, False)])
def test_a_save_is_begun_only_where_the_grace_allows_it(corpus, tmp_path, monkeypatch, takes, saved):
    """60 s of grace, against the measured time of the last save."""
    recipe = Recipe.load(
        "quickstart",
        settings(
            corpus,
            tmp_path / "run",
            **{"checkpoint.grace_seconds": 60, "eval.every": 0, "checkpoint.background": "false"},
        ),
    )
    monkeypatch.setattr(Saver, "last_seconds", property(lambda self: takes, lambda self, value: None), raising=False)

    def on_step(step: int, _: object) -> None:
        if step == 4:  # all ranks act on it one step later
            os.kill(os.getpid(), signal.SIGTERM)

    message = "all saved" if saved else "a save takes about 70 s and only 60 s are left.* and 2 steps are lost"
    with pytest.raises(Stopped if saved else RunFailed, match=message):
        train(recipe, on_step=on_step)
    run = Run(tmp_path / "run")
    there = sorted(int(p.name[5:]) for p in run.checkpoints_dir.glob("step-*"))
    assert there == ([3, 5] if saved else [3])
    assert [e["saved"] for e in run.events if e["event"] == "preempted"] == [saved]
    assert train(recipe).state == "finished"


def test_the_grace_is_held_against_a_save_of_an_earlier_start(corpus, tmp_path):
    """Before the first save of its own a start knows what its predecessor's took."""
    more = {"checkpoint.grace_seconds": 60, "eval.every": 0, "checkpoint.every": 100}
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **more))
    with pytest.raises(Stopped):
        train(recipe, stop_at=4)
    run = Run(tmp_path / "run")
    lines = [json.loads(line) for line in run.metrics_path.read_text().splitlines()]
    for line in lines:
        if line.get("event") == "checkpoint":
            line["write_s"] = 70.0
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def on_step(step: int, _: object) -> None:
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(RunFailed, match=r"a save takes about 70 s and only 60 s are left.* and 2 steps are lost"):
        train(recipe, on_step=on_step)
    assert train(recipe).state == "finished"


def test_a_late_second_rank_of_data_ends_after_the_grace(corpus, tmp_path, monkeypatch):
    """Ranks that wait for each other cannot stop while one has no data: after the grace it ends, and says what is lost."""
    from windlass.data.loader import Loader

    monkeypatch.setattr("windlass.parallel.dist.Ranks.world", property(lambda self: 2 if waiting else 1))
    waiting: list[int] = []
    poll = Loader.poll

    def late(self: Loader, timeout: float | None = 0.0) -> object:
        if self._next < 5:
            return poll(self, timeout)
        if not waiting:
            os.kill(os.getpid(), signal.SIGTERM)
        waiting.append(1)
        return None

    monkeypatch.setattr(Loader, "poll", late)
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **{"checkpoint.grace_seconds": 0.01}))
    with pytest.raises(RunFailed, match=r"rank 0 has waited for the data of step 5 .* and 1 steps are lost"):
        train(recipe)


def test_a_signal_is_noted_once_and_never_before_it_may_be():
    with Signals() as signals:
        assert not signals.asked
        with pytest.raises(Stopped, match="stopped by SIGUSR2 before step 1 of this start;"), signals.at_once():
            os.kill(os.getpid(), signal.SIGUSR2)
        assert signals.asked and signals.name == "SIGUSR2"
        with pytest.raises(Stopped), signals.at_once():
            raise AssertionError("a signal that came before is acted on, too")


def test_a_disk_too_small_is_said_before_step_1_and_at_each_save(corpus, tmp_path, monkeypatch, capsys):
    """A warning at the start; a save that has no room fails by itself, and training goes on; at the end it is an error."""
    free = [RESERVE_BYTES + 1000]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    recipe = Recipe.load("quickstart", settings(corpus, tmp_path / "run", **{"train.steps": 7}))
    with pytest.raises(RunFailed, match="the last checkpoint could not be saved"):
        train(recipe)
    run = Run(tmp_path / "run")
    said = " ".join("".join(capsys.readouterr()).split())
    assert "the run needs" in said and "are free" in said
    assert {3, 6, 7} <= {e["step"] for e in run.events if e["event"] == "save_failed"}
    assert len(run.lines("train")) == 7 and run.state == "failed"
    free[0] = 10**12
    assert train(recipe).state == "finished"


def test_the_last_save_is_tried_again_where_it_failed(corpus, tmp_path, monkeypatch):
    """The save of the last step fails, and is known to have failed before the run ends: it is made once more."""
    from windlass.training.actions import Actions

    original, failed = shutil.disk_usage, []
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=0) if len(failed) < 1 else original(path)
    )
    evaluate = Actions.evaluate

    def evaluate_and_wait(self: Actions) -> bool:
        whole = evaluate(self)
        if self.state.step == 3:
            failed.append(self.saves.wait())
        return whole

    monkeypatch.setattr(Actions, "evaluate", evaluate_and_wait)
    run = train(Recipe.load("quickstart", settings(corpus, tmp_path / "run", **{"train.steps": 3, "eval.every": 3})))
    assert failed == [False]
    saves = [(e["event"], e["step"]) for e in run.events if e["event"] in ("save_failed", "checkpoint")]
    assert saves == [("save_failed", 3), ("checkpoint", 3)]
    assert run.state == "finished" and (run.checkpoints_dir / "step-00000003" / "manifest.sha256").exists()
