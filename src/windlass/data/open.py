"""The data of a run: prepared tokens, divided and cut into samples, or the user's samples."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data import chat
from windlass.data.mixture import MixedSamples
from windlass.data.prepare import Prepared, prepare
from windlass.data.samples import (
    Batch,
    BestFitSamples,
    DocumentSamples,
    ExampleSamples,
    PackedSamples,
    Samples,
    TextSamples,
    Tokens,
)
from windlass.data.split import Division, Part, divide
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import UserError
from windlass.recipe import DataSettings, Recipe

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks


@dataclass(frozen=True)
class Data:
    """The data of a run. A user's own has two sets of samples, a fingerprint and a vocabulary."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer  # may be None in the user's `Data`; then Windlass generates no text
    fingerprint: str  # compared on resume: equal for equal tokens, split and tokenizer
    vocab: int
    # the layout of conversations (`data.format = "chat"`)
    template: chat.Template | None = field(default=None, repr=False)
    # of prepared data: see `describe`
    prepared: Prepared | None = field(default=None, repr=False)
    division: Division | None = field(default=None, repr=False)

    def save_tokenizer(self, directory: Path) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save(directory)
            if self.template is not None:
                self.template.save(directory / FOLDER)


def open_data(
    recipe: Recipe,
    ranks: Ranks | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    template: chat.Template | None = None,
    resuming: bool = False,
    only_val: bool = False,
) -> Data:
    """The data of a recipe, prepared and checked; arguments as `prepare`."""
    how: dict[str, Any] = {"tokenizer": tokenizer, "template": template}
    prepared = prepare(recipe, ranks, **how, resuming=resuming, only_val=only_val)
    rows = recipe.model.vocab
    if recipe.model.kind == "gpt" and rows and prepared.tokenizer.vocab > rows:
        ids = f"the tokenizer {recipe.data.tokenizer} has {prepared.tokenizer.vocab:,} ids"
        raise UserError(f"model.vocab = {rows:,}: {ids}; write that or 0")
    return open_samples(recipe, prepared)


def open_samples(recipe: Recipe, prepared: Prepared) -> Data:
    """Prepared data, divided and cut; `train` is None without training data (`only_val`)."""
    data, tokenizer, members = recipe.data, prepared.tokenizer, prepared.members
    division = divide(members, (data.train_size, data.eval_size), recipe.run.seed)
    sets = list[Samples | None]()
    for is_val, parts in ((False, division.train), (True, division.val)):
        opened = dict[str, Samples]()
        for member, own in zip(members, parts, strict=True):
            samples = _samples(member.data, own, tokenizer, recipe.model.context, is_val)
            if samples is not None and len(samples):
                opened[member.name] = samples
            elif samples is not None and not (data.mix and is_val):
                which = ", ".join(filter(None, ("val" if is_val else "train", member.name)))
                raise _too_few(samples, which, prepared, recipe.model.context)
        mixed = MixedSamples(opened, spread=is_val) if data.mix and opened else None
        sets.append(mixed or opened.get(""))
    train, val = sets
    kinds = {member.data.format for member in members}
    numbers = division.fingerprint(tokenizer), tokenizer.vocab
    template = prepared.template if kinds != {"text"} else None
    return Data(train, val, tokenizer, *numbers, template, prepared, division)  # type: ignore[arg-type]


def _too_few(samples: Samples, which: str, prepared: Prepared, context: int) -> UserError:
    problem = f"{getattr(samples, 'tokens', 0):,} tokens ({which}) are too few"
    if isinstance(samples, DocumentSamples) and samples.left_out:
        problem = f"no item ({which}) fits, {samples.left_out:,} are left out: too few"
    places = ", ".join(map(str, prepared.directories))
    return UserError(f"{places}: {problem} for one sample of model.context + 1 = {context + 1:,}")


def _samples(
    data: DataSettings, parts: Sequence[Part], tokenizer: Tokenizer, context: int, is_val: bool
) -> Samples | None:
    if not parts:
        return None
    tokens, following = Tokens(parts), (*tokenizer.first, 0)[0]
    is_text, best_fit = data.format == "text", data.packing == "best-fit"
    problem = ""  # the reason why documents cannot be apart
    if len(parts) == 1 and parts[0].corpus.index.single_text:
        problem = "the corpus is one text"
    elif any(part.tokens and not part.documents for part in parts):
        problem = "the shards do not name documents"
    if is_text and data.packing == "packed":
        if data.document_mask is True and problem:
            raise UserError(f'data.document_mask: {problem}: write "auto", or false')
        apart = data.document_mask is not False and not problem
        return PackedSamples(tokens, context, ragged=is_val, apart=apart, following=following)
    if is_text and problem:
        raise UserError(f'data.packing = "{data.packing}": {problem}; write "packed"')
    documents: DocumentSamples
    if is_text:
        documents = TextSamples(tokens, context, following=following, split=best_fit)
    else:
        documents = ExampleSamples(tokens, context, pad=tokenizer.eot or 0)
    return BestFitSamples(documents, context) if best_fit and len(documents) else documents


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


def own_data(data: Any, recipe: Recipe, measured: bool = False) -> Data | None:
    """A user's data: `Data` as they are, or from a `torch.utils.data.Dataset`, without tokenizer.

    A tuple holds two datasets, for training and validation. A single one is for training, or
    for validation if it is to be `measured`.

    Reads every item once, for the number of token ids and for a fingerprint, which a resume
    compares. Raises UserError for an iterable dataset, and for an item of another shape or type.
    """
    if isinstance(data, Data | None):
        return data
    pair = data if isinstance(data, tuple) else (None, data) if measured else (data, None)
    if len(pair) != 2:
        raise UserError("data: give one dataset, or a pair: (training, validation)")
    sets, digest, largest = list[Any](), hashlib.sha256(), 0
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
