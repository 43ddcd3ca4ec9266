"""Started by MPICH's mpiexec or by torchrun, two ranks do what `--world 2` does."""

from __future__ import annotations

import shutil
import sys

import pytest
from launching import DDP, TRAIN, launched

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
