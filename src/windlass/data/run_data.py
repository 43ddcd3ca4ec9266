"""Hold the data of a run (`Data`): from `open_data`, or from a user's own datasets (`own_data`)."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.batch import Batch, Samples
from windlass.data.chat import Template
from windlass.data.split import Division
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import UserError
from windlass.recipe import Recipe

if TYPE_CHECKING:
    from windlass.data.prepare import Prepared


@dataclass(frozen=True)
class Data:
    """The data of a run. A user's own has two sets of samples, a fingerprint and a vocabulary."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer  # may be None in the user's `Data`; then Windlass generates no text
    fingerprint: str  # compared on resume: equal for equal tokens, split and tokenizer
    vocab: int
    # the layout of conversations (`data.format = "chat"`)
    template: Template | None = field(default=None, repr=False)
    # of prepared data: see `describe`
    prepared: Prepared | None = field(default=None, repr=False)
    division: Division | None = field(default=None, repr=False)

    def save_tokenizer(self, directory: Path) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save(directory)
            if self.template is not None:
                self.template.save(directory / FOLDER)


def own_data(data: Any, recipe: Recipe, measured: bool = False) -> Data | None:
    """The data of a user: `Data`, a dataset, or a pair of datasets (training, validation).

    Every item of a dataset is read once for a fingerprint. `measured`: one dataset is validation data.
    """
    if isinstance(data, Data | None):
        return data
    pair = (data, None)
    if isinstance(data, tuple):
        pair = data
    elif measured:
        pair = (None, data)
    if len(pair) != 2:
        raise UserError("data: give one dataset, or a pair: (training, validation)")
    sets = list[Any]()
    digest = hashlib.sha256()
    largest = 0
    for dataset in pair:
        if dataset is None:
            sets.append(None)
            continue
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"data: {type(dataset).__name__} lacks a length or an index; Windlass reads samples "
                "in its own order, so give a map-style dataset"
            )
        samples = DatasetSamples(dataset, recipe.model.context)
        for index in range(len(samples)):
            row = samples.item(index)
            if row.min() < 0:
                raise UserError(f"data: item {index} of the dataset has a negative token")
            digest.update(row.tobytes())
            largest = max(largest, int(row.max()))
        sets.append(samples)
    train, val = sets
    return Data(train, val, None, digest.hexdigest()[:16], largest + 1)  # type: ignore[arg-type]


class DatasetSamples:
    """A map-style `torch.utils.data.Dataset` whose items are integer token tensors [T + 1]."""

    def __init__(self, dataset: Any, context: int):
        self.dataset, self.context = dataset, context

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        rows = np.stack([self.item(index) for index in indices.tolist()])
        return Batch(rows[:, :-1], rows[:, 1:])

    def item(self, index: int) -> np.ndarray:
        """Item `index`, int64 [T + 1]; UserError if it has another shape or type."""
        item = self.dataset[index]
        # numpy would read the items of any other object, such as a dataset, perhaps without end.
        is_row = hasattr(item, "__array__") or isinstance(item, list | tuple)
        item = np.asarray(item if is_row else None)
        if item.dtype.kind not in "iu" or item.shape != (self.context + 1,):
            raise UserError(
                f"data: item {index} of the dataset is {item.dtype} {list(item.shape)}; "
                f"it must hold integers [{self.context + 1}], model.context + 1 tokens"
            )
        return item.astype(np.int64)
