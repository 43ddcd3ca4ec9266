"""How the cost of a step grows, on CPU ranks: a table in Markdown, and the curves as a picture.

    python benchmarks/cost_curves.py [--rounds 3] [--picture docs/images/cost-curves.png]

One number of the quickstart changes at a time; the others stay as in BASE. A time is the median step
of `windlass train` after the first quarter of its steps, with one thread a rank; the runs of a round
follow each other in turns. "Shards" has the same tokens in more files, read in shuffled order. A
slope is the exponent of a power law between a curve's last two points: 1 is proportional.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from strategies import step_ms

STEPS = 24
BASE = ["model.dropout=0", "train.global_batch=4", "train.micro_batch=4", "eval.suites=[loss]"]
TEXT_TOKENS = 2_000_000  # of the text whose shards are counted


class Curve:
    """The steps of one axis: its values, the settings of each, and the number of ranks."""

    def __init__(
        self,
        axis: str,
        values: list[int],
        settings: Callable[[int], list[str]],
        world: bool = False,
    ):
        self.axis, self.values, self.settings, self.world = axis, values, settings, world
        self.times: dict[int, list[float]] = {value: [] for value in values}

    def measure(self, folder: Path) -> None:
        for value in self.values:
            settings, world = self.settings(value), value if self.world else 1
            kind = "strategy=ddp" if world > 1 else "strategy=single"
            own = folder / "-".join(s for s in settings if s.startswith("data."))
            own.mkdir(exist_ok=True)
            self.times[value].append(step_ms(own, kind, world, STEPS, *BASE, *settings))

    def points(self) -> list[float]:
        return [statistics.median(self.times[value]) for value in self.values]

    def slope(self) -> float:
        (x, y), (before, earlier) = ((self.values[i], self.points()[i]) for i in (-1, -2))
        return math.log(y / earlier) / math.log(x / before)


def batch(rows: int) -> list[str]:
    return [f"train.global_batch={rows}", f"train.micro_batch={rows}"]


CURVES = [
    Curve("tokens in a step", [256, 512, 1024, 2048, 4096], lambda n: batch(n // 128)),
    Curve("layers", [2, 4, 8, 16], lambda n: [f"model.layers={n}"]),
    Curve("width", [64, 128, 256, 512], lambda n: [f"model.width={n}", "model.heads=4"]),
    Curve(
        "context, 2,048 tokens in a step",
        [64, 256, 1024, 2048],
        lambda n: [f"model.context={n}", *batch(2048 // n)],
    ),
    Curve("vocabulary", [512, 4096, 32768, 131072], lambda n: [f"model.vocab={n}"]),
    Curve(
        "ranks, 4 rows on each",
        [1, 2, 4],
        lambda n: [f"train.global_batch={4 * n}", "train.micro_batch=4"],
        world=True,
    ),
    Curve(
        "shards of the text",
        [1, 8, 64, 512],
        lambda n: [f"data.shard_tokens={-(-TEXT_TOKENS // n)}"],
    ),
]


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, grid = plt.subplots(2, 4, figsize=(13, 6))
    for axes, curve in zip(grid.flat, CURVES, strict=False):
        x, y = curve.values, curve.points()
        low, high = ([pick(curve.times[v]) for v in x] for pick in (min, max))
        axes.fill_between(x, low, high, alpha=0.2, lw=0)
        axes.plot(x, y, "o-", ms=4)
        axes.plot(x, [y[-1] * v / x[-1] for v in x], ":", color="gray", lw=1)
        limits = min(y) / 1.5, max(y) * 1.5
        axes.set(xscale="log", yscale="log", xlabel=curve.axis, ylim=limits)
        marks = [v for v in (5, 10, 20, 50, 100, 200, 500, 1000) if limits[0] < v < limits[1]]
        axes.set_yticks(marks, [f"{v:,}" for v in marks], fontsize=8)
        axes.set_title(f"last slope {curve.slope():.2f}", fontsize=10)
        axes.set_xticks(x, [f"{v:,}" for v in x], fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    for axes in grid[:, 0]:
        axes.set_ylabel("ms a step")
    for axes in list(grid.flat)[len(CURVES) :]:
        axes.axis("off")
    figure.suptitle("The median step of quickstart (dotted: proportional)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--picture", type=Path, help="where to draw the curves")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        for _ in range(given.rounds):
            for curve in CURVES:
                curve.measure(Path(name))
    print("| what grows | values | step (ms) | last slope |\n|---|---|---|---:|")
    for curve in CURVES:
        values = ", ".join(f"{value:,}" for value in curve.values)
        times = ", ".join(f"{ms:,.1f}" for ms in curve.points())
        print(f"| {curve.axis} | {values} | {times} | {curve.slope():.2f} |")
    if given.picture:
        draw(given.picture)


if __name__ == "__main__":
    main()
