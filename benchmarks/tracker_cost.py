"""What trackers cost a training, healthy or sabotaged: time of a step beside them, in turns with
none.

    python benchmarks/tracker_cost.py [--rounds 3] [--steps 150]

A step is a matrix product of about 10 ms on one thread and a line in the ledger, after which the
trackers are looked after, as the loop does at every log. Each round runs every case once, so that a
machine that slows down slows all. The first seconds, in which a healthy tracker's libraries are
imported beside the training, are in the figures.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from windlass.ledger import Ledger
from windlass.recipe import Recipe
from windlass.telemetry.trackers import Trackers

ALL = ["tensorboard", "mlflow", "wandb"]
CASES = ("none", "healthy", "hung imports", "refused")


def environment(case: str, folder: Path) -> dict[str, str]:
    if case == "refused":
        nowhere = dict.fromkeys(("MLFLOW_TRACKING_URI", "WANDB_BASE_URL"), "http://127.0.0.1:9")
        return nowhere | {"WANDB_API_KEY": "0" * 40}
    if case != "hung imports":
        return {}
    for name in ALL:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text("import time\ntime.sleep(3600)\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


def train(case: str, steps: int) -> tuple[list[float], float, float]:
    """Milliseconds of each step, of the longest look after the trackers, and seconds of the end."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "runs" / "run"
        run.mkdir(parents=True)
        recipe = Recipe.model_validate({"telemetry": {"trackers": [] if case == "none" else ALL}})
        (run / "recipe.toml").write_text(recipe.toml())
        before = dict(os.environ)
        os.environ.update(environment(case, Path(name) / "hung"))
        trackers = Trackers(run, recipe.telemetry.trackers)
        os.environ.clear()
        os.environ.update(before)
        ledger, matrix = Ledger(run / "metrics.jsonl"), torch.ones(768, 768)
        ledger.write("event", 0, event="started", world=1)
        times, longest = [], 0.0
        for step in range(1, steps + 1):
            begin = time.perf_counter()
            matrix @ matrix
            ledger.write("train", step, loss=1 / step)
            look = time.perf_counter()
            trackers.poll()
            end = time.perf_counter()
            times.append(1e3 * (end - begin))
            longest = max(longest, 1e3 * (end - look))
        ledger.write("event", steps, event="finished")
        ledger.close()
        begin = time.perf_counter()
        trackers.finish(2.0 if case == "hung imports" else 30.0)
        return times, longest, time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, list[tuple[list[float], float, float]]] = {case: [] for case in CASES}
    for _ in range(given.rounds):
        for case in CASES:
            found[case].append(train(case, given.steps))
    print(f"{'trackers':<14} {'median step':>12} {'longest look':>13} {'end':>8}")
    for case, rounds in found.items():
        steps = statistics.median(x for times, _, _ in rounds for x in times)
        look = max(x for _, x, _ in rounds)
        end = max(x for _, _, x in rounds)
        print(f"{case:<14} {steps:>9.2f} ms {look:>10.2f} ms {end:>6.1f} s")


if __name__ == "__main__":
    main()
