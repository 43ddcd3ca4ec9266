"""A sweep's queue with a stand-in for the training, which writes a ledger and takes signals."""

import io
import json
import os
import signal
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest

from helpers import refused, tiny_recipe, write_corpus
from windlass.data.recipe_sources import data_dirs
from windlass.data.shards import Index
from windlass.errors import DONE, STOPPED, Stopped
from windlass.fileio import read_json
from windlass.processes import thread_share
from windlass.recipe import Recipe
from windlass.study import probes, runner
from windlass.study.progress import Progress
from windlass.study.runner import Sweep
from windlass.study.scale import create_scaling
from windlass.study.study import Study

STEPS = 4
TRAINING = textwrap.dedent(
    """
    import json, os, signal, sys, time
    from datetime import UTC, datetime
    from pathlib import Path

    run, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    run.mkdir(parents=True, exist_ok=True)
    ledger = run / "metrics.jsonl"
    before = [json.loads(x) for x in ledger.read_text().splitlines()] if ledger.exists() else []
    attempt = sum(x.get("event") in ("started", "resumed") for x in before)
    first = max((x["step"] for x in before if x["kind"] == "train"), default=0)

    def write(kind, step, **fields):
        now = datetime.now(UTC).isoformat()
        with ledger.open("a") as file:
            file.write(json.dumps({"kind": kind, "step": step, "attempt": attempt, "time": now, **fields}) + "\\n")

    def stop(*_):
        write("event", step, event="preempted")
        sys.exit(75)

    step = first
    signal.signal(signal.SIGTERM, stop)
    (run / "about.json").write_text(json.dumps({"world": int(sys.argv[4]), **os.environ}))
    if attempt < plan.get("taken", 0):
        write("event", step, event="started")
        print(f"windlass: another process trains in {run} already (process 1 on here); wait for it, or stop it")
        sys.exit(2)
    write("event", step, event="resumed" if before else "started", steps=plan["steps"])
    (run / "heartbeat").touch()
    for step in range(first + 1, plan["steps"] + 1):
        write("train", step, loss=4.0, tokens=step)
        write("eval", step, suite="loss", loss=4.0)
        if attempt < plan.get("killed", 0):
            (run / "heartbeat").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if attempt < plan.get("failed", 0):
            write("event", step, event="failed", reason="no luck")
            print("windlass: no luck")
            sys.exit(1)
        time.sleep(plan["pause"])
    write("event", step, event="finished")
    """
)


