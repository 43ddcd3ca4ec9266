"""The data of a recipe: prepared by one process where they are not there yet, checked by all, and opened as samples.

Documents become token shards (`documents.py`); questions and conversations become rows of tokens, in this file.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import time
import zipfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import hub
from windlass.data import chat, conversations, shards, squad, vocabulary
from windlass.data.division import stem_of
from windlass.data.documents import PROGRESS, Progress, prepare_text
from windlass.data.samples import (
    DocumentSamples,
    PackedSamples,
    Row,
    Rows,
    Samples,
    choose,
    lengths,
    split_documents,
    split_stream,
)
from windlass.data.shards import EVAL, MAIN, Index, RowsFile
from windlass.data.sources import JSON_LINES, describe_files, find_files, has_changed, slug
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import RunFailed, UserError
from windlass.recipe import Recipe, as_recipe

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

LOCK, REMARKS = ".lock", "remarks.txt"
SHOWN_REMARKS = 8
LOCK_POLL_SECONDS = 0.2
# What determines the shards; the rest (order, packing, workers ...) is about how they are read.
TEXT_SETTINGS = (
    "source",
    "eval_source",
    "sha256",
    "tokenizer",
    "text_key",
    "split",
    "eval_split",
    "max_documents",
    "max_tokens",
    "val_fraction",
    "val_shards",
    "shard_tokens",
)
ROWS_SETTINGS = (
    "format",
    "source",
    "eval_source",
    "val_fraction",
    "train_size",
    "eval_size",
    "split",
    "eval_split",
)


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a recipe, checked."""

    directory: Path
    index: Index
    tokenizer: Tokenizer
    is_new: bool  # prepared now, by this process
    seconds: float  # to prepare, wait and check

    @property
    def documents(self) -> int:
        """Documents, or items, of training and validation; 0 where that is not known."""
        documents = sum(self.index.documents(stem) for stem in self.index.streams)
        return documents + sum(rows.items for rows in self.index.rows.values())

    @property
    def vocab(self) -> int:
        """Token ids, the special ones included."""
        return self.tokenizer.vocab

    def tokens(self, split: str) -> int:
        """Tokens of `train` or `val`, without padding; 0 if there is no such split."""
        parts: dict[str, Any] = {**self.index.splits, **self.index.rows}
        return int(parts[split].tokens) if split in parts else 0


def prepare(recipe: Recipe | str | Path, ranks: Ranks | None = None) -> Prepared:
    """Prepare the data of a recipe where they are not there yet, and check them.

    Of all processes of a file system one works; the others wait until it is done, or resume where it was killed. If `ranks`
    are given, each of them calls this, and the ranks of a host divide the files that are to be checked. Raises UserError where source, tokenizer or directory cannot be used, a shard is missing or changed, or the data were prepared
    with other settings; RunFailed where the disk is full or fails.
    """
    recipe = as_recipe(recipe)
    started, settings, is_new, progress = (
        time.perf_counter(),
        preparing_settings(recipe),
        False,
        Progress(),
    )
    directory = data_dir(recipe, settings)
    try:
        index = _ready(recipe, settings, directory)
        if index is None:
            there = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
            if there and not there & {PROGRESS, LOCK}:
                raise UserError(
                    f"{directory} is not empty and holds no prepared data; give another data.dir"
                )
            with _lock(directory, progress):
                index = _ready(recipe, settings, directory)
                if index is None:
                    for leftover in [*directory.glob(".*.tmp"), *directory.glob(".*.new")]:
                        leftover.unlink()  # half written by a process that was killed
                    write = prepare_text if recipe.data.format == "text" else _prepare_rows
                    index, is_new = (
                        write(recipe, settings, directory, progress).save(directory),
                        True,
                    )
                    (directory / PROGRESS).unlink(missing_ok=True)
        tokenizer = vocabulary.load_tokenizer(recipe, directory)
        if tokenizer.fingerprint != index.tokenizer.fingerprint:
            raise UserError(
                f"wrong tokenizer in {directory / FOLDER}: {shards.prepare_again(directory)}"
            )
        vocabulary.check_tokenizer(
            recipe, tokenizer, progress.note if _is_rank_0() else lambda text: None
        )
        shards.verify(
            directory, index, lambda share: progress.update("checking SHA-256", share), ranks
        )
        if not is_new and recipe.data.format == "text" and _is_rank_0():
            sources = [
                (name, index.source[stem])
                for stem, name in _streams(recipe)
                if stem in index.source
            ]
            for name in [name for name, description in sources if has_changed(name, description)]:
                progress.note(
                    f"{name} has changed since it was prepared; delete {directory} to prepare it again"
                )
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise RunFailed(
                f"{directory}: {error.strerror}; what is committed stays: start again to resume"
            ) from None
        raise
    finally:
        progress.close()
    return Prepared(directory, index, tokenizer, is_new, time.perf_counter() - started)


