"""What a launcher and its workers agree on: variables, files and signals. No torch.

The launcher gives its workers a directory (`WATCH_DIR`). In it each rank keeps its *place* (step and phase, in a mapped
file, so that it is current even after a SIGKILL), on request the stacks of its threads, and the *failure* that ended it.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import signal
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

WATCH_DIR = "WINDLASS_WATCH_DIR"
"""The directory that launcher and workers share; unset without a launcher of ours."""
PARENT = "WINDLASS_PARENT"
"""The launcher's process id."""
STORE_FD = "WINDLASS_STORE_FD"
"""Rank 0: a listening socket for the store on MASTER_PORT, opened by the launcher, so that nobody else takes the port."""

STACKS_SIGNAL: int | None = signal.SIGRTMIN + 4 if hasattr(signal, "SIGRTMIN") else None
"""Asks a worker for the stacks of all its threads (SIGUSR1 and SIGUSR2 belong to the schedulers)."""

WATCHING = "windlass/parallel/heartbeat.py"
"""Threads that run this file say nothing about a hang."""

_PLACE_BYTES = 512
_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent`, its parent, ends (Linux); at once if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def keep_freed_memory() -> bool:
    """Have the C library reuse memory that was freed instead of handing it back; whether it can be told so (glibc).

    Left to itself, glibc gives the top of the heap back to the kernel when the backward pass has freed the activations, and
    the next step pays for every page again. Blocks above 32 MB still come and go, so the peak stays what it was.
    """
    if sys.platform != "linux":
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # The second setting turns off that the first one adapts by itself, from 128 kB on up to 32 MB: so it goes to the limit.
    return bool(mallopt(_M_MMAP_THRESHOLD, 2**25) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))


class Place:
    """Where this rank is, for whoever asks after it: step, phase and since when. Marking costs microseconds."""

    def __init__(self, rank: int, directory: str | None = None):
        self.rank, self.step, self.phase, self.since, self.steady = rank, 0, "start", time.time(), False
        self._map: mmap.mmap | None = None
        self._names: dict[str, str] = {}
        if directory:
            path = Path(directory) / f"place-{rank}.json"
            path.write_bytes(b" " * _PLACE_BYTES)
            with path.open("r+b") as file:
                self._map = mmap.mmap(file.fileno(), _PLACE_BYTES)
        self.mark(0, "start")

    def mark(self, step: int, phase: str) -> None:
        """Say that work on `phase` of `step` begins."""
        self.step, self.phase, self.since = step, phase, time.time()
        if self._map is not None:
            name = self._names.get(phase) or self._names.setdefault(phase, json.dumps(phase[:80]))
            text = f'{{"rank": {self.rank}, "step": {step}, "phase": {name}, "since": {self.since}}}'
            self._map[:] = text.encode().ljust(_PLACE_BYTES)

    def fields(self) -> dict[str, Any]:
        """As a JSON object."""
        return {"rank": self.rank, "step": self.step, "phase": self.phase[:80], "since": self.since}


def read_place(directory: str | Path, rank: int) -> dict[str, Any]:
    """The last place of a rank; empty where it never said."""
    return _json(Path(directory) / f"place-{rank}.json")


@dataclass(frozen=True)
class Failure:
    """How a rank ended: `first` is false where it only met the loss of another rank."""

    rank: int
    host: str
    step: int
    phase: str
    error: str
    time: float
    first: bool = True
    collective: str = ""

    def write(self, directory: str | Path, rank: int) -> None:
        """Leave it for the launcher as what ended `rank`."""
        path = Path(directory) / f"failure-{rank}.json"
        path.write_text(json.dumps(asdict(self)))

    def __str__(self) -> str:
        where = f"rank {self.rank} on {self.host} at step {self.step}, phase {self.phase}"
        last = f" (last collective: {self.collective})" if self.collective else ""
        return f"{where}: {self.error}{last}"


def read_failure(directory: str | Path, rank: int) -> Failure | None:
    """The failure that a rank left, if it did."""
    fields = _json(Path(directory) / f"failure-{rank}.json")
    return Failure(**fields) if fields else None


def dump_stacks_on_request(rank: int, directory: str | None) -> None:
    """From now on STACKS_SIGNAL writes the stacks of all threads into the watch directory (or to stderr)."""
    if STACKS_SIGNAL is None:
        return
    target = (Path(directory) / f"stacks-{rank}.txt").open("w") if directory else sys.stderr
    faulthandler.register(STACKS_SIGNAL, file=target, all_threads=True)


def read_stacks(directory: str | Path, rank: int, frames: int = 12) -> str:
    """What the rank wrote on STACKS_SIGNAL, the innermost frames of each thread; empty where it did not answer."""
    try:
        text = (Path(directory) / f"stacks-{rank}.txt").read_text(errors="replace").strip()
    except OSError:
        return ""
    threads = [block.splitlines()[: frames + 1] for block in text.split("\n\n") if WATCHING not in block]
    return "\n".join(line for thread in threads for line in thread)


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(errors="replace")))
    except (OSError, ValueError):
        return {}
