"""Every layout that fits on a number of ranks, against one process: a table of differences.

    python benchmarks/layouts.py --worlds 2,4,8
    python benchmarks/layouts.py --worlds 2,4,8 --transformers

Five steps with gloo ranks on this machine. A layout is tensor x context x pipeline x data ranks, in
each strategy. The model is a GPT of eight layers in GPT-2's parts and in today's, or tiny models of
transformers, which tensor ranks divide. The differences
are the largest of losses, gradient norms and every gradient of the first step (relative), and of
the parameters after the last step (absolute).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / "dist"), str(TESTS)]

import torch  # noqa: E402 - the tests come first in the path
from equivalence import VOCAB, built, gathered, settings, train  # noqa: E402
from harness import run_ranks  # noqa: E402

import hf_fixtures  # noqa: E402
from windlass.errors import UserError  # noqa: E402
from windlass.model.share import cut_of, with_cut  # noqa: E402
from windlass.parallel.parallelize import unwrap  # noqa: E402

SIZES = {"layers": 8, "heads": 8, "width": 32, "context": 12}
PARTS: dict[str, dict[str, Any]] = {
    "GPT-2's parts": {"head_bias": True},
    "today's parts": {
        "position": "rope",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "ff_width": 48,
        "kv_heads": 2,
        "qk_norm": True,
        "tie_head": False,
        "logit_cap": 5.0,
        "attn_bias": False,
    },
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "num_hidden_layers": 2}
TRANSFORMERS: dict[str, dict[str, Any]] = {
    "Llama": HEADS | {"attention_bias": True, "mlp_bias": True},
    "Qwen3": HEADS | {"intermediate_size": 37, "tie_word_embeddings": True},
    "GPT2": {"n_head": 8, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
}
STRATEGIES = ("ddp", "full_shard", "shard_optim", "shard_grad_op", "hybrid_shard")


def layouts(world: int) -> list[tuple[int, int, int]]:
    """Tensor, context and pipeline sizes whose product divides the ranks, without 1 x 1 x 1."""
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    every = itertools.product(sizes, repeat=3)
    return [(t, c, p) for t, c, p in every if world % (t * c * p) == 0 and t * c * p > 1]


def models(folder: Path | None) -> dict[str, dict[str, Any]]:
    """The settings of each model; those of transformers are written to the folder."""
    if folder is None:
        return {name: SIZES | parts for name, parts in PARTS.items()}
    for name, changes in TRANSFORMERS.items():
        hf_fixtures.save(name.lower(), folder / name, vocab=VOCAB, **changes)
    return {name: {"kind": "hf", "name": str(folder / name)} for name in TRANSFORMERS}


def recipe(
    layout: tuple[int, int, int], strategy: str, model: dict[str, Any], precision: str, world: int
) -> Any:
    """A recipe with as many micro-batches as stages, or more."""
    tensor, context, pipeline = layout
    stages = world // (tensor * context)  # of all replicas
    keys = {f"model__{key}": value for key, value in model.items()}
    sizes = {"tensor": tensor, "context": context, "pipeline": pipeline}
    keys |= {f"parallel__{key}": size for key, size in sizes.items()}
    chosen = settings(precision, strategy, 1, **keys, train__micro_batch=min(4, 16 // stages))
    chosen.batch(world)
    return chosen


def outcome(join: Any, chosen: Any) -> tuple[Any, ...]:
    """Losses, norms, this rank's gradients at the first update, and its last parameters, whole."""
    with join(chosen) as ranks:
        model, trainer = built(ranks, chosen)
        gradients, update = dict[str, torch.Tensor](), trainer.optimizer.step

        def step() -> None:
            if not gradients:
                for name, p in unwrap(model).named_parameters():
                    gradients[name] = gathered(with_cut(p.grad, cut_of(p)))
            update()

        trainer.optimizer.step = step
        losses, norms = train(ranks, chosen, trainer)
        return losses, norms, gradients, {n: gathered(p) for n, p in model.named_parameters()}


def outcomes(join: Any, recipes: list[Any]) -> list[Any]:
    return [outcome(join, chosen) for chosen in recipes]


def differences(found: Any, wanted: Any) -> tuple[float, float, float, float]:
    """Of losses, norms, gradients (relative to the largest entry of each), parameters."""
    losses, norms = (
        max(abs(a - b) / abs(b) for a, b in zip(found[i], wanted[i], strict=True)) for i in (0, 1)
    )
    gradients = max(
        float((grad.double() - wanted[2][name]).abs().max() / wanted[2][name].abs().max())
        for name, grad in found[2].items()
    )
    names = {name.removeprefix("module."): value for name, value in found[3].items()}
    parameters = max(float((p.double() - wanted[3][n]).abs().max()) for n, p in names.items())
    return losses, norms, gradients, parameters


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", default="2,4,8")
    parser.add_argument("--strategies", type=int, default=5, help="how many, in the order above")
    parser.add_argument("--transformers", action="store_true", help="models of transformers")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        table(given, models(Path(folder) if given.transformers else None))


def table(given: argparse.Namespace, models: dict[str, dict[str, Any]]) -> None:
    """Print a row for each layout and model."""
    worlds = [int(world) for world in given.worlds.split(",")]
    print("| ranks | tensor | context | pipeline | data | strategies | model ", end="")
    print("| loss | norm | gradients | parameters | fp32 loss | fp32 parameters |")
    print("|---:" * 5 + "|---|---" + "|---:" * 6 + "|")
    wanted = {
        name: run_ranks(outcomes, 1, [recipe((1, 1, 1), "single", model, "fp64", 1)])[0][0]
        for name, model in models.items()
    }
    for world in worlds:
        for layout in layouts(world):
            data = world // (layout[0] * layout[1] * layout[2])
            names = [s for s in STRATEGIES[: given.strategies] if s != "hybrid_shard" or data > 1]
            if given.transformers and layout[1:] != (1, 1):
                continue
            for kind, model in models.items():
                try:
                    cells = {
                        precision: [recipe(layout, s, model, precision, world) for s in names]
                        for precision in ("fp64", "fp32")
                    }
                except UserError as error:
                    print(f"{layout} on {world}: {error}", file=sys.stderr)
                    continue
                worst = []
                for recipes in cells.values():
                    per_rank = run_ranks(outcomes, world, recipes, timeout=300)
                    found = [differences(one, wanted[kind]) for rank in per_rank for one in rank]
                    worst.append([max(column) for column in zip(*found, strict=True)])
                numbers = [*worst[0], worst[1][0], worst[1][3]]
                shown = " | ".join(f"{number:.0e}" for number in numbers)
                sizes = " | ".join(str(size) for size in (world, *layout, data))
                print(f"| {sizes} | {len(names)} | {kind} | {shown} |", flush=True)


if __name__ == "__main__":
    main()
