"""muP against the table of its paper, written out by hand, and against plain arithmetic."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import refused
from windlass import train
from windlass.interop.init_from import load_initial
from windlass.model.build import build_model
from windlass.model.gpt import GPT, initialise
from windlass.optim.build import build_optimizer, count_groups, describe_groups, make_groups
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


def some_tokens(rows: int = 4) -> Tensor:
    return torch.randint(VOCAB, (rows, 12), generator=torch.Generator().manual_seed(1))


def is_hidden(name: str, value: Tensor) -> bool:
    """The maps between widths that grow: the rows "hidden" of table 8."""
    return name.startswith("blocks.") and value.dim() == 2


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
        hidden, group = is_hidden(name, value), groups[id(value)]
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


def test_the_groups_are_described_with_their_rates():
    groups = count_groups(make_groups(gpt(64), OPTIM))
    texts = describe_groups(groups).split("; ")
    assert texts[0] == "decay: 2 tensors with 2,240 parameters, lr 0.02"
    assert texts[-1] == "hidden.decay: 8 tensors with 98,304 parameters, lr 0.01"


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
    model, plain = gpt(4 * BASE, **parts), gpt(4 * BASE, base=0, **parts)
    plain.load_state_dict(model.state_dict())
    tokens = some_tokens()
    with torch.no_grad():
        mine, cache = model(tokens), model.new_cache(4, 12)
        cached = torch.cat([model(part, cache=cache) for part in tokens.split(1, 1)], 1)
        here = plain.prepare(tokens, None, 0, None)
        x = plain.norm(plain.through(plain.begin(here)[0], range(2), here))
        table = plain.embedding if plain.settings.tie_head else plain.head
        logits = x @ table.weight.T / 4
        if parts:
            logits = 8 * torch.tanh(logits / 8)
    torch.testing.assert_close(mine, logits, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(cached, logits, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["model.mup_base_width=64", "optim.kind=torch.optim.SGD"], ["optim.kind", "adamw"]),
        (["model.kind=hf", "model.name=gpt2", "model.mup_base_width=64"], ["model.mup_base_width"]),
    ],
)
def test_settings_that_do_not_go_with_mup_are_refused(changes, words):
    with refused(*words):
        Recipe.load("shakespeare-char-fast", changes)


def test_first_weights_of_another_width_multiple_are_refused(tmp_path: Path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat " * 40)
    tree: dict[str, Any] = {
        "model": {"layers": 1, "heads": 2, "width": 16, "context": 8, "mup_base_width": 8},
        "train": {"steps": 2, "global_batch": 4, "threads": 1},
        "data": {"source": str(tmp_path / "text.txt"), "dir": str(tmp_path / "data")},
        "eval.every": 0,
        "run.dir": str(tmp_path / "run"),
    }
    run = train(Recipe.from_dict(tree))
    again = Recipe.from_dict(tree).replace({"model.init_from": str(run.path)})
    load_initial(build_model(again, 257, device="cpu"), again)
    for base in (0, 16):
        other = again.replace({"model.mup_base_width": base})
        with refused("model.init_from", "model.mup_base_width = 8"):
            load_initial(build_model(other, 257, device="cpu"), other)
