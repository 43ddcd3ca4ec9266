"""Open the data of a run: prepared tokens, divided into training and validation data and cut into
samples, or a user's own datasets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.batch import Batch, Samples
from windlass.data.chat import Template
from windlass.data.mixture import MixedSamples
from windlass.data.prepare import Prepared, prepare
from windlass.data.samples import ExampleSamples, PackedSamples
from windlass.data.split import Division, DocumentSet, divide
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import UserError
from windlass.recipe import Recipe

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks


@dataclass(frozen=True)
class Data:
    """The data of a run. User-supplied data sets only `train`, `val`, `fingerprint` and `vocab`."""

    train: Samples  # None only if prepared without training data (`only_val`)
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


def open_data(recipe: Recipe, ranks: Ranks | None = None, **options: Any) -> Data:
    """The data of a recipe, prepared and checked; `options` as in `prepare`."""
    return open_samples(recipe, prepare(recipe, ranks, **options))


def open_samples(recipe: Recipe, prepared: Prepared) -> Data:
    """Prepared data, divided and cut."""
    data, tokenizer = recipe.data, prepared.tokenizer
    if recipe.model.is_new:
        tokenizer.start = None  # of the model that the tokenizer comes from
    sizes = data.train_size, data.eval_size
    division = divide(prepared.members, prepared.by_source, *sizes, seed=recipe.run.seed)
    train = _open_set(recipe, prepared, division.train, is_val=False)
    val = _open_set(recipe, prepared, division.val, is_val=True)
    has_layout = any(member.data.format != "text" for member in prepared.members)
    template = prepared.template if has_layout else None
    fingerprint, vocab = division.fingerprint(tokenizer), tokenizer.vocab
    return Data(train, val, tokenizer, fingerprint, vocab, template, prepared, division)  # type: ignore[arg-type]


def _open_set(
    recipe: Recipe, prepared: Prepared, sets: list[DocumentSet], is_val: bool
) -> Samples | None:
    """The samples of the set of each member; None without any."""
    tokenizer, context = prepared.tokenizer, recipe.model.context
    opened = dict[str, Samples]()
    for member, tokens in zip(prepared.members, sets, strict=True):
        if not len(tokens) and (is_val or not member.train):
            continue
        samples: ExampleSamples | PackedSamples
        data = member.data
        if data.format != "text":
            packed = data.packing == "best-fit"
            samples = ExampleSamples(tokens, context, pad=tokenizer.eot or 0, packed=packed)
            problem = f"no item fits, {samples.left_out:,} are left out"
        else:
            following = None  # begins the next document, if documents are apart
            if data.document_mask is not False and tokens.documents > 1:
                following = tokenizer.first[0] if tokenizer.first else 0
            samples = PackedSamples(tokens, context, ragged=is_val, following=following)
            problem = f"{len(tokens):,} tokens are too few"
        if len(samples):
            opened[member.name] = samples
        elif not (recipe.data.mix and is_val):
            which = "val" if is_val else "train"
            which += f", {member.name}" if member.name else ""
            places = ", ".join(map(str, prepared.directories))
            size = f"a sample has model.context + 1 = {context + 1:,}"
            raise UserError(f"{places} ({which}): {problem}; {size}")
    if recipe.data.mix and opened:
        return MixedSamples(opened, spread=is_val)
    return opened.get("")


def own_data(data: Any, recipe: Recipe, measured: bool = False) -> Data | None:
    """The data of a user: `Data`, a dataset, or a pair of datasets (training, validation).

    Windlass reads every item once for a fingerprint. `measured`: a single dataset is for validation.
    """
    if isinstance(data, Data | None):
        return data
    alone = (None, data) if measured else (data, None)
    pair = data if isinstance(data, tuple) else alone
    if len(pair) != 2:
        raise UserError("data: give one dataset, or a pair: (training, validation)")
    sets = [None if one is None else DatasetSamples(one, recipe.model.context) for one in pair]
    digest, vocab = hashlib.sha256(), 0
    for samples in filter(None, sets):
        for index in range(len(samples)):
            row = samples.item(index)
            digest.update(row.tobytes())
            vocab = max(vocab, int(row.max()) + 1)
    train, val = sets
    return Data(train, val, None, digest.hexdigest()[:16], vocab)  # type: ignore[arg-type]


class DatasetSamples:
    """A map-style `torch.utils.data.Dataset` whose items are integer token tensors [T + 1]."""

    def __init__(self, dataset: Any, context: int):
        self.dataset, self.context = dataset, context
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            problem = f"{type(dataset).__name__} lacks a length or an index"
            reason = "Windlass reads samples in its own order"
            raise UserError(f"data: {problem}; {reason}, so give a map-style dataset")

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
        wrong = item.dtype.kind not in "iu" or item.shape != (self.context + 1,)
        if wrong or item.min() < 0:
            raise UserError(
                f"data: item {index} of the dataset is {item.dtype} {list(item.shape)}; "
                f"it must hold integers [{self.context + 1}], model.context + 1 token ids from 0"
            )
        return item.astype(np.int64)
