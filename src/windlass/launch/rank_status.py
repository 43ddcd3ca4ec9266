"""What a rank tells its launcher or batch job by files: where it is, its failure, its exit code, and
how long a save takes. No torch."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from windlass.launch.schedulers import host_name

WATCH_DIR = "WINDLASS_WATCH_DIR"  # of the ranks' status files; unset without our launcher
# In a job: a directory that its hosts share, for the ranks' exit codes and failures.
REPORTS = "WINDLASS_REPORTS"
SAVED = "WINDLASS_SAVED"  # in a batch job: the file of `report_saved`
LIMIT = "WINDLASS_LIMIT"  # beside it: the job's time limit in seconds; 0: unknown
GRACE_SECONDS = 120  # between the signal to stop and the time limit, at least
STOP_MARGIN_SECONDS = 30  # of a stop, beside its saves: the step, trackers, the ranks' ends
END_MARGIN_SECONDS = 10  # of a batch job, after the training
STOPPED = "stopped"  # the phase of a rank that has saved and is about to exit
# the phases of a step; it is done after the last one
STEP_PHASES = ("data", "forward", "backward", "optimizer")


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


def stop_lead(save_seconds: float) -> int:
    """Seconds before a time limit at which a stop begins: one save may run, another follows."""
    return max(GRACE_SECONDS, math.ceil(2 * save_seconds) + STOP_MARGIN_SECONDS)


def report_saved(save_seconds: float) -> None:
    """Tell the script of a batch job that a checkpoint was saved, and its `stop_lead`."""
    if path := os.environ.get(SAVED):
        most = int(os.environ.get(LIMIT) or 0) // 2  # half of the time is for the training
        lead = max(GRACE_SECONDS, min(most, stop_lead(save_seconds)))
        with contextlib.suppress(OSError):
            new = Path(f"{path}.new")
            new.write_text(f"{lead}\n", encoding="ascii")
            new.replace(path)  # the script reads it at any time


def job_grace() -> float:
    """The seconds that a batch job leaves its training from the signal to the end; else 0."""
    if not (path := os.environ.get(SAVED)):
        return 0.0
    lead = float(GRACE_SECONDS)
    with contextlib.suppress(OSError, ValueError):
        lead = float(Path(path).read_text(encoding="ascii"))
    return lead - END_MARGIN_SECONDS
