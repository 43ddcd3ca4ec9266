from __future__ import annotations

import json
import subprocess
import sys

import pytest

from windlass.errors import UserError
from windlass.run import Run
from windlass.training.start import acquire_run_lock

HOLD = "import sys, pathlib\nfrom windlass.training.start import acquire_run_lock\nf = acquire_run_lock(pathlib.Path(sys.argv[1]))\nprint('held', flush=True)\nsys.stdin.read()"


def test_a_second_training_is_refused_and_a_killed_one_leaves_no_lock(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"process {holder.pid} on "):
        acquire_run_lock(tmp_path, seconds=0.2)
    holder.kill()
    holder.communicate()
    mine = acquire_run_lock(tmp_path, seconds=5)
    assert mine is not None
    mine.close()


def test_a_run_that_was_killed_is_not_alive_from_that_moment(tmp_path):
    run = Run(tmp_path)
    run.metrics_path.write_text(json.dumps({"kind": "event", "step": 0, "attempt": 0, "event": "started"}) + "\n")
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout.readline().strip() == "held"
    assert (run.alive, run.state) == (True, "running")  # by its lock alone: there is no heartbeat
    run.heartbeat_path.touch()
    holder.kill()
    holder.communicate()
    assert (run.alive, run.state) == (False, "failed")
    acquire_run_lock(tmp_path, seconds=0.0).close()  # having looked leaves no lock behind


def test_where_the_lock_is_another_hosts_the_heartbeat_counts(tmp_path):
    run = Run(tmp_path)
    run.lock_path.write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert not run.alive
    run.heartbeat_path.touch()
    assert run.alive
    run.lock_path.write_text("")
    assert run.alive
