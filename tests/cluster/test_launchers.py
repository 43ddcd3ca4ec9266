"""Started by MPICH's mpiexec or by torchrun, two ranks do what `--world 2` does."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import DDP, TRAIN, assert_same, launched

from helpers import wait_for
from windlass.run import Run

pytestmark = pytest.mark.dist
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.skipif(
    shutil.which("mpiexec") is None, reason="no mpiexec on this machine (Debian's package mpich)"
)
def test_mpiexec(settings, tmp_path, two_local_ranks):
    launched(["mpiexec", "-n", "2", *TRAIN, *settings(tmp_path / "run", **DDP)])
    assert_same(tmp_path / "run", two_local_ranks)


@pytest.fixture(params=["mpich", "openmpi"])
def pbs_job(request, tmp_path, monkeypatch) -> str:
    """The shell of a PBS job on one host with two ranks, whose `mpiexec` is the real one of this
    implementation.
    """
    program = shutil.which(f"mpiexec.{request.param}")
    if program is None:
        pytest.skip(
            f"no mpiexec.{request.param} on this machine (Debian's packages mpich and openmpi-bin)"
        )
    (tmp_path / "bin").mkdir()
    # MPICH looks for its parts beside a link
    (tmp_path / "bin" / "mpiexec").write_text(f'#!/bin/sh\nexec {program} "$@"\n')
    (tmp_path / "bin" / "mpiexec").chmod(0o755)
    (tmp_path / "nodes").write_text("127.0.0.1\n127.0.0.1\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in {
        "PBS_JOBID": "7.server",
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }.items():
        monkeypatch.setenv(name, value)
    return request.param


LAUNCH = [sys.executable, "-m", "windlass", "launch", "--"]


def test_launch_trains_under_mpiexec(pbs_job, settings, tmp_path, two_local_ranks):
    """PBS is its variables and host file here; mpiexec is real."""
    output = launched([*LAUNCH, *TRAIN, *settings(tmp_path / "run", **DDP)])
    assert ("--map-by ppr:2:node" if pbs_job == "openmpi" else "-ppn 2") in output
    assert_same(tmp_path / "run", two_local_ranks)


def test_a_signal_to_launch_stops_all_ranks_with_everything_saved(pbs_job, settings, tmp_path):
    run = Run(tmp_path / "run")
    long = DDP | {
        "train.steps": 4000,
        "telemetry.every": 20,
        "checkpoint.every": 5000,
        "eval.every": 5000,
    }
    process = subprocess.Popen(
        [*LAUNCH, *TRAIN, *settings(run.path, **long)], stdin=subprocess.DEVNULL
    )
    try:
        wait_for(lambda: run.path.exists() and run.lines("train"), 100)
        process.terminate()
        assert process.wait(100) == 75
    finally:
        process.kill()
    assert [e["saved"] for e in run.events if e["event"] == "preempted"] == [True]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_torchrun_starts_again_after_a_kill(settings, tmp_path, two_local_ranks):
    """Torch elastic's own restart: the second start resumes from the first's checkpoint."""
    run = tmp_path / "run"
    worker = str(Path(__file__).parent / "killed_once.py")
    launched(
        [*TORCHRUN, "--max-restarts", "1", worker, *settings(run, **DDP, **{"checkpoint.every": 3})]
    )
    starts = [
        (e["event"], e["step"]) for e in Run(run).events if e["event"] in ("started", "resumed")
    ]
    assert [name for name, _ in starts] == ["started", "resumed"] and starts[1][1] >= 3
    assert_same(run, two_local_ranks)
