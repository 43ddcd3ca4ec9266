"""Started by MPICH's mpiexec or by torchrun, two ranks do what `--world 2` does."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from launching import DDP, TRAIN, launched

from windlass.run import Run

pytestmark = pytest.mark.dist


@pytest.mark.skipif(shutil.which("mpiexec") is None, reason="no mpiexec on this machine (Debian's package mpich)")
def test_mpiexec(settings, tmp_path, same_as_two_local_ranks):
    done = launched(["mpiexec", "-n", "2", *TRAIN, *settings(tmp_path / "run", **DDP)])
    assert done.returncode == 0, done.stdout
    same_as_two_local_ranks(tmp_path / "run")


@pytest.mark.full
def test_torchrun(settings, tmp_path, same_as_two_local_ranks):
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAIN[1:]]
    done = launched([*start, *settings(tmp_path / "run", **DDP)])
    assert done.returncode == 0, done.stdout
    same_as_two_local_ranks(tmp_path / "run")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_torchrun_starts_again_after_a_kill(settings, tmp_path, same_as_two_local_ranks):
    """Torch elastic's own restart: the second start goes on from the first's checkpoint, whatever the recipe says of one."""
    place = tmp_path / "run"
    start = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "--max-restarts",
        "1",
    ]
    overrides = settings(place, **DDP, **{"checkpoint.every": 3})
    done = launched([*start, str(Path(__file__).parent / "killed_once.py"), *overrides])
    assert done.returncode == 0, done.stdout
    begun = [(e["event"], e["step"]) for e in Run(place).events if e["event"] in ("started", "resumed")]
    assert [name for name, _ in begun] == ["started", "resumed"]
    assert begun[1][1] >= 3
    same_as_two_local_ranks(place)
