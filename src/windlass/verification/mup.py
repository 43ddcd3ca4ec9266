"""The coordinate check of muP (arXiv 2203.03466, appendix D.1): activations over three widths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from windlass.recipe import Recipe
from windlass.verification.bench import SEEN, UNSEEN, Bench, Outcome

WIDTHS = (1, 2, 4)  # times the base width
FLAT, STEEP = 0.25, 0.4  # exponents with muP are below, the largest one without it above
Sizes = dict[str, float]  # mean absolute values after some steps, by the place in the model


def coordinates_flat(bench: Bench) -> Outcome:
    """Train three widths with muP and without, and fit the exponents of their activations."""
    if bench.model.kind != "gpt":
        return None, "muP is for Windlass's own GPT only"
    if bench.settings("mup").optim.kind not in ("adamw", "muon"):
        return None, "muP is for the optimizers adamw and muon only"
    base = bench.model.mup.base_width or bench.model.width
    widths, found = [base * times for times in WIDTHS], dict[str, dict[str, float]]()
    for name in ("mup", "standard"):
        sizes = list[Sizes]()
        for width in widths:
            settings = settings_at(bench, width, base if name == "mup" else 0)
            run = bench.train(f"{name}-{width}", **settings)
            sizes.append(measure(run.recipe, str(run.path)))
        found[name] = exponents(widths, sizes)
    worst, standard = (max(map(abs, one.values())) for one in found.values())
    text = f"widths {', '.join(map(str, widths))}: activations grow as width to the power of "
    text += ", ".join(f"{power:+.2f} ({place})" for place, power in found["mup"].items())
    if standard < STEEP:
        return False, f"{UNSEEN}the standard parametrisation (at most {standard:.2f})"
    return worst < FLAT, f"{text}; {standard:.2f} without muP{SEEN}"


def settings_at(bench: Bench, width: int, base: int) -> dict[str, Any]:
    """The settings of a training at a width; heads or their widths grow, as the recipe says."""
    m = bench.model
    start = m.mup.base_width or m.width
    head_width = m.mup.base_head_width or m.width // m.heads
    heads = (start if m.mup.base_head_width else width) // head_width
    settings: dict[str, Any] = {
        "model.width": width,
        "model.heads": heads,
        "model.kv_heads": max(1, heads * m.kv_heads_ // m.heads),
        "model.ff_width": m.ff_width_ * width // m.width,
        "model.dropout": 0.0,
        "model.mup.base_width": base,
        "optim.schedule.kind": "constant",
        "checkpoint.every": 0,
    }
    if not base:
        keys = ("base_head_width", "input_multiplier", "output_multiplier")
        defaults = type(m.mup)().model_dump()
        settings |= {f"model.mup.{key}": defaults[key] for key in keys}
    return settings


def measure(recipe: Recipe, run: str) -> Sizes:
    """The mean absolute values of each block's output and of the logits, of a trained run."""
    import torch

    from windlass.data.prepare import open_data
    from windlass.evaluation.source import alone, find_source, open_model

    model: Any = open_model(find_source(run), alone("cpu"))
    tokens, sizes = torch.from_numpy(open_data(recipe).train.read(np.arange(8))[0]), Sizes()

    def record(place: str, output: torch.Tensor) -> None:
        sizes[place] = float(output.abs().mean())

    for number, block in enumerate(model.blocks()):
        block.register_forward_hook(lambda _, __, out, at=f"block {number}": record(at, out))
    with torch.no_grad():
        record("logits", model(tokens))
    return sizes


def exponents(widths: Sequence[int], sizes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each place the slope of log(size) over log(width), by least squares."""
    logs = np.log(np.array(widths))
    return {
        place: float(np.polyfit(logs, np.log([one[place] for one in sizes]), 1)[0])
        for place in sizes[0]
    }
