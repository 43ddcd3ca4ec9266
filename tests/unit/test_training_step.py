"""One step: a non-finite gradient in each precision and policy, seen at once and seen later."""

import copy
import math
from contextlib import nullcontext
from dataclasses import asdict
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bare_trainer import bare_trainer, full_rows
from helpers import refused
from windlass.data.batch import Batch
from windlass.data.loader import MicroBatch
from windlass.errors import RunFailed
from windlass.model.gpt import GPT, initialise, seed_generators
from windlass.model.size import CHUNK_BYTES
from windlass.optim.build import build_optimizer
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import autocast
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.training.bad_steps import Counts, check_is_deferred, decide_nonfinite
from windlass.training.state import LossScaler, TrainState, set_divisor


class Line(nn.Module):
    """The sum over tokens of (w * token - label)^2, times a factor that may be infinite."""

    def __init__(self, dropout: float = 0.0):
        super().__init__()
        self.w = nn.Parameter(torch.tensor([[0.5]]))
        self.drop = nn.Dropout(dropout)
        self.factor = 1.0

    @property
    def weight(self) -> float:
        return float(self.w.detach())

    def forward(self, tokens, labels):
        return self.factor * (self.drop(self.w * tokens.float()) - labels.float()).square().sum()


def batch(step: int = 1, parts: int = 1) -> SimpleNamespace:
    tokens = torch.arange(1, 9).reshape(8, 1).chunk(parts)
    labels = torch.arange(2, 10).reshape(8, 1).chunk(parts)
    pairs = enumerate(map(Batch, tokens, labels))
    micro = [MicroBatch(number, pair) for number, pair in pairs]
    return SimpleNamespace(micro=micro, step=step, valid_tokens=8, unpadded_tokens=8)


def make(deferred: bool = False, dropout: float = 0.0, **settings):
    tree = {"train": {"grad_clip": 0.0, **settings}, "optim": {"lr": 0.01, "weight_decay": 0.0}}
    recipe, model = Recipe.model_validate(tree), Line(dropout)
    return model, bare_trainer(model, recipe, Ranks(DistEnv(), torch.device("cpu")), deferred)


def sgd(trainer, lr: float) -> torch.optim.SGD:
    return torch.optim.SGD([{"params": trainer.parameters, "base_lr": lr}], lr=lr)


@pytest.mark.parametrize("parts", [1, 2, 4, 8])
def test_loss_and_gradient_are_those_of_the_mean_over_tokens(parts):
    _, trainer = make()
    t, y, w = torch.arange(1.0, 9), torch.arange(2.0, 10), 0.5
    result = trainer.step(batch(1, parts), 1.0)
    assert result.tokens == 8
    assert float(result.loss) == pytest.approx(float(((w * t - y) ** 2).mean()))
    assert float(result.grad_norm) == pytest.approx(abs(float((2 * (w * t - y) * t).mean())))