def _streams(recipe: Recipe) -> list[tuple[str, str]]:
    """The streams of a text's sources, and the source of each."""
    parts = (MAIN, recipe.data.sources), (EVAL, recipe.data.eval_sources)
    return [
        (stem_of(stream, number), name)
        for stream, names in parts
        for number, name in enumerate(names)
    ]


def _is_rank_0() -> bool:
    return os.environ.get("RANK", "0") == "0"


def find_prepared(recipe: Recipe) -> Prepared | None:
    """The prepared data of a recipe, their files not checked; None where they are not there. Raises as `prepare`."""
    settings = preparing_settings(recipe)
    directory = data_dir(recipe, settings)
    index = _ready(recipe, settings, directory)
    return (
        Prepared(directory, index, vocabulary.load_tokenizer(recipe, directory), False, 0.0)
        if index
        else None
    )


def preparing_settings(recipe: Recipe) -> dict[str, Any]:
    """Everything that determines the prepared data: settings and the content of tokenizers, and of questions and
    conversations; `tokenizer_files` apart, they name the directory."""
    data = recipe.data
    settings: dict[str, Any] = {"tokenizer_files": vocabulary.tokenizer_files(data.tokenizer)}
    if data.tokenizer == "bpe":
        settings["tokenizer_vocab"] = data.tokenizer_vocab
    if data.format == "text":
        if data.source == "stdlib":
            settings["python"] = platform.python_version()
        return {**settings, **{key: getattr(data, key) for key in TEXT_SETTINGS}}
    files = [
        path
        for source in [*data.sources, *data.eval_sources]
        for path in _row_files(source, data.format)
    ]
    return {
        **settings,
        **{key: getattr(data, key) for key in ROWS_SETTINGS},
        "tokenizer": recipe.tokenizer,
        "context": recipe.model.context,
        "seed": recipe.run.seed,
        "layout": squad.PROMPT if data.format == "squad" else chat.LAYOUT,
        **{f"file {f['file']}": f.get("sha256") or f["changed_ns"] for f in describe_files(files)},
    }


def _row_files(source: str, kind: str) -> list[Path]:
    """The local files that questions or conversations are read from."""
    if source.startswith("hf:"):
        return [path for path in sorted(Path(source[3:]).expanduser().rglob("*")) if path.is_file()]
    if kind == "squad":
        return find_files(source.removeprefix("squad:")) if ":" in source else []
    return find_files(source, endings=JSON_LINES)


def data_dir(recipe: Recipe, settings: dict[str, Any] | None = None) -> Path:
    """Where the prepared data of a recipe lie: `data.dir`, or `data/<source>-<hash of what determines them>`."""
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    settings = preparing_settings(recipe) if settings is None else settings
    naming = {key: value for key, value in settings.items() if key != "tokenizer_files"}
    digest = hashlib.sha256(json.dumps(naming, sort_keys=True).encode()).hexdigest()
    name = slug(recipe.data.sources[0]) if recipe.data.format == "text" else recipe.data.format
    return Path("data") / f"{name}-{digest[:8]}"


def _ready(recipe: Recipe, wanted: dict[str, Any], directory: Path) -> Index | None:
    """The index of a directory, None where the data are not wholly there; UserError where they have other settings."""
    index = Index.load(directory)
    if index is None:
        return None
    there, prefix = index.settings, "data." if recipe.data.format == "text" else ""
    changed = [key for key in sorted({*wanted, *there}) if wanted.get(key) != there.get(key)]
    if not wanted["tokenizer_files"] and "tokenizer_files" in changed:
        changed.remove(
            "tokenizer_files"
        )  # where they are gone, what was saved beside the data is enough
    if changed:
        lines = [
            f"  {prefix}{k}: prepared with {there.get(k)!r}, the recipe says {wanted.get(k)!r}"
            for k in changed
        ]
        raise UserError(
            "\n".join([f"{directory} was prepared otherwise; give another data.dir:", *lines])
        )
    return index


