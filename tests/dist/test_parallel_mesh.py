"""Data ranks, groups and the gradient norm, on meshes that also divide matrices, sequences and
stages.
"""

from datetime import timedelta

import pytest
import torch
from harness import Join, grad_norm, recipe, run_ranks

from windlass.model.loss import Objective, Piece, cross_entropy_sum
from windlass.model.share import Peers
from windlass.parallel.collectives import max_async, sum_async, sum_over_ranks
from windlass.parallel.context import Copy
from windlass.parallel.mesh import LOSS_DIMENSIONS, Mesh
from windlass.recipe.strategies import STRATEGIES, Sizes


@pytest.mark.parametrize(
    ("sizes", "data_ranks", "rows"),
    [
        (Sizes(dp_replicate=2, dp_shard=2), [0, 1, 2, 3], [[0, 1, 2, 3]]),
        (Sizes(dp_shard=2, tp=2), [0, 0, 1, 1], [[0, 2], [1, 3]]),
        (Sizes(dp_replicate=2, cp=2), [0, 0, 1, 1], [[0, 1, 2, 3]]),
        (Sizes(pp=2, dp_shard=2), [0, 1, 0, 1], [[0, 1], [2, 3]]),
        (Sizes(2, 1, 2, 1, 2), [0, 0, 1, 1, 0, 0, 1, 1], [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)
def test_which_ranks_read_the_same_samples_and_which_add_their_losses(sizes, data_ranks, rows):
    meshes = [Mesh(sizes, rank) for rank in range(sizes.world)]
    assert [mesh.data_rank for mesh in meshes] == data_ranks
    assert meshes[0].data_world == max(data_ranks) + 1
    assert meshes[0].rows(LOSS_DIMENSIONS) == rows


def joined(join: Join, sizes: Sizes, strategy: str = "full_shard"):
    """The ranks of `join` as a mesh of these sizes, which no recipe asks for yet."""
    ranks = join(recipe(parallel__strategy="ddp"))
    ranks.mesh = Mesh(sizes, ranks.rank)
    ranks.mesh.connect(STRATEGIES[strategy], "cpu", timedelta(seconds=30))
    return ranks


def sums(join: Join, sizes: Sizes):
    with joined(join, sizes) as ranks:
        rank = ranks.rank
        numbers = sum_async([rank, 1], ranks).wait()
        flags = max_async([rank], ranks).wait()
        return numbers, flags, sum_over_ranks(torch.tensor(float(rank)), ranks).item()


@pytest.mark.dist
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (Sizes(dp_shard=2, tp=2), [2, 4, 2, 4]),
        (Sizes(dp_shard=2, cp=2), [6, 6, 6, 6]),
        (Sizes(pp=2, dp_replicate=2), [1, 1, 5, 5]),
    ],
)
def test_losses_and_counts_add_up_over_ranks_with_other_tokens_and_flags_over_all(sizes, expected):
    for (numbers, flags, loss), total in zip(run_ranks(sums, 4, sizes), expected, strict=True):
        count = sizes.data_world * sizes.cp
        assert (numbers, flags, loss) == ([total, count], [3], total)


def norm_of_stages(join: Join):
    with joined(join, Sizes(pp=2, dp_replicate=1), "ddp") as ranks:
        parameter = torch.nn.Parameter(torch.zeros(1))
        parameter.grad = torch.tensor([3.0 + ranks.rank])
        return grad_norm([parameter], ranks).item()


@pytest.mark.dist
def test_norm_adds_up_over_pipeline_stages():
    assert run_ranks(norm_of_stages, 2) == [5.0, 5.0]


def loss_of_a_divided_head(join: Join, cap: float, objective: tuple[float, float]):
    """Loss and gradients with the head's rows over three ranks, and of one process."""
    torch.manual_seed(2)
    x = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(20, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(20, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(20, (2, 5))
    labels[0, 1:3] = -100
    options = {"cap": cap, "objective": Objective(*objective)}
    expected = cross_entropy_sum(x, weight, labels, bias, chunk=0, **options)
    grads = torch.autograd.grad(expected, (x, weight, bias))
    with joined(join, Sizes(tp=3), "ddp") as ranks:
        group = ranks.mesh.tp
        assert group is not None
        peers = Peers(group.group_name, ranks.rank, 3)
        held = peers.piece(20)  # 6, 7 and 7 rows
        rows = [t.detach()[held.start : held.stop].requires_grad_() for t in (weight, bias)]
        piece = Piece(group.group_name, held.start, 20, len(held), lambda x: Copy.apply(x, peers))
        for chunk in (0, 4):
            how = {"chunk": chunk, "piece": piece, **options}
            loss = cross_entropy_sum(x, rows[0], labels, rows[1], **how)
            torch.testing.assert_close(loss, expected)
            for found, wanted in zip(torch.autograd.grad(loss, (x, *rows)), grads, strict=True):
                part = wanted[held.start : held.stop] if found.shape != wanted.shape else wanted
                torch.testing.assert_close(found, part)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("cap", "objective"), [(0.0, (0.0, 0.0)), (5.0, (0.0, 0.0)), (5.0, (1e-2, 0.2))]
)
def test_loss_of_a_head_whose_rows_are_divided(cap, objective):
    run_ranks(loss_of_a_divided_head, 3, cap, objective)
