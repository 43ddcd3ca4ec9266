"""What every process of a launch does: reuse its memory, end with its parent, and leave its status readable."""

import subprocess
import sys
import time

import pytest

from helpers import gone, wait_for
from windlass.processes import REPORTS, first_to_show

STEPS = """
import resource, sys
import numpy as np
from windlass.processes import keep_freed_memory
assert sys.argv[1] == "returned" or keep_freed_memory()
for step in range(13):
    if step == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [np.ones(2**18) for _ in range(40)]  # 40 blocks of 2 MB, as activations come
    while tensors:
        tensors.pop()  # and go, the last first
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


def test_ranks_of_a_job_show_the_same_message_once(tmp_path, monkeypatch) -> None:
    assert first_to_show("no file x") and first_to_show("no file x"), "no job"
    monkeypatch.setenv(REPORTS, str(tmp_path))
    assert [first_to_show(text) for text in ("no file x", "no file y", "no file x")] == [True, True, False]
    monkeypatch.setenv(REPORTS, str(tmp_path / "gone"))
    assert first_to_show("no file x")
