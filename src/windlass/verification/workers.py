"""Ranks in processes of their own that train recipes in turn, so that each imports torch once.

`python -m windlass.verification.workers FOLDER WORLD` starts them. A task is a file `task-N.json` in
FOLDER; when rank R has done it, `done-N-R` is there too.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from windlass import processes
from windlass.fileio import Files

POLL_SECONDS = 0.02
TAIL_LINES = 12


@dataclass(frozen=True)
class Task:
    """Recipes that the first `world` ranks train, one after the other."""

    world: int
    recipes: list[str]  # their files
    faults: dict[str, str] = field(default_factory=dict)  # by recipe: an error for `inject`
    kill_after: int = 0  # the step after which each rank kills itself; 0: none


class Workers:
    def __init__(self, folder: Path, world: int):
        """Start `world` processes; they import torch while this one goes on."""
        folder.mkdir()
        self.folder, self.number, self.task = folder, -1, Task(0, [])
        command = [*processes.MODULE, "windlass.verification.workers", str(folder), str(world)]
        environ = os.environ | {processes.PARENT: str(os.getpid())}
        with (folder / "output").open("wb") as output:
            self.process = subprocess.Popen(
                command, env=environ, stdout=output, stderr=output, start_new_session=True
            )

    def begin(self, task: Task) -> None:
        self.number, self.task = self.number + 1, task
        path = self.folder / f"task-{self.number}.json"
        Files().replace(path, json.dumps(asdict(task)).encode(), durable=False)

    def wait(self) -> None:
        """Wait until every rank has done the task."""
        left = [self.folder / f"done-{self.number}-{rank}" for rank in range(self.task.world)]
        while left := [path for path in left if not path.exists()]:
            self.check()
            time.sleep(POLL_SECONDS)

    def check(self) -> None:
        """RuntimeError if the processes have ended."""
        if (code := self.process.poll()) is not None:
            output = (self.folder / "output").read_text(errors="replace").splitlines()
            ended = f"a training ended with exit code {code}:"
            raise RuntimeError("\n".join([ended, *output[-TAIL_LINES:]]))

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def main(folder: str, world: str) -> int:
    """Be a rank, or the launcher of several ranks, which does not import torch."""
    from windlass.launch.local import launch

    processes.exit_with_parent()
    if world != "1" and "RANK" not in os.environ:
        command = [*processes.MODULE, "windlass.verification.workers", folder, world]
        return launch(command, int(world))
    serve(Path(folder), int(os.environ.get("RANK", "0")))
    return 0


def serve(folder: Path, rank: int) -> None:
    """Train the recipes of each task for this rank, until the process is killed."""
    import windlass.training.api  # noqa: F401 (imports torch before the first task is there)

    for number in itertools.count():
        path = folder / f"task-{number}.json"
        while not path.exists():
            time.sleep(POLL_SECONDS)
        task = Task(**json.loads(path.read_text()))
        if rank >= task.world:
            continue
        if task.world > 1:
            size = str(task.world)
            os.environ |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        for recipe in task.recipes:
            with inject(task.faults.get(recipe, "")):
                train(recipe, task.kill_after)
            gc.collect()  # the process groups of this training end here, not during the next one
        (folder / f"done-{number}-{rank}").touch()


def train(recipe_file: str, kill_after: int) -> None:
    import windlass
    from windlass.recipe import Recipe

    recipe = Recipe.load(recipe_file)

    class KillAfter(windlass.Callback):
        def on_step(self, now: Any) -> None:
            if now.step == kill_after:
                while not any((recipe.run_dir / "checkpoints").glob("step-????????")):
                    time.sleep(POLL_SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)

    windlass.train(recipe, callbacks=[KillAfter()] if kill_after else [])


def inject(fault: str) -> contextlib.AbstractContextManager[Any]:
    """An error that other trainers have had, to show that a proof sees it; empty: none."""
    from unittest.mock import patch

    from windlass.parallel import collectives
    from windlass.parallel.context import TokenPart

    match fault:
        case "own count":  # each rank divides the loss by its own number of labels
            local = lambda n, _: collectives.Pending(n, None, None)  # noqa: E731
            return patch.object(collectives, "count_async", local)
        case "norms":  # norms have seen a rank's own tokens, and nobody adds up their gradients
            return patch.object(collectives, "sum_over_tensor_ranks", lambda *_: None)
        case "labels":  # every rank has the labels of the first part of the sequence
            first = lambda part, whole: whole[:, : len(part.places)]  # noqa: E731
            return patch.object(TokenPart, "labels", first)
        case "clipping":  # each stage clips by its own norm
            return patch.object(collectives, "sum_over_all_ranks", lambda tensor, _: tensor)
    assert not fault, fault
    return contextlib.nullcontext()


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
