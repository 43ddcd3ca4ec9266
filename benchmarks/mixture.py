"""Samples of each source of a mixture against its weight, on 1, 2 and 4 ranks, over a kill and a
branch: `python benchmarks/mixture.py NAME=FILE:WEIGHT:LATER_WEIGHT...` prints a Markdown table.

Each cell is counted from what the ranks read. The run of the kill has two ranks, is killed after
step 6, continues on one rank, and branches after step 8 with the later weights on four ranks.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np

from windlass.data.mixture import MixedSamples
from windlass.data.open import open_data
from windlass.verification.bench import Bench
from windlass.verification.mixture import BRANCH, SAMPLES, moved_run, recorded, settings_of


def main(arguments: list[str]) -> None:
    """Train, count and print."""
    parts = [argument.partition("=")[::2] for argument in arguments]
    rows = [(name, *rest.rsplit(":", 2)) for name, rest in parts]
    sources = [
        {"name": name, "source": str(Path(file).resolve()), "weight": float(weight)}
        for name, file, weight, _ in rows
    ]
    last = [float(row[3]) for row in rows]
    bench = Bench(Path(tempfile.mkdtemp()), overrides=["train.threads=1"])
    settings = settings_of(bench, sources)
    later = settings | {
        "data.mix": [source | {"weight": w} for source, w in zip(sources, last, strict=True)]
    }
    read = {}
    for world in (1, 2, 4):
        record = str(bench.folder / f"reads-{world}")
        task = {"record": record, "stop_at": BRANCH}
        bench.train(f"world-{world}", world, task, **settings)
        read[world] = recorded(record, world, BRANCH)
    moved = moved_run(bench, settings, later)
    samples = open_data(bench.settings("mixed", **settings)).train
    assert isinstance(samples, MixedSamples)
    edge = BRANCH * SAMPLES
    equal = read[1] == read[2] == read[4] == moved[:edge]

    def counts(numbers: list[int]) -> list[int]:
        at = np.searchsorted(samples.starts, numbers, side="right") - 1
        return np.bincount(at, minlength=len(rows)).tolist()

    columns = [counts(read[world]) for world in (1, 2, 4)]
    columns += [counts(moved[:edge]), counts(moved[edge:])]
    rest = len(moved) - edge
    head = ["source", "weight", f"of {edge:,}", "1 rank", "2 ranks", "4 ranks", "killed, 2 then 1"]
    head += ["weight in the branch", f"of {rest:,}", "branch, 4 ranks"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    first = [source["weight"] / sum(s["weight"] for s in sources) for source in sources]
    for number, source in enumerate(sources):
        share = last[number] / sum(last)
        own = [str(column[number]) for column in columns]
        cells = [source["name"], f"{first[number]:g}", f"{edge * first[number]:.1f}", *own[:4]]
        print(f"| {' | '.join([*cells, f'{share:g}', f'{rest * share:.1f}', own[4]])} |")
    print(f"\nThe first {edge:,} samples are equal, in equal order, in all four runs: {equal}")


if __name__ == "__main__":
    main(sys.argv[1:])
