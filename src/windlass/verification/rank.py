"""One rank of the trainings of a proof: `python -m windlass.verification.rank TASK`."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import windlass
from windlass import processes
from windlass.launch.local import launch
from windlass.parallel import collectives
from windlass.parallel.context import TokenPart
from windlass.recipe import Recipe

# Errors that other trainers have had, to show that a proof sees them: object, name, replacement.
FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    # The ranks divide the loss by their own number of labels.
    "own count": (collectives, "count_async", lambda n, _: collectives.Pending(n, None, None)),
    # Norms have seen only this rank's tokens, and nobody adds up their gradients.
    "norms": (collectives, "sum_over_tensor_ranks", lambda *_: None),
    # Every rank has the labels of the first part of the sequence.
    "labels": (TokenPart, "labels", lambda part, whole: whole[:, : len(part.places)]),
    # Each stage clips by its own norm.
    "clipping": (collectives, "sum_over_all_ranks", lambda s, _: s),
}


def run_rank(task: dict[str, Any]) -> None:
    """Train each recipe of a task, whose files are in `recipes`, on `world` ranks.

    The task may have `faults`: for each recipe the name of an error to inject, or ""; and
    `kill_after`, a step.
    """
    faults = task.get("faults") or [""] * len(task["recipes"])
    for path, fault in zip(task["recipes"], faults, strict=True):
        with mock.patch.object(*FAULTS[fault]) if fault else contextlib.nullcontext():
            train(Recipe.load(path), task)
        gc.collect()  # the process groups of this training end here, not during the next one


def train(recipe: Recipe, task: dict[str, Any]) -> None:
    class AtStep(windlass.Callback):
        def on_step(self, now: Any) -> None:
            if now.step == task.get("kill_after"):
                while not any((recipe.run_dir / "checkpoints").glob("step-????????")):
                    time.sleep(0.01)
                os.kill(os.getpid(), signal.SIGKILL)

    windlass.train(recipe, callbacks=[AtStep()])


if __name__ == "__main__":
    processes.exit_with_parent()
    task = json.loads(sys.argv[1])
    if task["world"] > 1 and "RANK" not in os.environ:
        command = [*processes.MODULE, "windlass.verification.rank", sys.argv[1]]
        sys.exit(launch(command, task["world"]))
    run_rank(task)