def _lock(directory: Path, progress: Progress) -> AbstractContextManager[Any]:
    """Hold the directory's lock. It is the kernel's: it goes with its process however that ends."""
    from filelock import FileLock, Timeout

    lock = FileLock(directory / LOCK, poll_interval=LOCK_POLL_SECONDS)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return lock.acquire(timeout=1)
    except Timeout:
        progress.note(f"waiting for another process that prepares or checks {directory}")
        return lock.acquire()
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error.strerror}); give another data.dir"
        ) from None


def _prepare_rows(
    recipe: Recipe, settings: dict[str, Any], directory: Path, progress: Progress
) -> Index:
    """Rows of questions or conversations, in memory, then in `train.npz` and `val.npz`; returns the index."""
    data, context, is_squad = recipe.data, recipe.model.context, recipe.data.format == "squad"
    splits: Any = (
        squad.read_splits(recipe) if is_squad else conversations.read_splits(recipe, progress.note)
    )
    for i, (size, purpose) in enumerate([(data.train_size, "train"), (data.eval_size, "eval")]):
        keys = [item.id if is_squad else str(number) for number, item in enumerate(splits[i])]
        splits[i] = [splits[i][place] for place in choose(keys, size, recipe.run.seed, purpose)]
    template = chat.Template()
    if is_squad:
        layouts = [
            (squad.PROMPT.format(question=q.question, context=q.context), *q.answers)
            for q in splits[0]
        ]
    else:
        layouts = [tuple(item.texts) for item in splits[0]]
        if recipe.tokenizer.startswith("hf:"):
            template = chat.Template.of_directory(
                hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
            )
    texts, kind = (
        dict.fromkeys(text for layout in layouts for text in layout),
        vocabulary.kind_of(data.tokenizer),
    )
    if kind == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from the training items")
        tokenizer = vocabulary.train_bpe(texts, data.tokenizer_vocab)
    elif kind == "char":  # also the characters of the layout
        tokenizer = vocabulary.char_tokenizer(
            [*texts, squad.PROMPT, "User: System: Assistant: \n"], with_eot=True
        )
    else:
        tokenizer = vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
    files, remarks = dict[str, RowsFile](), list[str]()
    for name, items in zip(("train", "val"), splits, strict=True):
        if not items:
            continue
        pairs: list[Row] = []
        for number, item in enumerate(items, 1):
            row = (
                squad.row(item, tokenizer, context)
                if is_squad
                else chat.row(item, template, tokenizer, context)
            )
            pairs += [row] if row else []
            remarks += _remarks(item, row, context)
            progress.update(f"{data.format} rows ({name})", number / len(items))
        rows = Rows(pairs, pad=tokenizer.eot or 0)
        if not len(rows):
            raise UserError(
                f"no question or conversation ({name}) is of use with model.context = {context}: {remarks[-1]}"
            )
        rows.save(directory / f".{name}.tmp")
        (directory / f".{name}.tmp").replace(directory / f"{name}.npz")
        held_out: list[Any] = [
            (q.question, q.context, *q.answers) if is_squad else q.texts
            for q in items
            if name == "val"
        ]
        files[name] = RowsFile(
            text=hashlib.sha256(json.dumps(held_out).encode()).hexdigest()[:16] if held_out else "",
            items=len(rows),
            fingerprint=rows.fingerprint,
            tokens=rows.tokens,
            unmasked=rows.valid_tokens,
            left_out=len(items) - len(rows),
            **lengths([row.whole for row in pairs], context + 1),
        )
    tokenizer.save(directory)
    template.save(directory / FOLDER)
    _write_remarks(directory / REMARKS, remarks, progress)
    source = {}
    for stream, names in ((MAIN, data.sources), (EVAL, data.eval_sources)):
        paths = [path for name in names for path in _row_files(name, data.format)]
        source[stream] = {"name": names, "files": describe_files(paths)}
    named = (
        ""
        if is_squad
        else template.describe(recipe.tokenizer, [item for split in splits for item in split])
    )
    return Index(
        settings=settings, source=source, tokenizer=tokenizer.describe(), rows=files, template=named
    )


def _remarks(item: Any, row: Row | None, context: int) -> list[str]:
    """What became of a question or conversation, if it is not used whole; each with its place."""
    where = getattr(item, "where", "") or f"question {item.id}"
    remarks = list(getattr(item, "remarks", ()))
    if row is None:
        return [*remarks, f"{where}: left out, because nothing to learn is left of it"]
    lost = row.whole - context - 1
    return remarks + (
        [f"{where}: cut at model.context = {context:,}, {lost:,} of {row.whole:,} tokens lost"]
        if lost > 0
        else []
    )


