"""The data of a recipe: prepared by one process, checked by all, and opened as samples.

Preparation has one order for every format: sources, documents or examples, hold-out, shards or
rows, and then the index. `documents.py` prepares text, `rows.py` questions and conversations.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import time
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data import chat, squad, vocabulary
from windlass.data.disk import StreamSamples
from windlass.data.division import source_number, stream_name
from windlass.data.documents import PROGRESS, prepare_text
from windlass.data.files import describe_files, has_changed
from windlass.data.mixture import MixedSamples
from windlass.data.packing import BestFitSamples
from windlass.data.progress import Progress
from windlass.data.rows import local_files, prepare_rows
from windlass.data.samples import (
    DatasetSamples,
    DocumentSamples,
    PackedSamples,
    Rows,
    Samples,
    split_documents,
    split_stream,
)
from windlass.data.shards import EVAL, MAIN, Index, Split, prepare_again, verify
from windlass.data.sources import slug
from windlass.data.stream import open_source, prepare_stream
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import RunFailed, UserError
from windlass.fileio import LockHeld, acquire_lock, locked
from windlass.recipe import Recipe, as_recipe
from windlass.run import Run, data_commit

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

LOCK = ".lock"
# The settings that determine prepared data. The others (order, packing ...) change its reading.
COMMON = ("source", "eval_source", "split", "eval_split", "val_fraction")
LIMITS = ("max_documents", "max_tokens", "val_shards", "shard_tokens")
TEXT_SETTINGS = (*COMMON, *LIMITS, "sha256", "tokenizer", "text_key")
ROWS_SETTINGS = (*COMMON, "format", "train_size", "eval_size")


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a recipe, checked."""

    directory: Path
    index: Index = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    is_new: bool = False  # prepared now, by this process
    seconds: float = 0.0  # to prepare, wait and check
    changed: Sequence[str] = ()  # what has changed since, in sentences; on rank 0


def prepare(recipe: Recipe | str | Path, ranks: Ranks | None = None, pinned: str = "") -> Prepared:
    """Prepare the data of a recipe unless it is prepared, and check it.

    One process of a file system prepares. The others wait for it, or resume if it is killed. All
    `ranks` call this together. `pinned`: the commit of a streamed source that a run has recorded;
    empty: the one that the recipe's run has, if there is one.

    Raises:
        UserError: Source, tokenizer or directory cannot be used, a shard is missing or changed, or
            the data was prepared with other settings.
        RunFailed: The disk is full or fails.
    """
    recipe, started, progress = as_recipe(recipe), time.perf_counter(), Progress()
    changed = list[str]()
    settings = preparing_settings(recipe)
    directory = data_dir(recipe, settings)
    try:
        index, is_new = _find(recipe, settings, directory), False
        if index is None:
            pinned = pinned or (data_commit(Run(recipe.run_dir)) if recipe.data.disk_tokens else "")
            index, is_new = _write(recipe, settings, directory, progress, pinned)
        tokenizer, again = vocabulary.load_tokenizer(recipe, directory), prepare_again(directory)
        if tokenizer.fingerprint != index.tokenizer.fingerprint:
            raise UserError(f"wrong tokenizer in {directory / FOLDER}: {again}")
        is_rank_0 = os.environ.get("RANK", "0") == "0"
        notify = progress.note if is_rank_0 else lambda text: None
        vocabulary.check_tokenizer(recipe, tokenizer, notify)
        verify(directory, index, lambda done: progress.update("checking SHA-256", done), ranks)
        looks = recipe.data.format == "text" and index.stream is None  # which looks at each file
        if not is_new and looks and is_rank_0:
            for kind, names in ((MAIN, recipe.data.sources), (EVAL, recipe.data.eval_sources)):
                for number, name in enumerate(names):
                    origin = index.source.get(stream_name(kind, number))
                    if name and origin and has_changed(name, origin):
                        changed.append(f"{name} has changed since it was prepared; {again}")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        remedy = "committed shards stay: start again to resume"
        raise RunFailed(f"{directory}: {error.strerror}; {remedy}") from None
    finally:
        progress.close()
    seconds = time.perf_counter() - started
    return Prepared(directory, index, tokenizer, is_new, seconds, changed)


def _write(
    recipe: Recipe, settings: dict[str, Any], directory: Path, progress: Progress, pinned: str
) -> tuple[Index, bool]:
    """Write the data under the directory's lock; the index, and whether this process wrote it."""
    existing = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    if existing and not existing & {PROGRESS, LOCK}:
        raise UserError(f"{directory} is not empty and has no prepared data; give another data.dir")
    with _lock(directory, progress):
        if index := _find(recipe, settings, directory):
            return index, False
        for leftover in [*directory.glob(".*.tmp"), *directory.glob(".*.new")]:
            leftover.unlink()  # incomplete files of a process that was killed
        write = prepare_text if recipe.data.format == "text" else prepare_rows
        write = partial(prepare_stream, pinned=pinned) if recipe.data.disk_tokens else write
        index = write(recipe, settings, directory, progress).save(directory)
        (directory / PROGRESS).unlink(missing_ok=True)
    return index, True


