"""Exactly one process works in a directory; the others wait without a time-out.

The lock is the kernel's (`flock`), so it goes with its process however that ends: a stale lock cannot be. Where a file
system does not know locks across hosts, two hosts may do the same work: what they write is the same, and each file is
committed by a rename, so that the result is right all the same.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from windlass.errors import UserError

LOCK = ".lock"
POLL_SECONDS = 0.5
TELL_AFTER_SECONDS, TELL_SECONDS = 2.0, 60.0
"""When a waiting process first says so, and how often it says it again."""
NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


@contextmanager
def only_one(directory: Path, done: Callable[[], bool], notify: Callable[[str], None], what: str) -> Iterator[bool]:
    """Hold the directory's lock while `done()` is false; yields whether there is something left to do.

    While another process holds the lock, `done` is asked again twice a second; whoever gets the lock after the holder died
    goes on from where it was.
    """
    with _file(directory) as file:
        waited = 0.0
        while not _try(file):
            if done():
                yield False
                return
            if waited >= TELL_AFTER_SECONDS and (waited - TELL_AFTER_SECONDS) % TELL_SECONDS < POLL_SECONDS:
                notify(f"waiting for {_holder(directory)}, which {what} {directory}")
            time.sleep(POLL_SECONDS)
            waited += POLL_SECONDS
        if done():
            yield False
            return
        file.seek(0)
        file.truncate()
        file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
        file.flush()
        yield True


def _file(directory: Path) -> IO[str]:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return (directory / LOCK).open("a+", encoding="utf-8")
    except FileExistsError:
        raise UserError(f"{directory} is a file; give another data.dir") from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written ({error.strerror}); give another data.dir") from None


def _try(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        if error.errno not in NO_LOCKS:
            raise
    return True


def _holder(directory: Path) -> str:
    try:
        known = json.loads((directory / LOCK).read_text(encoding="utf-8"))
        return f"process {known['pid']} on {known['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
