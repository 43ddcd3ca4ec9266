"""What an error says, and how a rank that has failed ends."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys

import torch.distributed as dist

from windlass.errors import Stopped


def orderly(error: BaseException) -> bool:
    """Whether all ranks leave by this exception together: a stop that they agreed on."""
    return isinstance(error, Stopped)


LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "timed out",
    "timeout",
    "broken pipe",
    "socket",
    "nccl",
)


def lost_contact(error: BaseException) -> bool:
    """Whether an error only says that another rank is gone or late."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in LOST)


def headline(error: BaseException) -> str:
    """Kind and first line of an error, without gloo's source paths and good wishes."""
    text = re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", str(error).strip().split("\n")[0]).split(". This is typically")[0]
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__


def last_collective() -> str:
    """The last collective this rank entered, from the flight recorder; empty where it recorded none."""
    try:
        from torch._C._distributed_c10d import _dump_fr_trace_json  # type: ignore[attr-defined]

        entries = json.loads(_dump_fr_trace_json(True, False)).get("entries", [])
    except Exception:  # the recorder is a help, never a reason to fail
        return ""
    if not entries:
        return ""
    entry = entries[-1]
    return f"{entry.get('profiling_name', '?')} of {entry.get('input_sizes', '?')}, {entry.get('state', '?')}"


def end_here(code: int) -> None:
    """The end of a process that failed: the interpreter would take down groups whose threads still wait, and abort over it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