KINDS = {
    "adamw": {"kind": "adamw"},
    "muon": {"kind": "muon"},
    "a fused one of torch": {"kind": "torch.optim.SGD", "options": {"fused": True}},
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize(("precision", "clip"), [("fp32", 0.5), ("fp16", 0.5), ("fp16", 0.0)])
def test_the_update_divides_as_if_the_gradients_were_clipped_before(kind, precision, clip):
    """By torch's `clip_grad_norm_`, after the division by the loss scale; Adam's moments too."""
    size = {"layers": 1, "heads": 2, "width": 16, "context": 8}
    tree = {"model": size, "optim": {"lr": 0.01, "eps": 1e-2, **KINDS[kind]}}
    recipe = Recipe.model_validate(
        tree | {"train": {"grad_clip": clip, "precision": precision, "steps": 10}}
    )
    cpu, rows = torch.device("cpu"), full_rows(recipe, 11, 2, 1)
    model = GPT(recipe.model, 11)
    initialise(model, 0)
    other = copy.deepcopy(model)
    trainer = bare_trainer(model, recipe, Ranks(DistEnv(), cpu))
    scale = 1.0 if trainer.scaler.scale is None else float(trainer.scaler.scale)
    optimizer = build_optimizer(other, recipe.optim, "cpu")
    for _ in range(3):
        other.load_state_dict(model.state_dict())  # fp16 rounds weights that differ in a last bit
        result = trainer.step(rows, 1.0)
        assert trainer.optimizer.grad_scale is not None
        with autocast(recipe, cpu):
            loss = other(rows.micro[0].batch.tokens, rows.micro[0].batch.labels)
        (loss / rows.valid_tokens * scale).backward()
        for p in other.parameters():
            p.grad /= scale
        norm = torch.nn.utils.clip_grad_norm_(other.parameters(), clip or math.inf)
        assert float(norm) > 0.5 and float(result.grad_norm) == pytest.approx(float(norm), rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-5)


def test_a_float64_model_is_clipped_in_float64():
    """torch's fused optimizers divide by a float32 number."""
    model = nn.Linear(3, 2, dtype=torch.float64)
    optimizer = build_optimizer(model, Recipe.model_validate({}).optim, "cpu")
    assert not set_divisor(optimizer, torch.tensor(3.0, dtype=torch.float64))
    assert set_divisor(optimizer, torch.tensor(3.0)) and float(optimizer.grad_scale) == 3
    assert set_divisor(optimizer, None) and optimizer.grad_scale is None


@pytest.mark.parametrize("deferred", [False, True])
def test_a_bad_step_leaves_the_weights_as_they_were_until_someone_looks(deferred):
    model, trainer = make(deferred)
    trainer.step(batch(1), 1.0)
    before = model.weight
    model.factor = math.inf
    trainer.step(batch(2), 1.0)
    model.factor = 1.0
    if deferred:
        # nobody has looked yet: no update is made by this good step either
        trainer.step(batch(3), 1.0)
    assert model.weight == before
    bad = 2 if deferred else 1
    assert trainer.bad_steps.read() == Counts(bad, bad, bad, loss_bad=True)
    assert trainer.bad_steps.read() == Counts(0, bad, bad, loss_bad=False)


@pytest.mark.parametrize("deferred", [False, True])
def test_an_infinite_loss_with_a_finite_gradient_is_a_bad_step(deferred):
    model, trainer = make(deferred)
    before, forward = model.weight, model.forward
    model.forward = lambda tokens, labels: forward(tokens, labels) + torch.tensor(math.inf)
    assert math.isfinite(float(trainer.step(batch(), 1.0).grad_norm))
    assert model.weight == before
    assert trainer.bad_steps.read() == Counts(1, 1, 1, loss_bad=True)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("pattern", "ends"), [("bgbgbgbgbgbg", False), ("gbbgbbgbbgbb", False), ("gggbbbgggggg", True)]
)
def test_skips_in_a_row_are_counted_by_step_and_not_by_look(deferred, pattern, ends):
    """Three bad steps in a row end the run, three apart do not; the host looks every four steps."""
    model, trainer = make(deferred, on_nonfinite="skip", max_skips=3)

    error = refused("3 updates in a row", "train.max_skips", error=RunFailed)
    with error if ends else nullcontext():
        for number, kind in enumerate(pattern, 1):
            model.factor, before = math.nan if kind == "b" else 1.0, model.weight
            trainer.step(batch(number), 1.0)
            assert (model.weight == before) == (kind == "b")
            trainer.state.step += 1
            if number % 4 == 0 or not deferred:
                trainer.bad_steps.decide()
    if not ends:
        assert trainer.state.updates_skipped == pattern.count("b")
        assert trainer.state.skips_in_a_row == len(pattern) - len(pattern.rstrip("b"))


def test_the_device_decides_about_an_update_only_if_the_optimizer_is_on_it():
    """torch would copy the flag to an offloaded optimizer on the CPU without waiting for it."""
    ours = build_optimizer(nn.Linear(2, 2), Recipe.model_validate({}).optim, "cpu")
    plain = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, foreach=True)
    plain._step_supports_amp_scaling = False
    cases = [("cuda", ours, False), ("cuda", ours, True), ("cpu", ours, False)]
    cases.append(("cuda", plain, False))
    decided = [check_is_deferred(torch.device(kind), *rest) for kind, *rest in cases]
    assert decided == [True, False, False, False]


