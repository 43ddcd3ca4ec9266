"""What data cost: the time to prepare a corpus with each tokenizer, and the time that the loader
takes for a step.

    python benchmarks/data_cost.py TEXT... [--src SRC ...] [--rounds 5] [--copies 10]

The texts are repeated `copies` times, as one JSON-lines corpus of paragraphs and as one text. With
several `--src` (the `src` directories of checkouts) they are measured interleaved, in an order that
changes from round to round, each in a process of its own, and the ratio to the first is shown: two
runs of the same command differ by more than most changes cost.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 200


def measure(corpus: Path, folder: Path, gpt2: str) -> dict[str, float]:
    """Seconds by what was done, with the windlass of PYTHONPATH."""
    from windlass.data.loader import Loader
    from windlass.recipe import Recipe

    try:
        from windlass.data.open import open_data
    except ImportError:  # an older checkout
        from windlass.data.open import open_data

    seconds = {}
    tokenizers = {
        "byte": "byte",
        "char": "char",
        "bpe 1024": "bpe",
        **({"gpt2": f"gpt2:{gpt2}"} if gpt2 else {}),
    }
    for source in (corpus / "corpus.jsonl", corpus / "corpus.txt"):
        for name, tokenizer in tokenizers.items():
            settings = {
                "source": str(source),
                "tokenizer": tokenizer,
                "tokenizer_vocab": 1024,
                "workers": 2,
            }
            directory = folder / f"{name}{source.suffix}"
            recipe = Recipe.model_validate(
                {"data": {**settings, "dir": str(directory), "shard_tokens": 5_000_000}}
            )
            started = time.perf_counter()
            data = open_data(recipe)
            seconds[f"prepare {name} {source.suffix}"] = time.perf_counter() - started
            started = time.perf_counter()
            open_data(recipe)
            seconds[f"open {name} {source.suffix}"] = time.perf_counter() - started
        for prefetch in (0, 2):
            with Loader(data.train, recipe.batch(1), 0, 1, prefetch=prefetch) as loader:
                started = time.perf_counter()
                for _ in range(STEPS):
                    next(loader)
                seconds[f"{STEPS} steps {source.suffix} prefetch {prefetch}"] = (
                    time.perf_counter() - started
                )
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--src", action="append", default=[])
    parser.add_argument("--gpt2", default="", help="a directory with vocab.bpe and encoder.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--copies", type=int, default=10)
    parser.add_argument("--child", type=Path)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measure(options.texts[0], options.child, options.gpt2)))
        return
    sources = options.src or [str(Path(__file__).resolve().parents[1] / "src")]
    seconds: dict[str, list[dict[str, float]]] = {source: [] for source in sources}
    with tempfile.TemporaryDirectory() as name:
        corpus = Path(name)
        text = (
            "\n\n".join(path.read_text(encoding="utf-8") for path in options.texts) * options.copies
        )
        (corpus / "corpus.txt").write_text(text, encoding="utf-8")
        lines = (json.dumps({"text": part}) + "\n" for part in text.split("\n\n"))
        (corpus / "corpus.jsonl").write_text("".join(lines), encoding="utf-8")
        for turn in range(options.rounds):
            for source in sources if turn % 2 else sources[::-1]:
                command = [
                    sys.executable,
                    __file__,
                    str(corpus),
                    "--gpt2",
                    options.gpt2,
                    "--child",
                    str(corpus / "out"),
                ]
                environment = {**os.environ, "PYTHONPATH": source}
                done = subprocess.run(
                    command, env=environment, check=True, stdout=subprocess.PIPE, text=True
                )
                seconds[source].append(json.loads(done.stdout.splitlines()[-1]))
                shutil.rmtree(corpus / "out")
    print(
        f"{len(text) / 1e6:.1f} M characters, {options.rounds} rounds; median seconds, and median ratio to the first"
    )
    for key in seconds[sources[0]][0]:
        cells = [f"{key:32}"]
        for source in sources:
            ratios = [
                a[key] / b[key] for a, b in zip(seconds[source], seconds[sources[0]], strict=True)
            ]
            cells.append(
                f"{statistics.median(run[key] for run in seconds[source]):8.3f} s {statistics.median(ratios):6.3f}"
            )
        print("  ".join(cells))


if __name__ == "__main__":
    main()
