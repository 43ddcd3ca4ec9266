"""The directory of a finished run: known step times and evaluations."""

from pathlib import Path
from typing import Any

from helpers import write_ledger
from windlass.recipe import Recipe
from windlass.run import Run


def write_run(
    path: Path, device: str = "CPU", world: int = 1, step_s: float = 0.1, until: int = 100
) -> Run:
    """A run of 100 steps on quickstart's data, evaluated every 25 and logged every 2 steps."""
    settings = "train.steps=100 train.global_batch=16 eval.every=25 eval.sample_every=0"
    recipe, run, tokens = Recipe.load("quickstart", settings.split()), Run(path), 16 * 128
    start: dict[str, Any] = {"world": world, "strategy": recipe.strategy(world).name}
    start |= {"device": device, "precision": "fp32", "steps": 100, "samples_per_epoch": 0}
    lines = [{"kind": "event", "step": 0, "event": "started", **start, "data": {"vocab": 257}}]
    for step in range(0, 101, 25):
        score = {"suite": "loss", "loss": 4.0 - step / 100, "runtime_s": 2.0}
        lines.append({"kind": "eval", "step": step, **score})
    for step in range(2, 101, 2):
        speed = {"step_ms": 1e3 * step_s, "tokens_per_s": tokens / step_s, "loss": 4.0}
        count = {"tokens": tokens * step, "samples": 16 * step}
        lines.append({"kind": "train", "step": step, **speed, **count})
    lines.sort(key=lambda line: line["step"])
    write_ledger(run, *(line for line in lines if line["step"] <= until))
    (path / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    return run