@pytest.mark.parametrize("deferred", [False, True])
def test_fp16_scales_up_and_down_and_survives_a_resume(deferred):
    model, trainer = make(deferred, precision="fp16")
    scaler = trainer.scaler
    assert float(scaler.scale) == 65536
    before, unscaled = model.weight, float(make()[1].step(batch(1), 1.0).grad_norm)
    scaler.scale.fill_(1e38)  # the scaled gradient overflows, the loss does not
    result = trainer.step(batch(1), 1.0)
    assert math.isfinite(float(result.loss)) and not math.isfinite(float(result.grad_norm))
    assert model.weight == before
    assert float(scaler.scale) == pytest.approx(5e37)
    assert trainer.bad_steps.read() == Counts(1, 1, 1, loss_bad=False)
    scaler.scale.fill_(1024.0)
    scaler.good_steps.fill_(1999)
    assert float(trainer.step(batch(2), 1.0).grad_norm) == pytest.approx(unscaled, rel=1e-3)
    assert float(scaler.scale) == 2048
    assert model.weight != before
    state = TrainState(step=2)
    scaler.save(state)
    again = LossScaler(torch.device("cpu"), TrainState.from_json(asdict(state)), "fp16")
    assert (float(again.scale), float(again.good_steps)) == (2048, 0)


def test_bad_steps_in_a_row_count_on_over_a_resume():
    model, trainer = make(deferred=True, on_nonfinite="skip", max_skips=3)
    trainer.state.skips_in_a_row = 2
    model.factor = math.nan
    trainer.step(batch(), 1.0)
    with pytest.raises(RunFailed):
        trainer.bad_steps.decide()


def test_state_survives_json_and_no_counter_is_lost_unnoticed():
    state = TrainState(7, 56, 896, 700, 3, 2, 512.0, 9, 1.5)
    saved = asdict(state)
    assert TrainState.from_json(saved) == state
    for name in saved:
        with pytest.raises(KeyError):
            TrainState.from_json({k: v for k, v in saved.items() if k != name})


def test_dropout_is_a_pure_function_of_seed_step_and_micro_batch():
    def losses(order):
        trainer = make(dropout=0.5)[1]
        trainer.optimizer = sgd(trainer, 0.0)
        return {number: float(trainer.step(batch(number, 2), 0.0).loss) for number in order}

    torch.manual_seed(0)
    first = losses([1, 2, 3])
    torch.manual_seed(99)
    assert losses([3, 1, 2]) == first
    assert len(set(first.values())) == 3


@pytest.mark.parametrize(
    ("changed", "word"),
    [(lambda x: x.reshape(1), "[1]"), (lambda x: (x, None), "tuple"), (torch.Tensor.item, "float")],
)
def test_a_loss_that_is_not_a_scalar_ends_the_step(changed, word):
    class Changed(Line):
        def forward(self, tokens, labels):
            return changed(super().forward(tokens, labels))

    trainer = bare_trainer(Changed(), Recipe(), Ranks(DistEnv(), torch.device("cpu")))
    trainer.optimizer = sgd(trainer, 0.1)
    with refused("forward(tokens, labels)", word, "scalar", "-100"):
        trainer.step(batch(), 1.0)


@pytest.mark.parametrize(
    ("policy", "ranks", "fp16", "action", "where"),
    [
        ("stop", [0], False, "stop", "step 5: loss not finite on rank 0"),
        ("skip", [0], False, "skip", "up to step 7: loss not finite on rank 0"),
        # With fp16 an overflow of the gradient alone is an ordinary event.
        ("stop", [], True, "skip", "up to step 7: gradient not finite"),
        # Updates followed the bad step, until the host looked.
        ("stop", [1], True, "stop", "up to step 7: loss not finite on rank 1"),
    ],
)
def test_what_a_nonfinite_step_means(policy, ranks, fp16, action, where):
    settings = Recipe.model_validate({"train": {"on_nonfinite": policy}}).train
    decided, reason = decide_nonfinite(Counts(3, 3, 3, bool(ranks)), ranks, 7, settings, fp16)
    assert decided == action and reason.startswith(where)


