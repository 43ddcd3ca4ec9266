"""Where the proofs run: a directory with short trainings, in this process or on ranks."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import windlass
from windlass import processes
from windlass.recipe import Recipe
from windlass.recipe.layers import dotted
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run
from windlass.verification.workers import Task, Workers

STEPS, BATCH, MICRO = 12, 8, 2
TINY = {
    "model": {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab": 0, "dropout": 0.1},
    "data": {"tokenizer": "byte", "val_fraction": 0.1},
}
COMMON = {
    "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": MICRO, "compile": False},
    "train.deterministic": True,
    "checkpoint": {"every": 1, "keep_last": 2 * STEPS, "best": "loss"},
    "eval": {"every": 0, "sample_every": 0, "suites": ["loss"]},
    "telemetry": {"every": 1, "trackers": []},
    "parallel": {"strategy": "auto", "timeout_seconds": 120, "startup_timeout_seconds": 300},
    **NO_LAYOUT,
    "optim.schedule.warmup": 2,
}
MOST_DATA_RANKS = 4  # more of them would prove nothing else
Settings = Mapping[str, Any]  # by dotted key


class Bench:
    """Where the proofs run: a directory, and a tiny recipe or the given one, shortened."""

    def __init__(
        self,
        folder: Path,
        recipe: str = "",
        overrides: Sequence[str] = (),
        worlds: Sequence[int] = (1, 2, 4),
        kills: int = 10,
    ):
        self.folder, self.recipe = folder.resolve(), recipe or "quickstart"
        self.worlds, self.kills = [w for w in worlds if w <= MOST_DATA_RANKS], kills
        self.most = max(worlds)  # ranks of a layout
        self.untried: list[str] = []  # by the proof that runs
        self._groups: list[Workers] = []
        self._ranks: Workers | None = None
        self.base = dotted(COMMON) | {"data.dir": str(self.folder / "data")}
        # One number for all worlds, because threads change bits.
        self.base["train.threads"] = processes.thread_share(self.most)
        if not recipe:
            text = self.folder / "text.txt"
            text.write_text(Path(__file__).read_text(encoding="utf-8")[:900], encoding="utf-8")
            self.base |= dotted(TINY) | {"data.source": str(text)}
        self.base |= dotted(overrides)
        self.model = self.settings("model").model

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        for workers in self._groups:
            workers.kill()

    def settings(self, run: str, changes: Settings | None = None) -> Recipe:
        """The recipe of a run: the base recipe with changes."""
        place = {"run.dir": str(self.folder / run)}
        return Recipe.load(self.recipe, self.base | dotted(changes or {}) | place)

    def write(self, run: str, changes: Settings | None = None) -> str:
        """Write the recipe of a run; returns its path."""
        path = self.folder / f"{run}.toml"
        path.write_text(self.settings(run, changes).toml(), encoding="utf-8")
        return str(path)

    def train(self, run: str, changes: Settings | None = None, branch_from: str = "") -> Run:
        """Train in this process, without output; `branch_from`: RUN@STEP."""
        with open(os.devnull, "w", encoding="utf-8") as null, contextlib.redirect_stdout(null):
            return windlass.train(self.settings(run, changes), branch_from=branch_from)

    def train_all(
        self, runs: Mapping[str, Settings], world: int, faults: Mapping[str, str] | None = None
    ) -> list[Run]:
        """Train runs on the same `world` ranks, or in this process; `faults`: for `inject`, by run.

        RuntimeError if a rank fails.
        """
        if world == 1:
            return [self.train(run, changes) for run, changes in runs.items()]
        recipes = {run: self.write(run, changes) for run, changes in runs.items()}
        workers = self.ranks()
        injected = {recipes[run]: fault for run, fault in (faults or {}).items()}
        workers.begin(Task(world, list(recipes.values()), injected))
        workers.wait()
        return [Run(self.folder / run) for run in runs]

    def ranks(self) -> Workers:
        """The ranks of all worlds; a new group if one of them has failed."""
        if self._ranks is None or self._ranks.process.poll() is not None:
            self._ranks = self.workers(self.most)
        return self._ranks

    def workers(self, world: int) -> Workers:
        """Start another group of ranks, which ends with this bench."""
        self._groups.append(Workers(self.folder / f"ranks-{len(self._groups)}", world))
        return self._groups[-1]
