"""muP on several ranks: every layout trains as one process does, in float64 to 1e-9."""

import numpy as np
import pytest
import torch
from equivalence import VOCAB, distance, each, rows, settings, trained
from harness import run_ranks

from windlass.model.build import build_model
from windlass.model.gpt import initialise

MUP = {
    "model__mup": {"base_width": 4, "base_head_width": 2, "input_multiplier": 2.0},
    "model__heads": 4,
    "model__qk_norm": True,
    "model__tie_head": False,
}
LAYOUTS = {
    "ddp": {},
    "shard_optim": {},
    "full_shard": {},
    "tensor": {"parallel__tensor": 2},
    "context": {"parallel__context": 2},
    "pipeline": {"parallel__pipeline": 2},
}


def plain_loop():
    """Losses and parameters of AdamW with a group for each tensor, by the paper's table."""
    recipe = settings(**MUP)
    model = build_model(recipe, VOCAB, device="cpu").to(torch.float64)
    initialise(model, recipe.run.seed)
    groups = []
    for name, p in model.named_parameters():
        slow = 4 if name.startswith("blocks.") and p.dim() == 2 else 1
        decay = 0.1 * slow if p.dim() == 2 else 0.0
        groups.append({"params": [p], "lr": 3e-3 / slow, "weight_decay": decay})
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8 / 4, foreach=False)
    rates, losses, norms, data = [g["lr"] for g in optimizer.param_groups], [], [], rows()
    for step, rate in enumerate([0.5, 1.0, 1.0, 1.0, 0.5]):
        tokens, labels, *_ = data.read(np.arange(step * 16, (step + 1) * 16))
        logits, labels = model(torch.from_numpy(tokens)), torch.from_numpy(labels)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        model.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        for group, peak in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = peak * rate
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: p.detach().clone() for n, p in model.named_parameters()}


@pytest.mark.dist
def test_every_layout_trains_as_a_plain_loop():
    wanted = plain_loop()
    recipes = []
    for name, layout in LAYOUTS.items():
        strategy = name if not layout else "auto"
        recipes.append(settings("fp64", strategy, 1 if layout else 2, 2, **MUP, **layout))
    [alone] = run_ranks(trained, 1, settings("fp64", "single", **MUP))
    assert max(distance(alone, wanted)) < 1e-9
    for per_rank in run_ranks(each, 2, recipes, timeout=120):
        for name, outcome in zip(LAYOUTS, per_rank, strict=True):
            here = {n: p for n, p in wanted[2].items() if n in outcome[2]}  # of this rank's stage
            assert here and max(distance(outcome, (*wanted[:2], here))) < 1e-9, name
