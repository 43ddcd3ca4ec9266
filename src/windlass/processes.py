"""The contract of a launcher and its ranks; the processes and GPUs of this machine. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.launch.schedulers import host_name

WATCH_DIR = "WINDLASS_WATCH_DIR"  # of the ranks' status files; unset without our launcher
PARENT = "WINDLASS_PARENT"  # the process that this one must not outlive: a launcher or a sweep
QUIET_END = "WINDLASS_QUIET_END"  # set if another process shows the end of this run
# Rank 0 gets a socket that listens on MASTER_PORT already, so nobody else can take the port.
STORE_FD = "WINDLASS_STORE_FD"
# In a job: a directory that its hosts share, for the ranks' exit codes and failures.
REPORTS = "WINDLASS_REPORTS"
STOPPED = "stopped"  # the phase of a rank that has saved and is about to exit
# the phases of a step; it is done after the last one
STEP_PHASES = ("data", "forward", "backward", "optimizer")
# How a child runs a module: without -P Python would import files of the working directory, such as
# the user's random.py, in place of its own modules.
MODULE = (sys.executable, "-P", "-m")
WINDLASS = (*MODULE, "windlass")  # the command line, as a child process of this one
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_MMAP_MAX = -1, -3, -4  # of malloc.h


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_share(ranks: int) -> int:
    """The threads for each of `ranks` ranks on this machine: an equal share of its cores."""
    return max(1, usable_cores() // ranks)


def visible_gpus() -> list[str]:
    """This process's NVIDIA GPUs, as CUDA reads CUDA_VISIBLE_DEVICES; at most one MIG instance."""
    count = None
    with contextlib.suppress(Exception):  # no driver, no library
        import pynvml

        pynvml.nvmlInit()
        count = pynvml.nvmlDeviceGetCount()
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is None:
        return [str(number) for number in range(count or 0)]
    names = list[str]()
    for name in map(str.strip, visible.split(",")):
        is_number = name.isdigit() and (count is None or int(name) < count)
        if not is_number and not name.startswith(("GPU-", "MIG-")):
            break
        names.append(name)
    return names[:1] if names and names[0].startswith("MIG-") else names


def nvml_handle(nvml: Any, name: str) -> Any:
    """NVML's handle by index, or by UUID, also as torch gives it: without `GPU-`."""
    if name.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    is_whole = name.startswith(("GPU-", "MIG-"))
    return nvml.nvmlDeviceGetHandleByUUID(name if is_whole else f"GPU-{name}")


def exit_with_parent(default: int = 0) -> None:
    """End this process with exit code 1 soon after the parent that PARENT names, or `default`."""
    parent = int(os.environ.pop(PARENT, default))

    def poll() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    if parent:
        threading.Thread(target=poll, name="windlass-parent", daemon=True).start()


@contextlib.contextmanager
def catch_signals(numbers: Iterable[int], handle: Callable[[int], object]) -> Iterator[None]:
    """Call `handle` with the number of each signal that comes, until the block ends.

    Outside the main thread the block catches nothing. An ignored SIGHUP (nohup) stays ignored.
    """
    previous = dict[int, Any]()
    for number in numbers if threading.current_thread() is threading.main_thread() else ():
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            previous[number] = signal.signal(number, lambda number, _: handle(number))
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler or signal.SIG_DFL)  # None: it was not set from Python


def kill_with_parent() -> None:
    """Have the kernel kill this process when the thread that forked it ends (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def keep_freed_memory(every_size: bool = False) -> bool:
    """Have glibc reuse freed memory instead of returning it; False for another C library.

    By default the next step faults in every page again: 5 to 7 % of a step. Blocks above 32 MB are
    still returned unless `every_size`, for the time after the first step: what is built before
    leaves holes in the heap that no such block fits.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    # Setting the trim threshold fixes the other one, which would grow from 128 kB up to 32 MB.
    return bool(
        mallopt
        and mallopt(M_MMAP_THRESHOLD, 2**25)
        and mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
        and mallopt(M_MMAP_MAX, 0 if every_size else 65_536)
    )


@dataclass(frozen=True)
class Failure:
    """How a rank failed.

    `secondary`: it only lost contact with another rank, which failed first. `lost`: it fell silent.
    """

    rank: int
    host: str
    step: int
    phase: str
    error: str
    time: float
    secondary: bool = False
    lost: bool = False
    place: str = ""  # the rank's coordinates in the mesh, such as `pp 1, dp 0, tp 1`
    again: bool = False  # whether the launcher starts all ranks again

    def __str__(self) -> str:
        rank = f"rank {self.rank} ({self.place})" if self.place else f"rank {self.rank}"
        place = f"{rank} on {self.host} at step {self.step}, phase {self.phase}"
        return f"{place}: {self.error}"


class RankStatus:
    """Where this rank is, also in a file: host, step, phase and its start (Unix time)."""

    def __init__(self, rank: int, directory: str | None = None):
        self.rank, self.host, self.directory = rank, socket.gethostname(), directory
        self.place = ""  # this rank's coordinates in the mesh, once it has them
        self._file = -1
        if directory:
            path = Path(directory, f"status-{rank}.json")
            with contextlib.suppress(OSError):  # a full disk costs the launcher's message only
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT)
        self.mark(0, "start")

    def mark(self, step: int, phase: str) -> None:
        """Work on `phase` of `step` begins. Takes microseconds."""
        self.step, self.phase, self.since = step, phase[:80], time.time()
        if self._file >= 0:  # one write at offset 0, so that a kill never leaves half of it
            with contextlib.suppress(OSError):
                os.pwrite(self._file, json.dumps(self.fields()).ljust(512).encode(), 0)

    def fields(self) -> dict[str, Any]:
        names = ("rank", "host", "step", "phase", "since", "place")
        return {name: getattr(self, name) for name in names}

    def failure(self, error: str, secondary: bool = False, again: bool = False) -> Failure:
        at = (self.rank, self.host, self.step, self.phase)
        return Failure(*at, error, time.time(), secondary, place=self.place, again=again)

    def write(self, failure: Failure) -> None:
        """Tell the launcher what ended this rank: its own failure, or another rank's."""
        for directory in filter(None, (self.directory, os.environ.get(REPORTS))):
            with contextlib.suppress(OSError):
                path = Path(directory, f"failure-{self.rank}.json")
                path.write_text(json.dumps(asdict(failure)))
                for name in (host_name(os.environ) or self.host, self.host.partition(".")[0]):
                    Path(directory, f"host-{name}").touch()


def first_to_show(message: str) -> bool:
    """Whether no other rank of a job has shown this message, which several ranks may have."""
    try:
        if reports := os.environ.get(REPORTS):
            Path(reports, f"shown-{zlib.crc32(message.encode())}").touch(exist_ok=False)
    except OSError as error:
        return not isinstance(error, FileExistsError)
    return True


def report_code(code: Any) -> None:
    """Tell `launch` this process's exit code, which torchrun and mpiexec change."""
    with contextlib.suppress(OSError):
        if reports := os.environ.get(REPORTS):
            Path(reports, f"code-{socket.gethostname()}-{os.getpid()}").write_text(str(code))
