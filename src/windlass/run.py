"""A run directory and its effective ledger, read without torch.

Everything that draws, counts or compares runs reads them through here, so that a run that was killed and resumed looks the
same to all of them. Nothing is cached but the recipe and the environment: each call reads what is there now.
"""

from __future__ import annotations

import fcntl
import json
import socket
import time
from collections.abc import Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.fileio import read_json, read_jsonl
from windlass.recipe import Recipe

Line = dict[str, Any]
"""One line of the ledger: `kind`, `step`, `time` (UTC, ISO 8601), `attempt`, and what belongs to the kind."""

ALIVE_SECONDS = 60.0
"""A run whose heartbeat file is younger than this counts as running, where its lock cannot tell."""
LOCK = ".lock"
"""Held by the process that trains in the directory, from its start to its end, however it ends."""
OCCUPIED = "another process trains in"
"""How the error of a training begins that finds its directory locked."""
STARTS = ("started", "resumed", "branched")
ENDINGS = ("finished", "preempted", "failed")


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a ledger as they were written, without torn ones."""
    return (line for line in read_jsonl(path) if "kind" in line and isinstance(line.get("step"), int))


def effective(lines: Iterable[Line]) -> list[Line]:
    """The ledger as if no kill had happened, in the order of the steps.

    An attempt that starts at step *s* makes void whatever earlier attempts wrote of steps past *s*: those steps are done
    again. Of a line that was written twice for one step (same kind, suite and index) the last one counts. Events of starting,
    resuming and ending all stay.
    """
    valid: list[Line] = []
    attempt = 0
    for line in lines:
        number = int(line.get("attempt", attempt))
        if number > attempt or (line["kind"] == "event" and line.get("event") == "resumed"):
            attempt = number
            valid = [earlier for earlier in valid if earlier["step"] <= line["step"] or _is_restart(earlier)]
        valid.append(line)
    last: dict[tuple[Any, ...], int] = {}
    for index, line in enumerate(valid):
        identity = (line["kind"], line["step"], line.get("suite"), line.get("event"), line.get("index"))
        last[(*identity, index) if _is_restart(line) else identity] = index
    return [valid[index] for index in sorted(last.values(), key=lambda index: (valid[index]["step"], index))]


def _is_restart(line: Line) -> bool:
    """Whether a line tells of a start, an end, or anything else that a later attempt does not do again."""
    return line["kind"] == "event" and line.get("event") != "checkpoint"


class Run:
    """A run directory.

    Attributes:
        recipe_path: every setting, resolved.
        metrics_path: the ledger.
        checkpoints_dir: the committed checkpoints and their index.
        devices_dir: utilisation and memory, a file a rank.
        samples_dir: generated texts.
        report_dir: the report's tables, plots and page.
        log_path: what the terminal showed, as plain lines.
        heartbeat_path: touched by rank 0 every few seconds while the run lives.
        lock_path: locked by rank 0 while the run lives; says which process on which host it is.
    """

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self.name = path.name
        self.recipe_path, self.metrics_path = path / "recipe.toml", path / "metrics.jsonl"
        self.checkpoints_dir, self.devices_dir = path / "checkpoints", path / "devices"
        self.samples_dir, self.report_dir = path / "samples", path / "report"
        self.log_path, self.heartbeat_path, self.lock_path = path / "log.txt", path / "heartbeat", path / LOCK

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Run) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @staticmethod
    def open(path: str | Path) -> Run:
        """The run at `path`; raises UserError where there is none."""
        run = Run(path)
        if not run.recipe_path.is_file():
            raise UserError(f"{path} is no run directory: it has no recipe.toml; `windlass runs` lists the runs")
        return run

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe of the run."""
        return Recipe.load(self.recipe_path)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, hosts and devices of the last start; empty where there is none."""
        return read_json(self.path / "environment.json")

    def ledger(self) -> list[Line]:
        """The effective ledger: one line a step and kind, whatever was killed and done again."""
        return effective(read_lines(self.metrics_path))

    def lines(self, kind: str, **where: Any) -> list[Line]:
        """The effective lines of one kind, with the given fields equal to the given values."""
        return [x for x in self.ledger() if x["kind"] == kind and all(x.get(k) == v for k, v in where.items())]

    @property
    def summary(self) -> Line:
        """The last `summary` line; empty before the end."""
        return next(reversed(self.lines("summary")), {})

    @property
    def events(self) -> list[Line]:
        """The effective `event` lines."""
        return self.lines("event")

    @property
    def alive(self) -> bool:
        """Whether a process trains in the directory now.

        By its lock where this host can tell: a lock that is held says yes; a free one that was last held on this host says
        no, at once after a kill. Else (another host's run, a file system without locks) by a fresh heartbeat.
        """
        held = lock_held(self.lock_path)
        if held is not None:
            return held
        try:
            return time.time() - self.heartbeat_path.stat().st_mtime < ALIVE_SECONDS
        except OSError:
            return False

    @property
    def state(self) -> str:
        """`new`, `running`, `finished`, `preempted` (stopped with everything saved) or `failed` (also: killed)."""
        return self.state_by(read_lines(self.metrics_path))

    def state_by(self, lines: Iterable[Line]) -> str:
        """The state by the raw lines of the ledger, where they have been read already."""
        events = [str(line["event"]) for line in lines if _is_restart(line)]
        if not events:
            return "running" if self.alive else "new"
        last = next((event for event in reversed(events) if event in (*ENDINGS, *STARTS)), "started")
        return last if last in ENDINGS else "running" if self.alive else "failed"


def lock_held(path: Path) -> bool | None:
    """Whether a process holds a run's lock; None where this host cannot know (no lock file, no locks, another host's)."""
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file closes
            holder = json.loads(file.read())
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return None
    return False if isinstance(holder, dict) and holder.get("host") == socket.gethostname() else None
