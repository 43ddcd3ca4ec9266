"""Processes of Windlass: their cores, GPUs, parents, signals and freed memory. No torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

PARENT = "WINDLASS_PARENT"  # the process that this one must not outlive: a launcher or a sweep
QUIET_END = "WINDLASS_QUIET_END"  # set if another process shows the end of this run
# Rank 0 gets a socket that listens on MASTER_PORT already, so nobody else can take the port.
STORE_FD = "WINDLASS_STORE_FD"
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
