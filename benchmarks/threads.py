"""Tokens a second on a CPU by number of threads and waiting policy, alone and beside a process that
keeps a core busy.

    python benchmarks/threads.py [--rounds 2] [--seconds 4]

Trains quickstart and a tiny model through `windlass train`, in turns: libgomp's own waiting with a
thread a core (`before`), passive waiting, one thread, and what windlass chooses. Shown is the
median over the rounds, of each run the median of its logged steps. The machine must be otherwise
idle.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from windlass.processes import usable_cores
from windlass.run import Run

QUICKSTART = ["train.steps=100000", "telemetry.every=4"]
TINY = [
    "train.steps=100000",
    "telemetry.every=50",
    "model.layers=2",
    "model.heads=2",
    "model.width=32",
    "model.context=32",
    "train.global_batch=8",
]
CASES = {
    "before": ({"GOMP_SPINCOUNT": "300000"}, [f"train.threads={usable_cores()}"]),
    "passive": ({"OMP_WAIT_POLICY": "passive"}, [f"train.threads={usable_cores()}"]),
    "one thread": ({}, ["train.threads=1"]),
    "chosen": ({}, []),
}


def speed(model: list[str], case: str, folder: Path, seconds: float) -> tuple[float, int]:
    """Tokens a second of a run that is stopped after some seconds of steps, and its threads."""
    more, settings = CASES[case]
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | more
    run = Run(folder / f"run-{len(list(folder.iterdir()))}")
    words = [
        *model,
        *settings,
        "eval.every=0",
        "eval.sample_every=0",
        "checkpoint.every=0",
        "telemetry.sample_seconds=60",
    ]
    command = [
        sys.executable,
        "-m",
        "windlass",
        "train",
        "quickstart",
        *words,
        f"data.dir={folder / 'data'}",
    ]
    process = subprocess.Popen(
        [*command, f"run.dir={run.path}"], env=environ, stdout=subprocess.DEVNULL
    )
    try:
        while not run.lines("train"):
            if process.poll() is not None:
                raise SystemExit(f"the run failed with exit code {process.returncode}")
            try:
                process.wait(0.1)
            except subprocess.TimeoutExpired:
                continue
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        pass
    finally:
        process.kill()
        process.wait()
    speeds = [
        line["tokens_per_s"] for line in run.lines("train")[1:]
    ]  # the first step fills caches
    return statistics.median(speeds or [0.0]), run.events[0]["threads"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=4.0)
    given = parser.parse_args()
    print(
        f"{usable_cores()} cores; tokens/s (threads)\n{'':<24}"
        + "".join(f"{case:>18}" for case in CASES)
    )
    for name, model in {"quickstart": QUICKSTART, "tiny": TINY}.items():
        for busy in (False, True):
            beside = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if busy else None
            results: dict[str, list[tuple[float, int]]] = {case: [] for case in CASES}
            try:
                with tempfile.TemporaryDirectory() as folder:
                    for _ in range(given.rounds):
                        for case in CASES:
                            results[case].append(speed(model, case, Path(folder), given.seconds))
            finally:
                if beside:
                    beside.kill()
            row = [
                f"{statistics.median(s for s, _ in r):,.0f} ({','.join(str(n) for n in sorted({n for _, n in r}))})"
                for r in results.values()
            ]
            print(
                f"{name + (', one busy beside' if busy else ', alone'):<24}"
                + "".join(f"{text:>18}" for text in row),
                flush=True,
            )


if __name__ == "__main__":
    main()
