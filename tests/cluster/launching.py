"""Commands that train, started as a user starts them."""

from __future__ import annotations

import os
import subprocess
import sys

TRAIN = [sys.executable, "-m", "windlass", "train", "quickstart"]
DDP = {"parallel.strategy": "ddp"}


def launched(command: list[str]) -> subprocess.CompletedProcess[str]:
    """A command of a plain shell, to its end, with all its output in `.stdout`."""
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "PMI_", "OMPI_"))}
    return subprocess.run(
        ["timeout", "-k", "5", "100", *command], env=outside | {"WINDLASS_QUIET_END": "1"}, check=False, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
