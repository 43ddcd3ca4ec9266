"""How far the losses of several ranks are from those of one, in fp32 and float64: a table in
Markdown.

    python benchmarks/rounding.py [--steps 240] [--worlds 2,4]

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
SETTINGS = ["telemetry.every=1", "eval.every=0", "eval.sample_every=0", "train.threads=1"]


def losses(folder: Path, precision: str, world: int, steps: int) -> list[float]:
    """The training losses of a run, step by step."""
    run = Run(folder / f"{precision}-{world}")
    own = [f"train.precision={precision}", f"train.micro_batch={BATCH // world}"]
    places = [f"data.dir={folder / 'data'}", f"run.dir={run.path}"]
    command = [sys.executable, "-m", "windlass", "train", "quickstart", f"train.steps={steps}"]
    command += [*SETTINGS, *own, *places, "--world", str(world)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return [line["loss"] for line in run.lines("train")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--worlds", default="2,4")
    given = parser.parse_args()
    print(f"| `train.precision` | ranks | steps 1–{FIRST} | steps 1–{given.steps} |")
    print("|---|---:|---:|---:|")
    with tempfile.TemporaryDirectory() as name:
        for precision in ("fp32", "fp64"):
            one = losses(Path(name), precision, 1, given.steps)
            for world in map(int, given.worlds.split(",")):
                several = losses(Path(name), precision, world, given.steps)
                apart = [abs(a - b) for a, b in zip(several, one, strict=True)]
                row = f"{max(apart[:FIRST]):.1e} | {max(apart):.1e}"
                print(f"| `{precision}` | {world} | {row} |", flush=True)


if __name__ == "__main__":
    main()
