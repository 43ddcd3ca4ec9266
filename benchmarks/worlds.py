"""Weak scaling on paper: the fastest layout that fits on 8 to 16,384 GPUs, by the plan's model.

    python benchmarks/worlds.py [--picture docs/images/plan-worlds.png]

It prints a table in Markdown. Each rank has TOKENS a step. Tensor parallelism stays inside a host
of 8; the strategy, checkpointing, micro-batch and pipeline vary. The picture also has the published
weak-scaling runs, with what the model predicts for their own programs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from published import PublishedRun, published_runs

from windlass.estimate.devices import find_device
from windlass.estimate.layouts import NETWORK, variants
from windlass.estimate.memory import memory
from windlass.estimate.rank import Layout
from windlass.estimate.step import Links, constants, published_speeds, slowest
from windlass.model.size import flops_per_token
from windlass.recipe import ModelSettings
from windlass.telemetry.timing import peak_flops

DEVICE, HOST, TOKENS = find_device("H100"), 8, 2**14
PEAK = peak_flops(DEVICE.name, "bf16") or 0.0
WORLDS = [2**n for n in range(3, 15)]
LLAMA = {"norm": "rmsnorm", "position": "rope", "activation": "swiglu", "tie_head": False}
LLAMA |= {"attn_bias": False, "ff_bias": False, "kv_heads": 8}
SHAPES = {  # layers, heads, width, hidden width, context, vocabulary
    "124M": ({}, (12, 12, 768, 3072, 1024), 50304),
    "1.3B": ({}, (24, 16, 2048, 8192, 2048), 50304),
    "8B": (LLAMA, (32, 32, 4096, 14336, 8192), 128256),
    "70B": (LLAMA, (80, 64, 8192, 28672, 8192), 128256),
    "405B": (LLAMA, (126, 128, 16384, 53248, 8192), 128256),
}
COLORS = {n: f"C{i}" for i, n in enumerate(("124M", "1.3B", "7B", "8B", "70B", "405B"))}
NUMBERS = ("layers", "heads", "width", "ff_width", "context")
SERIES = {
    "1.3B": "mpt-1b-H100-",
    "7B": "mpt-7b-H100-",
    "8B compiled": "titan-8b-",
    "70B": "mpt-70b-H100-",
}


def layouts(model: ModelSettings, world: int) -> Iterator[Layout]:
    """The layouts to compare."""
    samples = TOKENS // model.context
    for tensor, pipeline in product((1, 2, 4, 8), (1, 2, 4, 8, 16)):
        ranks = tensor * pipeline
        if world % ranks or world < ranks or model.layers < pipeline or model.heads % tensor:
            continue
        share = samples * ranks  # sequences of a replica in a step
        for micro in (n for n in (1, 2, 4, 8, 16) if share % n == 0 and share // n >= pipeline):
            how = {"micro_batch": micro, "accumulation": share // micro, "device": "cuda"}
            base = Layout("ddp", world, 1, "bf16", tensor=tensor, pipeline=pipeline, **how)
            base = replace(base, workspace=DEVICE.workspace_bytes, compile=True)
            groups = HOST // tensor if world > HOST else 0
            for layout in variants(base, groups_of_host=groups):
                if pipeline == 1 or layout.strategy in ("ddp", "shard_grad_op"):
                    yield layout


def best(model: ModelSettings, vocab: int, world: int) -> tuple[Layout, float] | None:
    """The fastest layout that fits, and the seconds of its step."""
    links = Links(DEVICE.link, NETWORK, HOST if world > HOST else 0)
    speeds = published_speeds(DEVICE, PEAK, links)
    timed = [
        (slowest(model, vocab, x, speeds).total, n, x) for n, x in enumerate(layouts(model, world))
    ]
    for seconds, _, layout in sorted(timed):
        if memory(model, vocab, layout).total <= (DEVICE.usable_bytes or 0):
            return layout, seconds
    return None


def curves() -> dict[str, list[tuple[int, float]]]:
    """MFU of each shape by GPUs; prints the table."""
    result: dict[str, list[tuple[int, float]]] = {}
    print("| model | GPUs | layout | MFU % | tokens/s per GPU |\n|---|---:|---|---:|---:|")
    for (name, (kind, shape, vocab)), world in product(SHAPES.items(), WORLDS):
        model = ModelSettings(**kind, **dict(zip(NUMBERS, shape, strict=True)))
        if (found := best(model, vocab, world)) is None:
            continue
        layout, seconds = found
        mfu = TOKENS * flops_per_token(model, vocab) / seconds / PEAK
        result.setdefault(name, []).append((world, mfu))
        if world in (8, 128, 1024, 16384) or len(result[name]) == 1:
            parts = [layout.strategy, f"checkpointing {layout.checkpointing}"]
            parts += [f"tensor {layout.tensor}"] * (layout.tensor > 1)
            parts += [f"pipeline {layout.pipeline}"] * (layout.pipeline > 1)
            speed = f"{100 * mfu:.0f} | {TOKENS / seconds:,.0f}"
            print(f"| {name} | {world:,} | {', '.join(parts)} | {speed} |", flush=True)
    return result


def measured(prefix: str) -> list[PublishedRun]:
    """The published runs of a model at one micro-batch a step, by GPUs."""
    own = [run for run in published_runs() if run.id.startswith(prefix) and run.device == DEVICE]
    own = [run for run in own if "eager" not in run.id and run.rank.model.context in (2048, 8192)]
    own = [run for run in own if run.rank.layout.accumulation == 1]
    return sorted(own, key=lambda run: run.rank.layout.world)


def draw(path: str, planned: dict[str, list[tuple[int, float]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    _, low, high = constants().ranges["H100"]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), sharey=True)
    for name, prefix in SERIES.items():
        color = COLORS[name.split()[0]]
        runs = measured(prefix)
        x = [run.rank.layout.world for run in runs]
        scale = [flops_per_token(run.rank.model, run.rank.vocab) / PEAK * 100 for run in runs]
        y = [run.predicted() * s for run, s in zip(runs, scale, strict=True)]
        seen = [run.tokens_per_s * s for run, s in zip(runs, scale, strict=True)]
        left.plot(x, y, color=color, label=name)
        band = [[v / (1 + e) for v in y] for e in (high, low)]
        left.fill_between(x, *band, color=color, alpha=0.15, lw=0)
        left.plot(x, seen, "o", color=color, ms=5)
    for name, points in planned.items():
        color = COLORS[name]
        x, y = zip(*((world, 100 * mfu) for world, mfu in points), strict=True)
        right.plot(x, y, color=color, marker=".", label=name)
        band = [[v / (1 + e) for v in y] for e in (high, low)]
        right.fill_between(x, *band, color=color, alpha=0.15, lw=0)
    left.set_title("Published runs: measured (dots), predicted (lines)", fontsize=10)
    right.set_title("Windlass, compiled: the fastest layout that fits", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("H100 GPUs")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
        axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda n, _: f"{n:,.0f}"))
        axes.tick_params(axis="x", labelrotation=30)
    left.set_ylabel("MFU (%)")
    left.set_ylim(0, 60)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--picture", default="", help="where to draw the curves")
    picture = parser.parse_args().picture
    planned = curves()
    if picture:
        draw(picture, planned)


if __name__ == "__main__":
    main()
