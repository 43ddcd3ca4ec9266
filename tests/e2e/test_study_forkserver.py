"""Cells that a process with torch imported forks: they are processes like any other."""

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from helpers import TINY, curve, gone, overrides, wait_for, windlass
from windlass import Recipe, sweep
from windlass.errors import BAD_INPUT, DONE, STOPPED
from windlass.processes import WINDLASS
from windlass.run import Run
from windlass.study.process import CellProcess, ForkServer, cell_environment
from windlass.study.study import Study

pytestmark = pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="only Linux has pidfds")


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")  # numpy's own threads survive a fork
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # it changes, and a fork has the server's variables
    with closing(ForkServer(cell_environment(1))) as server:
        yield server


@pytest.fixture
def cell(tmp_path, monkeypatch):
    """Start a command of a cell, and give its process."""
    study = Study.create(Recipe.load("quickstart"), ["run.seed=1,2"], tmp_path / "study")

    def start(server, *words):
        monkeypatch.delenv("PYTEST_CURRENT_TEST", raising=False)
        command = [*WINDLASS, *map(str, words)]
        return CellProcess(study.cells[0], command, tmp_path / "run", 1, (), server)

    return start


@pytest.fixture
def endless(corpus, tmp_path):
    """The words of a training that only a signal ends, and whether it trains."""
    run = Run(tmp_path / "run")
    settings = {**TINY, "data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    settings |= {"run.dir": str(run.path), "train.steps": 10**6, "parallel.device": "cpu"}
    return ["train", "quickstart", *overrides(settings)], lambda: len(run.lines("train")) > 2


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def ends(process: CellProcess) -> int:
    wait_for(lambda: process.poll() is not None, 60)
    return process.poll()


def test_forks_end_alone_with_their_own_output_and_exit_code(server, cell, endless) -> None:
    words, trains = endless
    training = cell(server, *words)
    assert os.getsid(training.pid) == training.pid != parent(training.pid)
    wait_for(trains, 60)
    bad = cell(server, "recipe", "quickstart", "optim.lr=fast")
    assert parent(bad.pid) == parent(training.pid) != os.getpid()
    assert ends(bad) == BAD_INPUT and "bad input: windlass: recipe" in bad.failure(BAD_INPUT)
    assert training.poll() is None
    assert len(list(Path(f"/proc/{parent(training.pid)}/task").iterdir())) == 1  # no thread yet
    training.terminate()
    assert ends(training) == STOPPED
    resumed = cell(server, *words)
    wait_for(lambda: "resumed from" in resumed.log_path.read_text(), 60)
    resumed.kill()
    assert resumed.poll() == -signal.SIGKILL and gone(resumed.pid)
    assert resumed.failure(resumed.poll()).startswith("killed by signal 9")


def test_after_the_end_of_the_server_its_forks_end_and_cells_are_new_processes(
    server, cell, endless
) -> None:
    words, trains = endless
    training = cell(server, *words)
    wait_for(trains, 60)
    os.kill(parent(training.pid), signal.SIGKILL)
    assert ends(training) == -signal.SIGKILL
    wait_for(lambda: gone(training.pid))
    after = cell(server, "recipe", "quickstart")
    assert parent(after.pid) == os.getpid() and ends(after) == DONE


def test_a_study_that_is_killed_leaves_no_process(endless, tmp_path) -> None:
    code = (
        "import sys; from pathlib import Path; from windlass.study.process import *;"
        "server = ForkServer(cell_environment(1));"
        "print(server.start(sys.argv[1:], Path('log')), flush=True); signal.pause()"
    )
    words, trains = endless
    study = subprocess.Popen(
        [sys.executable, "-c", code, *words], cwd=tmp_path, stdout=subprocess.PIPE, text=True
    )
    training = int(study.stdout.readline())
    server = parent(training)
    wait_for(trains, 60)
    study.kill()
    study.communicate()
    wait_for(lambda: gone(server) and gone(training))


def test_a_cell_computes_what_a_new_process_computes(corpus, tmp_path, monkeypatch) -> None:
    settings = {**TINY, "data.source": str(corpus), "data.dir": str(tmp_path / "data")}
    settings |= {"parallel.device": "cpu", "model.width": 64, "model.dropout": 0.1}
    forks = list[int]()
    start = ForkServer.start
    monkeypatch.setattr(ForkServer, "start", lambda *args: forks.append(start(*args)) or forks[-1])
    recipe = Recipe.load("quickstart", overrides(settings))
    study = sweep(recipe, ["train.threads+optim.lr=1+1e-2,2+3e-3"], path=tmp_path / "study")
    assert len(forks) == 2 and all(forks)
    for number, run in enumerate(study.runs()):
        alone = tmp_path / f"alone-{number}"
        words = [*study.cells[number].overrides, f"run.dir={alone}"]
        windlass("train", study.path / "recipe.toml", *words)
        assert curve(run) == curve(alone) and len(curve(run)) == TINY["train.steps"]
    assert curve(study.runs()[0]) != curve(study.runs()[1])
