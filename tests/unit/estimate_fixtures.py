"""The directory of a finished run: known step times, evaluations and saves."""

import json
from pathlib import Path
from typing import Any

from windlass.recipe import Recipe
from windlass.run import Run


def write_run(
    path: Path,
    device: str = "CPU",
    world: int = 1,
    step_s: float = 0.1,
    until: int = 100,
) -> Run:
    """A run of 100 steps on quickstart's data, evaluated at 0, 25, 50, 75 and 100, logged every 2
    steps; 1 s of start-up.
    """
    settings = "train.steps=100 train.global_batch=16 eval.every=25 eval.sample_every=0"
    recipe = Recipe.load("quickstart", settings.split())
    path.mkdir(parents=True)
    (path / "recipe.toml").write_text(recipe.toml(), encoding="utf-8")
    tokens = 16 * 128
    spent = {"startup": 1.0, "eval": 0.0, "train": 0.0}
    lines: list[dict[str, Any]] = []

    def line(kind: str, step: int, **fields: Any) -> None:
        lines.append({"kind": kind, "step": step, **fields, "seconds": dict(spent)})

    def evaluate(step: int, seconds: float) -> None:
        spent["eval"] += seconds
        line("eval", step, suite="loss", loss=4.0 - step / 100, runtime_s=seconds)

    start = {"world": world, "steps": 100, "strategy": recipe.strategy(world).name}
    start |= {"device": device, "precision": "fp32"}
    line("event", 0, event="started", **start, samples_per_epoch=0, data={"vocab": 257})
    evaluate(0, 2.0)
    for step in range(2, 101, 2):
        spent["train"] += 2 * step_s
        speed = {"step_ms": 1e3 * step_s, "tokens_per_s": tokens / step_s}
        line("train", step, loss=4.0, **speed, tokens=tokens * step, samples=16 * step)
        if step % 25 == 0 or step in (26, 76):  # 25 and 75 are logged with the next even step
            evaluate(step // 25 * 25, 2.0)
    kept = [line for line in lines if line["step"] <= until]
    run = Run(path)
    run.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in kept), "utf-8")
    return Run(path)
