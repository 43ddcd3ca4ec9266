"""Time of a step of the quickstart under each strategy, or with the ranks of --layouts that divide
the model, on CPU ranks: a table in Markdown.

    python benchmarks/strategies.py [--layouts] [--rounds 3] [--steps 80]

The strategies train in turns, with one thread a rank. A run's time is the median of its steps after
the first quarter.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from windlass.run import Run

STRATEGIES = ("ddp", "shard_optim", "shard_grad_op", "full_shard")
CASES = [("strategy=single", 1), *((f"strategy={strategy}", 2) for strategy in STRATEGIES)]
DIVIDED = ("strategy=ddp", "tensor=2", "context=2", "pipeline=2")
LAYOUTS = [*((case, 2) for case in DIVIDED), *((case, 4) for case in DIVIDED)]
LAYOUTS += [("tensor=2 context=2", 4), ("tensor=2 pipeline=2", 4)]
SETTINGS = ["telemetry.every=1", "eval.every=0", "checkpoint.every=0", "train.threads=1"]


def step_ms(folder: Path, case: str, world: int, steps: int, *settings: str) -> float:
    """The median time of a step of one training."""
    run = Run(Path(tempfile.mkdtemp(prefix="run-", dir=folder)) / "run")
    places = [f"data.dir={folder / 'data'}", f"run.dir={run.path}"]
    command = [sys.executable, "-m", "windlass", "train", "quickstart", f"train.steps={steps}"]
    command += [*(f"parallel.{setting}" for setting in case.split()), *SETTINGS, *places, *settings]
    command += ["--world", str(world)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return statistics.median(line["step_ms"] for line in run.lines("train")[steps // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()
    cases = LAYOUTS if given.layouts else CASES
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(given.rounds):
            for case in cases:
                times[case].append(step_ms(Path(name), *case, given.steps))
    print(
        f"| {'layout' if given.layouts else 'strategy'} | ranks | step (ms) | lowest to highest (ms) |"
    )
    print("|---|---:|---:|---:|")
    for (case, world), found in times.items():
        spread = f"{min(found):.1f} to {max(found):.1f}"
        name = case if given.layouts else case.partition("=")[2]
        print(f"| `{name}` | {world} | {statistics.median(found):.1f} | {spread} |")


if __name__ == "__main__":
    main()
