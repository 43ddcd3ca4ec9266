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


def shared(join, layout: dict, changes: bool):
    settings = recipe(**layout)
    with join(settings) as ranks:
        model = parallelize(Model(), ranks, settings)
        buffers, sent, send = Buffers(model, ranks), [], dist.broadcast
        dist.broadcast = lambda *given, **how: sent.append(1) or send(*given, **how)
        own = getattr(model, "module", model)
        own.cache = torch.full((1,), float(ranks.rank))
        if changes and ranks.rank:  # on one rank alone
            own.wave.data += 1j * ranks.rank
            own.flag[1], own.mean[2, 1] = True, ranks.rank
            own.count = torch.tensor(7 + ranks.rank)
        buffers.find_changing()
        buffers.share(every=False)
        values = {name: buffer.tolist() for name, buffer in own.named_buffers()}
        own.mask[0] = bool(ranks.rank)  # later than in the first step
        buffers.share(every=True)
        dist.broadcast = send
        return buffers.changing, values, len(sent), own.mask.tolist()


@pytest.mark.dist
@pytest.mark.parametrize("strategy", ["ddp", "shard_optim"])
def test_the_ranks_share_what_changes_and_all_of_it_before_a_save(strategy):
    first, second = run_ranks(shared, 2, {"parallel__strategy": strategy}, True)
    assert first[0] == second[0] == ["wave", "flag", "count", "mean"]
    assert second[1].pop("cache") == [1.0] and first[1].pop("cache") == [0.0]
    assert first[1] == second[1] and first[1]["count"] == 0
    assert first[2] == second[2] == 2
    assert first[3] == second[3] and first[3][0] == [False] * 3


@pytest.mark.dist
def test_buffers_that_never_change_cost_no_collective_in_a_step():
    for changing, _, sent, _ in run_ranks(shared, 2, {"parallel__strategy": "ddp"}, False):
        assert changing == [] and sent == 1, "the one before a save"


def test_a_single_rank_has_nothing_to_share():
    [(changing, values, sent, _)] = run_ranks(shared, 1, {"parallel__strategy": "single"}, False)
    assert (changing, sent) == ([], 0) and values["count"] == 0
