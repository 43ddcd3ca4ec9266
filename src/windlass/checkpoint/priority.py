"""Lets a thread in the background give way to the training, where the system can."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import threading

NICE = 10
"""Low enough to give way, high enough to come to an end on a machine that is busy with other things."""
IOPRIO_SET = {"x86_64": 251, "aarch64": 30, "ppc64le": 273, "riscv64": 30}
"""The number of Linux's `ioprio_set` by machine: the C library has no function for it."""
WHO_PROCESS, CLASS_BEST_EFFORT, LOWEST = 1, 2, 7


def lower_this_thread() -> None:
    """Give the calling thread the lowest ordinary priority for the processor and the disk; on Linux only, silently."""
    if not sys.platform.startswith("linux"):
        return
    thread = threading.get_native_id()  # on Linux a thread is scheduled as a process is
    set_nice(thread, NICE)
    number = IOPRIO_SET.get(platform.machine())
    if number is not None:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).syscall(number, WHO_PROCESS, thread, CLASS_BEST_EFFORT << 13 | LOWEST)


def set_nice(thread: int, nice: int) -> None:
    """Set a thread's priority for the processor; raising it again takes rights that not everybody has."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, nice)
