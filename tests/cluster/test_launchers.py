"""Started by MPICH's mpiexec or by torchrun, two ranks do what `--world 2` does."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import DDP, LONG, TRAIN, assert_same, launched

from helpers import programs, wait_for
from windlass.run import Run

pytestmark = pytest.mark.dist
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.fixture
def pbs_job(request, tmp_path, monkeypatch) -> str:
    """The shell of a PBS job on one host with two ranks, whose `mpiexec` is the real one of this
    implementation.
    """
    program = shutil.which(f"mpiexec.{request.param}")
    if program is None:
        packages = "Debian's packages mpich and openmpi-bin"
        pytest.skip(f"no mpiexec.{request.param} on this machine ({packages})")
    # MPICH looks for its parts beside a link
    programs(tmp_path / "bin", monkeypatch, mpiexec=f'exec {program} "$@"')
    (tmp_path / "nodes").write_text("127.0.0.1\n127.0.0.1\n")
    job = {"PBS_JOBID": "7.server", "PBS_NODEFILE": str(tmp_path / "nodes")}
    job |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    return request.param


LAUNCH = [sys.executable, "-m", "windlass", "launch", "--"]


@pytest.mark.parametrize(
    "pbs_job", ["mpich", pytest.param("openmpi", marks=pytest.mark.full)], indirect=True
)
def test_launch_trains_under_mpiexec(pbs_job, settings, tmp_path, two_local_ranks):
    """PBS is its variables and host file here; mpiexec is real."""
    output = launched([*LAUNCH, *TRAIN, *settings(tmp_path / "run", **DDP)])
    assert ("--map-by ppr:2:node" if pbs_job == "openmpi" else "-ppn 2") in output
    assert_same(tmp_path / "run", two_local_ranks)


@pytest.mark.parametrize(
    "pbs_job", ["mpich", pytest.param("openmpi", marks=pytest.mark.full)], indirect=True
)
def test_a_signal_to_launch_stops_all_ranks_with_everything_saved(pbs_job, settings, tmp_path):
    run = Run(tmp_path / "run")
    words = [*LAUNCH, *TRAIN, *settings(run.path, **(LONG | {"train.steps": 4000}))]
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL)
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
    killed = str(Path(__file__).parents[1] / "e2e" / "killed.py")
    words = settings(run, **(DDP | {"checkpoint.every": 3}))
    launched([*TORCHRUN, "--max-restarts", "1", killed, "quickstart", "8", *words])
    starts = [e for e in Run(run).events if e["event"] in ("started", "resumed")]
    assert [e["event"] for e in starts] == ["started", "resumed"] and starts[1]["step"] >= 3
    assert_same(run, two_local_ranks)
