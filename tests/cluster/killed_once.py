"""A rank of a training whose rank 1 kills itself after step 8 of the first start: `python killed_once.py [KEY=VALUE...]`."""

from __future__ import annotations

import os
import signal
import sys
import time

from windlass import Recipe, train

recipe = Recipe.load("quickstart", sys.argv[1:])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def on_step(step: int, _: object) -> None:
    if not first or step != 8:
        return
    deadline = time.monotonic() + 60
    while not any((recipe.run_dir / "checkpoints").glob("step-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)


train(recipe, on_step=on_step)
