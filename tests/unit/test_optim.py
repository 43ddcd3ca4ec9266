"""Optimizer and schedule: groups, Muon against numpy and torch, the learning rate by hand.

`test_optim_torch.py` compares AdamW with torch's.
"""

import math

import numpy as np
import pytest
import torch
from torch import nn

from helpers import refused
from windlass.model.build import build_model, sizes_of
from windlass.model.gpt import GPT
from windlass.model.size import describe_sizes
from windlass.optim.build import build_optimizer, count_groups, describe_groups, make_groups
from windlass.optim.muon import COEFFICIENTS, MuonAdamW, orthogonalise, update_scale
from windlass.optim.schedule import lr_multiplier, set_lr
from windlass.recipe import Horizon, ModelSettings, OptimSettings, Recipe, ScheduleSettings


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optim.kind": "sgd"}, ("optim.kind", "torch.optim.SGD")),
        ({"optim.kind": "pytorch_optimizer.Lionn"}, ("optim.kind", "r.Lion?")),
        ({"optim.kind": "adam8bit"}, ("optim.kind", "adamw8bit")),
        ({"optim.kind": "adamw8bit", "parallel.tensor": 2}, ("optim.kind", "parallel.tensor=1")),
        ({"optim.options": {"momentum": 0.9}}, ("optim.options", "adamw")),
        ({"model.mup_base_width": 64, "optim.kind": "torch.optim.SGD"}, ("optim.kind", "adamw")),
        (
            {"model.kind": "hf", "model.name": "gpt2", "model.mup_base_width": 64},
            ("model.mup_base_width",),
        ),
        ({"train.master": "bf16", "train.precision": "fp32"}, ("train.master", "bf16")),
        ({"train.master": "bf16", "optim.kind": "torch.optim.SGD"}, ("train.master", "adamw")),
        ({"train.master": "bf16", "train.average": 0.9}, ("train.average", "train.master")),
        ({"train.average": 1.0}, ("train.average", "less than 1")),
        ({"train.ema": 0.999}, ("train.ema", "train.average=0.999")),
        ({"checkpoint.best": "loss.average_loss"}, ("checkpoint.best", "train.average")),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with refused(*words):
        Recipe().replace(settings)


class Model(nn.Module):
    """An embedding, two blocks and a tied head."""

    def __init__(self, vocab=11, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        inner = [
            [nn.Linear(width, 3 * width), nn.ReLU(), nn.Linear(3 * width, width, bias=False)]
            for _ in range(2)
        ]
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), *layers) for layers in inner)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedding.weight

    def blocks(self):
        return list(self.layers)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.layers:
            x = x + block(x)
        return self.head(x).pow(2).mean()


MATRICES = [f"layers.{i}.{part}.weight" for i in (0, 1) for part in (1, 3)]


def model(dtype=torch.float32, width=8):
    torch.manual_seed(0)
    return Model(width=width).to(dtype)


def gradients(m, seed=0):
    m.zero_grad()
    m(torch.arange(11).roll(seed).view(1, 11) % 7).backward()


def names(m, groups):
    name_of = {id(p): n for n, p in m.named_parameters()}
    return {g["name"]: [name_of[id(p)] for p in g["params"]] for g in groups}


def test_adamw_groups_by_dimension_and_ties_once():
    m = model()
    vectors = [f"layers.{i}.{part}" for i in (0, 1) for part in ("0.weight", "0.bias", "1.bias")]
    expected = {"decay": ["embedding.weight", *MATRICES], "no_decay": vectors}
    assert names(m, make_groups(m, OptimSettings())) == expected
    (group,) = make_groups(m, OptimSettings(decay_on="all", weight_decay=0.3))
    assert group["weight_decay"] == 0.3 and len(group["params"]) == len(list(m.parameters()))
    m.embedding.weight.requires_grad_(False)
    assert names(m, make_groups(m, OptimSettings()))["decay"] == MATRICES


