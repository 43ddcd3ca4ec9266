"""The coordinate check of muP (arXiv 2203.03466, appendix D.1).

The first steps change the activations of a model. With muP the size of this change does not depend
on the width. Initial logits do: they shrink as 1 / sqrt(width), so the check leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from windlass.recipe import ModelSettings, Recipe
from windlass.recipe.network import MupSettings
from windlass.verification.bench import SEEN, UNSEEN, Bench, Outcome

WIDTHS, SEEDS = (1, 2, 4), 3  # times the base width; trainings of each width
BASE, HEAD = 64, 16  # the base width, and its heads' width, of a recipe without muP
FLAT, STEEP = 0.4, 0.5  # powers with muP are below, the largest one without it above
Sizes = dict[str, float]  # mean absolute changes in some steps, by the place in the model


def coordinates_flat(bench: Bench) -> Outcome:
    """Train three widths with muP and without, and fit how the change of activations grows."""
    if bench.model.kind != "gpt":
        return None, "muP is for Windlass's own GPT only"
    if "." in bench.settings("mup").optim.kind:
        return None, "muP is for the optimizers adamw and muon only"
    base = bench.model.mup.base_width or BASE
    widths, powers = [base * times for times in WIDTHS], dict[str, dict[str, float]]()
    for name in ("mup", "standard"):
        sizes = [sizes_at(bench, width, base if name == "mup" else 0) for width in widths]
        powers[name] = exponents(widths, sizes)
    worst, standard = (max(map(abs, one.values())) for one in powers.values())
    if standard < STEEP:
        return False, f"{UNSEEN}the standard parametrisation (power {standard:.2f})"
    shown = ", ".join(f"{power:+.2f} ({place})" for place, power in powers["mup"].items())
    text = f"changes at widths {', '.join(map(str, widths))} grow with the power {shown}"
    return worst < FLAT, f"{text}; {standard:+.2f} without muP{SEEN}"


def sizes_at(bench: Bench, width: int, base: int) -> Sizes:
    """The geometric mean over seeds of the changes at a width; `base` 0: without muP."""
    found, settings = list[Sizes](), settings_at(bench.model, width, base)
    for seed in range(SEEDS):
        run = bench.train(f"mup-{base}-{width}-{seed}", run__seed=seed, **settings)
        found.append(measure(run.recipe, str(run.path)))
    return {at: float(np.exp(np.mean([np.log(one[at]) for one in found]))) for at in found[0]}


def settings_at(m: ModelSettings, width: int, base: int) -> dict[str, Any]:
    """The settings of a training at a width; heads or their widths grow, as the recipe says."""
    head_width = m.mup.base_head_width or (m.width // m.heads if m.mup.base_width else HEAD)
    heads = (m.mup.base_width if m.mup.base_head_width else width) // head_width
    settings: dict[str, Any] = {
        "model.width": width,
        "model.heads": heads,
        "model.kv_heads": max(1, heads * m.kv_heads_ // m.heads),
        "model.ff_width": m.ff_width_ * width // m.width,
        "model.dropout": 0.0,
        "model.init_from": "",
        "model.mup.base_width": base,
        "optim.schedule.kind": "constant",
        "checkpoint.every": 0,
    }
    if not base:
        defaults = MupSettings().model_dump(exclude={"base_width"})
        settings |= {f"model.mup.{key}": value for key, value in defaults.items()}
    return settings


def measure(recipe: Recipe, run: str) -> Sizes:
    """The mean absolute change of each block's output and of the logits since the first weights."""
    import torch

    from windlass.data.open import open_data
    from windlass.evaluation.source import alone, find_source, open_model
    from windlass.model.build import build_model
    from windlass.model.gpt import initialise

    data, places = open_data(recipe), list[dict[str, Any]]()
    first: Any = build_model(recipe, data.vocab, "cpu")
    initialise(first, recipe.run.seed)
    tokens = torch.from_numpy(data.train.read(np.arange(8))[0])
    for model in (first.eval(), open_model(find_source(run), alone("cpu"))):
        outputs = dict[str, Any]()
        for number, block in enumerate(model.blocks()):
            at = f"block {number}"
            block.register_forward_hook(lambda _, __, out, at=at, to=outputs: to.update({at: out}))
        with torch.no_grad():
            outputs["logits"] = model(tokens)
        places.append(outputs)
    before, after = places
    return {at: float((after[at] - before[at]).abs().mean()) for at in before}


def exponents(widths: Sequence[int], sizes: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """For each place the slope of log(size) over log(width), by least squares."""
    logs = np.log(np.array(widths))
    return {
        place: float(np.polyfit(logs, np.log([one[place] for one in sizes]), 1)[0])
        for place in sizes[0]
    }
