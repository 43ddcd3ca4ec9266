"""A run directory and its effective ledger, read without torch.

Everything that draws, counts or compares runs reads them through here, so that a run that was killed and resumed looks the
same to all of them.
"""

from __future__ import annotations

import fcntl
import json
import socket
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.fileio import read_json, read_jsonl
from windlass.recipe import Recipe

Line = dict[str, Any]
"""One line of the ledger: `kind`, `step`, `time` (UTC, ISO 8601), `attempt`, and what belongs to the kind."""

ALIVE_SECONDS = 60.0
"""A run whose heartbeat file is younger than this is taken to be running, where its lock cannot tell."""

LOCK = ".lock"
"""Held by the process that trains in the directory, from its start to its end, however it ends."""

OCCUPIED = "another process trains in"
"""What a training says that finds its directory taken."""

STARTS = ("started", "resumed", "branched")
ENDINGS = {"finished": "finished", "preempted": "preempted", "failed": "failed"}


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of a ledger as they were written, without torn ones."""
    return (line for line in read_jsonl(path) if "kind" in line and isinstance(line.get("step"), int))


def effective(lines: Iterable[Line]) -> list[Line]:
    """The ledger as if no kill had happened, in the order of the steps.

    An attempt that starts at step *s* makes void whatever earlier attempts wrote of steps past *s*: those steps are done
    again. Of a line that was written twice for one step (same kind, suite and name) the last attempt's stands. Events of
    starting, resuming and ending stay, all of them: they are the seams.
    """
    kept: list[Line] = []
    attempt = 0
    for line in lines:
        number = int(line.get("attempt", attempt))
        if number > attempt or (line["kind"] == "event" and line.get("event") == "resumed"):
            attempt = number
            kept = [old for old in kept if old["step"] <= line["step"] or _seam(old)]
        kept.append(line)
    last: dict[tuple[Any, ...], int] = {}
    for place, line in enumerate(kept):
        last[(*_identity(line), place) if _seam(line) else _identity(line)] = place
    chosen = sorted(last.values(), key=lambda place: (kept[place]["step"], place))
    return [kept[place] for place in chosen]


def _seam(line: Line) -> bool:
    return line["kind"] == "event" and line.get("event") not in ("checkpoint",)


def _identity(line: Line) -> tuple[Any, ...]:
    return (line["kind"], line["step"], line.get("suite"), line.get("event"), line.get("index"))


@dataclass(frozen=True)
class Run:
    """A run directory. Nothing is cached but the recipe and the environment: each call reads what is there now."""

    path: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", Path(self.path))

    @staticmethod
    def open(path: str | Path) -> Run:
        """The run at `path`; raises UserError where there is none."""
        run = Run(Path(path))
        if not (run.path / "recipe.toml").is_file():
            raise UserError(f"{path} is no run directory: it has no recipe.toml; `windlass runs` lists the runs")
        return run

    @property
    def name(self) -> str:
        """The directory's name."""
        return self.path.name

    @property
    def recipe_path(self) -> Path:
        """Every setting, resolved."""
        return self.path / "recipe.toml"

    @property
    def metrics_path(self) -> Path:
        """The ledger."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_dir(self) -> Path:
        """The committed checkpoints and their index."""
        return self.path / "checkpoints"

    @property
    def devices_dir(self) -> Path:
        """Utilisation and memory, a file a rank."""
        return self.path / "devices"

    @property
    def samples_dir(self) -> Path:
        """Generated texts."""
        return self.path / "samples"

    @property
    def report_dir(self) -> Path:
        """The report's tables, plots and page."""
        return self.path / "report"

    @property
    def log_path(self) -> Path:
        """What the terminal showed, as plain lines."""
        return self.path / "log.txt"

    @property
    def heartbeat_path(self) -> Path:
        """Touched by rank 0 every few seconds while the run lives."""
        return self.path / "heartbeat"

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
        found = self.lines("summary")
        return found[-1] if found else {}

    @property
    def events(self) -> list[Line]:
        """The effective `event` lines."""
        return self.lines("event")

    @property
    def lock_path(self) -> Path:
        """Locked by rank 0 while the run lives; says which process on which host it is."""
        return self.path / LOCK

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
        """The state by the raw lines of the ledger, for who has read them already."""
        seams = [line for line in lines if line["kind"] == "event" and _seam(line)]
        if not seams:
            return "running" if self.alive else "new"
        last = next((s["event"] for s in reversed(seams) if s["event"] in (*ENDINGS, *STARTS)), "started")
        if last in ENDINGS:
            return ENDINGS[last]
        return "running" if self.alive else "failed"


def cell_state(state: str, events: Iterable[Line], verdict: Mapping[str, Any] | None) -> tuple[str, str]:
    """How a study's cell stands, and why: by its run's state and events, and by what was decided from outside.

    Returns:
        `waiting`, `running`, `interrupted`, `finished`, `failed`, `diverged` or `pruned`, and the reason where one is known.
    """
    said = (str(verdict.get("state", "")), str(verdict.get("reason", ""))) if verdict else ("", "")
    if state == "finished":
        return state, ""
    if said[0] not in ("", "interrupted"):
        return said
    if state == "failed":
        seams = [x for x in events if x["kind"] == "event"]
        last = max((int(x.get("attempt", 0)) for x in seams), default=0)
        failures = [x for x in seams if x.get("event") == "failed" and int(x.get("attempt", 0)) == last]
        if failures:  # by the last start itself; one that was killed says nothing
            return "failed", str(failures[-1].get("reason", ""))
    state = {"new": "waiting", "preempted": "interrupted", "failed": "interrupted"}.get(state, state)
    return said if said[0] and state in ("waiting", "interrupted") else (state, "")


def lock_held(path: Path) -> bool | None:
    """Whether a process holds a run's lock; None where this host cannot know (no lock file, no locks, another host's)."""
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # given back when the file closes
            holder = json.loads(file.read())
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return None
    ours = isinstance(holder, dict) and holder.get("host") == socket.gethostname()
    return False if ours else None
