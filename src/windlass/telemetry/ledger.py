"""The ledger `metrics.jsonl`: JSON lines that rank 0 appends. A full disk never stops the run: an
unwritten line waits in memory. Each line is one `write`, so a kill tears at most the last one.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any

from windlass.errors import RunFailed
from windlass.run import Line
from windlass.telemetry.measures import lower_is_better


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


class Ledger:
    """Appends lines to a run's ledger on rank 0 (`enabled`). Once open it never raises OSError, but
    RunFailed if it was deleted.

    `attempt` is 0 for the first start of the run and one more for each restart. `stamp` gives
    further fields for `train`, `event` and `summary` lines, such as the wall time by phase.
    """

    def __init__(
        self, path: Path, attempt: int = 0, enabled: bool = True, stamp: Callable[[], Line] = dict
    ):
        self.path, self.attempt, self.enabled, self.stamp = path, attempt, enabled, stamp
        self.warning: str | None = None
        self._unwritten, self._file = b"", -1
        self._size: int | None = None  # of the file before a write that has not ended
        if enabled:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            size = os.fstat(self._file).st_size
            if size and os.pread(self._file, 1, size - 1) != b"\n":
                self._unwritten = b"\n"  # the end of a line that was torn by a kill

    def write(self, kind: str, step: int, **fields: Any) -> Line:
        """Append a line after `step` optimizer steps, without fields that are None; returns it."""
        if kind in ("train", "summary"):
            self.check()
        line: Line = {"kind": kind, "step": int(step), "time": now(), "attempt": self.attempt}
        if kind in ("train", "event", "summary"):
            line |= self.stamp()
        line |= {key: value for key, value in fields.items() if value is not None}
        if self.enabled:
            encoded = encode(line).encode("utf-8", "replace") + b"\n"
            self._unwritten += encoded  # without a call, in which a signal may come
            self._flush()
        return line

    def sync(self) -> None:
        """Make all lines so far survive a crash of the machine; for the commit of a checkpoint."""
        if self.enabled and self._flush():
            with contextlib.suppress(OSError):
                os.fsync(self._file)

    def check(self) -> None:
        """Raise RunFailed if the file is gone, because a save would make the directory anew."""
        if self.enabled and not self.path.exists():
            problem = f"{self.path.parent} was deleted or moved while the run trained in it"
            raise RunFailed(f"{problem}: move it back and train again, or begin a new run")

    def close(self) -> None:
        if self._file >= 0:
            self.sync()
            os.close(self._file)
            self._file, self.enabled = -1, False

    def _flush(self) -> bool:
        """Write what is unwritten. A signal's handler may call it in the midst of itself."""
        if self._size is not None:  # it ends the process, so the interrupted call does not go on
            written = os.fstat(self._file).st_size - self._size
            self._unwritten, self._size = self._unwritten[written:], None
        while self._unwritten:
            try:
                self._size = os.fstat(self._file).st_size
                written = os.write(self._file, self._unwritten)
            except OSError as error:
                problem = f"{self.path} cannot be written ({error.strerror}); tried again later"
                self.warning, self._size = self.warning or problem, None
                return False
            self._unwritten, self._size = self._unwritten[written:], None
        return True


LOSS = "loss"
SAME_ITEMS = ("samples", "items", "items_hash")  # identify the items that an `eval` line measured


class Scores(dict[int, float]):
    """Values of a measure by step; `lower`: whether less is better."""

    def __init__(self, values: Mapping[int, float] = MappingProxyType({}), lower: bool = True):
        super().__init__(values)
        self.lower = lower

    def ranked(self) -> list[int]:
        """The steps with a finite value, the best first; among equals the earliest first."""
        sign = 1 if self.lower else -1
        finite = [step for step, value in self.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * self[step], step))

    @property
    def best_step(self) -> int | None:
        return next(iter(self.ranked()), None)

    @property
    def best(self) -> float | None:
        return None if self.best_step is None else self[self.best_step]


def scores_by_step(lines: Iterable[Mapping[str, Any]], measure: str) -> Scores:
    """The finite, `comparable` values of a measure in `eval` lines."""
    suite, _, name = measure.partition(".")
    own = [x for x in lines if x["kind"] == "eval" and x.get("suite", LOSS) == suite]
    values = {int(x["step"]): float(x.get(name or suite, math.nan)) for x in comparable(own)}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    return Scores(finite, lower_is_better(measure, own))


def comparable(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `eval` lines of a suite on the items of the last one: a resume may change the items."""
    return [x for x in lines if all(x.get(key) == lines[-1].get(key) for key in SAME_ITEMS)]
