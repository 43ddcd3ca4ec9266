"""Where the proofs run: a directory with short trainings.

Their ranks are forks of one process, which has imported torch and computed nothing. So a rank
starts in a tenth of a second instead of five.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from windlass import processes
from windlass.errors import FAILED, RunFailed, UserError
from windlass.recipe import Recipe
from windlass.recipe.layers import dotted
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run

FORKS = multiprocessing.get_context("forkserver")
# A rank would spend 3 seconds on the import of FSDP2, with torch's compiler and sympy.
PRELOADED = ["windlass.training.rank", "torch.distributed.fsdp", "torch._dynamo"]
POLL_SECONDS = 0.02

STEPS, BATCH, MICRO = 12, 8, 2
TINY = {
    "model": {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab": 0, "dropout": 0.1},
    "data": {"tokenizer": "byte", "val_fraction": 0.1},
}
COMMON = {
    "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": MICRO, "compile": False},
    "checkpoint": {"every": 1, "keep_last": 2 * STEPS, "best": "loss"},
    "eval": {"every": 0, "sample_every": 0, "suites": ["loss"]},
    "telemetry": {"every": 1, "trackers": []},
    "parallel": {"strategy": "auto", "timeout_seconds": 120, "startup_timeout_seconds": 300},
    **NO_LAYOUT,
    "optim.schedule.warmup": 2,
}
TAIL_LINES = 12
MOST_DATA_RANKS = 4  # more would prove nothing else
Settings = Mapping[str, Any]  # by dotted key


class Bench:
    """A directory for the runs, and their base: a tiny recipe, or the given one shortened."""

    def __init__(
        self,
        folder: Path,
        recipe: str = "",
        overrides: Sequence[str] = (),
        worlds: Sequence[int] = (1, 2, 4),
        kills: int = 10,
    ):
        import torch

        self.folder, self.recipe = folder.resolve(), recipe or "quickstart"
        self.worlds, self.kills = [w for w in worlds if w <= MOST_DATA_RANKS], kills
        self.most = max(worlds)  # ranks of a layout
        self.base = dotted(COMMON) | {"data.dir": str(self.folder / "data")}
        self.base["train.deterministic"] = torch.cuda.is_available()
        # One number for all worlds, because threads change bits.
        self.base["train.threads"] = processes.thread_share(self.most)
        if not recipe:
            text = self.folder / "text.txt"
            text.write_text(Path(__file__).read_text(encoding="utf-8")[:900], encoding="utf-8")
            self.base |= dotted(TINY) | {"data.source": str(text)}
        self.base |= dotted(overrides)
        self.model = self.settings("model").model

    def settings(self, run: str, changes: Settings | None = None) -> Recipe:
        """The recipe of a run: the base with changes."""
        place = {"run.dir": str(self.folder / run)}
        return Recipe.load(self.recipe, self.base | dotted(changes or {}) | place)

    def train(self, run: str, changes: Settings | None = None, world: int = 1, **more: Any) -> Run:
        """Train on ranks, each a process; `more`: as `start`. RuntimeError if a rank fails."""
        if any(codes := wait(self.start(run, changes, world, **more))):
            raise RuntimeError(f"a training failed (exit codes {codes}):\n{self.tail(run)}")
        return Run(self.folder / run)

    def start(
        self, run: str, changes: Settings | None = None, world: int = 1, **more: Any
    ) -> list[ForkServerProcess]:
        """Begin to train; returns the ranks, which end with this process.

        `more`: `branch_from`, RUN@STEP; `kill_after`, the step after which each rank kills itself.
        """
        recipe, output = self.folder / f"{run}.toml", self.folder / f"{run}.out"
        recipe.write_text(self.settings(run, changes).toml(), encoding="utf-8")
        FORKS.set_forkserver_preload(PRELOADED)
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
            args = [(recipe, output, rank, world, listening) for rank in range(world)]
            ranks = [FORKS.Process(target=run_rank, args=x, kwargs=more, daemon=True) for x in args]
            for rank in ranks:
                rank.start()
        return ranks

    def tail(self, run: str) -> str:
        lines = (self.folder / f"{run}.out").read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])


def wait(ranks: Sequence[ForkServerProcess]) -> list[int | None]:
    """The exit codes of the ranks, when all have ended; negative: a signal."""
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def run_rank(
    recipe_file: Path,
    output: Path,
    rank: int,
    world: int,
    listening: socket.socket,
    branch_from: str = "",
    kill_after: int = 0,
) -> None:
    """Train as a rank that `launch.local` has started, in a process of the fork server."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:  # the fork server itself lives as long as a rank
        parent.join()
        os._exit(FAILED)

    threading.Thread(target=end_with_parent, daemon=True).start()
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if world > 1:
        host, port = listening.getsockname()
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WINDLASS_LAUNCHED": "1"}
        os.environ |= {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
        os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port)}
        if rank == 0:
            os.environ[processes.STORE_FD] = str(os.dup(listening.fileno()))
        listening.close()
    import windlass

    recipe = Recipe.load(recipe_file)
    checkpoints = recipe.run_dir / "checkpoints"

    class KillAfter(windlass.Callback):
        def on_step(self, now: Any) -> None:
            if now.step == kill_after:
                while not any(checkpoints.glob("step-????????")):
                    time.sleep(POLL_SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [KillAfter()] if kill_after else []
    try:
        windlass.train(recipe, callbacks=callbacks, branch_from=branch_from)
    except (UserError, RunFailed) as error:
        print(error)
        sys.exit(FAILED)
