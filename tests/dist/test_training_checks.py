"""The start-up checks one by one; tests/e2e/test_training_startup_checks.py sees all of them from
outside.
"""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import recipe, run_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from toy import Toy

from windlass.errors import RunFailed, UserError
from windlass.parallel.dist import Ranks
from windlass.parallel.env import DistEnv
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


class Rows:
    """Samples with these numbers of unmasked labels, each of as many tokens as the longest read."""

    def __init__(self, *labels: int):
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def read(self, indices):
        longest = max(2, *(self.labels[i] for i in indices))
        tokens = np.stack([np.arange(longest) % 7 for _ in indices])
        own = np.stack([np.arange(longest) < self.labels[i] for i in indices])
        return tokens, np.where(own, (tokens + 1) % 7, -100)


LOSSES = {
    "sum": lambda losses, counts: losses.sum(),
    "mean over labels": lambda losses, counts: losses.sum() / counts.sum(),
    "mean over samples": lambda losses, counts: losses.sum() / len(losses),
    "mean of each sample": lambda losses, counts: (losses.sum(1) / counts).nansum(),
    "mean over all places": lambda losses, counts: losses.mean(),
}


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize(
    "labels",
    [(8, 8), (0, 8), (0, 0, 0, 5), (3, 8), (6,), (*[0] * 100, 9, 4)],
    ids=["full", "first masked", "three masked", "ragged", "single", "late"],
)
def test_only_a_sum_over_labels_passes(kind, labels):
    class Model(torch.nn.Embedding):
        def forward(self, tokens, labels):
            logits = super().forward(tokens).transpose(1, 2)
            losses = F.cross_entropy(logits, labels, reduction="none")
            return LOSSES[kind](losses, (labels != -100).sum(1))

    torch.manual_seed(0)
    ranks = Ranks(DistEnv(), torch.device("cpu"))
    given = Model(7, 7), Rows(*labels), ranks, nullcontext
    if kind == "sum":
        checks.check_loss_is_a_sum(*given)
        return
    with pytest.raises(UserError, match='reduction="sum"'):
        checks.check_loss_is_a_sum(*given)


def test_samples_without_labels_are_no_reason_to_refuse_a_sum():
    class Sum(torch.nn.Embedding):
        def forward(self, tokens, labels):
            return (super().forward(tokens).sum(2) * (labels != -100)).sum()

    ranks = Ranks(DistEnv(), torch.device("cpu"))
    checks.check_loss_is_a_sum(Sum(7, 7), Rows(0, 0), ranks, nullcontext)
