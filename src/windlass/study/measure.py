"""A few real steps of a recipe on this machine, for a plan's time. No torch in this process."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

from windlass.errors import RunFailed
from windlass.estimate.time import MEASURED, Speed
from windlass.recipe import Recipe
from windlass.run import Run

STEPS = 8
WARM = 2
"""Steps at the beginning that do not count: caches, compilation, first allocations."""
MICRO_BATCHES = 4
"""Micro-batches of a rank in a measured step, at most; a step of the recipe may have more."""


def measuring_recipe(recipe: Recipe, world: int, device: str, directory: Path) -> Recipe:
    """The recipe cut down to a few steps in a directory of its own: no evaluation, no saves, no trackers.

    The micro-batch stays what it is; of the micro-batches that a rank accumulates in a step only a few are left.
    """
    batch = recipe.batch(world, device)
    kept = min(batch.accumulation, MICRO_BATCHES)
    return recipe.with_overrides(
        **{
            "run.dir": str(directory), "run.name": "", "train.steps": STEPS, "train.micro_batch": batch.micro_batch,
            "train.global_batch": batch.micro_batch * world * kept, "train.startup_checks": False, "eval.every": 0,
            "eval.sample_every": 0, "checkpoint.every": 0, "telemetry.every": 1, "telemetry.trackers": [],
            "optim.schedule.warmup": 0, "optim.schedule.decay": 0,
        }
    )  # fmt: skip


def measure(recipe: Recipe, world: int = 1, device: str = "cpu") -> Speed:
    """The speed of a recipe on `world` ranks of this machine, from a few real steps of it.

    What a step spends on each micro-batch is taken times the recipe's accumulation, what it spends once (the update,
    waiting for data) is taken once.

    Raises:
        RunFailed: the steps could not be made; the message has the end of what they said.
    """
    with tempfile.TemporaryDirectory(prefix="windlass-measure-") as place:
        cut = measuring_recipe(recipe, world, device, Path(place) / "run")
        file = Path(place) / "recipe.toml"
        file.write_text(cut.toml(), encoding="utf-8")
        command = [sys.executable, "-m", "windlass", "train", str(file), "--world", str(world)]
        environ = os.environ | {"WINDLASS_QUIET_END": "1"}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            said = "\n".join(done.stdout.splitlines()[-15:])
            raise RunFailed(f"the steps to measure could not be made (exit code {done.returncode}):\n{said}")
        return speed_of(Run.open(Path(place) / "run"), recipe, cut, world, device)


def speed_of(run: Run, recipe: Recipe, cut: Recipe, world: int, device: str) -> Speed:
    """What the ledger of the cut-down run says of the whole recipe."""
    lines = run.lines("train")[WARM:]
    times = cut.train.global_batch // (cut.train.micro_batch * world)
    ratio = recipe.batch(world, device).accumulation / times
    once = median(x.get("optimizer_ms", 0.0) + x.get("data_ms", 0.0) for x in lines)
    step_ms = median(x["step_ms"] for x in lines)
    tokens = median(x["tokens_per_s"] * x["step_ms"] / 1e3 for x in lines) * ratio
    whole_ms = (step_ms - once) * ratio + once
    started = [x for x in run.events if x.get("event") == "started"]
    name = str(started[-1].get("device", device)) if started else device
    detail = f"{len(lines)} steps of {times} micro-batches of {cut.train.micro_batch} made here: {world} x {name}"
    return Speed(tokens / (whole_ms / 1e3), world, MEASURED, detail)
