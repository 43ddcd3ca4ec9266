from __future__ import annotations

import subprocess
import sys

import pytest

from windlass.errors import UserError
from windlass.training.occupancy import occupy

HOLD = "import sys, pathlib\nfrom windlass.training.occupancy import occupy\nf = occupy(pathlib.Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()"


def test_a_second_training_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on "):
        occupy(tmp_path, seconds=0.2)
    holder.kill()
    holder.communicate()
    mine = occupy(tmp_path, seconds=5)
    assert mine is not None
    mine.close()
