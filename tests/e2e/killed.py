"""A rank of a training that is killed: `python killed.py RECIPE KILL_AFTER [KEY=VALUE...]`.

After the step KILL_AFTER, once a checkpoint of an earlier step is committed, every rank kills
itself with SIGKILL (0: none). A rank that torchrun starts again trains to the end.
"""

import os
import signal
import sys
import time
from typing import Any

from windlass import Callback, Recipe, train

recipe, kill_after = Recipe.load(sys.argv[1], sys.argv[3:]), int(sys.argv[2])
if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
    kill_after = 0


class AtStep(Callback):
    def on_step(self, now: Any) -> None:
        if now.step != kill_after:
            return
        deadline, saved = time.monotonic() + 60, recipe.run_dir / "checkpoints"
        while not any(saved.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


train(recipe, callbacks=[AtStep()])
