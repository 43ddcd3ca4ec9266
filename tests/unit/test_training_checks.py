"""The check that a user's module returns a sum."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from helpers import refused
from windlass.parallel.env import DistEnv
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.training import network


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
@pytest.mark.parametrize("labels", [(8, 8), (0, 8), (3, 8), (6,), (0, 0)])
def test_only_a_sum_over_labels_passes(kind, labels):
    """Samples without labels tell nothing."""

    class Model(torch.nn.Embedding):
        def forward(self, tokens, labels):
            logits = super().forward(tokens).transpose(1, 2)
            losses = F.cross_entropy(logits, labels, reduction="none")
            return LOSSES[kind](losses, (labels != -100).sum(1))

    torch.manual_seed(0)
    ranks = Ranks(DistEnv(), torch.device("cpu"))
    passes = kind == "sum" or not any(labels)
    with nullcontext() if passes else refused('reduction="sum"'):
        network.check_loss_is_a_sum(Model(7, 7), Rows(*labels), ranks, Recipe())
