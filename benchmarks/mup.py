"""muP (model.mup) measured: the best learning rate over widths, beside the standard parametrisation.

    python benchmarks/mup.py rates input.txt RESULTS.json     # about 5 minutes on one core
    python benchmarks/mup.py pictures RESULTS.json [--to docs/images]

`rates` trains four widths with three seeds and each learning rate on a text. It continues a file of
results that a stop left incomplete. `pictures` draws them and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import windlass
from windlass.recipe import Recipe
from windlass.reports.plots import DPI, PALETTE, SHAPES, STYLE

WIDTHS, SEEDS = (16, 32, 64, 128), (1, 2, 3)
RATES = [2.0**power for power in range(-10, -3)]
STEPS, BATCH, CONTEXT, HEAD = 100, 8, 64, 8
MODEL = {
    "layers": 2,
    "context": CONTEXT,
    "norm": "rmsnorm",
    "position": "rope",
    "qk_norm": True,
    "activation": "relu2",
    "attn_bias": False,
    "ff_bias": False,
    "zero_init_output": True,
    "tie_head": False,
}
KINDS = ("standard", "muP")


def recipe_of(text: str, folder: Path, width: int, rate: float, seed: int, base: int) -> Recipe:
    """A small GPT of a width; its heads have 8 units, so a wider model has more of them."""
    settings: dict[str, Any] = {
        "model": {**MODEL, "width": width, "heads": width // HEAD},
        "model.mup.base_width": base,
        "data": {"source": text, "dir": str(folder / "data"), "tokenizer": "char"},
        "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": BATCH, "threads": 1},
        "train.startup_checks": False,  # a high learning rate may diverge
        "optim": {"lr": rate, "schedule": {"kind": "cosine", "warmup": 0.1}},
        "eval": {"every": STEPS, "batches": 12, "at_end": "batches"},
        "checkpoint.every": 0,
        "telemetry.every": STEPS,
        "run": {"dir": str(folder / f"{base}-{width}-{rate}-{seed}"), "seed": seed},
    }
    return Recipe.from_dict(settings)


def rates(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """The final validation loss of every cell; muP at the base width is the standard one."""
    cells = [
        (kind, width, rate, seed)
        for seed in SEEDS
        for width in WIDTHS
        for kind in KINDS
        for rate in RATES
        if kind == "standard" or width != WIDTHS[0]
    ]
    losses, folder = results.setdefault("rates", {}), Path(tempfile.mkdtemp())
    for number, (kind, width, rate, seed) in enumerate(cells):
        key = f"{kind} {width} {rate} {seed}"
        if key in losses:
            continue
        began, base = time.process_time(), WIDTHS[0] if kind == "muP" else 0
        recipe = recipe_of(options.text, folder, width, rate, seed, base)
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null):
            try:
                run = windlass.train(recipe)
                losses[key] = run.lines("eval")[-1]["loss"]
            except windlass.RunFailed:
                losses[key] = None
        shutil.rmtree(recipe.run_dir)
        options.results.write_text(json.dumps(results, indent=1))
        seconds = time.process_time() - began
        print(f"{number + 1}/{len(cells)} {key}: {losses[key]} ({seconds:.1f} s)", flush=True)


def medians(results: dict[str, Any], kind: str, width: int) -> list[float]:
    """The median over seeds of the loss of each learning rate; infinite if one seed failed."""
    own = "standard" if width == WIDTHS[0] else kind
    every = [[results["rates"][f"{own} {width} {rate} {seed}"] for seed in SEEDS] for rate in RATES]
    return [statistics.median(math.inf if x is None else x for x in losses) for losses in every]


def pictures(options: argparse.Namespace, results: dict[str, Any]) -> None:
    """Draw the measurements, and print the best learning rate of each width."""
    with style.context(STYLE, after_reset=True):
        draw(options.to / "mup-lr.png", (8.0, 3.4), lambda *at: rate_curves(results, *at))
    print("| width | standard: best optim.lr | loss | muP: best optim.lr | loss |")
    for width in WIDTHS:
        cells = [f"{width}"]
        for kind in KINDS:
            losses = medians(results, kind, width)
            best = min(range(len(RATES)), key=losses.__getitem__)
            cells += [f"{RATES[best]:.4f}", f"{losses[best]:.3f}"]
        print(f"| {' | '.join(cells)} |")


def draw(path: Path, size: tuple[float, float], curves: Callable[..., None]) -> None:
    """A picture with the standard parametrisation on the left and muP on the right."""
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, kind in ((left, "standard"), (right, "muP")):
        curves(axes, kind)
        axes.legend(fontsize=8)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def ticks(axis: Any, values: Sequence[float]) -> None:
    """A logarithmic axis with these values written out."""
    axis._set_axes_scale("log")
    axis.set_ticks(values, labels=[f"{value:.2g}" if value < 1 else f"{value}" for value in values])
    axis.set_ticks([], minor=True)


def rate_curves(results: dict[str, Any], axes: Any, kind: str) -> None:
    axes.set_title("standard parametrisation" if kind == "standard" else "muP, base width 16")
    axes.set(xlabel="optim.lr", ylabel="validation loss" if kind == "standard" else "")
    ticks(axes.xaxis, RATES[::2])
    for width, colour, shape in zip(WIDTHS, PALETTE, SHAPES, strict=False):
        losses = medians(results, kind, width)
        axes.plot(RATES, losses, color=colour, marker=shape, label=f"width {width}")
        best = min(range(len(RATES)), key=losses.__getitem__)
        axes.plot(RATES[best], losses[best], "o", color=colour, markersize=11, fillstyle="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    verbs = parser.add_subparsers(required=True)
    for verb in (rates, pictures):
        one = verbs.add_parser(verb.__name__)
        if verb is rates:
            one.add_argument("text")
        one.add_argument("results", type=Path)
        if verb is pictures:
            one.add_argument("--to", type=Path, default=Path("docs/images"))
        one.set_defaults(verb=verb)
    options = parser.parse_args()
    file = options.results
    options.verb(options, json.loads(file.read_text()) if file.exists() else {})


if __name__ == "__main__":
    main()
