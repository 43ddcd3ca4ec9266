"""How far the losses of several ranks are from those of one, by precision and strategy: a table in
Markdown.

    python benchmarks/rounding.py [--steps 240]

Each run is the quickstart, with one thread a rank. A run on N ranks has 1/N of the micro-batch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from windlass.run import Run

FIRST = 10  # steps of the first column
BATCH = 8  # of the quickstart
RUNS = (
    ("fp32", "ddp", 2),
    ("fp32", "ddp", 4),
    ("fp32", "full_shard", 2),
    ("bf16", "ddp", 2),
    ("bf16", "full_shard", 2),
    ("fp64", "ddp", 2),
    ("fp64", "ddp", 4),
    ("fp64", "full_shard", 2),
)
SETTINGS = ["telemetry.every=1", "eval.every=0", "eval.sample_every=0", "train.threads=1"]


def losses(folder: Path, precision: str, strategy: str, world: int, steps: int) -> list[float]:
    """The training losses of a run, step by step."""
    run = Run(folder / f"{precision}-{strategy}-{world}")
    own = [f"train.precision={precision}", f"train.micro_batch={BATCH // world}"]
    own += [f"parallel.strategy={strategy}"]
    places = [f"data.dir={folder / 'data'}", f"run.dir={run.path}"]
    command = [sys.executable, "-m", "windlass", "train", "quickstart", f"train.steps={steps}"]
    command += [*SETTINGS, *own, *places, "--world", str(world)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [line["loss"] for line in run.lines("train")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    given = parser.parse_args()
    print(f"| `train.precision` | strategy | ranks | steps 1–{FIRST} | steps 1–{given.steps} |")
    print("|---|---|---:|---:|---:|")
    one: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        for precision, strategy, world in RUNS:
            steps = FIRST if precision == "bf16" else given.steps  # a CPU takes seconds a step
            if precision not in one:
                one[precision] = losses(Path(name), precision, "single", 1, steps)
            several = losses(Path(name), precision, strategy, world, steps)
            apart = [abs(a - b) for a, b in zip(several, one[precision], strict=True)]
            row = f"{max(apart[:FIRST]):.1e} | {f'{max(apart):.1e}' if steps > FIRST else '–'}"
            print(f"| `{precision}` | `{strategy}` | {world} | {row} |", flush=True)


if __name__ == "__main__":
    main()