def test_decayed_and_undecayed_tensors_are_counted():
    """nanoGPT's line for its character model: its vocabulary of 65, 6 layers, 384 wide, no biases."""
    model = build_model(Recipe.load("shakespeare-char"), 65)
    assert describe_sizes(sizes_of(model)) == "10,745,088 parameters (10.65M without positions)"

    tables = [("adamw.decay", 2, (65 + 256) * 384), ("adamw.no_decay", 13, 4992)]
    for settings, expected in (
        ({}, [("decay", 26, 10_740_096), ("no_decay", 13, 4992)]),
        ({"decay_on": "all", "kind": "torch.optim.SGD"}, [("decay", 39, 10_745_088)]),
        ({"kind": "muon"}, [("muon.decay", 24, 6 * 12 * 384**2), *tables]),
    ):
        groups = count_groups(make_groups(model, OptimSettings(**settings)))
        assert [(g["name"], g["tensors"], g["parameters"]) for g in groups] == expected
    text = describe_groups(groups)
    assert "muon.decay: 24 tensors with 10,616,832 parameters, lr 0.02; " in text


def test_muon_takes_the_blocks_matrices_and_lr_keeps_the_ratio():
    m, settings = model(), OptimSettings(kind="muon", lr=0.01, muon_lr=0.02)
    groups = names(m, make_groups(m, settings))
    assert (groups["muon.decay"], groups["adamw.decay"]) == (MATRICES, ["embedding.weight"])
    assert len(groups["adamw.no_decay"]) == 6
    optimizer = build_optimizer(m, settings, "cpu")
    set_lr(optimizer, 0.5)
    assert [g["lr"] for g in optimizer.param_groups] == [0.01, 0.005, 0.005]
    assert all(type(g["lr"]) is float for g in optimizer.param_groups)
    gpt = GPT(ModelSettings(layers=1, heads=4, kv_heads=2, width=8, context=4), 11)
    parts = make_groups(gpt, OptimSettings(kind="muon"))[0]["parts"]
    assert parts == [(8, 4, 4), (8,), (32,), (8,)]


def test_muon_against_torch():
    """In bfloat16, as torch's own has it; ours differs from it in nothing else."""
    ours, reference = model(), model()
    settings = OptimSettings(kind="muon", lr=1e-2, muon_lr=0.02, weight_decay=0.1)
    optimizer = build_optimizer(ours, settings, "cpu")
    optimizer.dtype = torch.bfloat16
    split = make_groups(reference, settings)
    matrices = [p for g in split if g["muon"] for p in g["params"]]
    muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, momentum=0.95)
    rest = [{k: g[k] for k in ("params", "lr", "weight_decay")} for g in split if not g["muon"]]
    adamw = torch.optim.AdamW(rest, betas=settings.betas, eps=settings.eps, fused=True)
    for i in range(4):
        for m, optimizers in ((ours, [optimizer]), (reference, [muon, adamw])):
            gradients(m, i)
            for one in optimizers:
                one.step()
    for (name, a), b in zip(ours.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("shape", [(6, 6), (5, 12), (12, 5), (1, 4), (7, 1)])
def test_orthogonalise_maps_singular_values_by_the_quintic(shape):
    x = np.random.default_rng(0).normal(size=shape)
    got = orthogonalise(torch.from_numpy(x), torch.float64).numpy()
    u, s, vt = np.linalg.svd(x / np.linalg.norm(x), full_matrices=False)
    a, b, c = COEFFICIENTS
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    np.testing.assert_allclose(got, u * s @ vt, atol=1e-12)
    assert s.min() > 0.6 and s.max() < 1.25


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        *((kind, torch.float32) for kind in ("adamw", "muon", "adamw8bit")),
        ("adamw", torch.bfloat16),
    ],
)
def test_a_step_that_is_called_off_on_the_device_changes_nothing(kind, dtype):
    """A non-finite gradient with `found_inf` set: weights, moments and step counts stay."""
    plain, interrupted = model(dtype, 64), model(dtype, 64)  # large enough for 8-bit moments
    a, b = (build_optimizer(m, OptimSettings(kind=kind), "cpu") for m in (plain, interrupted))
    for i in range(3):
        gradients(plain, i)
        a.step()
        for bad in (True, False) if i == 1 else (False,):
            gradients(interrupted, i)
            for p in interrupted.parameters() if bad else ():
                p.grad.view(-1)[0] = float("nan")
            b.found_inf = torch.tensor(float(bad))
            b.step()
    for (name, x), y in zip(plain.named_parameters(), interrupted.parameters(), strict=True):
        assert torch.equal(x, y), name
        for key, value in a.state[x].items():
            assert torch.equal(value.float(), b.state[y][key].float()), (name, key)


