"""muP (model.mup) measured: activations and the best learning rate over widths, beside the standard
parametrisation.

    python benchmarks/mup.py rates input.txt RESULTS.json     # about 15 minutes on one core
    python benchmarks/mup.py coordinates RESULTS.json         # about a minute
    python benchmarks/mup.py pictures RESULTS.json [--to docs/images]

`rates` trains four widths with three seeds and each learning rate on a text; `coordinates` makes
the check of `windlass verify --mup` over six widths. Both continue a file of results that a stop
left incomplete. `pictures` draws both and prints the table.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import windlass
from windlass.recipe import Recipe
from windlass.verification.bench import Bench
from windlass.verification.mup import BASE, exponents, sizes_at

WIDTHS, SEEDS = (16, 32, 64, 128), (1, 2, 3)
RATES = [2.0**power for power in range(-10, -3)]
STEPS, BATCH, CONTEXT, HEAD = 100, 8, 64, 8
MODEL = {
    **{"layers": 2, "context": CONTEXT, "norm": "rmsnorm", "position": "rope", "qk_norm": True},
    **{"activation": "relu2", "attn_bias": False, "ff_bias": False, "zero_init_output": True},
    "tie_head": False,
}
COORDINATES = (64, 96, 128, 192, 256)
KINDS = {"standard": "standard parametrisation", "muP": "muP, base width"}


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


def main() -> None:
    parser = argparse.ArgumentParser()
    verbs = parser.add_subparsers(required=True)
    for name, verb in {"rates": rates}.items():
        one = verbs.add_parser(name)
        if name == "rates":
            one.add_argument("text")
        one.add_argument("results", type=Path)
        one.set_defaults(verb=verb)
    options = parser.parse_args()
    file = options.results
    options.verb(options, json.loads(file.read_text()) if file.exists() else {})


if __name__ == "__main__":
    main()