def find_prepared(recipe: Recipe) -> Prepared | None:
    """The prepared data of a recipe, not checked; None if there is none. Raises as `prepare`."""
    settings = preparing_settings(recipe)
    directory = data_dir(recipe, settings)
    index = _find(recipe, settings, directory)
    if index is None:
        return None
    return Prepared(directory, index, vocabulary.load_tokenizer(recipe, directory))


def preparing_settings(recipe: Recipe) -> dict[str, Any]:
    """The settings and files that determine the data; their hash names the directory.

    Paths are as written, so that a run and its data can move.
    """
    home, located, recipe = recipe.home, recipe.data, recipe.as_written
    data, files = recipe.data, vocabulary.tokenizer_files(located.tokenizer)

    def written(path: str) -> str:
        return path.removeprefix(f"{home}/")

    hashes = {written(path): digest for path, digest in files.items()}
    settings: dict[str, Any] = {"tokenizer_files": hashes}
    if data.tokenizer == "bpe":
        settings["tokenizer_vocab"] = data.tokenizer_vocab
    if data.format == "text":
        if "stdlib" in data.sources:
            settings["python"] = platform.python_version()
        settings |= {key: getattr(data, key) for key in TEXT_SETTINGS}
        settings |= {"streamed": True} if data.disk_tokens else {}
        settings |= {"revision": data.revision} if data.revision else {}
        if data.mix:  # weights and epochs change its reading
            own = {"source", "eval_source", "max_tokens", "val_fraction"}
            settings["mix"] = [part.model_dump(include=own) for part in data.mix]
            settings["source"] = data.sources
        return settings
    sources = [*located.sources, *located.eval_sources]
    rows = describe_files([path for name in sources for path in local_files(name, data.format)])
    return {
        **settings,
        **{key: getattr(data, key) for key in ROWS_SETTINGS},
        "tokenizer": recipe.tokenizer,
        "context": recipe.model.context,
        "seed": recipe.run.seed,
        **({"revision": data.revision} if data.revision else {}),
        "layout": squad.PROMPT if data.format == "squad" else chat.LAYOUT,
        **{f"file {written(f['file'])}": f.get("sha256") or f["changed_ns"] for f in rows},
    }


def data_dir(recipe: Recipe, settings: dict[str, Any] | None = None) -> Path:
    """The directory of the data: `data.dir`, or `data/<source>-<hash of preparing_settings>`."""
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    settings = preparing_settings(recipe) if settings is None else settings
    naming = {key: value for key, value in settings.items() if key != "tokenizer_files"}
    digest = hashlib.sha256(json.dumps(naming, sort_keys=True).encode()).hexdigest()
    name = slug(recipe.data.sources[0]) if recipe.data.format == "text" else recipe.data.format
    return (recipe.home or Path()) / "data" / f"{name}-{digest[:8]}"


def _find(recipe: Recipe, wanted: dict[str, Any], directory: Path) -> Index | None:
    """The index of a directory; None without one, UserError if it has other settings."""
    index = Index.load(directory)
    if index is None:
        return None
    stored, prefix = index.settings, "data." if recipe.data.format == "text" else ""
    if not wanted["tokenizer_files"]:  # then the tokenizer saved beside the data serves
        stored = stored | {"tokenizer_files": {}}
    changed = [
        f"\n  {prefix}{k}: prepared with {stored.get(k)!r}, the recipe says {wanted.get(k)!r}"
        for k in sorted({*wanted, *stored})
        if wanted.get(k) != stored.get(k)
    ]
    if changed:
        head = f"{directory} was prepared with other settings; give another data.dir:"
        raise UserError(head + "".join(changed))
    return index


def _lock(directory: Path, progress: Progress) -> AbstractContextManager[Any]:
    """Hold the directory's lock, which the kernel releases when the process ends."""
    try:
        return acquire_lock(directory / LOCK, seconds=1) or nullcontext()
    except LockHeld:
        progress.note(f"waiting for another process that prepares or checks {directory}")
        return locked(directory / LOCK)
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error.strerror}); give another data.dir"
        ) from None


# -- opened for training


