"""Commands that train, started as a user starts them, and what two local ranks make of the same
recipe.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from windlass.run import Run

TRAIN = [sys.executable, "-m", "windlass", "train", "quickstart"]
DDP = {"parallel.strategy": "ddp"}
LONG = {"train.steps": 400, "telemetry.every": 20, "checkpoint.every": 5000, "eval.every": 5000}
LONG |= DDP
"""A run to be stopped on the way, with no checkpoint of its own before the end."""


def launched(command: list[str]) -> str:
    """The output of a command of a plain shell, which has to end with exit code 0."""
    jobs = ("SLURM_", "PMI_", "OMPI_COMM_")
    outside = {key: value for key, value in os.environ.items() if not key.startswith(jobs)}
    done = subprocess.run(
        ["timeout", "-k", "5", "100", *command],
        env=outside | {"WINDLASS_QUIET_END": "1"},
        check=False,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def assert_same(path: Path, reference: Run) -> None:
    """Two ranks, every step, and the losses of the reference to rounding."""
    run = Run(path)
    assert run.state == "finished"
    starts = [event for event in run.events if event["event"] in ("started", "resumed")]
    assert {event["world"] for event in starts} == {2}
    assert [x["step"] for x in run.lines("train")] == list(range(1, 13))
    for kind in ("train", "eval"):
        mine, wanted = run.lines(kind), reference.lines(kind)
        for key in ("step", "tokens"):
            assert [x[key] for x in mine] == [x[key] for x in wanted]
        assert [x["loss"] for x in mine] == pytest.approx([x["loss"] for x in wanted], rel=1e-6)
