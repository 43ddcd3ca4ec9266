"""A run directory, read without torch."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from windlass.errors import UserError, require
from windlass.fileio import lock_held, read_json
from windlass.ledger import ENDINGS, PLACE, STARTS, Line, effective, read_lines
from windlass.recipe import Recipe
from windlass.recipe.layers import RECIPE, recorded

ALIVE_SECONDS = 60.0  # a run with a younger heartbeat is running, if its lock cannot tell
LOCK = ".lock"  # the training process holds it from its start to its end
OCCUPIED = "another process trains in"  # the start of the error about a locked directory


@dataclass(init=False, unsafe_hash=True)
class Run:
    """A run directory."""

    path: Path

    def __init__(self, path: str | Path):
        self.path = path = Path(path)
        self.name = path.name
        self.recipe_path = path / RECIPE  # every setting, resolved, to read and edit
        self.metrics_path = path / "metrics.jsonl"  # the ledger
        self.checkpoints_dir = path / "checkpoints"
        self.devices_dir = path / "devices"  # utilisation and memory, a file a rank
        self.report_dir = path / "report"
        self.log_path = path / "log.txt"  # the terminal's output as plain lines
        self.heartbeat_path = path / "heartbeat"  # rank 0 touches it while the run lives
        self.lock_path = path / LOCK  # names the process that holds it, and its host

    @staticmethod
    def open(path: str | Path) -> Run:
        """The run at `path`. Raises UserError if there is none."""
        run = Run(path)
        if not run.exists:
            problem = f"{path} is not a run directory: it lacks recipe.toml"
            raise UserError(f"{problem}; `windlass runs DIR` lists the runs in a directory")
        return run

    @property
    def exists(self) -> bool:
        return self.recipe_path.is_file() or bool(recorded(self.recipe_path))

    @cached_property
    def recipe(self) -> Recipe:
        """The resolved recipe that the run was last trained with, whatever its file says now."""
        place = str(self.path)
        if settings := recorded(self.recipe_path):
            return Recipe.from_dict(settings | {"run": settings["run"] | {"dir": place}})
        return Recipe.load(self.recipe_path, {"run.dir": place})

    @cached_property
    def environment(self) -> dict[str, Any]:
        """Versions, hosts and devices of the last start."""
        return read_json(self.path / "environment.json")

    @property
    def on_gpus(self) -> bool:
        ranks = self.environment.get("ranks", [])
        return any(str(rank.get("device", "")).startswith("cuda") for rank in ranks)

    def ledger(self) -> list[Line]:
        """The effective ledger: one line for each step and kind."""
        return effective(read_lines(self.metrics_path))

    def lines(self, kind: str, **where: Any) -> list[Line]:
        """The effective lines of one kind whose fields have the given values."""
        lines = (x for x in self.ledger() if x["kind"] == kind)
        return [x for x in lines if all(x.get(key) == value for key, value in where.items())]

    def to_pandas(self, kind: str = "") -> Any:
        """The ledger as a `pandas.DataFrame` with a row for each step.

        The columns are the fields of `train` lines, `eval_loss`, the measures of other suites
        (`squad.f1`) and the values of callbacks (`log.NAME`). With a kind (`train`, `eval`,
        `sample`, `event`, `summary`, `log`): a row for each of its lines.
        """
        require("pandas", "Run.to_pandas")
        import pandas

        if kind:
            frame = pandas.json_normalize(self.lines(kind))
            return frame.set_index("step") if len(frame) else frame
        rows: dict[int, Line] = {}
        kinds = ("train", "eval", "log")  # in this order of their columns
        lines = [x for x in self.ledger() if x["kind"] in kinds]
        for line in sorted(lines, key=lambda line: kinds.index(line["kind"])):
            prefix = ""
            if line["kind"] == "eval":
                prefix = "eval_" if line["suite"] == "loss" else f"{line['suite']}."
            row = rows.setdefault(line["step"], {})
            for key, value in line.items():
                if key not in PLACE and not isinstance(value, dict | list):
                    row[f"{prefix}{key}"] = value
        return pandas.DataFrame.from_dict(rows, orient="index").sort_index().rename_axis("step")

    def __repr__(self) -> str:
        lines = self.ledger()
        step = f", step {lines[-1]['step']}" if lines else ""
        return f"Run({self.path}: {self.state}{step})"

    @property
    def summary(self) -> Line:
        """The last `summary` line; empty before the end."""
        lines = self.lines("summary")
        return lines[-1] if lines else {}

    @property
    def events(self) -> list[Line]:
        return self.lines("event")

    @property
    def alive(self) -> bool:
        """Whether a process trains in the directory now."""
        locked = lock_held(self.lock_path)
        if locked is not None:  # None: the lock is another host's, or this system lacks locks
            return locked
        with contextlib.suppress(OSError):
            return time.time() - self.heartbeat_path.stat().st_mtime < ALIVE_SECONDS
        return False

    @property
    def state(self) -> str:
        """`new`, `running`, `finished`, `stopped` (asked to), `preempted` (by a signal), `failed`.

        A stopped or preempted run has everything saved. A killed run has failed.
        """
        return self.state_by(read_lines(self.metrics_path), self.alive)

    def state_by(self, lines: Iterable[Line], alive: bool) -> str:
        """The state by the raw lines of the ledger; `alive` before they were read, because a run
        may end while they are read."""
        events = [str(line["event"]) for line in lines if line["kind"] == "event"]
        last = next((x for x in reversed(events) if x in (*ENDINGS, *STARTS)), "started")
        if last in ENDINGS:
            return last
        if alive:
            return "running"
        return "failed" if events else "new"
