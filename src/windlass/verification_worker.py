"""One rank of a proof: `python -m windlass.verification_worker '{"recipe": ..., "kill_after": ...}'`, started by `verify`."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from windlass.errors import BAD_INPUT, DONE, STOPPED, Stopped, UserError


class Recorder:
    """A set of samples that remembers which ones were read, in order."""

    def __init__(self, inner: Any):
        self.inner, self.reads = inner, []  # type: ignore[var-annotated]

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels of the samples."""
        self.reads.append([int(i) for i in indices])
        found: tuple[np.ndarray, np.ndarray] = self.inner.read(indices)
        return found


def main(task: dict[str, Any]) -> int:
    """Train a recipe as this process's rank; `kill_after` steps, or write the samples of the steps done to `record`."""
    from dataclasses import replace

    from windlass import Recipe, train
    from windlass.data.dataset import open_data

    recipe = Recipe.load(task["recipe"], task["overrides"])
    data = open_data(recipe)
    recorder = Recorder(data.train)
    steps_done = 0

    def on_step(step: int, _: object) -> None:
        nonlocal steps_done
        steps_done += 1
        if step == task.get("kill_after"):
            while not any((recipe.run_dir / "checkpoints").glob("step-*")):
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    try:
        train(recipe, data=replace(data, train=recorder), on_step=on_step, stop_at=task.get("stop_at", 0))
        code = DONE
    except Stopped:
        code = STOPPED
    except UserError as error:
        print(f"windlass: {error}", file=sys.stderr)
        return BAD_INPUT
    if "record" in task:
        world, rank = int(os.environ.get("WORLD_SIZE", "1")), os.environ.get("RANK", "0")
        each = recipe.batch(world).accumulation
        Path(f"{task['record']}-{rank}.json").write_text(json.dumps(recorder.reads[: steps_done * each]))
    return code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
