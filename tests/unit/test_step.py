"""One step: what a non-finite gradient does, in each precision and policy, seen at once and seen later."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from windlass.optim.build import build_optimizer
from windlass.parallel.dist import Ranks
from windlass.parallel.env import DistEnv
from windlass.recipe import Recipe
from windlass.telemetry.timing import StepTimer
from windlass.training.guard import is_spike
from windlass.training.state import TrainState
from windlass.training.step import Step, step_seed


class Line(nn.Module):
    """loss_sum = sum over tokens of (w * token - label)^2, times a factor that a test may make infinite."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[0.5]]))
        self.drop = nn.Dropout(dropout)
        self.factor = 1.0

    def forward(self, tokens, labels):
        return self.factor * (self.drop(self.w * tokens.float()) - labels.float()).square().sum()


@dataclass
class Micro:
    tokens: torch.Tensor
    labels: torch.Tensor
    k: int = 0


@dataclass
class Batch:
    micro: list[Micro]
    step: int = 1
    valid_tokens: int = field(init=False)

    def __post_init__(self):
        self.valid_tokens = sum(m.labels.numel() for m in self.micro)


def batch(step: int = 1, parts: int = 1) -> Batch:
    tokens, labels = torch.arange(1, 9).reshape(8, 1), torch.arange(2, 10).reshape(8, 1)
    return Batch(
        [Micro(t, lab, k) for k, (t, lab) in enumerate(zip(tokens.chunk(parts), labels.chunk(parts), strict=True))],
        step,
    )


def make(deferred: bool = False, dropout: float = 0.0, **settings):
    tree = {"train": {"grad_clip": 0.0, **settings}, "optim": {"lr": 0.01, "weight_decay": 0.0}}
    recipe, model = Recipe.model_validate(tree), Line(dropout)
    ranks = Ranks(DistEnv(), torch.device("cpu"), "single")
    return model, Step(
        model, build_optimizer(model, recipe.optim, "cpu"), ranks, recipe, StepTimer(), deferred=deferred
    )


def test_loss_and_gradient_are_those_of_the_mean_over_tokens():
    _, step = make()
    t, y, w = torch.arange(1.0, 9), torch.arange(2.0, 10), 0.5
    result = step(batch(), 1.0)
    assert float(result.loss) == pytest.approx(float(((w * t - y) ** 2).mean()))
    assert float(result.grad_norm) == pytest.approx(abs(float((2 * (w * t - y) * t).mean())))
    assert result.valid_tokens == 8


@pytest.mark.parametrize("parts", [2, 4, 8])
def test_accumulation_changes_nothing(parts):
    whole, cut = make(), make()
    for number in range(1, 6):
        a, b = whole[1](batch(number), 1.0), cut[1](batch(number, parts), 1.0)
        assert float(a.loss) == pytest.approx(float(b.loss), rel=1e-6)
    assert float(whole[0].w.detach()) == pytest.approx(float(cut[0].w.detach()), rel=1e-6)


def test_clipping_takes_the_global_norm():
    model, step = make(grad_clip=1.0)
    step.optimizer = torch.optim.SGD([{"params": list(model.parameters()), "base_lr": 0.01}], lr=0.01)
    before = float(model.w.detach())
    result = step(batch(), 1.0)
    assert float(result.grad_norm) > 1
    assert abs(float(model.w.detach()) - before) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.parametrize("deferred", [False, True])
def test_a_bad_step_leaves_the_weights_as_they_were_until_someone_looks(deferred):
    model, step = make(deferred)
    step(batch(1), 1.0)
    before = float(model.w.detach())
    model.factor = math.inf
    step(batch(2), 1.0)
    model.factor = 1.0
    if deferred:
        step(batch(3), 1.0)  # nobody has looked yet: latched, this good step is not made either
    assert float(model.w.detach()) == before
    assert step.trouble() == (2 if deferred else 1, True)
    assert step.trouble() == (0, False)


