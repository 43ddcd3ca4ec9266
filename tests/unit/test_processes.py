"""What every process of a launch does: reuse its memory, end with its parent, and leave its status readable."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from helpers import gone, wait_for
from windlass.processes import RankStatus, read

STEPS = """
import resource, sys
import numpy as np
from windlass.processes import keep_freed_memory

if sys.argv[1] == "reused":
    assert keep_freed_memory()

def step():
    tensors = [np.ones(2**18) for _ in range(40)]  # 40 blocks of 2 MB, as activations come
    while tensors:
        tensors.pop()  # and go, the last first

for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10)
"""
PARENT = """
import subprocess, sys, threading, time
child = "import os, time; from windlass.processes import exit_with_parent; exit_with_parent(os.getppid()); "
child += "print(os.getpid(), flush=True); time.sleep(60)"
thread = threading.Thread(target=lambda: subprocess.Popen([sys.executable, "-c", child]))
thread.start()
thread.join()
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc has the setting")
def test_a_step_does_not_fetch_its_pages_again() -> None:
    """80 MB are 20,480 pages of 4 kB, or 40 huge ones; reused, a step needs next to none."""
    faults = [float(subprocess.check_output([sys.executable, "-c", STEPS, mode])) for mode in ("returned", "reused")]
    assert faults[0] > 40 > faults[1]


def test_a_process_outlives_the_thread_that_started_it_but_not_the_process() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        time.sleep(1.0)
        assert not gone(child)
        parent.kill()
    wait_for(lambda: gone(child))


def test_a_status_is_read_whole_whatever_was_there_before(tmp_path: Path) -> None:
    assert read(tmp_path, "status", 0) == {}
    status = RankStatus(0, str(tmp_path))
    status.mark(123456, "a long phase " * 20)
    status.mark(7, "backward")
    assert read(tmp_path, "status", 0) == status.fields()
    assert (status.step, status.phase) == (7, "backward")
