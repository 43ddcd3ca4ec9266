"""Which buffers the ranks share, and when; tests/e2e/test_training_custom_model.py sees a run."""

import pytest
import torch
import torch.distributed as dist
from harness import recipe, run_ranks
from torch import nn

from windlass.parallel.parallelize import parallelize
from windlass.training.state import Buffers


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool))
        self.register_buffer("cache", torch.zeros(1), persistent=False)
        self.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("flag", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(2, 3, dtype=torch.float64).T)


def shared(join, layout: dict):
    settings = recipe(**layout)
    with join(settings) as ranks:
        model = parallelize(Model(), ranks, settings)
        buffers, sent, send = Buffers(model, ranks), [], dist.broadcast
        dist.broadcast = lambda *given, **how: sent.append(1) or send(*given, **how)
        own = getattr(model, "module", model)
        own.cache = torch.full((1,), float(ranks.rank))
        if ranks.rank:  # on one rank alone
            own.wave.data += 1j * ranks.rank
            own.flag[1], own.mean[2, 1] = True, ranks.rank
            own.count = torch.tensor(7 + ranks.rank)
        buffers.share()
        dist.broadcast = send
        return {name: buffer.tolist() for name, buffer in own.named_buffers()}, len(sent)


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "shard_optim"])
def test_the_ranks_share_persistent_buffers_in_one_collective(strategy):
    (first, sent), (second, _) = run_ranks(shared, 2, {"parallel__strategy": strategy})
    assert second.pop("cache") == [1.0] and first.pop("cache") == [0.0]
    assert first == second and first["count"] == 0 and sent == 1


def test_a_single_rank_has_nothing_to_share():
    [(values, sent)] = run_ranks(shared, 1, {"parallel__strategy": "single"})
    assert sent == 0 and values["count"] == 0
