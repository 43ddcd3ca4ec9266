"""Each start-up check finds what it is there for."""

from __future__ import annotations

import pytest
import torch
from harness import recipe, run_ranks
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy

from windlass.parallel import collectives
from windlass.parallel.dist import Ranks
from windlass.parallel.env import DistEnv
from windlass.parallel.parallelize import parallelize
from windlass.training import checks

ALONE = Ranks(DistEnv(), torch.device("cpu"), "single")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight


def test_masters_in_half_precision_are_found():
    model = nn.Linear(3, 3)
    assert checks.master_weights(model, torch.float32) == []
    model.bias = nn.Parameter(model.bias.detach().bfloat16())
    assert "bias" in checks.master_weights(model, torch.float32)[0]
    model.bias.requires_grad_(False)
    assert checks.master_weights(model, torch.float32) == [], "what is not trained may be in any precision"


def test_a_lost_tie_is_found():
    model = Tied()
    before = checks.tie_groups(model)
    assert before == [["first.weight", "second.weight"]]
    assert checks.lost_ties(model, before) == []
    model.second.weight = nn.Parameter(model.first.weight.detach().clone())
    assert "first.weight and second.weight" in checks.lost_ties(model, before)[0]


def test_a_wrong_gradient_norm_is_found_and_gradients_come_back(monkeypatch):
    model = nn.Linear(3, 3)
    model.weight.grad = torch.full((3, 3), 7.0)
    assert checks.norm_probe(model, ALONE) == []
    assert torch.equal(model.weight.grad, torch.full((3, 3), 7.0))
    assert model.bias.grad is None
    right = collectives.global_grad_norm
    monkeypatch.setattr(collectives, "global_grad_norm", lambda parameters, ranks: right(list(parameters)[1:], ranks))
    assert "gradient norm" in checks.norm_probe(model, ALONE)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_hash_of_a_tensor_sees_every_bit_and_place(dtype):
    tensor = torch.arange(1000, dtype=dtype)
    mark = checks.fingerprint(tensor)
    assert checks.fingerprint(tensor.clone()) == mark
    assert checks.fingerprint(tensor.flip(0)) != mark
    for place in (0, 500, 999):
        other = tensor.clone()
        other[place] = torch.nextafter(other[place], torch.tensor(1e9, dtype=dtype))
        assert checks.fingerprint(other) != mark


class Largest(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes inside the context, views of `known` left out."""

    def __init__(self, known):
        super().__init__()
        self.known, self.bytes = known.untyped_storage().data_ptr(), 0

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        made = function(*arguments, **(more or {}))
        if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() != self.known:
            self.bytes = max(self.bytes, made.numel() * made.element_size())
        return made


def test_hashing_a_large_tensor_takes_little_memory():
    """Start-up must not need more memory than the training: 8 bytes for each word of a chunk, whatever the size."""
    tensor = torch.arange(6 * checks.HASH_WORDS + 5, dtype=torch.float32)
    with Largest(tensor) as largest:
        mark = checks.fingerprint(tensor)
    assert largest.bytes <= 8 * checks.HASH_WORDS < 2 * tensor.numel()
    words = tensor.view(torch.int32).long()  # the same in one piece
    places = torch.arange(words.numel())
    assert mark == int((words * (places * 0x9E3779B1 + 1 | 1)).sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8])
def test_tensors_of_narrow_types_are_hashed_whatever_their_length(dtype):
    tensor = torch.arange(101).to(dtype)
    other = tensor.clone()
    other[100] += 1
    assert checks.fingerprint(tensor) != checks.fingerprint(other)


def found(join, strategy: str, spoil: bool):
    with join(recipe(parallel__strategy=strategy)) as ranks:
        model = parallelize(Toy(), ranks, recipe(parallel__strategy=strategy))
        if spoil and ranks.rank == ranks.world - 1:
            with torch.no_grad():
                checks.local(next(model.parameters())).view(-1)[0] += 1.0
        return checks.replicas(model, ranks), checks.norm_probe(model, ranks), checks.lost_ties(model, [])


@pytest.mark.dist
@pytest.mark.parametrize(("strategy", "world"), [("ddp", 2), ("full_shard", 2), ("hybrid_shard", 4)])
def test_replicas_that_differ_are_found(strategy, world):
    for answers in run_ranks(found, world, strategy, False):
        assert answers == ([], [], [])
    if strategy == "full_shard":  # no two ranks hold the same part
        return
    for replicas, _, _ in run_ranks(found, world, strategy, True):
        assert f"and {world - 1} hold different values" in replicas[0]