def test_matrices_without_gradients_are_left_out_of_a_division():
    m = model()
    optimizer = build_optimizer(m, OptimSettings(kind="muon"), "cpu")
    before = [p.detach().clone() for p in m.parameters()]
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step()
    assert all(map(torch.equal, m.parameters(), before))


def test_matrices_that_lie_in_one_are_taken_apart():
    """One tensor of two matrices makes the updates of two tensors."""
    whole, grad = torch.randn(2, 9, 4, generator=torch.Generator().manual_seed(2))
    one = [nn.Parameter(whole.clone())]
    two = [nn.Parameter(part.clone()) for part in whole.split([3, 6])]
    for parameters, parts in ((one, [(3, 6)]), (two, [(3,), (6,)])):
        for p, g in zip(parameters, grad.split([p.shape[0] for p in parameters]), strict=True):
            p.grad = g.clone()
        group = {"params": parameters, "muon": True, "parts": parts}
        MuonAdamW([group | {"lr": 0.1, "weight_decay": 0.1}]).step()
    # The tallest part, of 6 x 4, has the largest step; all parts of a tensor have its step.
    update = update_scale((6, 4)) * orthogonalise(grad[:3], torch.float32)
    first = whole[:3] * (1 - 0.01) - 0.1 * update
    torch.testing.assert_close(one[0].detach()[3:], two[1].detach(), atol=1e-6, rtol=0)
    torch.testing.assert_close(one[0].detach()[:3], first, atol=1e-5, rtol=0)


HALF = 0.45 * math.sqrt(0.5)


@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        ("wsd", {"warmup": 2, "decay": 4}, [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        ("wsd", {"warmup": 4, "decay": 2, "final": 0.5}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 0.75]),
        # A warm-up and a decay that overlap shorten the decay.
        ("wsd", {"warmup": 8, "decay": 6}, [*(i / 8 for i in range(1, 9)), 1, 0.5]),
        ("linear", {"warmup": 2}, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("linear", {"warmup": 0, "final": 0.2}, [1, 0.8, 0.6, 0.4]),
        ("cosine", {"warmup": 2, "final": 0.1}, [0.5, 1, 1, 0.55 + HALF, 0.55, 0.55 - HALF]),
        ("constant", {"warmup": 2}, [0.5, 1, 1, 1, 1]),
        # Of a length of its own: the run ends on the way, or stays at the schedule's end; fractions
        # are of the schedule.
        ("linear", {"warmup": 0.5, "steps": 4}, [0.5, 1, 1]),
        ("wsd", {"warmup": 0, "decay": 0.5, "final": 0.2, "steps": 4}, [1, 1, 1, 0.6, 0.2, 0.2]),
        ("linear", {"warmup": 0, "steps": 0.5}, [1, 0.5, 0, 0]),
        ("linear", {"warmup": 0, "steps": "0.05 epochs"}, [1, 0.8, 0.6]),
    ],
)
def test_schedules_by_hand(kind, settings, expected):
    schedule = ScheduleSettings(kind=kind, **settings)
    horizon = Horizon(len(expected), samples_per_epoch=1000, samples_per_step=10)
    found = [lr_multiplier(schedule, horizon, update) for update in range(len(expected))]
    assert found == pytest.approx(expected)