def _write_remarks(path: Path, remarks: list[str], progress: Progress) -> None:
    if remarks:
        more = (
            [f"and {len(remarks) - SHOWN_REMARKS:,} more"] if len(remarks) > SHOWN_REMARKS else []
        )
        progress.note(
            "\n  ".join(
                [f"{len(remarks):,} remarks on items ({path}):", *remarks[:SHOWN_REMARKS], *more]
            )
        )
        path.write_text("".join(f"{line}\n" for line in remarks), encoding="utf-8")


@dataclass(frozen=True)
class Data:
    """What a run is trained on. A user's own is made of two sets of samples, a fingerprint and a vocabulary."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer  # a user's own data may have None: then no text is generated
    fingerprint: str  # what a resume compares: equal for equal tokens, split and tokenizer, wherever they lie
    vocab: int
    directory: Path | None = None  # of the prepared data
    template: chat.Template | None = (
        None  # with `data.format = "chat"`: how a conversation is written down
    )
    index: Index | None = None  # of the prepared data: see `facts.describe`

    def save_tokenizer(self, directory: Path) -> None:
        """Write what turns text into tokens and back into `directory/tokenizer`: a run can then be sampled by itself."""
        if self.tokenizer is not None:
            self.tokenizer.save(directory)
            if self.template is not None:
                self.template.save(directory / FOLDER)


def open_data(recipe: Recipe, ranks: Ranks | None = None) -> Data:
    """The data of a recipe, prepared if need be, every file checked before the first step; raises UserError as `prepare`, and
    where there are too few tokens for one sample or `model.vocab` is too small."""
    prepared = prepare(recipe, ranks)
    rows = recipe.model.vocab
    if recipe.model.kind == "gpt" and rows and prepared.tokenizer.vocab > rows:
        ids = f"the tokenizer {recipe.data.tokenizer} has {prepared.tokenizer.vocab:,} ids"
        raise UserError(f"model.vocab = {rows:,}: {ids}; write that or 0")
    return as_data(recipe, prepared)


def as_data(recipe: Recipe, prepared: Prepared) -> Data:
    """Prepared data, opened."""
    train, val = open_samples(recipe, prepared)
    template = (
        chat.Template.of_directory(prepared.directory / FOLDER)
        if recipe.data.format != "text"
        else None
    )
    tokenizer, directory = prepared.tokenizer, prepared.directory
    index = prepared.index
    return Data(
        train, val, tokenizer, index.fingerprint, tokenizer.vocab, directory, template, index
    )


def open_samples(recipe: Recipe, prepared: Prepared) -> tuple[Samples, Samples | None]:
    """The training and the validation set of prepared data, as `data.packing` and `model.context` cut them."""
    index, context, eot, directory = (
        prepared.index,
        recipe.model.context,
        prepared.tokenizer.eot,
        prepared.directory,
    )
    sets: dict[str, Samples] = {}
    for name, file in index.rows.items():
        try:
            sets[name] = rows = Rows.load(directory / f"{name}.npz")
            damage = "" if rows.fingerprint == file.fingerprint else "it has changed"
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
            damage = str(error)
        if damage:
            raise UserError(
                f"{directory / name}.npz is damaged ({damage}); {shards.prepare_again(directory)}"
            )
    for name, split in index.splits.items():
        stream, documents = (
            split_stream(directory, index, split),
            recipe.data.packing == "documents",
        )
        if documents and eot is not None:
            sets[name] = DocumentSamples(
                stream, split_documents(directory, index, split), context, eot
            )
        else:
            sets[name] = PackedSamples(stream, context, ragged=name == "val")
        single_text = any(index.source[part.stream].get("single_text") for part in split.ranges)
        if documents and (
            eot is None or single_text or not any(shard.documents for shard in stream.shards)
        ):
            raise UserError(
                'data.packing = "documents": the corpus is one stream of tokens; write "packed"'
            )
        if not len(sets[name]):
            few = f"{split.tokens:,} tokens ({name}) are too few"
            raise UserError(
                f"{directory}: {few} for one sample of model.context + 1 = {context + 1:,}"
            )
    return sets["train"], sets.get("val")