ROUNDED = {"linear", "matmul", "mm", "addmm", "bmm", "baddbmm", "scaled_dot_product_attention"}
"""The products, whose inputs autocast rounds. Every other operator that CUDA's autocast knows is
computed in float32, or in the widest precision of its inputs."""
LLAMA = {"position": "rope", "norm": "rmsnorm", "activation": "swiglu", "kv_heads": 1}
AUTOCAST_STEPS = {
    "gpt2": ({}, []),
    "gelu": ({"activation": "gelu", "tie_head": False}, ["optim.kind=muon"]),
    "relu": ({"activation": "relu"}, ["train.average=0.999"]),
    "relu2": ({"activation": "relu2", "qk_norm": True, "logit_cap": 5.0}, []),
    "llama": (LLAMA | {"qk_norm": True}, []),
}


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("name", AUTOCAST_STEPS)
def test_autocast_of_cuda_raises_no_operator_of_a_step(name, documents, monkeypatch):
    """Every operator of model, loss and optimizer, against the lists of this torch."""
    shape, overrides = AUTOCAST_STEPS[name]
    size = {"layers": 1, "heads": 2, "width": 16, "context": 8}
    recipe = Recipe.model_validate({"model": size | shape})
    recipe = recipe.replace(["train.precision=bf16", "train.steps=10", *overrides])
    rows = full_rows(recipe, 11, 2, 1)
    if documents:
        places, numbers = (torch.arange(8).expand(2, 8) % 4, torch.arange(8).expand(2, 8) // 4)
        one = rows.micro[0].batch._replace(documents=numbers, positions=places)
        rows.micro[:] = [MicroBatch(0, one)]
    for chunk_bytes in (4 * 11 * 3, 2**20):  # chunks of 3 tokens, and logits of all tokens
        monkeypatch.setitem(CHUNK_BYTES, "cpu", chunk_bytes)
        model, cpu = GPT(recipe.model, 11), torch.device("cpu")
        initialise(model, 0)
        trainer = bare_trainer(model, recipe, Ranks(DistEnv(), cpu))
        with Functions() as functions:
            trainer.step(rows, 1.0)
        assert {"linear", "scaled_dot_product_attention", "add"} <= functions.names
        assert functions.names & widened_on_cuda() == set()


def widened_on_cuda() -> set[str]:
    """The operators whose low-precision inputs CUDA's autocast raises."""
    widened = autocast_operators("AutocastCUDA") - ROUNDED
    assert {"pow", "layer_norm", "softmax", "index_put"} <= widened
    return widened | {"rms_norm"}  # from torch 2.13 on


@cache
def autocast_operators(key: str) -> set[str]:
    registered = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if registered(name, key)]
    return {name.removeprefix("aten::").partition(".")[0] for name in names}


def test_a_step_seeds_the_generators_of_its_own_device(monkeypatch):
    gpus = [torch.Generator().manual_seed(1) for _ in range(2)]
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    seed_generators(torch.device("cuda", 1), 5)
    assert [one.initial_seed() for one in (*gpus, torch.default_generator)] == [1, 5, 5]
    torch.manual_seed(7)
    expected = torch.rand(4)
    seed_generators(torch.device("cpu"), 7)
    assert torch.equal(torch.rand(4), expected)
    # A GPT with dropout, and any module of a user, through the step
    monkeypatch.setattr(torch, "manual_seed", None)
    size = {"layers": 2, "heads": 2, "width": 16, "context": 8, "dropout": 0.5}
    recipe = Recipe.model_validate({"model": size, "train": {"steps": 10}})
    model = GPT(recipe.model, 11)
    initialise(model, 0)
    trainer = bare_trainer(model, recipe, Ranks(DistEnv(), torch.device("cpu")))
    trainer.step(full_rows(recipe, 11, 2, 2), 1.0)


class Functions(TorchFunctionMode):
    """The functions of torch that got a low-precision tensor under autocast, and the ATen operators
    inside those that autocast does not know."""

    def __init__(self):
        super().__init__()
        self.names = set()
        self.known = autocast_operators("AutocastCPU") | autocast_operators("AutocastCUDA")

    def __torch_function__(self, func, types, args=(), kwargs=None):
        operators = nullcontext()
        if torch.is_autocast_enabled("cpu") and is_low(args, kwargs):
            self.names.add(func.__name__)
            operators = nullcontext() if func.__name__ in self.known else Operators(self.names)
        with operators:
            return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_low(args, kwargs):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def is_low(*arguments) -> bool:
    given = [x for x in tree_leaves(arguments) if isinstance(x, torch.Tensor)]
    return any(x.dtype == torch.bfloat16 for x in given)
