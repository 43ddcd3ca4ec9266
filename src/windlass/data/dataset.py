"""The data of a recipe, prepared, checked and open: the samples that the loader reads."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path

from windlass.data.chat import Template
from windlass.data.prepare import Prepared, prepare
from windlass.data.samples import DocumentSamples, PackedSamples, Rows, Samples
from windlass.data.shards import Stream, prepare_again
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import UserError
from windlass.recipe import Recipe


@dataclass(frozen=True)
class Data:
    """What a run is trained on. A user's own is made of two sets of samples, a fingerprint and a vocabulary."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer  # a user's own data may have None: then no text is generated
    fingerprint: str  # what a resume compares: equal for equal tokens, split and tokenizer, wherever they lie
    vocab: int
    directory: Path | None = None  # of the prepared data
    template: Template | None = None  # with `data.format = "chat"`: how a conversation is written down

    def save_tokenizer(self, directory: Path) -> None:
        """Write what turns text into tokens and back into `directory/tokenizer`: a run can then be sampled by itself."""
        if self.tokenizer is not None:
            self.tokenizer.save(directory)
            if self.template is not None:
                self.template.save(directory / FOLDER)


def open_data(recipe: Recipe) -> Data:
    """The data of a recipe, prepared if need be, every file checked before the first step.

    Raises UserError as `prepare`, and where there are too few tokens for one sample or `model.vocab` is too small.
    """
    prepared = prepare(recipe)
    rows = recipe.model.vocab
    if recipe.model.kind == "gpt" and rows and prepared.vocab > rows:
        raise UserError(
            f"model.vocab = {rows:,}: the tokenizer {recipe.data.tokenizer} has {prepared.vocab:,} ids; write that or 0"
        )
    train, val = open_samples(recipe, prepared)
    template = Template.of_directory(prepared.directory / FOLDER) if recipe.data.format != "text" else None
    return Data(
        train, val, prepared.tokenizer, prepared.index.fingerprint, prepared.vocab, prepared.directory, template
    )


def open_samples(recipe: Recipe, prepared: Prepared) -> tuple[Samples, Samples | None]:
    """The training and the validation set of prepared data, as `data.packing` and `model.context` cut them."""
    index, context, eot, directory = prepared.index, recipe.model.context, prepared.tokenizer.eot, prepared.directory
    sets: dict[str, Samples] = {}
    for name, file in index.rows.items():
        try:
            sets[name] = rows = Rows.load(directory / f"{name}.npz")
            damage = "" if rows.fingerprint == file.fingerprint else "it has changed"
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            damage = str(error)
        if damage:
            raise UserError(f"{directory / name}.npz is damaged ({damage}); {prepare_again(directory)}")
    for name, split in index.splits.items():
        stream, documents = Stream(directory, index.streams[split.stream]), recipe.data.packing == "documents"
        if documents and eot is not None:
            sets[name] = DocumentSamples(stream, split.start, split.stop, context, eot)
        else:
            sets[name] = PackedSamples(stream, split.start, split.stop, context, ragged=name == "val")
        if documents and (eot is None or not len(sets[name]) or not any(shard.documents for shard in stream.shards)):
            raise UserError('data.packing = "documents": the corpus is one stream of tokens; write "packed"')
        if not len(sets[name]):
            tokens = split.stop - split.start
            raise UserError(
                f"{directory}: {tokens:,} tokens ({name}) are too few for one sample of model.context + 1 = {context + 1:,}"
            )
    return sets["train"], sets.get("val")
