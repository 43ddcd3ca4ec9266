"""Where the processor time of a small step goes, in two checkouts: a table, and a picture.

    python benchmarks/step_profile.py TEXT --src OLD/src NEW/src [--picture docs/images/profile.png]

Each checkout trains 4 layers of width 128 on 12 x 64 characters, in fp32 with one thread, in a
process of its own. torch's profiler watches some steps after the warm-up and groups the time of each
operator, which takes a little longer than without a profiler.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WARM, WATCHED = 20, 40
KINDS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::linear"),
    "attention": ("attention",),
    "activation": ("gelu", "Gelu"),
    "norms of layers": ("layer_norm", "rms_norm"),
    "loss": ("softmax", "nll_loss", "cross_entropy"),
    "embeddings": ("embedding", "index"),
    "optimizer": ("adam", "_foreach"),
    "gradient norm": ("vector_norm", "linalg"),
}
OTHER = "other operators"
SETTINGS = ["model.layers=4", "model.heads=4", "model.width=128", "model.context=64"]
SETTINGS += ["model.dropout=0", "train.global_batch=12", "train.micro_batch=12"]
SETTINGS += [f"train.steps={WARM + WATCHED}", "train.precision=fp32", "train.threads=1"]
SETTINGS += ["telemetry.every=20", "eval.every=0", "checkpoint.every=0", "eval.sample_every=0"]


def kind_of(operator: str) -> str:
    return next((k for k, words in KINDS.items() if any(w in operator for w in words)), OTHER)


def watch(text: str, out: str) -> None:
    """Train with the windlass of PYTHONPATH, and write the milliseconds of a step by kind."""
    from torch.profiler import ProfilerActivity, profile

    from windlass.cli import main
    from windlass.training.trainer import Trainer

    step, calls = Trainer.step, 0
    profiler = profile(activities=[ProfilerActivity.CPU])

    def counted(self: Any, *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == WARM + 1:
            profiler.start()
        return step(self, *arguments)

    Trainer.step = counted  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        places = [f"data.source={text}", f"data.dir={folder}/data", f"run.dir={folder}/run"]
        sys.argv = ["windlass", "train", "shakespeare-char", *places, *SETTINGS]
        try:
            main()
        except SystemExit as stop:
            assert not stop.code, stop.code
    profiler.stop()
    kinds = dict.fromkeys([*KINDS, OTHER], 0.0)
    for event in profiler.key_averages():
        kinds[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / WATCHED
    Path(out).write_text(json.dumps(kinds))


def draw(path: Path, sides: dict[str, dict[str, float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 1.4 + 0.7 * len(sides)))
    colors = plt.get_cmap("tab10").colors  # type: ignore[attr-defined]
    for row, kinds in enumerate(sides.values()):
        left = 0.0
        for (kind, ms), color in zip(kinds.items(), colors, strict=False):
            axes.barh(row, ms, left=left, color=color, label=kind if row == 0 else None)
            if ms > 0.6:
                axes.text(left + ms / 2, row, f"{ms:.1f}", ha="center", va="center", fontsize=8)
            left += ms
    axes.set_yticks(range(len(sides)), list(sides))
    axes.invert_yaxis()
    axes.set_xlabel("ms of processor time a step")
    axes.legend(ncols=5, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.35), frameon=False)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a text, as tiny Shakespeare")
    parser.add_argument("--src", nargs="+", required=True, help="`src` of each checkout")
    parser.add_argument("--names", nargs="+", default=["before", "after"])
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.out:
        watch(str(given.text), given.out)
        return
    sides = dict[str, dict[str, float]]()
    with tempfile.TemporaryDirectory() as folder:
        for name, src in zip(given.names, given.src, strict=False):
            out = Path(folder) / "kinds.json"
            words = [sys.executable, __file__, str(given.text), "--src", src, "--out", str(out)]
            environment = os.environ | {"PYTHONPATH": src}
            subprocess.run(words, env=environment, check=True, stdout=subprocess.DEVNULL)
            sides[name] = json.loads(out.read_text())
    print(f"| ms of processor time a step | {' | '.join(sides)} |\n|---|{'---:|' * len(sides)}")
    for kind in next(iter(sides.values())):
        print(f"| {kind} | {' | '.join(f'{kinds[kind]:.2f}' for kinds in sides.values())} |")
    print(f"| all | {' | '.join(f'{sum(kinds.values()):.2f}' for kinds in sides.values())} |")
    if given.picture:
        draw(given.picture, sides)


if __name__ == "__main__":
    main()
