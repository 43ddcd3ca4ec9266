"""The start-up checks one by one; tests/e2e/test_training_startup_checks.py sees all of them from
outside.
"""

import pytest
import torch
from harness import recipe, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy

from windlass.errors import RunFailed
from windlass.parallel.parallelize import parallelize
from windlass.training import checks


class Largest(TorchDispatchMode):
    """Bytes of the largest new tensor of an operation inside the context."""

    bytes = 0

    def __torch_dispatch__(self, function, types, arguments=(), more=None):
        out = function(*arguments, **(more or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != self.known:
            self.bytes = max(self.bytes, out.numel() * out.element_size())
        return out


def test_hashing_a_large_tensor_takes_little_memory():
    """Start-up must not need more memory than the training: 8 bytes for each word of a chunk,
    whatever the size.
    """
    tensor = torch.arange(6 * checks.HASH_WORDS + 5, dtype=torch.float32)
    with Largest() as largest:
        largest.known = tensor.untyped_storage().data_ptr()
        in_chunks = checks.fingerprint(tensor)
    assert largest.bytes <= 8 * checks.HASH_WORDS < 2 * tensor.numel()
    words = tensor.view(torch.int32).long()
    assert in_chunks == int((words * (torch.arange(words.numel()) * 0x9E3779B1 + 1 | 1)).sum())


def check(join, strategy: str, spoil: bool):
    with join(recipe(parallel__strategy=strategy)) as ranks:
        model = parallelize(Toy(), ranks, recipe(parallel__strategy=strategy))
        if spoil and ranks.rank == ranks.world - 1:
            first = next(model.parameters())
            with torch.no_grad():
                getattr(first, "to_local", lambda: first)().view(-1)[0] += 1.0
        try:
            checks.startup_checks(model, [], "fp32", ranks)
        except RunFailed as error:
            return str(error)
        return ""


@pytest.mark.dist
@pytest.mark.parametrize(
    ("strategy", "world"), [("ddp", 2), ("full_shard", 2), ("hybrid_shard", 4)]
)
def test_replicas_that_differ(strategy, world):
    assert run_ranks(check, world, strategy, False) == [""] * world
    if strategy != "full_shard":  # there no two ranks hold the same part
        for text in run_ranks(check, world, strategy, True):
            assert f"and {world - 1} hold different values" in text
