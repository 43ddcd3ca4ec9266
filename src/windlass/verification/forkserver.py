"""Trainings on ranks that are forks of one process, which has imported torch and computed nothing.

A rank so starts in a tenth of a second instead of five. The process reads a task from each line of
its input; it answers with the process group of the ranks, and when they have ended with their exit
codes.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from typing import Any

from windlass import processes
from windlass.errors import DONE, FAILED, RunFailed, UserError

PYTHON = (*processes.MODULE[:-1], "-c")
POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Task:
    """A recipe that `world` ranks train."""

    recipe: str  # its file
    world: int
    output: str  # the file to which the ranks write
    branch_from: str = ""  # RUN@STEP
    kill_after: int = 0  # the step after which each rank kills itself; 0: none


class ForkServer:
    def __init__(self) -> None:
        """Start the process, which imports torch while this one goes on."""
        self.process = subprocess.Popen(
            [*PYTHON, "from windlass.verification.forkserver import serve; serve()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, task: Task) -> int:
        """Start the ranks of a task; returns their process group. `wait` comes before the next."""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(asdict(task)), file=self.process.stdin, flush=True)
        return int(self._answer())

    def wait(self) -> list[int]:
        """The exit codes of the ranks, when all have ended; negative: a signal."""
        codes: list[int] = self._answer()
        return codes

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"the fork server ended with exit code {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()  # closes its input, and ends it


def serve() -> None:
    """Do the tasks of the standard input, one at a time; ranks end with this process."""
    import windlass.training.rank  # noqa: F401

    while line := sys.stdin.readline():
        ranks = start_ranks(Task(**json.loads(line)))
        print(json.dumps(ranks[0]), flush=True)
        codes: dict[int, int] = {}
        while len(codes) < len(ranks):
            if select.select([sys.stdin], [], [], POLL_SECONDS)[0]:  # the input has ended
                os.killpg(ranks[0], signal.SIGKILL)
                return
            for process in set(ranks) - codes.keys():
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[process] = os.waitstatus_to_exitcode(status)
        print(json.dumps([codes[process] for process in ranks]), flush=True)


def start_ranks(task: Task) -> list[int]:
    """Fork the ranks of a task; returns their process ids, of which the first is their group."""
    ranks: list[int] = []
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listening:
        for rank in range(task.world):
            if child := os.fork():
                ranks.append(child)
                with contextlib.suppress(PermissionError):  # the child has done it already
                    os.setpgid(child, ranks[0])
                continue
            os.setpgid(0, ranks[0] if ranks else 0)
            code = FAILED
            try:
                become_rank(task, rank, listening)
                train(task)
                code = DONE
            except (UserError, RunFailed) as error:
                print(error)
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush()
            os._exit(code)
    return ranks


def become_rank(task: Task, rank: int, listening: socket.socket) -> None:
    """Have the output and the variables of a rank that `launch.local` has started."""
    output = os.open(task.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ[processes.PARENT] = str(os.getppid())
    processes.exit_with_parent()
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
