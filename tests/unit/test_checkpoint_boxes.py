"""Tensors in boxes: any box read from any others."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint.format import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.shard import Box, Shard, boxes_of, divide_rows
from windlass.model.sharding import Cut, Peers, boxes_of, with_cut

Place = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes


def place(box: Place) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(*box, strict=True))


def grid(cuts: tuple[list[int], ...]) -> list[Place]:
    cells = itertools.product(*(list(itertools.pairwise(ends)) for ends in cuts))
    boxes = [(tuple(a for a, _ in cell), tuple(b - a for a, b in cell)) for cell in cells]
    return boxes[::-1]


@pytest.mark.parametrize(
    "cuts",
    [
        ([0, 6], [0, 5], [0, 7]),
        ([0, 2, 6], [0, 5], [0, 7]),
        ([0, 6], [0, 1, 4, 5], [0, 7]),
        ([0, 6], [0, 5], [0, 3, 7]),
        ([0, 1, 6], [0, 2, 5], [0, 6, 7]),
    ],
)
def test_any_box_is_read_from_any_boxes(tmp_path, cuts):
    shape = tuple(ends[-1] for ends in cuts)
    whole = torch.randn(shape, dtype=torch.float64)
    writer = Writer(tmp_path / "checkpoints", background=False)
    boxes = [Box("x", whole[place(box)], shape, box[0]) for box in grid(cuts)]
    writer.write(1, Shard(boxes, {}), {})
    [outcome] = writer.poll()
    assert not outcome.error
    checkpoint = open_checkpoint(outcome.path)
    assert torch.equal(checkpoint.tensor("x"), whole)
    for low in itertools.product((0, 3), (0, 2), (0, 1, 5)):
        for high in itertools.product((4, 6), (3, 5), (6, 7)):
            wanted = whole[tuple(map(slice, low, high))]
            target = torch.full(wanted.shape, torch.nan, dtype=torch.float64)
            checkpoint.read_into("x", low, target)
            assert torch.equal(target, wanted)
            spread = torch.full(wanted.shape[::-1], torch.nan, dtype=torch.float64).permute(2, 1, 0)
            checkpoint.read_into("x", low, spread)  # into memory in another order
            assert torch.equal(spread, wanted)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 5))
def test_ranks_divide_rows_without_gaps(rows: list[int], world: int) -> None:
    tensors = {str(i): torch.zeros(n, 3) for i, n in enumerate(rows)}
    shares = [divide_rows(tensors, rank, world) for rank in range(world)]
    for name, tensor in tensors.items():
        pieces = [share[name] for share in shares if name in share]
        assert [0, *(end for _, end in pieces)] == [*(first for first, _ in pieces), len(tensor)]
    sizes = [sum(last - first for first, last in share.values()) for share in shares]
    assert max(sizes) - min(sizes) <= 2


@pytest.mark.parametrize("dim", [0, 1])
def test_a_cut_tensor_is_a_box_for_each_of_its_ranges(dim: int) -> None:
    """Rows or columns 2, 3, 8, 9 of ten; the local rows 1 and 2."""
    whole = torch.arange(40).reshape((10, 4) if dim == 0 else (4, 10))
    cut = Cut(dim, 10, (range(2, 4), range(8, 10)), Peers("", 0, 1))
    found = list(boxes_of(with_cut(cut.take(whole), cut), 1, 3))
    expected = [((3, 0), whole[3:4]), ((8, 0), whole[8:9])]
    if dim == 1:
        expected = [((1, 2), whole[1:3, 2:4]), ((1, 8), whole[1:3, 8:10])]
    for (offsets, box), (place, part) in zip(found, expected, strict=True):
        assert offsets == place and torch.equal(box, part)
