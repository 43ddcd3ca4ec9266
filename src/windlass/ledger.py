"""The ledger `metrics.jsonl`: rank 0 appends JSON lines, and readers get each step once. No torch.

A full disk never stops the run: an unwritten line waits in memory. Each line is one `write`, so a
kill tears at most the last one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from windlass.errors import RunFailed

Line = dict[str, Any]
"""A line of the ledger: `kind`, `step`, `time` (UTC, ISO 8601), `attempt`, and further fields."""
PLACE = ("kind", "step", "time", "attempt", "suite", "epoch", "samples_trained")
"""Fields that say where in the run a line belongs."""
STARTS = ("started", "resumed", "branched")
ENDINGS = ("finished", "stopped", "preempted", "failed")
STAMPED = ("train", "event", "summary")  # kinds of lines with the wall time by phase


class Ledger:
    """Appends lines to a run's ledger on rank 0 (`enabled`). Once open it never raises OSError, but
    RunFailed if it was deleted.

    `attempt` is 0 for the first start of the run and one more for each restart. `stamp` gives
    further fields for STAMPED lines.
    """

    def __init__(
        self, path: Path, attempt: int = 0, enabled: bool = True, stamp: Callable[[], Line] = dict
    ):
        self.path, self.attempt, self.stamp = path, attempt, stamp
        self.warning: str | None = None
        self._file = -1  # open on rank 0 only
        self._unwritten = b""
        if enabled:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._unwritten = b"\n"  # the end of a line that was torn by a kill

    def write(self, kind: str, step: int, **fields: Any) -> Line:
        """Append a line after `step` optimizer steps, without fields that are None; returns it."""
        if kind in ("train", "summary"):
            self.check()
        line: Line = {"kind": kind, "step": int(step), "time": now(), "attempt": self.attempt}
        if kind in STAMPED:
            line |= self.stamp()
        line |= {key: value for key, value in fields.items() if value is not None}
        if self._file >= 0:
            self._unwritten += encode(line).encode("utf-8", "replace") + b"\n"
            self._flush()
        return line

    def sync(self) -> None:
        """Make all lines so far survive a crash of the machine; for the commit of a checkpoint."""
        if self._file >= 0 and self._flush():
            with contextlib.suppress(OSError):
                os.fsync(self._file)

    def check(self) -> None:
        """Raise RunFailed if the file is gone, because a save would make the directory anew."""
        if self._file >= 0 and not self.path.exists():
            raise RunFailed(
                f"{self.path.parent} was deleted or moved while the run trained in it: "
                "move it back and train again, or begin a new run"
            )

    def close(self) -> None:
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file = -1

    def _flush(self) -> bool:
        """Write what is unwritten; whether it worked."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            problem = f"{self.path} cannot be written ({error.strerror}); tried again later"
            self.warning = self.warning or problem
        return not self._unwritten


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def encode(line: Mapping[str, Any]) -> str:
    """A line as strict JSON; finite floats read back bit for bit. TypeError for other objects."""
    return json.dumps(plain(line), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))


def plain(value: Any) -> Any:
    """A value in terms of JSON: scalars of numpy and torch become plain numbers, and non-finite
    numbers the strings `"NaN"`, `"Infinity"`, `"-Infinity"`."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    if not isinstance(value, str | int | float | None) and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def decode(line: Line) -> Line:
    """A line with floats for the words NaN, Infinity and -Infinity, because JSON lacks these."""
    if line.get("kind") in ("event", "sample"):  # lines of text
        return line
    words = ("NaN", "Infinity", "-Infinity")
    return {key: float(value) if value in words else value for key, value in line.items()}


def timestamp(line: Line) -> float:
    """When a line was written, in seconds since 1970."""
    return datetime.fromisoformat(line["time"]).timestamp()


def read_lines(path: Path) -> Iterator[Line]:
    """All whole lines of a ledger, decoded; none without the file."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for line in text.split("\n"):
        with contextlib.suppress(ValueError):
            x = json.loads(line)
            if isinstance(x, dict) and "kind" in x and isinstance(x.get("step"), int):
                yield decode(x)


def effective(lines: Iterable[Line]) -> list[Line]:
    """The ledger as if no kill had happened, in the order of the steps.

    An attempt that starts at step *s* does the steps after *s* again, so it replaces their lines.
    If one step has two lines of the same kind, suite and index, the last one counts. Events of
    starting and ending stay.
    """
    valid, attempt = list[Line](), 0
    for line in lines:
        number = int(line.get("attempt", attempt))
        if number > attempt or (line["kind"] == "event" and line.get("event") == "resumed"):
            attempt = number
            valid = [x for x in valid if x["step"] <= line["step"] or _is_permanent(x)]
        valid.append(line)
    last: dict[tuple[Any, ...], int] = {}
    for index, line in enumerate(valid):
        identity = (line["kind"], line["step"], *map(line.get, ("suite", "event", "index")))
        last[(*identity, index) if _is_permanent(line) else identity] = index
    return [valid[i] for i in sorted(last.values(), key=lambda i: (valid[i]["step"], i))]


def last_start(ledger: Iterable[Line]) -> Line:
    """The event of the last start by attempt, with the fields of earlier starts that it lacks."""
    starts = [x for x in ledger if x["kind"] == "event" and x.get("event") in STARTS]
    merged: Line = {}
    for line in sorted(starts, key=lambda line: int(line.get("attempt", 0))):
        merged |= line
    return merged


def _is_permanent(line: Line) -> bool:
    # an event that a later attempt does not repeat, such as a start or an end
    return line["kind"] == "event" and line.get("event") != "checkpoint"
