"""A run directory and its effective ledger, read without torch.

All that draws, counts or compares runs reads them through here: a run that was killed and resumed
looks the same to all.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.errors import UserError, require
from windlass.fileio import read_json, read_jsonl
from windlass.recipe import Recipe

Line = dict[
    str, Any
]  # of the ledger: `kind`, `step`, `time` (UTC, ISO 8601), `attempt`, and what belongs to the kind

ALIVE_SECONDS = (
    60.0  # a run whose heartbeat file is younger counts as running, where its lock cannot tell
)
# locked by the process that trains in the directory, from its start to its end, however it ends
LOCK = ".lock"
OCCUPIED = (
    "another process trains in"  # how the error of a training begins whose directory is locked
)
PLACE = (
    "kind",
    "step",
    "time",
    "attempt",
    "suite",
    "epoch",
    "samples_trained",
)  # fields that say where a line belongs
STARTS = ("started", "resumed", "branched")
ENDINGS = ("finished", "stopped", "preempted", "failed")


def decode(line: Line) -> Line:
    """A line of numbers with floats for the words NaN, Infinity and -Infinity, which JSON lacks."""
    if line.get("kind") in ("event", "sample"):  # lines of text
        return line
    words = ("NaN", "Infinity", "-Infinity")
    return {key: float(value) if value in words else value for key, value in line.items()}


def timestamp(line: Line) -> float:
    """When a line was written, in seconds since 1970."""
    return datetime.fromisoformat(line["time"]).timestamp()


def read_lines(path: Path) -> Iterator[Line]:
    """All whole lines of a ledger, in the order of writing; see `decode`."""
    lines = read_jsonl(path)
    return (decode(x) for x in lines if "kind" in x and isinstance(x.get("step"), int))


def effective(lines: Iterable[Line]) -> list[Line]:
    """The ledger as if no kill had happened, in the order of the steps.

    An attempt that starts at step *s* makes void what earlier attempts wrote of steps past *s*:
    those steps are done again. Of two lines for one step (same kind, suite and index) the last one
    counts. Events of starting and ending stay.
    """
    valid, attempt = list[Line](), 0
    for line in lines:
        number = int(line.get("attempt", attempt))
        if number > attempt or (line["kind"] == "event" and line.get("event") == "resumed"):
            attempt = number
            valid = [
                earlier
                for earlier in valid
                if earlier["step"] <= line["step"] or _is_restart(earlier)
            ]
        valid.append(line)
    last: dict[tuple[Any, ...], int] = {}
    for index, line in enumerate(valid):
        identity = (
            line["kind"],
            line["step"],
            line.get("suite"),
            line.get("event"),
            line.get("index"),
        )
        last[(*identity, index) if _is_restart(line) else identity] = index
    return [
        valid[index]
        for index in sorted(last.values(), key=lambda index: (valid[index]["step"], index))
    ]


def last_start(ledger: Iterable[Line]) -> Line:
    """The event of a run's last start, with what it lacks from the starts before it; empty before
    the first.

    The ledger is in the order of the steps, and the last start may have gone back behind those of
    another one.
    """
    starts = [x for x in ledger if x["kind"] == "event" and x.get("event") in (*STARTS, "rewound")]
    merged: Line = {}
    for line in sorted(starts, key=lambda line: int(line.get("attempt", 0))):
        merged |= line
    return merged


def _is_restart(line: Line) -> bool:
    # a start, an end, or anything else that a later attempt does not do again
    return line["kind"] == "event" and line.get("event") != "checkpoint"


@dataclass(init=False, unsafe_hash=True)
class Run:
    """A run directory."""

    path: Path

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self.name = path.name
        self.recipe_path = path / "recipe.toml"  # every setting, resolved
        self.metrics_path = path / "metrics.jsonl"  # the ledger
        self.checkpoints_dir = path / "checkpoints"
        self.devices_dir = path / "devices"  # utilisation and memory, a file a rank
        self.report_dir = path / "report"
        self.log_path = path / "log.txt"  # what the terminal showed, as plain lines
        self.heartbeat_path = (
            path / "heartbeat"
        )  # touched by rank 0 every few seconds while the run lives
        self.lock_path = (
            path / LOCK
        )  # locked by rank 0 while the run lives; names the process and its host

    @staticmethod
    def open(path: str | Path) -> Run:
        """The run at `path`; raises UserError where there is none."""
        run = Run(path)
        if not run.recipe_path.is_file():
            raise UserError(
                f"{path} is no run directory: it has no recipe.toml; by default the runs lie in runs/"
            )
        return run

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe of the run."""
        return Recipe.load(self.recipe_path)

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, hosts and devices of the last start; empty where there is none."""
        return read_json(self.path / "environment.json")

    @property
    def on_gpus(self) -> bool:
        """Whether the last start was on GPUs."""
        return any(
            str(rank.get("device", "")).startswith("cuda")
            for rank in self.environment.get("ranks", [])
        )

    def ledger(self) -> list[Line]:
        """The effective ledger: one line a step and kind, also after kills."""
        return effective(read_lines(self.metrics_path))

    def lines(self, kind: str, **where: Any) -> list[Line]:
        """The effective lines of one kind, with the given fields equal to the given values."""
        return [
            x
            for x in self.ledger()
            if x["kind"] == kind and all(x.get(k) == v for k, v in where.items())
        ]

    def to_pandas(self, kind: str = "") -> Any:
        """The ledger as a `pandas.DataFrame`, a row a step: the `train` lines, and beside them
        `eval_loss`, the measures of other suites (`squad.f1`) and what callbacks have logged
        (`log.NAME`). With a kind (`train`, `eval`, `sample`, `event`, `summary`, `log`) all its
        lines and fields.
        """
        require("pandas", "Run.to_pandas")
        import pandas

        if kind:
            frame = pandas.json_normalize(self.lines(kind))
            return frame.set_index("step") if len(frame) else frame
        rows: dict[int, Line] = {}
        for line in sorted(
            self.ledger(), key=lambda line: line["kind"] != "train"
        ):  # whose columns come first
            if line["kind"] in ("train", "eval", "log"):
                suite = line.get("suite", "")
                prefix = "eval_" if suite == "loss" else f"{suite}." if suite else ""
                own = {
                    k: v
                    for k, v in line.items()
                    if k not in PLACE and not isinstance(v, dict | list)
                }
                rows.setdefault(line["step"], {}).update(
                    {f"{prefix}{k}": v for k, v in own.items()}
                )
        return pandas.DataFrame.from_dict(rows, orient="index").sort_index().rename_axis("step")

    def __repr__(self) -> str:
        """Its path, its state, how far it is and its last loss."""
        lines = self.ledger()
        steps = next(
            (x["steps"] for x in reversed(lines) if x["kind"] == "event" and "steps" in x), "?"
        )
        text = [f"{self.state}, step {lines[-1]['step']} of {steps}" if lines else self.state]
        for kind, word in (("train", "loss"), ("eval", "val loss")):
            own = [
                x
                for x in lines
                if x["kind"] == kind and "loss" in x and x.get("suite", "loss") == "loss"
            ]
            text += [f"{word} {float(own[-1]['loss']):.4f}"] if own else []
        return f"Run({self.path}: {', '.join(text)})"

    @property
    def summary(self) -> Line:
        """The last `summary` line; empty before the end."""
        return next(reversed(self.lines("summary")), {})

    @property
    def events(self) -> list[Line]:
        return self.lines("event")

    @property
    def alive(self) -> bool:
        """Whether a process trains in the directory now."""
        locked = lock_held(self.lock_path)
        if locked is not None:
            # right at once after a kill; else (another host, no locks) a fresh heartbeat tells
            return locked
        with contextlib.suppress(OSError):
            return time.time() - self.heartbeat_path.stat().st_mtime < ALIVE_SECONDS
        return False

    @property
    def state(self) -> str:
        """`new`, `running`, `finished`, `stopped` (as asked), `preempted` (by a signal), both with
        everything saved, or `failed` (also: killed)."""
        return self.state_by(read_lines(self.metrics_path))

    def state_by(self, lines: Iterable[Line]) -> str:
        """The state by the raw lines of the ledger."""
        events = [str(line["event"]) for line in lines if _is_restart(line)]
        last = next(
            (event for event in reversed(events) if event in (*ENDINGS, *STARTS)), "started"
        )
        return (
            last if last in ENDINGS else "running" if self.alive else "failed" if events else "new"
        )


def lock_held(path: Path) -> bool | None:
    """Whether a process holds a run's lock; None where this host cannot know (no lock file, no
    locks, another host's)."""
    try:
        with path.open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)  # released when the file closes
            holder = json.loads(file.read())
    except BlockingIOError:
        return True
    except (OSError, ValueError):
        return None
    return (
        False if isinstance(holder, dict) and holder.get("host") == socket.gethostname() else None
    )
