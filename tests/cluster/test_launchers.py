"""Started by MPICH's mpiexec or by torchrun, two ranks do what `--world 2` does."""

import shutil
import sys
from pathlib import Path

import pytest
from launching import DDP, TRAIN, assert_same, launched

from windlass.run import Run

pytestmark = pytest.mark.dist
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="no mpiexec on this machine (Debian's package mpich)")
def test_mpiexec(settings, tmp_path, two_local_ranks):
    launched(["mpiexec", "-n", "2", *TRAIN, *settings(tmp_path / "run", **DDP)])
    assert_same(tmp_path / "run", two_local_ranks)


@pytest.mark.full
@pytest.mark.timeout(300)
def test_torchrun_starts_again_after_a_kill(settings, tmp_path, two_local_ranks):
    """Torch elastic's own restart: the second start resumes from the first's checkpoint."""
    run = tmp_path / "run"
    worker = str(Path(__file__).parent / "killed_once.py")
    launched([*TORCHRUN, "--max-restarts", "1", worker, *settings(run, **DDP, **{"checkpoint.every": 3})])
    starts = [(e["event"], e["step"]) for e in Run(run).events if e["event"] in ("started", "resumed")]
    assert [name for name, _ in starts] == ["started", "resumed"] and starts[1][1] >= 3
    assert_same(run, two_local_ranks)
