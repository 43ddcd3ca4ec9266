"""Python programs of a test as forks of its process, which has imported torch: a rank starts in a
tenth of a second instead of three.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import importlib
import inspect
import os
import runpy
import signal
import subprocess
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

import pytest

MODULES = "torch._dynamo", "windlass.cli", "windlass.training.trainer"
"""Imported once here, before the first fork; DDP imports the first one."""
PYTHONPATH = os.environ.get("PYTHONPATH")

execute_child = subprocess.Popen._execute_child
SIGNATURE = inspect.signature(execute_child)


def fork(self: subprocess.Popen, args: Any, *more: Any) -> None:
    """Instead of `Popen._execute_child`: fork this process if the command is a function, or
    `python -m MODULE`, `python -c CODE` or `python FILE` with this process's PYTHONPATH.

    `os.environ`, standard streams, signals, session and open files are those of a new process. The
    kernel's view of it (`/proc`, psutil) has this process's command line and environment.
    """
    words = [word if callable(word) else os.fspath(word) for word in args]
    how = SIGNATURE.bind(self, args, *more).arguments
    program = words if callable(words[0]) else words[2:] if words[1:2] == ["-P"] else words[1:]
    is_python = words[0] == sys.executable and (program[0] in ("-c", "-m") or program[0][0] != "-")
    path = (os.environ if how["env"] is None else how["env"]).get("PYTHONPATH")
    if not (callable(words[0]) or (is_python and path == PYTHONPATH)):
        execute_child(self, args, *more)
        return
    for module in MODULES:
        importlib.import_module(module)
    end_openmp_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12, if this process has other threads
        self.pid = os.fork()
    if self.pid == 0:
        begin(program, how)
    self._child_created = True
    names = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
    self._close_pipe_fds(*(how[name] for name in names))


def end_openmp_threads() -> None:
    """End this thread's pool of OpenMP threads: a child would wait for threads that it lacks."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split()[-1] for line in maps if "libgomp" in line}
    for path in paths:
        assert ctypes.CDLL(path).omp_pause_resource_all(2) == 0  # omp_pause_hard


class Forked(subprocess.Popen):
    """A process that is a fork of this one, if it runs Python."""

    _execute_child = fork


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Every program of Python that this process starts is a fork of it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess.Popen, "_execute_child", fork)
        yield


def run(command: list[Any], **how: Any) -> subprocess.CompletedProcess:
    """As `subprocess.run`, with a fork."""
    with forking():
        return subprocess.run(command, check=False, **how)


def launch(command: list[Any], worlds: Any, **more: Any) -> int:
    """As Windlass's `launch`, with forked ranks; `[FUNCTION]` is a command, too."""
    from windlass.launch import local

    with forking():
        return local.launch(command, worlds, **more)


def begin(program: list[Any], how: dict[str, Any]) -> NoReturn:
    """Become a new process that runs a program, in a child that was just forked."""
    code = 1
    try:
        atexit._clear()
        inherit(how)
        code = run_as_main(program)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        for thread in threading.enumerate():
            if thread is not threading.current_thread() and not thread.daemon:
                thread.join()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    os._exit(code)


def inherit(how: dict[str, Any]) -> None:
    """Have what a new process has of its parent, and no more."""
    if how["start_new_session"]:
        os.setsid()
    if how["process_group"] >= 0:
        os.setpgid(0, how["process_group"])
    streams = (how["p2cread"], how["c2pwrite"], how["errwrite"])
    for number, descriptor in enumerate(streams):
        if descriptor >= 0:
            os.dup2(descriptor, number)
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2 and number not in (*how["pass_fds"], null):
            with contextlib.suppress(OSError):  # the listing's own
                # the number stays taken: an object that the parent left will close it
                os.dup2(null, number, inheritable=False)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if how["cwd"] is not None:
        os.chdir(how["cwd"])
    if how["env"] is not None:
        os.environ.clear()
        os.environ.update(how["env"])
    if how["preexec_fn"]:
        how["preexec_fn"]()
    sys.stdin = sys.__stdin__ = stream(0, "r")
    sys.stdout = sys.__stdout__ = stream(1, "w")
    sys.stderr = sys.__stderr__ = stream(2, "w", buffering=1, errors="backslashreplace")
    faulthandler.cancel_dump_traceback_later()
    faulthandler.enable(sys.stderr)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")


def stream(descriptor: int, mode: str, **how: Any) -> TextIO:
    return open(descriptor, mode, closefd=False, encoding="utf-8", **how)


def run_as_main(program: list[Any]) -> int:
    """Call a function, or run a program of Python as the module `__main__`."""
    sys.modules["__main__"] = types.ModuleType("__main__")
    kind, *words = program
    with forking():
        if callable(kind):
            kind()
        elif kind == "-c":
            sys.argv = ["-c", *words[1:]]
            exec(words[0], vars(sys.modules["__main__"]))
        elif kind == "-m":
            sys.argv = words
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            sys.path.insert(0, str(Path(kind).parent))
            runpy.run_path(kind, run_name="__main__")
    return 0
