"""Trainings on ranks that are forks of one process, which has imported torch and computed nothing.

A rank so starts in a tenth of a second instead of five.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from typing import Any

from windlass import processes
from windlass.errors import FAILED, RunFailed, UserError

FORKS = multiprocessing.get_context("forkserver")
POLL_SECONDS = 0.02
# A rank would spend 3 seconds on the import of FSDP2, with torch's compiler and sympy.
PRELOADED = ["windlass.training.rank", "torch.distributed.fsdp", "torch._dynamo"]


@dataclass(frozen=True)
class Task:
    """A recipe that `world` ranks train."""

    recipe: str  # its file
    world: int
    output: str  # the file to which the ranks write
    branch_from: str = ""  # RUN@STEP
    kill_after: int = 0  # the step after which each rank kills itself; 0: none


def start(task: Task) -> list[ForkServerProcess]:
    """Start the ranks of a task, which end with this process."""
    FORKS.set_forkserver_preload(PRELOADED)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        how = [(task, rank, listening) for rank in range(task.world)]
        ranks = [FORKS.Process(target=run_rank, args=args, daemon=True) for args in how]
        for rank in ranks:
            rank.start()
    return ranks


def wait(ranks: list[ForkServerProcess]) -> list[int | None]:
    """The exit codes of the ranks, when all have ended; negative: a signal."""
    for rank in ranks:
        rank.join()
    return [rank.exitcode for rank in ranks]


def run_rank(task: Task, rank: int, listening: socket.socket) -> None:
    threading.Thread(target=end_with_parent, daemon=True).start()
    become_rank(task, rank, listening)
    try:
        train(task)
    except (UserError, RunFailed) as error:
        print(error)
        sys.exit(FAILED)


def end_with_parent() -> None:
    """End this rank with the process of `start`. The fork server itself lives as long as a rank."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(FAILED)


def become_rank(task: Task, rank: int, listening: socket.socket) -> None:
    """Have the output and the variables of a rank that `launch.local` has started."""
    output = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if task.world == 1:
        return
    host, port = listening.getsockname()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(task.world),
        "LOCAL_WORLD_SIZE": str(task.world),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "WINDLASS_LAUNCHED": "1",
    }
    if rank == 0:
        os.environ[processes.STORE_FD] = str(os.dup(listening.fileno()))
    listening.close()


def train(task: Task) -> None:
    import windlass
    from windlass.recipe import Recipe

    recipe = Recipe.load(task.recipe)
    checkpoints = recipe.run_dir / "checkpoints"

    class KillAfter(windlass.Callback):
        def on_step(self, now: Any) -> None:
            if now.step == task.kill_after:
                while not any(checkpoints.glob("step-????????")):
                    time.sleep(POLL_SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)

    callbacks = [KillAfter()] if task.kill_after else []
    windlass.train(recipe, callbacks=callbacks, branch_from=task.branch_from)