@pytest.fixture
def play(tmp_path, monkeypatch):
    """Sweep over seeds with planned trainings: gives exit code, study and messages."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    def start(plans, axes=None, **options):
        axes = axes or [f"run.seed={','.join(str(n) for n in range(1, len(plans) + 1))}"]
        recipe, path, messages = Recipe.load("quickstart"), tmp_path / "study", []
        study = Study.create(recipe, axes, path, world=options.pop("world", 0))

        def command(_, cell):
            plan = {"steps": STEPS, "pause": 0.0} | plans[study.cells.index(cell)]
            return [sys.executable, "-c", TRAINING, str(study.run_of(cell).path), json.dumps(plan)]

        progress = Progress(io.StringIO())
        progress.notify, progress.show = messages.append, options.pop("show", lambda *_: None)
        options["progress"] = progress
        monkeypatch.setattr(runner, "train_command", command)
        monkeypatch.setattr(runner, "POLL_SECONDS", 0.02)
        try:
            Sweep(study, study.cells, **options).run(study.cells)
        except Stopped:
            return STOPPED, study, messages
        return (DONE if set(states(study)) == {"finished"} else 1), study, messages

    return start


def states(study):
    return [result.state for result in study.results()]


def attempts(study, number=0):
    events = study.run_of(study.cells[number]).events
    return [e["event"] for e in events if e["event"] in ("started", "resumed")]


def about(study, number=0):
    return json.loads((study.run_of(study.cells[number]).path / "about.json").read_text())


def test_a_signal_saves_ends_with_75_and_the_same_command_resumes(play):
    def interrupt(study, *_):
        if "running" in states(study) and study.results()[0].numbers.step:
            os.kill(os.getpid(), signal.SIGTERM)

    slow = [{"pause": 30.0, "steps": 2}, {}]
    code, study, _ = play(slow, show=interrupt)
    assert (code, states(study)) == (STOPPED, ["interrupted", "waiting"])
    assert study.run_of(study.cells[0]).events[-1]["event"] == "preempted"
    assert attempts(play([{}, {}])[1]) == ["started", "resumed"]


@pytest.mark.parametrize("plan", [{"killed": 1}, {"taken": 1}])
def test_a_cell_that_is_killed_or_that_another_process_trains_is_left_to_the_next_sweep(play, plan):
    code, study, messages = play([plan, {}])
    assert (code, states(study)) == (1, ["interrupted", "finished"])
    assert "killed" not in plan or "signal 9" in "\n".join(messages)
    code, study, _ = play([plan, {}])
    assert code == DONE and attempts(study)[1:] == ["resumed"]


def test_failed_cells_are_left_alone_until_asked_for(play):
    code, study, _ = play([{"failed": 1}, {}])
    assert (code, states(study)) == (1, ["failed", "finished"])
    assert study.results()[0].reason == "exit code 1: windlass: no luck"
    code, study, _ = play([{}, {}])
    assert (code, attempts(study)) == (1, ["started"])
    code, study, _ = play([{}, {}], retry_failed=True)
    assert (code, attempts(study), attempts(study, 1)) == (
        DONE,
        ["started", "resumed"],
        ["started"],
    )


def test_data_are_prepared_before_the_first_cell_and_once_for_all(tmp_path, monkeypatch):
    """A cell whose own data cannot be used fails alone."""
    corpus, begun, prepared = write_corpus(tmp_path / "text.txt", 4000), [], []
    real = runner.prepare

    def prepare(recipe, resuming):
        real(recipe)
        prepared.extend(data_dirs(recipe))

    monkeypatch.setattr(runner, "prepare", prepare)
    monkeypatch.setattr(Sweep, "run", lambda self, cells: begun.append(cells))
    recipe, seeds = tiny_recipe(corpus, tmp_path / "run"), {"run.seed": [1, 2, 3]}
    missing = str(tmp_path / "missing.txt")
    with refused("missing.txt"):
        runner.sweep(recipe.replace({"data.source": missing}), seeds, path=tmp_path / "none")
    assert not begun and not prepared
    study = runner.sweep(recipe, seeds, {"train.steps": 3}, path=tmp_path / "seeds")
    assert {cell.recipe.train.steps for cell in study.cells} == {3}
    assert len(prepared) == len(begun) == 1 and Index.load(prepared[0])
    own = recipe.replace({"data.dir": ""})
    monkeypatch.chdir(tmp_path)
    runner.sweep(own, {"data.source": [str(corpus), missing]}, path=tmp_path / "some")
    assert len(begun) == 2 and len(prepared) == 2


def test_a_study_is_trained_outside_the_main_thread(play, tmp_path, monkeypatch):
    """A probe, too, which has a process that fails here."""
    with ThreadPoolExecutor(1) as pool:
        code, study, _ = pool.submit(play, [{}, {}]).result()
        assert (code, states(study)) == (DONE, ["finished"] * 2)
        monkeypatch.setattr(probes, "WINDLASS", ("false",))
        recipe, notes = Recipe.load("quickstart", ["parallel.device=cpu"]), []
        scaling = create_scaling(recipe, [1, 2], path=tmp_path / "scaling")
        pool.submit(probes.run_probe, scaling, scaling.cells[1], notes.append).result()
    directory = probes.probe_dir(scaling, scaling.cells[1])
    assert "exit code 1" in read_json(directory / "probe.json")["reason"] and notes


def test_workers_and_ranks_share_the_cores(play):
    code, study, _ = play([{}, {}], axes=["parallel.world=1,2"], world=4, workers=2)
    assert code == DONE
    seen = [(about(study, n)["world"], int(about(study, n)["OMP_NUM_THREADS"])) for n in (0, 1)]
    assert seen == [(1, thread_share(4)), (2, thread_share(4))]
    cores = len(os.sched_getaffinity(0))
    assert (thread_share(cores), thread_share(4 * cores)) == (1, 1)


@pytest.mark.parametrize(
    ("devices", "workers", "world", "given"),
    [("3,5", 4, 1, {"3", "5"}), ("0,1,2,3", 4, 2, {"0,1", "2,3"}), ("", 2, 1, {""})],
)
def test_each_cell_has_devices_of_its_own(play, monkeypatch, devices, workers, world, given):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    monkeypatch.setitem(sys.modules, "pynvml", None)  # which would say that this machine has fewer
    _, study, _ = play([{"pause": 0.1}] * 4, workers=workers, world=world)
    assert states(study) == ["finished"] * 4
    assert {about(study, n)["CUDA_VISIBLE_DEVICES"] for n in range(4)} == given
