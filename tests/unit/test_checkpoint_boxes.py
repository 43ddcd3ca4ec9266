"""Tensors in boxes: any box read from any others."""

import itertools

import pytest
import torch

from windlass.checkpoint.format import open_checkpoint
from windlass.checkpoint.save import Writer
from windlass.checkpoint.shard import Box, Shard

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
