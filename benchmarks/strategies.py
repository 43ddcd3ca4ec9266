"""Time of a step of the quickstart under each strategy, on CPU ranks: a table in Markdown.

    python benchmarks/strategies.py [--rounds 3] [--steps 80]

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

CASES = [("single", 1), *((s, 2) for s in ("ddp", "shard_optim", "shard_grad_op", "full_shard"))]
SETTINGS = ["telemetry.every=1", "eval.every=0", "checkpoint.every=0", "train.threads=1"]


def step_ms(folder: Path, strategy: str, world: int, steps: int) -> float:
    """The median time of a step of one training."""
    run = Run(folder / f"run-{len(list(folder.iterdir()))}")
    places = [f"data.dir={folder / 'data'}", f"run.dir={run.path}"]
    command = [sys.executable, "-m", "windlass", "train", "quickstart", f"train.steps={steps}"]
    command += [f"parallel.strategy={strategy}", *SETTINGS, *places, "--world", str(world)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return statistics.median(line["step_ms"] for line in run.lines("train")[steps // 4 :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=80)
    given = parser.parse_args()
    times: dict[tuple[str, int], list[float]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(given.rounds):
            for case in CASES:
                times[case].append(step_ms(Path(name), *case, given.steps))
    print("| strategy | ranks | step (ms) | lowest to highest (ms) |")
    print("|---|---:|---:|---:|")
    for (strategy, world), found in times.items():
        spread = f"{min(found):.1f} to {max(found):.1f}"
        print(f"| `{strategy}` | {world} | {statistics.median(found):.1f} | {spread} |")


if __name__ == "__main__":
    main()
