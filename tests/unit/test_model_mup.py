"""muP against the table of its paper, written out by hand, and against plain arithmetic."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from helpers import refused, tiny_recipe, write_corpus
from windlass import load_model, train
from windlass.data.open import open_data
from windlass.interop.init_from import load_initial
from windlass.model.build import build_model
from windlass.model.gpt import GPT, initialise
from windlass.optim import build
from windlass.optim.build import build_optimizer
from windlass.optim.schedule import set_lr
from windlass.recipe import ModelSettings, OptimSettings, Recipe

VOCAB, BASE = 23, 32
OLD: dict[str, Any] = {}
NEW: dict[str, Any] = {
    "norm": "rmsnorm",
    "position": "rope",
    "activation": "swiglu",
    "qk_norm": True,
    "tie_head": False,
    "logit_cap": 8.0,
    "kv_heads": 2,
}
OPTIM = OptimSettings(lr=0.02, eps=1e-6, weight_decay=0.3, betas=(0.8, 0.9))


def gpt(
    width: int, *, base: int = BASE, dtype: torch.dtype = torch.float64, **settings: Any
) -> GPT:
    shape = {"layers": 2, "heads": width // 8, "width": width, "context": 12}
    with torch.device("meta"):
        model = GPT(ModelSettings(**{**shape, **settings, "mup_base_width": base}), VOCAB)
    model = model.to_empty(device="cpu").to(dtype)
    initialise(model, 3)
    return model


def some_tokens() -> Tensor:
    return torch.randint(VOCAB, (4, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("parts", [OLD, NEW])
@pytest.mark.parametrize("multiple", [1, 4])
def test_spreads_rates_decay_and_eps_are_those_of_table_8(parts, multiple):
    """With Adam, table 8 of arXiv 2203.03466 has by fan-in n: input and output weights init 1, lr
    1; hidden weights init 1/n, lr 1/n; the output is multiplied by 1/n."""
    model = gpt(BASE * multiple, dtype=torch.float32, init_std=0.05, **parts)
    optimizer = build_optimizer(model, OPTIM, "cpu")
    set_lr(optimizer, 0.5)
    groups = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    for name, value in model.named_parameters():
        hidden, group = name.startswith("blocks.") and value.dim() == 2, groups[id(value)]
        assert group["lr"] == pytest.approx(0.5 * 0.02 / (multiple if hidden else 1)), name
        assert group["eps"] == pytest.approx(1e-6 / multiple), name
        per_step = group["lr"] * group["weight_decay"]  # what a step shrinks a weight by
        assert per_step == pytest.approx(0.5 * 0.02 * 0.3 if value.dim() == 2 else 0.0), name
        if value.dim() == 2:
            variance = 0.05**2 / (multiple if hidden else 1)
            output = name.endswith(("out.weight", "down.weight"))
            variance /= 2 * 2 if output else 1  # GPT-2's, of two layers
            off = 5 * variance * math.sqrt(2 / value.numel())
            assert abs(float(value.detach().var()) - variance) < off, name


def test_muon_keeps_its_matrices_rate_and_its_adamw_the_eps_of_mup():
    settings = OptimSettings(**OPTIM.model_dump() | {"kind": "muon", "muon_lr": 0.05})
    groups = build_optimizer(gpt(4 * BASE), settings, "cpu").param_groups
    rates = {g["name"]: (g["base_lr"], g["weight_decay"], g.get("eps")) for g in groups}
    assert rates == {
        "muon.decay": (0.05, 0.3, None),
        "adamw.decay": (0.02, 0.3, 1e-6 / 4),
        "adamw.no_decay": (0.02, 0.0, 1e-6 / 4),
    }


@pytest.mark.parametrize("parts", [OLD, NEW])
def test_at_the_base_width_nothing_changes(parts):
    plain, same = gpt(BASE, base=0, **parts), gpt(BASE, **parts)
    tokens = some_tokens()
    for _ in range(3):
        assert all(map(torch.equal, plain.state_dict().values(), same.state_dict().values()))
        for model in (plain, same):
            optimizer = build_optimizer(model, OPTIM, "cpu")
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            optimizer.step()
    assert torch.equal(plain(tokens), same(tokens))


@pytest.mark.parametrize("parts", [OLD, NEW])
def test_logits_are_those_of_the_plain_model_divided_by_hand(parts):
    model, plain = gpt(4 * BASE, **parts), gpt(4 * BASE, base=0, **parts | {"logit_cap": 0.0})
    plain.load_state_dict(model.state_dict())
    tokens = some_tokens()
    with torch.no_grad():
        cache, logits = model.new_cache(4, 12), plain(tokens) / 4
        logits = 8 * torch.tanh(logits / 8) if parts else logits
        cached = [model(part, cache=cache) for part in tokens.split(1, 1)]
        for mine in (model(tokens), torch.cat(cached, 1)):
            torch.testing.assert_close(mine, logits, rtol=1e-9, atol=1e-12)


def test_first_weights_of_another_width_multiple_are_refused(tmp_path: Path):
    corpus = write_corpus(tmp_path / "text.txt")
    recipe = tiny_recipe(corpus, tmp_path / "run", train__steps=1, model__mup_base_width=16)
    again = recipe.replace({"model.init_from": str(train(recipe).path)})
    load_initial(build_model(again, 257, device="cpu"), again)
    for base in (0, 32):
        other = again.replace({"model.mup_base_width": base})
        with refused("model.init_from", "model.mup_base_width = 16"):
            load_initial(build_model(other, 257, device="cpu"), other)


WIDTHS = (32, 128)
QUICKSTART = Recipe.load("quickstart")


def changes(recipe: Recipe) -> dict[str, float]:
    """The mean absolute change of each block's output and of the logits."""
    data, outputs = open_data(recipe), list[dict[str, Any]]()
    first = build_model(recipe, data.vocab, "cpu")
    initialise(first, recipe.run.seed)
    tokens = torch.from_numpy(data.train.read(np.arange(8))[0])
    for model in (first.eval(), load_model(train(recipe))):
        out = dict[str, Any]()
        for number, block in enumerate(model.blocks):
            name = f"block {number}"
            block.register_forward_hook(lambda _, __, x, name=name, out=out: out.update({name: x}))
        with torch.no_grad():
            out["logits"] = model(tokens)
        outputs.append(out)
    return {name: float((outputs[1][name] - x).abs().mean()) for name, x in outputs[0].items()}


