"""Two trainings never write one run directory: the second waits a moment for the first to end, then is refused."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import IO

from windlass.errors import UserError
from windlass.run import LOCK, OCCUPIED

WAIT_SECONDS = 10.0
"""A run that was just killed may still be ending."""


def acquire_run_lock(run: Path, seconds: float = WAIT_SECONDS) -> IO[str] | None:
    """Hold the run's lock until the returned file is closed or this process ends, however it ends.

    None where the file system knows no locks. Raises UserError, naming the holder, where another process still trains in
    the directory after `seconds`.
    """
    file = (run / LOCK).open("a+", encoding="utf-8")
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, run / LOCK):
                break
            file.close()  # its directory was set aside while we waited: another one has the name now
            run.mkdir(parents=True, exist_ok=True)
            file = (run / LOCK).open("a+", encoding="utf-8")
        except BlockingIOError:
            if time.monotonic() >= end:
                who = _holder(file)
                file.close()
                raise UserError(f"{OCCUPIED} {run} already ({who}); wait for it, or stop it") from None
            time.sleep(0.1)
        except OSError:
            file.close()
            return None
    file.seek(0)
    file.truncate()
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    file.flush()
    return file


def _is_at(file: IO[str], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _holder(file: IO[str]) -> str:
    file.seek(0)
    try:
        known = json.loads(file.read())
        return f"process {known['pid']} on {known['host']}"
    except (ValueError, KeyError, TypeError):
        return "of an unknown number"
