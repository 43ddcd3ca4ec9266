"""Where the proofs run: a directory with short trainings, in this process or in others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import windlass
from windlass import processes
from windlass.errors import DONE
from windlass.recipe import Recipe
from windlass.recipe.layers import dotted
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run

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
ROUNDING = 1e-9  # the largest difference in float64 that counts as rounding
FLOAT64: dict[str, Any] = {"train.precision": "fp64"}
Task = dict[str, Any]  # see `rank.run_rank`
Outcome = tuple[bool | None, str]  # `passed` and `measured` of a Proof


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
        self.worlds, self.kills = [w for w in worlds if w <= 4], kills
        self.most = max(worlds)  # ranks of a layout
        self.untried: list[str] = []  # by the proof that runs
        self.base = dotted(COMMON) | {"data.dir": str(self.folder / "data")}
        # One number for all worlds, because threads change bits.
        self.base["train.threads"] = processes.thread_share(max(worlds))
        if not recipe:
            text = self.folder / "text.txt"
            text.write_text(Path(__file__).read_text(encoding="utf-8")[:900], encoding="utf-8")
            self.base |= dotted(TINY) | {"data.source": str(text)}
        self.base |= dotted(overrides)
        self.model = self.settings("model").model

    def settings(self, run: str, **settings: Any) -> Recipe:
        """The base recipe with changes for a run, as `train__micro_batch=4`."""
        changes = {key.replace("__", "."): value for key, value in settings.items()}
        place = {"run.dir": str(self.folder / run)}
        return Recipe.load(self.recipe, self.base | dotted(changes) | place)

    def start(
        self, run: str, world: int, task: Task | None = None, **settings: Any
    ) -> subprocess.Popen[bytes]:
        """Begin to train in `world` processes, which write to RUN.out."""
        task = {"recipes": [self.write(run, **settings)], "world": world, **(task or {})}
        command = [*processes.MODULE, "windlass.verification.rank", json.dumps(task)]
        how: Any = {"env": {**os.environ, processes.PARENT: str(os.getpid())}}
        with (self.folder / f"{run}.out").open("ab") as out:
            how |= {"stdout": out, "stderr": out, "start_new_session": True}
            return subprocess.Popen(command, **how)

    def write(self, run: str, **settings: Any) -> str:
        """Write the recipe of a run; returns its path."""
        path = self.folder / f"{run}.toml"
        path.write_text(self.settings(run, **settings).toml(), encoding="utf-8")
        return str(path)

    def train(
        self,
        run: str,
        world: int = 1,
        task: Task | None = None,
        *,
        branch_from: str = "",
        **settings: Any,
    ) -> Run:
        """Train in this process without output, or for a task or a world in processes of their own.

        `branch_from`: RUN@STEP, in this process. RuntimeError if processes fail.
        """
        if world == 1 and task is None:
            with open(os.devnull, "w", encoding="utf-8") as null, contextlib.redirect_stdout(null):
                return windlass.train(self.settings(run, **settings), branch_from=branch_from)
        code = self.start(run, world, task, **settings).wait()
        if code not in ((1, -signal.SIGKILL) if "kill_after" in (task or {}) else (DONE,)):
            lines = (self.folder / f"{run}.out").read_text(errors="replace").splitlines()[-12:]
            raise RuntimeError("\n".join([f"a training ended with exit code {code}:", *lines]))
        return Run(self.folder / run)

    def train_all(
        self,
        runs: Mapping[str, dict[str, Any]],
        world: int,
        faults: Mapping[str, str] | None = None,
    ) -> list[Run]:
        """Train runs in the same `world` processes; `faults`: by run, a name in `rank.FAULTS`."""
        if not runs or (world == 1 and not faults):
            return [self.train(run, **settings) for run, settings in runs.items()]
        recipes = [self.write(run, **settings) for run, settings in runs.items()]
        names = [(faults or {}).get(run, "") for run in runs]
        first, settings = next(iter(runs.items()))
        self.train(first, world, {"recipes": recipes, "faults": names}, **settings)
        return [Run(self.folder / run) for run in runs]
