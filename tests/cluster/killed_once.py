"""A rank of a training whose rank 1 kills itself after step 8 of the first start: `python
killed_once.py [KEY=VALUE...]`.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parent.parent))
from helpers import wait_for
from windlass import Callback, Recipe, train

recipe = Recipe.load("quickstart", sys.argv[1:])
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


class AtStep(Callback):
    def on_step(self, now: Any) -> None:
        if first and now.step == 8:
            wait_for(lambda: any((recipe.run_dir / "checkpoints").glob("step-*")), 60)
            if os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)


train(recipe, callbacks=[AtStep()])