@pytest.mark.parametrize("case", ["muP", "standard", "undivided rate"])
def test_changes_are_equal_at_all_widths_with_mup_alone(tmp_path, monkeypatch, case):
    """The coordinate check (arXiv 2203.03466, appendix D.1): with muP, twelve steps change the
    activations of a model equally at any width. Initial logits shrink with the width, so the changes
    count."""
    if case == "undivided rate":
        monkeypatch.setattr(build, "blocks_of", lambda model: [])
    corpus, sizes = write_corpus(tmp_path / "text.txt", 4000), list[dict[str, float]]()
    for width in WIDTHS:
        changed = {"model.width": width, "model.heads": width // 16, "model.dropout": 0.0}
        changed |= {"optim.lr": QUICKSTART.optim.lr, "optim.schedule.kind": "constant"}
        if case != "standard":
            changed |= {"model.mup_base_width": BASE}
        changed |= {"optim.schedule.warmup": 2, "train.threads": 1, "checkpoint.every": 0}
        recipe = tiny_recipe(corpus, tmp_path / f"{case}-{width}").replace(changed)
        sizes.append(changes(recipe))
    low, high = sizes
    powers = [np.log(high[name] / low[name]) / np.log(WIDTHS[1] / WIDTHS[0]) for name in low]
    steepest = max(map(abs, powers))
    assert steepest < 0.4 if case == "muP" else steepest > 0.5, powers
