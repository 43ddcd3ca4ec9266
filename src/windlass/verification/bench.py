"""Where the proofs run: a directory with short trainings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from windlass import processes
from windlass.recipe import Recipe
from windlass.recipe.layers import dotted
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run
from windlass.verification.forkserver import Task, start, wait

STEPS, BATCH, MICRO = 12, 8, 2
TINY = {
    "model": {"layers": 2, "heads": 2, "width": 32, "context": 16, "vocab": 0, "dropout": 0.1},
    "data": {"tokenizer": "byte", "val_fraction": 0.1},
}
COMMON = {
    "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": MICRO, "compile": False},
    "checkpoint": {"every": 1, "keep_last": 2 * STEPS, "best": "loss"},
    "eval": {"every": 0, "sample_every": 0, "suites": ["loss"]},
    "telemetry": {"every": 1, "trackers": []},
    "parallel": {"strategy": "auto", "timeout_seconds": 120, "startup_timeout_seconds": 300},
    **NO_LAYOUT,
    "optim.schedule.warmup": 2,
}
TAIL_LINES = 12
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
        import torch

        self.folder, self.recipe = folder.resolve(), recipe or "quickstart"
        self.worlds, self.kills = [w for w in worlds if w <= MOST_DATA_RANKS], kills
        self.most = max(worlds)  # ranks of a layout
        self.untried: list[str] = []  # by the proof that runs
        self.base = dotted(COMMON) | {"data.dir": str(self.folder / "data")}
        self.base["train.deterministic"] = torch.cuda.is_available()
        # One number for all worlds, because threads change bits.
        self.base["train.threads"] = processes.thread_share(self.most)
        if not recipe:
            text = self.folder / "text.txt"
            text.write_text(Path(__file__).read_text(encoding="utf-8")[:900], encoding="utf-8")
            self.base |= dotted(TINY) | {"data.source": str(text)}
        self.base |= dotted(overrides)
        self.model = self.settings("model").model

    def settings(self, run: str, changes: Settings | None = None) -> Recipe:
        """The recipe of a run: the base recipe with changes."""
        place = {"run.dir": str(self.folder / run)}
        return Recipe.load(self.recipe, self.base | dotted(changes or {}) | place)

    def train(self, run: str, changes: Settings | None = None, world: int = 1, **task: Any) -> Run:
        """Train on ranks in processes of their own; `task`: more fields of the task. RuntimeError
        if a rank fails."""
        if any(codes := wait(self.start(run, changes, world, **task))):
            raise RuntimeError(f"a training failed (exit codes {codes}):\n{self.tail(run)}")
        return Run(self.folder / run)

    def start(
        self, run: str, changes: Settings | None = None, world: int = 1, **task: Any
    ) -> list[ForkServerProcess]:
        """Begin to train; returns the ranks."""
        recipe, output = self.folder / f"{run}.toml", self.folder / f"{run}.out"
        recipe.write_text(self.settings(run, changes).toml(), encoding="utf-8")
        return start(Task(str(recipe), world, str(output), **task))

    def tail(self, run: str) -> str:
        lines = (self.folder / f"{run}.out").read_text(errors="replace").splitlines()
        return "\n".join(lines[-TAIL_LINES:])