@dataclass(frozen=True)
class Data:
    """The data of a run. A user's own has two sets of samples, a fingerprint and a vocabulary."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer  # a user's own data may have None; then Windlass generates no text
    fingerprint: str  # compared on resume: equal for equal tokens, split and tokenizer
    vocab: int
    directory: Path | None = None  # of the prepared data
    # the layout of conversations (`data.format = "chat"`)
    template: chat.Template | None = field(default=None, repr=False)
    # of the prepared data: see `facts.describe`
    index: Index | None = field(default=None, repr=False)
    changed: Sequence[str] = ()  # as in `Prepared`

    def save_tokenizer(self, directory: Path) -> None:
        """Write tokenizer and template to `directory/tokenizer`, for sampling without the data."""
        if self.tokenizer is not None:
            self.tokenizer.save(directory)
            if self.template is not None:
                self.template.save(directory / FOLDER)


def open_data(recipe: Recipe, ranks: Ranks | None = None, pinned: str = "") -> Data:
    """The data of a recipe, prepared if necessary, with every file checked.

    `pinned` as in `prepare`. Raises as `prepare`, and UserError if there are too few tokens for one sample or `model.vocab`
    is too small.
    """
    prepared = prepare(recipe, ranks, pinned)
    rows = recipe.model.vocab
    if recipe.model.kind == "gpt" and rows and prepared.tokenizer.vocab > rows:
        ids = f"the tokenizer {recipe.data.tokenizer} has {prepared.tokenizer.vocab:,} ids"
        raise UserError(f"model.vocab = {rows:,}: {ids}; write that or 0")
    return as_data(recipe, prepared)


def as_data(recipe: Recipe, prepared: Prepared) -> Data:
    """Prepared data, opened."""
    index, tokenizer, template = prepared.index, prepared.tokenizer, None
    if recipe.data.format != "text":
        template = chat.Template.of_directory(prepared.directory / FOLDER)
    train, val = open_samples(recipe, prepared)
    numbers = index.fingerprint, tokenizer.vocab
    place, changed = prepared.directory, prepared.changed
    return Data(train, val, tokenizer, *numbers, place, template, index, changed)


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
                f"data: {type(dataset).__name__} has no length and index; Windlass reads samples "
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


def open_samples(recipe: Recipe, prepared: Prepared) -> tuple[Samples, Samples | None]:
    """The training and validation set, cut by `data.packing` and `model.context`."""
    index, sets = prepared.index, dict[str, Samples]()
    for name, file in index.rows.items():
        path = prepared.directory / f"{name}.npz"
        try:
            rows = Rows.load(path)
            damage = "" if rows.fingerprint == file.fingerprint else "it has changed"
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            damage = str(error)
        if damage:
            raise UserError(f"{path} is damaged ({damage}); {prepare_again(prepared.directory)}")
        best_fit = recipe.data.packing == "best-fit"
        sets[name] = BestFitSamples(rows, recipe.model.context) if best_fit else rows
    mix = recipe.data.mix
    for name, split in index.splits.items():
        parts = dict[str, Samples]()
        for number, part in enumerate(mix):
            ranges = [one for one in split.ranges if source_number(one.stream) == number]
            own = split.model_copy(update={"ranges": ranges})
            parts[part.name] = _text_samples(recipe, prepared, own, name, part.name)
        if mix:
            sets[name] = MixedSamples(parts, spread=name == "val")
        else:
            sets[name] = _text_samples(recipe, prepared, split, name)
    if index.stream is not None:
        data, run = recipe.data, hashlib.sha256(str(recipe.run_dir.absolute()).encode()).hexdigest()
        sets["train"] = StreamSamples(
            prepared.directory / f"stream-{run[:8]}",
            open_source(data, index, prepared.tokenizer),
            recipe.model.context,
            data.shard_tokens,
            data.disk_tokens,
            data.document_mask is not False,
        )
    return sets["train"], sets.get("val")


def keeps_apart(recipe: Recipe, index: Index, split: Split) -> bool:
    """Whether packed rows of a split keep documents apart (`data.document_mask`).

    UserError if the recipe says so, and the index does not know where documents begin.
    """
    wanted, names = recipe.data.document_mask, [part.stream for part in split.ranges]
    single_text = any(index.source[name].get("single_text") for name in names)
    tables = all(shard.table for name in names for shard in index.streams[name])
    if wanted is True and (single_text or not tables):
        reason = (
            "the corpus is one text" if single_text else "the shards have no table of documents"
        )
        raise UserError(f'data.document_mask: {reason}: write "auto", or false')
    return wanted is not False and not single_text and tables


def _text_samples(
    recipe: Recipe, prepared: Prepared, split: Split, name: str, source: str = ""
) -> Samples:
    """The samples of the split `name`, or of its part of a mixture's `source`.

    UserError if there are none; a source may have no validation data.
    """
    index, eot, context = prepared.index, prepared.tokenizer.eot, recipe.model.context
    stream = split_stream(prepared.directory, index, split)
    packing = recipe.data.packing
    single_text = any(index.source[part.stream].get("single_text") for part in split.ranges)
    samples: Samples
    if packing == "packed":
        masked: dict[str, Any] = {}
        if eot is not None and keeps_apart(recipe, index, split):
            starts = split_documents(prepared.directory, index, split)
            masked = {"starts": starts, "eot": eot}
        samples = PackedSamples(stream, context, ragged=name == "val", **masked)
    elif eot is None or single_text:
        raise UserError(
            f'data.packing = "{packing}": the corpus is one stream of tokens; write "packed"'
        )
    else:
        starts, best_fit = split_documents(prepared.directory, index, split), packing == "best-fit"
        samples = DocumentSamples(stream, starts, context, eot, split=best_fit)
        samples = BestFitSamples(samples, context) if best_fit else samples
    if not len(samples) and not (source and name == "val"):
        which = f"{name}, {source}" if source else name
        raise UserError(
            f"{prepared.directory}: {split.tokens:,} tokens ({which}) are too few for one "
            f"sample of model.context + 1 = {context + 1:,}"
        )
    return samples
