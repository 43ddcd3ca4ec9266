"""Resume from the checkpoint of each layout in every layout, and export from each: a table.

    python benchmarks/layouts_resume.py

A tiny GPT trains twelve steps in float64 in each layout; the sixth checkpoint of each is resumed in
all of them. A row has the largest difference from one process, over the layouts that resume: of
losses and gradient norms (relative) and of the last parameters (absolute). The last column is the
largest difference between the logits of the exported model in transformers (float32) and the logits
of one process.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

from windlass.evaluation.source import alone, find_source, open_model
from windlass.interop.export import export
from windlass.run import Run
from windlass.verification.bench import FLOAT64, STEPS, Bench
from windlass.verification.proofs import GPT2_SHAPE, difference

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"strategy": "single"}),
    (2, {"strategy": "ddp"}),
    (2, {"tensor": 2}),
    (2, {"context": 2}),
    (2, {"pipeline": 2}),
    (4, {"strategy": "full_shard"}),
    (4, {"tensor": 2, "strategy": "full_shard"}),
    (4, {"context": 2, "strategy": "shard_optim"}),
    (4, {"pipeline": 2, "strategy": "full_shard"}),
    (4, {"tensor": 2, "context": 2}),
    (4, {"tensor": 2, "pipeline": 2}),
    (4, {"context": 2, "pipeline": 2}),
]
HALF = STEPS // 2
TOKENS = torch.arange(12).reshape(1, 12)


def name_of(world: int, layout: dict[str, Any]) -> str:
    parts = [f"{key}={value}" for key, value in layout.items()]
    return f"`{' '.join(parts)}` x {world}"


def trained(bench: Bench, starts: dict[str, str]) -> dict[str, list[Run]]:
    """Runs from each RUN@STEP (empty: the seed) in each layout, by the name of the start."""
    runs: dict[str, list[Run]] = {start: [] for start in starts}
    for number, (world, layout) in enumerate(LAYOUTS):
        settings = {f"parallel.{key}": value for key, value in layout.items()}
        settings |= {"checkpoint.every": HALF, **FLOAT64, **GPT2_SHAPE}
        for place, (start, checkpoint) in enumerate(starts.items()):
            name = f"{number}-from-{place}-of-{len(starts)}"
            task = {"branch_from": checkpoint} if checkpoint else None
            runs[start].append(bench.train(name, world, task, **settings))
    return runs


def export_distance(run: Run, folder: Path, wanted: torch.Tensor) -> float:
    """The largest difference of a logit in transformers."""
    export(str(run.path), folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return float((model(TOKENS).logits - wanted).abs().max())


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        bench = Bench(folder)
        [first] = trained(bench, {"": ""}).values()
        reference, names = first[0], [name_of(*layout) for layout in LAYOUTS]
        starts = {name: f"{run.path}@{HALF}" for name, run in zip(names, first, strict=True)}
        resumed = trained(bench, starts)
        with torch.no_grad():
            wanted = open_model(find_source(str(reference.path)), alone("cpu"))(TOKENS)
        print("| trained, and resumed by all | whole run | resumed runs | exported logits |")
        print("|---|---:|---:|---:|")
        for name, run in zip(names, first, strict=True):
            worst = max(difference(other, reference) for other in resumed[name])
            logits = export_distance(run, folder / f"hf-{run.path.name}", wanted)
            print(f"| {name} | {difference(run, reference):.0e} | {worst:.0e} | {logits:.0e} |")


if __name__ == "__main__":
    main()
