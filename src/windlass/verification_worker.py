"""One rank of a proof: `python -m windlass.verification_worker '{"recipe": ..., "kill_after": ...}'`, started by `verify`.

The task: `recipe` and `overrides` to train, `stop_at` a step, `kill_after` so many steps, or `record`: write the indices of
the samples of the steps that were done, a list for each micro-batch, to `RECORD-RANK.json`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from windlass.errors import BAD_INPUT, DONE, STOPPED, Stopped, UserError
from windlass.processes import PARENT, exit_with_parent


class Recorder:
    """A set of samples that remembers which ones were read, in order."""

    def __init__(self, inner: Any):
        self.inner, self.reads = inner, list[list[int]]()

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of the samples."""
        self.reads.append([int(i) for i in indices])
        tokens, labels = self.inner.read(indices)
        return tokens, labels


def main(task: dict[str, Any]) -> int:
    """Do the task as this process's rank; the exit code."""
    from windlass import Recipe, train
    from windlass.data.dataset import open_data

    if parent := os.environ.pop(PARENT, ""):
        exit_with_parent(int(parent))
    recipe = Recipe.load(task["recipe"], task["overrides"])
    data = open_data(recipe)
    recorder = Recorder(data.train)
    steps_done = 0

    def on_step(step: int, _: object) -> None:
        nonlocal steps_done
        steps_done += 1
        if step == task.get("kill_after"):
            while not any((recipe.run_dir / "checkpoints").glob("step-????????")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    code = DONE
    try:
        train(recipe, data=dataclasses.replace(data, train=recorder), on_step=on_step, stop_at=task.get("stop_at", 0))
    except Stopped:
        code = STOPPED
    except UserError as error:
        print(f"windlass: {error}", file=sys.stderr)
        return BAD_INPUT
    if "record" in task:  # the loader reads ahead: only the steps that were done count
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
        micro_batches = steps_done * recipe.train.global_batch // (world * recipe.train.micro_batch)
        Path(f"{task['record']}-{rank}.json").write_text(json.dumps(recorder.reads[:micro_batches]))
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
