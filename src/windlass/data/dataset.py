"""A map-style dataset of torch as the data of a run."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch

from windlass.data.batch import Batch
from windlass.data.prepare import Data
from windlass.errors import UserError
from windlass.recipe import Recipe


class DatasetSamples:
    """Samples of a dataset whose items are integer token tensors [T + 1]."""

    def __init__(self, dataset: Any, context: int):
        self.dataset, self.context = dataset, context

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        rows = np.stack([self.item(int(index)) for index in indices])
        return Batch(rows[:, :-1], rows[:, 1:])

    def item(self, index: int) -> np.ndarray:
        """Item `index`, int64 [T + 1]; raises UserError if it has another shape or type."""
        item = torch.as_tensor(self.dataset[index])
        if item.is_floating_point() or item.shape != (self.context + 1,):
            raise UserError(
                f"data: item {index} of the dataset is {item.dtype} {list(item.shape)}; "
                f"it must hold integers [{self.context + 1}], model.context + 1 tokens"
            )
        return item.to(torch.int64).numpy()


def from_dataset(dataset: Any, recipe: Recipe) -> Data:
    """The data of a run from a `torch.utils.data.Dataset`, without validation data and tokenizer.

    Reads every item once, for the number of token ids and for a fingerprint, which a resume
    compares. Raises UserError for an iterable dataset, and for an item of another shape or type.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise UserError(
            f"data: {type(dataset).__name__} has no length and index; Windlass reads samples in "
            "its own order, so give a map-style dataset"
        )
    samples, digest, largest = DatasetSamples(dataset, recipe.model.context), hashlib.sha256(), 0
    for index in range(len(samples)):
        row = samples.item(index)
        if row.min() < 0:
            raise UserError(f"data: item {index} of the dataset has a negative token")
        digest.update(row.tobytes())
        largest = max(largest, int(row.max()))
    vocab = max(largest + 1, recipe.model.vocab)
    return Data(samples, None, None, digest.hexdigest()[:16], vocab)  # type: ignore[arg-type]
