"""A process that imports torch once, and forks itself for each `windlass` command of a study.

A study starts it as `python -m windlass.forkserver` (`study.process.ForkServer`). It reads a line of
JSON for each command: the arguments, and the file for the output. It writes the process id of each
fork when the fork begins, and again, with the exit code, when the fork ends.

Forking is safe because nothing has computed here: torch has no threads of autograd, OpenMP or CUDA
yet. So a fork starts its own, and computes what a new process would.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import sys

from windlass.cli import main, spin_briefly
from windlass.errors import DONE, FAILED
from windlass.processes import PARENT


def serve() -> list[str]:
    """Returns in each fork, with its arguments; ends with the process that reads the output."""
    os.close(os.pidfd_open(os.getpid()))  # raises here if the kernel or a container forbids it
    commands, ends = open(0, "rb", buffering=0, closefd=False), dict[int, int]()  # noqa: SIM115
    while True:
        ready = select.select([0, *ends], [], [])[0]
        for end in ends.keys() & ready:
            pid = ends.pop(end)
            os.close(end)
            report(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        if 0 in ready:
            if not (line := commands.readline()):
                sys.exit()  # the study has ended; the forks follow (`exit_with_parent`)
            arguments, log = json.loads(line)
            if not (pid := os.fork()):
                for end in ends:
                    os.close(end)
                become(log)
                return list(arguments)
            ends[os.pidfd_open(pid)] = pid


def report(pid: int, code: int | None = None) -> None:
    os.write(1, f"{json.dumps([pid, code])}\n".encode())


def become(log: str) -> None:
    """Make this fork a session of its own, whose output goes to a file."""
    os.setsid()
    report(os.getpid())
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)


def leave() -> None:
    """End a fork without Python's own end, which would copy the shared memory to free it: 0.2 s."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    exit_code = FAILED  # unless `main` ends as it should
    atexit.register(leave)  # the first to be registered is the last to be called
    gc.disable()
    spin_briefly()
    import windlass.cli.train
    import windlass.launch.local
    import windlass.training.api
    import windlass.training.trainer  # noqa: F401

    gc.freeze()  # the forks share the memory of these objects
    gc.enable()
    os.environ[PARENT] = str(os.getpid())
    arguments = serve()
    sys.orig_argv[3:], sys.argv[1:] = ["windlass", *arguments], arguments
    try:
        main()
    except SystemExit as end:
        exit_code = int(end.code or DONE)
        raise
