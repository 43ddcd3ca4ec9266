"""A step of our GPT beside the same model of others, and the loss over a large vocabulary in three
ways.

    python benchmarks/model_step.py step [small|large] [NANOGPT_DIR]
    python benchmarks/model_step.py loss [full|chunked|library] [WIDTH]
    python benchmarks/model_step.py objective [WIDTH]

The steps are made in turns, and CPU time of one thread is given, so that a busy machine does not
decide; the last column is the median of the ratios to the first row. `objective` compares the loss
with and without z-loss and label smoothing in the same way. With a clone of
karpathy/nanoGPT its own model is measured too. `loss` measures one way in a process, because its
peak of memory is the process's.
"""

from __future__ import annotations

import importlib.util
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from windlass.model.build import build_model
from windlass.model.convert import config
from windlass.model.gpt import initialise
from windlass.model.loss import PLAIN, Objective, cross_entropy_sum
from windlass.processes import keep_freed_memory
from windlass.recipe import Recipe

VOCAB, BATCH = 65, 12
SHAPES = {"small": (4, 4, 128, 64, 40), "large": (6, 6, 384, 256, 6)}
NEWER = (
    "model.position=rope",
    "model.norm=rmsnorm",
    "model.activation=relu2",
    "model.qk_norm=true",
    "model.zero_init_output=true",
)

Step = Callable[[], float]


def stepper(model: torch.nn.Module, loss: Callable[[], Tensor]) -> Step:
    """One training step; gives the CPU seconds it took."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> float:
        start = time.process_time()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return time.process_time() - start

    return step


def steps(shape: str, nanogpt: str | None) -> None:
    layers, heads, width, context, rounds = SHAPES[shape]
    tokens = torch.randint(VOCAB, (BATCH, context))
    labels = tokens.roll(-1, 1)
    sizes = (
        f"model.layers={layers}",
        f"model.heads={heads}",
        f"model.width={width}",
        f"model.context={context}",
    )
    plain = Recipe.load("shakespeare-char", [*sizes, "model.dropout=0"])

    def ours(recipe: Recipe) -> Step:
        model = build_model(recipe, VOCAB, "cpu")
        initialise(model, 0)
        return stepper(model, lambda: model(tokens, labels) / tokens.numel())

    def transformers() -> Step:
        from transformers import AutoConfig, AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config(plain.model, VOCAB, None))
        )
        return stepper(model, lambda: model(tokens, labels=tokens).loss)

    rows = {"windlass": ours(plain), "windlass, newer parts": ours(plain.replace(*NEWER))}
    if nanogpt:
        rows["nanoGPT"] = stepper(
            *nano(Path(nanogpt), layers, heads, width, context, tokens, labels)
        )
    rows["transformers GPT-2"] = transformers()
    in_turns(rows, rounds)


def in_turns(rows: dict[str, Step], rounds: int) -> None:
    """Print the time of each row, and its ratio to the first."""
    taken: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds + 2):
        for name, step in rows.items():
            taken[name].append(step())
    first = next(iter(taken.values()))[2:]
    for name, times in taken.items():
        ratio = statistics.median(a / b for a, b in zip(times[2:], first, strict=True))
        print(f"{name:24s} {1e3 * statistics.median(times[2:]):9.1f} ms {ratio:7.3f}")


def objectives(width: int) -> None:
    rows, vocab = 2048, 50257
    x = torch.randn(rows, width, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width)).requires_grad_()
    labels = torch.randint(vocab, (rows,))

    def timed(objective: Objective) -> Step:
        def step() -> float:
            start = time.process_time()
            cross_entropy_sum(x, weight, labels, objective=objective).backward()
            x.grad = weight.grad = None
            return time.process_time() - start

        return step

    more = {"z-loss": (1e-4, 0.0), "label smoothing": (0.0, 0.1), "both": (1e-4, 0.1)}
    in_turns({"plain": timed(PLAIN)} | {k: timed(Objective(*v)) for k, v in more.items()}, 8)


def nano(
    folder: Path, layers: int, heads: int, width: int, context: int, tokens: Tensor, labels: Tensor
) -> tuple[torch.nn.Module, Callable[[], Tensor]]:
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    shape = module.GPTConfig(
        block_size=context,
        vocab_size=VOCAB,
        n_layer=layers,
        n_head=heads,
        n_embd=width,
        dropout=0.0,
        bias=False,
    )
    model = module.GPT(shape)
    return model, lambda: model(tokens, labels)[1]


def losses(how: str, width: int) -> None:
    rows, vocab = 2048, 50257
    x = torch.randn(rows, width, requires_grad=True)
    weight = (0.02 * torch.randn(vocab, width)).requires_grad_()
    labels = torch.randint(vocab, (rows,))
    ways: dict[str, Callable[[], Tensor]] = {
        "full": lambda: cross_entropy_sum(x, weight, labels, chunk=0),
        "chunked": lambda: cross_entropy_sum(x, weight, labels),
        "library": lambda: F.linear_cross_entropy(
            x,
            weight,
            labels,
            reduction="sum",
            options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256),
        ),
    }
    before, times = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, []
    for _ in range(4):
        start = time.process_time()
        ways[how]().backward()
        times.append(time.process_time() - start)
        x.grad = weight.grad = None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(
        f"{how:10s} {min(times):.2f} s, +{peak / 1e6:.2f} GB for {rows:,} tokens x {vocab:,} at width {width}"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    keep_freed_memory()
    what, *rest = sys.argv[1:] or ["step"]
    if what == "loss":
        losses(rest[0] if rest else "chunked", int(rest[1]) if len(rest) > 1 else 256)
    elif what == "objective":
        objectives(int(rest[0]) if rest else 256)
    else:
        steps(rest[0] if rest else "small", rest[1] if len(rest) > 1 else None)
