"""Freed memory is kept for the next step: page faults are counted, not seconds."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PROGRAM = """
import json, resource, sys
import numpy as np
from windlass.processes import keep_freed_memory

if sys.argv[1] == "kept":
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
print(json.dumps((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 10))
"""


def faults(mode: str) -> float:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, check=True)
    return float(json.loads(done.stdout))


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be told to keep its memory")
def test_a_step_does_not_fetch_its_pages_again() -> None:
    """80 MB are 20,480 pages of 4 kB, or 40 huge ones; kept, a step needs next to none."""
    assert faults("left") > 40
    assert faults("kept") < 40