@pytest.mark.parametrize("deferred", [False, True])
def test_an_infinite_loss_with_a_finite_gradient_is_a_bad_step(deferred):
    model, step = make(deferred)
    before = float(model.w.detach())
    original, model.forward = model.forward, None
    model.forward = lambda tokens, labels: original(tokens, labels) + torch.tensor(math.inf)
    result = step(batch(), 1.0)
    assert math.isfinite(float(result.grad_norm))
    assert float(model.w.detach()) == before
    assert step.trouble() == (1, True)


@pytest.mark.parametrize("deferred", [False, True])
def test_with_the_policy_skip_only_the_bad_step_is_left_out(deferred):
    model, step = make(deferred, on_nonfinite="skip")
    step(batch(1), 1.0)
    before = float(model.w.detach())
    model.factor = math.nan
    step(batch(2), 1.0)
    assert float(model.w.detach()) == before
    model.factor = 1.0
    step(batch(3), 1.0)
    assert float(model.w.detach()) != before
    assert step.trouble()[0] == 1


@pytest.mark.parametrize("deferred", [False, True])
def test_fp16_scales_up_and_down_and_survives_a_resume(deferred):
    model, step = make(deferred, precision="fp16")
    state = TrainState()
    step.load(state)
    assert float(step.scale) == 65536
    before = float(model.w.detach())
    step.scale.fill_(1e38)  # the scaled gradient overflows, the loss does not
    result = step(batch(1), 1.0)
    assert math.isfinite(float(result.loss))
    assert not math.isfinite(float(result.grad_norm))
    assert float(model.w.detach()) == before
    assert float(step.scale) == pytest.approx(5e37)
    assert step.trouble() == (1, False)
    step.scale.fill_(1024.0)
    step.good.fill_(1999)
    good = step(batch(2), 1.0)
    assert math.isfinite(float(good.grad_norm))
    assert float(step.scale) == 2048
    assert float(model.w.detach()) != before
    state.step = 2
    step.save(state)
    again = make(deferred, precision="fp16")[1]
    again.load(TrainState.from_json(state.to_json()))
    assert (float(again.scale), float(again.good)) == (2048, 0)


def test_the_loss_scale_does_not_show_in_the_gradient_norm():
    plain, scaled = make()[1], make(precision="fp16")[1]
    scaled.scale.fill_(256.0)
    assert float(scaled(batch(), 1.0).grad_norm) == pytest.approx(float(plain(batch(), 1.0).grad_norm), rel=1e-3)


def test_dropout_is_a_pure_function_of_seed_step_and_micro_batch():
    def losses(order):
        step = make(dropout=0.5)[1]
        step.optimizer = torch.optim.SGD([{"params": step.parameters, "base_lr": 0.0}], lr=0.0)
        return {number: float(step(batch(number, 2), 0.0).loss) for number in order}

    torch.manual_seed(0)
    first = losses([1, 2, 3])
    torch.manual_seed(99)
    assert losses([3, 1, 2]) == first
    assert len(set(first.values())) == 3
    assert len({step_seed(s, t, k) for s in range(3) for t in range(3) for k in range(3)}) == 27


def test_state_survives_json_and_no_counter_is_forgotten():
    state = TrainState(7, 56, 896, 1.5, 0.5, [(8, 16)], 2, 1, 512.0, 9, [1.0, 2.0])
    saved = state.to_json()
    assert TrainState.from_json(saved) == state
    for name in saved.keys() - {"best_score"}:  # older checkpoints have none, and the ledger knows it
        with pytest.raises(KeyError):
            TrainState.from_json({k: v for k, v in saved.items() if k != name})


def test_a_spike_needs_a_history():
    flat = [2.0 + 0.01 * (-1) ** i for i in range(30)]
    assert is_spike(flat, 3.0, 6)
    assert not is_spike(flat, 2.02, 6)
    assert not is_spike(flat[:10], 3.0, 6)
    assert not is_spike([2.0] * 30, 3.0, 6), "no spread, no measure"
