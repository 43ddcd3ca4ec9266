"""Stop signals: before the first step the process ends at once; from then on all ranks save the
same step. Exit code 75.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from small_runs import curve, evaluations, recipe_of, settings, stopped, untouched

from forked import Forked, launch
from helpers import best_step, command, each_step, refused, wait_for
from windlass import train
from windlass.checkpoint.format import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.errors import RunFailed, Stopped
from windlass.run import Run
from windlass.training import evaluator

STRUCK = Path(__file__).parent.parent / "faults" / "struck.py"
SLOW = {
    "data.val_fraction": 0.4,
    "eval.every": 4,
    "eval.sample_every": 4,
    "eval.sample_tokens": 60,
    "eval.sample_count": 1,
    "checkpoint.every": 3,
    "model.context": 8,
}
ENDLESS = {"train.steps": 100_000, "checkpoint.every": 100_000, "eval.every": 0}
full = pytest.mark.full


def output_of(
    command: list[Any],
    ready: Callable[[], bool],
    number: int = signal.SIGTERM,
    alone: int | None = None,
    **env: str,
) -> str:
    """What a command prints that is signalled when it is ready; `alone`: that rank of its children
    gets the signal.
    """
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = Forked(command, env={**os.environ, **env}, **pipes)
    wait_for(lambda: ready() or process.poll() is not None, 90)
    assert process.poll() is None, process.communicate()[0]
    ranks = sorted(psutil.Process(process.pid).children(), key=lambda rank: rank.pid)
    (process if alone is None else ranks[alone]).send_signal(number)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 75 and "Traceback" not in output, output
    return output


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # the terminal has no more writers, or was closed here
        return b""


def signalled(
    folder: Path, overrides: list[str], phase: str, world: int = 1, alone: int | None = None
) -> str:
    """What a training prints that is stopped while it is in `phase`, where it stays long."""
    here = folder / "here"
    rank = [sys.executable, str(STRUCK), "wait", phase, "-1", "train", "quickstart", *overrides]
    command = rank if world == 1 else [lambda: sys.exit(launch(rank, world))]
    output = output_of(command, here.exists, alone=alone, STRUCK_HERE=str(here))
    assert "again" in output
    return output


def assert_last_step_saved(run: Run, state: str = "preempted") -> None:
    """A signal stopped the run, whose only checkpoint is of its last step."""
    last = run.lines("train")[-1]["step"]
    assert run.state == state
    assert [p.name for p in run.checkpoints_dir.glob("step-*")] == [f"step-{last:08d}"]


def files(run: Run) -> dict[Path, bytes]:
    return {p: p.read_bytes() for p in run.checkpoints_dir.rglob("*") if p.is_file()}


@pytest.mark.dist
@pytest.mark.parametrize(
    ("phase", "world", "alone"),
    [
        ("start", 1, None),
        ("start", 2, None),
        ("read@3", 2, None),
        ("start", 2, 1),
        ("read@3", 2, 0),
        ("evaluation", 1, None),
        pytest.param("evaluation", 2, None, marks=full),
        pytest.param("read@3", 1, None, marks=full),
        pytest.param("choose", 1, None, marks=full),
        pytest.param("choose", 2, None, marks=full),
    ],
)
def test_before_the_first_step_the_process_ends_at_once_and_nothing_is_changed(
    corpus, tmp_path, phase, world, alone
):
    more = SLOW | {"data.dir": f"'{tmp_path / 'data'}'"}
    recipe, run = recipe_of(corpus, tmp_path / "run", **more), Run(tmp_path / "run")
    if resumes := phase not in ("start", "evaluation"):
        stopped(recipe, 3)
    before = files(run)
    output = signalled(tmp_path, settings(corpus, tmp_path / "run", **more), phase, world, alone)
    assert "stopped by SIGTERM before the first step" in output
    assert files(run) == before
    assert [line["step"] for line in run.lines("train")] == ([1, 2, 3] if resumes else [])
    assert run.state == ("stopped" if resumes else "new" if phase == "start" else "preempted")
    if world == 1:
        assert curve(train(recipe)) == curve(untouched(recipe))


@pytest.mark.dist
@pytest.mark.parametrize(
    ("phase", "world"),
    [
        ("evaluation@8", 2),
        ("data@4", 1),
        pytest.param("data@4", 2, marks=full),
        pytest.param("sample@2", 1, marks=full),
        pytest.param("sample@2", 2, marks=full),
        pytest.param("forward@5", 2, marks=full),
    ],
)
def test_in_training_every_phase_ends_with_the_step_saved(corpus, tmp_path, phase, world):
    overrides = [*settings(corpus, tmp_path / "run", **SLOW), f"data.dir='{tmp_path / 'data'}'"]
    output = signalled(tmp_path, overrides, phase, world)
    run = Run(tmp_path / "run")
    assert run.state == "preempted"
    assert next(e for e in run.events if e["event"] == "preempted")["saved"]
    last = max(line["step"] for line in run.lines("train"))
    assert f"stopped by SIGTERM after step {last}" in output
    assert open_checkpoint(run.checkpoints_dir / f"step-{last:08d}").step == last
    if phase.startswith("sample"):  # it is cut short, and made up by the next start
        assert last == 4 and not run.lines("sample")


@pytest.mark.dist
@pytest.mark.parametrize(
    ("world", "number"), [(1, signal.SIGINT), (2, signal.SIGTERM), (2, signal.SIGUSR1)]
)
def test_a_signal_saves_the_same_step_on_every_rank_and_exits_75(corpus, tmp_path, world, number):
    run = Run(tmp_path / "run")
    overrides = settings(corpus, run.path, **ENDLESS)
    words = command("train", "quickstart", *overrides, "--world", str(world))
    output = output_of(words, lambda: len(run.lines("train")) >= 3, number=number)
    assert "again" in output
    assert_last_step_saved(run, "stopped" if number == signal.SIGINT else "preempted")
    event = next(e for e in run.events if e["event"] == run.state)
    assert event["reason"] == signal.Signals(number).name, "also if another rank got it"


@pytest.mark.parametrize("verb", ["train", "sweep"])
def test_a_dropped_connection_stops_with_everything_saved(corpus, tmp_path, verb):
    """The other end of the terminal goes away, as when ssh is cut: the kernel sends SIGHUP, and
    every write fails.
    """
    place, *others = settings(corpus, tmp_path / "run", **ENDLESS)
    grid = [word for value in others for word in ("--set", value)]
    words = {
        "train": [place, *others],
        "sweep": ["optim.lr=1e-3", *grid, "--dir", tmp_path / "study"],
    }[verb]
    here, there = os.openpty()
    process = Forked(
        command(verb, "quickstart", *words),
        stdin=there,
        stdout=there,
        stderr=there,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # its controlling terminal
        cwd=tmp_path,
    )
    os.close(there)
    threading.Thread(target=lambda: list(iter(partial(read, here), b"")), daemon=True).start()

    def runs() -> list[Run]:
        return [Run(path.parent) for path in tmp_path.rglob("metrics.jsonl")]

    def trains() -> bool:
        return any(len(run.lines("train")) >= 3 for run in runs())

    wait_for(lambda: process.poll() is not None or trains(), 120)
    os.close(here)
    assert process.wait(90) == 75
    (run,) = runs()
    assert_last_step_saved(run)
    reason = next(e["reason"] for e in run.events if e["event"] == "preempted")
    # a cell has no terminal: its study stops it
    assert reason == ("SIGHUP" if verb == "train" else "SIGTERM")


def test_a_hangup_that_is_ignored_stops_nothing():
    """`nohup windlass train`."""
    code = "import os, signal; from windlass.training.stop import StopSignals\nwith StopSignals() as stop:\n"
    code += "    stop.hold(); os.kill(os.getpid(), signal.SIGHUP); print(stop.requested, stop.name)"
    for words, said in (([], "True SIGHUP"), (["nohup"], "False")):
        done = subprocess.run([*words, sys.executable, "-c", code], capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.startswith(said), done


def test_a_second_interrupt_of_one_process_ends_it_at_once():
    code = "import os, signal, types; from windlass.training.stop import StopSignals\nwith StopSignals() as stop:\n"
    code += "    stop.follow(types.SimpleNamespace(step=1234), print); stop.hold()\n"
    code += "    [os.kill(os.getpid(), signal.SIGINT) for _ in range(2)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert "interrupted twice" in done.stderr
    assert "step 1,234" in done.stderr


@pytest.mark.parametrize(
    ("name", "grace", "takes", "every", "saves"),
    [
        ("SIGTERM", 60, 50.0, 3, [3, 5]),
        ("SIGTERM", 60, 70.0, 3, [3]),
        ("SIGTERM", 60, 70.0, 100, []),
        ("SIGINT", 60, 70.0, 3, [3, 5]),  # a person waits
        ("SIGTERM", 0.1, 70.0, 3, [3, 5]),  # after the grace nothing has killed the run
    ],
)
def test_save_is_begun_only_where_grace_allows_it(
    corpus, tmp_path, monkeypatch, name, grace, takes, every, saves
):
    """Against the measured time of the last save. If the grace is too short, a restart can resume
    from the newest checkpoint, if there is one.
    """
    more = {"checkpoint.grace_seconds": grace, "eval.every": 0, "checkpoint.background": "false"}
    more |= {"checkpoint.every": every}
    recipe, run = recipe_of(corpus, tmp_path / "run", **more), Run(tmp_path / "run")
    monkeypatch.setattr(
        Writer,
        "last_seconds",
        property(lambda self: takes, lambda self, value: None),
        raising=False,
    )

    def stop(now: Any) -> None:
        if now.step == 4:  # all ranks act on it one step later
            os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.2)

    saved, lost = 5 in saves, 5 - max(saves, default=0)
    words = () if saved else ("70 s", f"{lost} steps lost", "checkpoint.every")
    with refused(*words, error=Stopped if saves else RunFailed):
        train(recipe, callbacks=[each_step(stop)])
    assert sorted(int(p.name[5:]) for p in run.checkpoints_dir.glob("step-*")) == saves
    assert [e["saved"] for e in run.events if e["event"] in ("preempted", "stopped")] == [saved]
    assert train(recipe).state == "finished"


@pytest.mark.parametrize("at", [4, 12])
@pytest.mark.parametrize("what", ["evaluation", "sample"])
def test_what_a_stop_cut_short_is_made_up(corpus, tmp_path, monkeypatch, at, what):
    """An evaluation or a sample of a step, the last one too: ledger and best checkpoint are those
    of an untouched run.
    """
    own = {"data.val_fraction": 0.3, "data.dir": f"'{tmp_path / 'data'}'"}
    own |= {"eval.sample_every": 4, "eval.sample_tokens": 3}
    recipe = recipe_of(corpus, tmp_path / "run", **own)
    whole = untouched(recipe)
    place, name = (evaluator.Suites, "measure") if what == "evaluation" else (evaluator, "generate")
    original, steps = getattr(place, name), []

    def cut(*things: object, **more: object) -> object:
        if steps and steps[-1] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*things, **more)

    with monkeypatch.context() as patch, refused(f"after step {at}", error=Stopped):
        patch.setattr(place, name, cut)
        train(recipe, callbacks=[each_step(lambda now: steps.append(now.step))])
    run = Run(recipe.run_dir)
    assert run.state == "preempted"
    kind = "eval" if what == "evaluation" else "sample"
    assert at not in [line["step"] for line in run.lines(kind)]
    as_if_untouched(train(recipe), whole)


def texts(run: Run) -> list[tuple[int, str]]:
    return [(line["step"], line["text"]) for line in run.lines("sample")]


def as_if_untouched(run: Run, whole: Run) -> None:
    assert run.state == "finished"
    assert curve(run) == curve(whole) and evaluations(run) == evaluations(whole)
    assert texts(run) == texts(whole) and best_step(run) == best_step(whole)
    for key in ("final_loss", "final_eval_loss", "best_eval_loss", "best_step"):
        assert run.summary.get(key) == whole.summary.get(key), key
    assert open_checkpoint(run.checkpoints_dir / "step-00000012").manifest.meta["reason"] == "final"


def test_a_save_without_room_fails_and_training_continues(corpus, tmp_path, monkeypatch):
    """At the end it is an error; with room, the same command saves the end."""
    free = [1000]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free[0]))
    recipe, run = recipe_of(corpus, tmp_path / "run", **{"train.steps": 7}), Run(tmp_path / "run")
    with refused("last checkpoint", error=RunFailed):
        train(recipe)
    failed = {e["step"]: e["reason"] for e in run.events if e["event"] == "save_failed"}
    assert {3, 6, 7} <= set(failed) and "reserve of 16.8 MB; the disk has 1.0 kB" in failed[7]
    assert len(run.lines("train")) == 7 and run.state == "failed"
    free[0] = 10**12
    assert train(recipe).state == "finished"


def test_a_run_whose_saves_fail_again_and_again_ends(corpus, tmp_path, monkeypatch):
    """It would continue for days with nothing to resume from."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    more = {"checkpoint.every": 2, "train.steps": 30}
    more |= {"checkpoint.background": "false", "eval.every": 0}
    with refused("3 saves in a row", error=RunFailed):
        train(recipe_of(corpus, tmp_path / "run", **more))
    run = Run(tmp_path / "run")
    assert [e["step"] for e in run.events if e["event"] == "save_failed"] == [2, 4, 6]
    assert max(line["step"] for line in run.lines("train")) <= 8 and run.state == "failed"
