"""Corpus -> tokenizer -> token shards: in parallel, committed shard by shard, going on where a kill left it.

The result is a pure function of the corpus and the settings: the number of workers, and any number of kills, change no
byte of it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

from windlass.data import foreign, verify
from windlass.data.corpus import find_files, open_corpus, slug
from windlass.data.encode import encode_documents
from windlass.data.items import directory_of, prepare_items
from windlass.data.lock import LOCK, only_one
from windlass.data.progress import Progress, console
from windlass.data.shards import (
    EVAL,
    INDEX,
    MAIN,
    PROGRESS,
    Index,
    Shard,
    ShardWriter,
    dtype_for,
    sweep,
    write_json,
)
from windlass.data.splits import Part, budget, cut, halves, make_splits
from windlass.data.tokenizer import Tokenizer
from windlass.data.vocabulary import (
    char_tokenizer,
    kind_of,
    load_tokenizer,
    named_tokenizer,
    tokenizer_files,
    train_bpe,
)
from windlass.errors import RunFailed, UserError
from windlass.recipe import DataSettings, Recipe

SHAPING = (
    "source", "eval_source", "sha256", "tokenizer", "tokenizer_vocab", "text_key", "split", "eval_split",
    "max_documents", "max_tokens", "val_fraction", "val_shards", "shard_tokens",
)  # fmt: skip
"""The settings that determine the shards; the rest (order, packing, workers ...) only says how they are read."""
BPE_CHARACTERS = 200_000_000
"""Characters of the corpus that a byte-pair vocabulary is learned from, at most."""


def shaping(data: DataSettings) -> dict[str, Any]:
    """The settings that determine the prepared data."""
    values = {key: getattr(data, key) for key in SHAPING}
    if data.tokenizer != "bpe":
        del values["tokenizer_vocab"]
    if data.source == "stdlib":
        import platform

        values["python"] = platform.python_version()
    return values


def data_dir(recipe: Recipe) -> Path:
    """Where the prepared data of a recipe lie: `data.dir`, or `data/<source>-<digest of what shapes them>`."""
    if recipe.data.format != "text":
        return directory_of(recipe)
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    digest = hashlib.sha256(json.dumps(shaping(recipe.data), sort_keys=True).encode()).hexdigest()
    return Path("data") / f"{slug(recipe.data.source)}-{digest[:8]}"


def ready(recipe: Recipe, directory: Path) -> Index | None:
    """The index of prepared data that belong to a recipe; None where they are not (wholly) there.

    Raises UserError where the directory holds data that were prepared with other settings, which are shown.
    """
    index = Index.load(directory)
    if index is None:
        return None
    wanted, there = shaping(recipe.data), index.settings
    changed = [k for k in sorted({*wanted, *there}) if wanted.get(k) != there.get(k)]
    if changed:
        lines = [f"  data.{k}: prepared with {there.get(k)!r}, the recipe says {wanted.get(k)!r}" for k in changed]
        raise UserError(
            "\n".join([f"{directory} holds data that were prepared otherwise; give another data.dir:", *lines])
        )
    return index


def prepare(recipe: Recipe, progress: Progress | None = None) -> Path:
    """Prepare the data of a recipe where they are not there yet; returns their directory.

    Exactly one process of a file system works; the others wait, without a time-out, until it is done, or take over where
    it was killed.

    Args:
        recipe: Its `data` section is what counts.
        progress: Shows how far it is; None: on stderr, where it takes longer than a moment.

    Raises:
        UserError: The source, the tokenizer or the directory is not what it should be.
        RunFailed: The disk is full or fails.
    """
    if recipe.data.format != "text":
        return prepare_items(recipe, progress)
    directory = data_dir(recipe)
    if ready(recipe, directory) is not None:
        return directory
    shown = progress or console()
    _refuse_strangers(directory)
    try:
        with only_one(directory, lambda: ready(recipe, directory) is not None, shown.note, "prepares") as left:
            if left:
                _Preparation(recipe, directory, shown).run()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS):
            raise RunFailed(f"{directory}: {error.strerror}; what is committed stays, start again to go on") from None
        raise
    finally:
        shown.close()
    return directory


def _refuse_strangers(directory: Path) -> None:
    """Raise UserError where a directory holds something else than data being prepared."""
    ours = (INDEX, PROGRESS, LOCK)
    if directory.is_dir() and any(directory.iterdir()) and not any((directory / name).exists() for name in ours):
        raise UserError(f"{directory} is not empty and holds no prepared data; give another data.dir")


class _Preparation:
    """One go at a data directory, by the process that holds its lock."""

    def __init__(self, recipe: Recipe, directory: Path, shown: Progress):
        self.recipe, self.data, self.directory, self.shown = recipe, recipe.data, directory, shown
        self.workers = self.data.workers or len(os.sched_getaffinity(0))
        self.state: dict[str, Any] = {}
        self.inherited: set[str] = set()
        """Files that an earlier go committed: what the disk has of them is checked when they are opened."""

    def run(self) -> None:
        """Do what is left to do, and write the index."""
        sweep(self.directory)
        index = self._foreign() if self.data.source.startswith("shards:") else self._own()
        index = index.save(self.directory)
        seen = {file: verify.state_of(self.directory / file, sha256) for file, _, sha256 in verify.parts(index.shards)}
        verify.remember(self.directory, {file: state for file, state in seen.items() if file not in self.inherited})
        (self.directory / PROGRESS).unlink(missing_ok=True)
        for stray in [p for stem in (MAIN, EVAL) for p in self.directory.glob(f"{stem}-[0-9]*") if p.name not in seen]:
            stray.unlink(missing_ok=True)  # of an earlier go with another corpus

    def _own(self) -> Index:
        parts = self._parts()
        source = {
            part.stem: {"name": part.corpus.name, "single_text": part.corpus.single_text, **part.corpus.description}
            for part in parts
        }
        self._go_on(source)
        tokenizer = self._tokenizer(parts)
        if self.state.setdefault("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
            self._forget(source)
            self.state["tokenizer"] = tokenizer.fingerprint
        for part in parts:
            if not part.corpus.single_text and tokenizer.eot is None:
                raise UserError(
                    f"data.tokenizer: {self.data.tokenizer} has no end-of-text token to separate documents with; use "
                    "another, or a source that is one text"
                )
        streams = {part.stem: self._write(part, tokenizer) for part in parts}
        splits = make_splits(self.data, self.directory, streams)
        return Index(shaping(self.data), source, _describe(self.data, tokenizer), streams, splits)

    def _parts(self) -> list[Part]:
        """What is to be written: the training corpus, and the validation corpus where it is one of its own."""
        d, note = self.data, self.shown.note
        main = open_corpus(d, d.source, sha256=d.sha256, split=d.split, notify=note)
        main.limit = d.max_documents
        separate = d.eval_source or (d.eval_split and d.source)
        if not separate:
            if main.single_text and d.val_fraction and not d.val_shards:
                return halves(main, d)
            held_out = d.val_shards * d.shard_tokens
            return [Part(MAIN, main, budget(d, held_out=True), cut(main, d.max_tokens, held_out))]
        held = open_corpus(d, separate, split=d.eval_split or d.split, notify=note)
        share = Fraction(str(d.val_fraction))
        held.limit = max(1, int(d.max_documents * share)) if d.max_documents and share else 0
        few = max(1, int(d.max_tokens * share)) if d.max_tokens and share else 0
        return [
            Part(MAIN, main, budget(d, held_out=False), cut(main, d.max_tokens)),
            Part(EVAL, held, lambda tokens: bool(few) and tokens >= few, cut(held, few)),
        ]

    def _tokenizer(self, parts: list[Part]) -> Tokenizer:
        """The tokenizer: saved by an earlier go, named, or made from the corpus; saved beside the shards."""
        kind = kind_of(self.data.tokenizer)
        if kind not in ("char", "bpe"):
            tokenizer = named_tokenizer(self.recipe.tokenizer)
        elif "tokenizer" in self.state:
            return load_tokenizer(self.recipe, self.directory)
        elif kind == "char":
            tokenizer = self._characters(parts)
        else:
            self.shown.note(f"learning {self.data.tokenizer_vocab:,} byte pairs from {parts[0].corpus.name}")
            texts = _first(parts[0].corpus.documents(), BPE_CHARACTERS)
            tokenizer = train_bpe(texts, self.data.tokenizer_vocab)
        tokenizer.save(self.directory)
        return tokenizer

    def _characters(self, parts: list[Part]) -> Tokenizer:
        found: set[str] = set()
        for part in parts:
            tokens = 0
            for text in part.corpus.documents():
                found |= set(text)
                tokens += len(text) + 1
                if part.enough(tokens):
                    break
        if not found:
            raise UserError(f"data.source: there is no text in {parts[0].corpus.name}")
        return char_tokenizer(found, with_eot=not all(part.corpus.single_text for part in parts))

    def _write(self, part: Part, tokenizer: Tokenizer) -> list[Shard]:
        before = self.state["streams"].get(part.stem, {"shards": [], "resume": [0, 0], "done": False})
        shards = [Shard(**s) for s in before["shards"]]
        if before["done"]:
            return shards
        if shards:
            self.shown.note(f"going on after {len(shards)} committed shards, {sum(s.tokens for s in shards):,} tokens")
        writer = ShardWriter(
            self.directory, part.stem, dtype_for(tokenizer.vocab), self.data.shard_tokens, shards,
            tuple(before["resume"]), lambda w: self._commit(part.stem, w, done=False),
        )  # fmt: skip
        try:
            documents = self._pour(part, tokenizer, writer)
            shards = writer.finish(documents)
        finally:
            writer.close()
        if not shards:
            raise UserError(f"data: there is no text in {part.corpus.name}")
        self._commit(part.stem, writer, done=True)
        return shards

    def _pour(self, part: Part, tokenizer: Tokenizer, writer: ShardWriter) -> int:
        """Write the documents' tokens in order; returns the number of documents of the source that were used."""
        what = "validation data" if part.stem == EVAL else "training data"
        number, carried = writer.resume
        if not carried and part.enough(writer.tokens):
            return number
        eot = None if part.corpus.single_text else tokenizer.eot
        batches = encode_documents(part.corpus.documents(number), number, tokenizer, eot, self.workers)
        seen = 0
        with contextlib.closing(batches):
            for batch in batches:
                for number, tokens, last in batch:
                    writer.add(tokens[: max(0, part.cut - seen)] if part.cut else tokens, number)
                    seen += len(tokens)
                    if last and part.enough(writer.tokens):
                        return number + 1
                self.shown.update(what, self._fraction(part, writer.tokens), writer.tokens)
        return number + 1

    def _fraction(self, part: Part, tokens: int) -> float | None:
        shares = [part.corpus.fraction]
        if part.corpus.limit:
            shares.append(None)
        if self.data.max_tokens and part.stem == MAIN:
            shares.append(min(1.0, tokens / self.data.max_tokens))
        return max((s for s in shares if s is not None), default=None)

    def _commit(self, stem: str, writer: ShardWriter, *, done: bool) -> None:
        self.state["streams"][stem] = {
            "shards": [asdict(s) for s in writer.shards], "resume": list(writer.resume), "done": done
        }  # fmt: skip
        write_json(self.directory / PROGRESS, self.state)

    def _go_on(self, source: dict[str, Any]) -> None:
        """Take up what an earlier go committed, if it was the same work and its files are there; else begin anew."""
        try:
            self.state = json.loads((self.directory / PROGRESS).read_text(encoding="utf-8"))
            same = self.state["settings"] == shaping(self.data) and self.state["source"] == source
            shards = [Shard(**s) for stream in self.state["streams"].values() for s in stream["shards"]]
            whole = all((self.directory / f).stat().st_size == size for f, size, _ in verify.parts(shards))
            self.inherited = {file for file, _, _ in verify.parts(shards)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            same = whole = False
        if not (same and whole):
            self._forget(source)

    def _forget(self, source: dict[str, Any]) -> None:
        self.state, self.inherited = {"settings": shaping(self.data), "source": source, "streams": {}}, set()

    def _foreign(self) -> Index:
        """The index of shards that others wrote: they are read once, and stay where they are."""
        d = self.data
        tokenizer = load_tokenizer(self.recipe)
        main = find_files(d.source.removeprefix("shards:"))
        held: list[Path] = []
        if d.eval_source:
            if not d.eval_source.startswith("shards:"):
                raise UserError("data.eval_source: where data.source is token shards, so is it: write shards:GLOB")
            held = find_files(d.eval_source.removeprefix("shards:"), "data.eval_source")
        elif not d.val_shards:
            held = [path for path in main if foreign.is_validation(path)]
            held = held if len(held) < len(main) else []
        taken = {path.resolve() for path in held}
        main = [path for path in main if path.resolve() not in taken]
        if not main:
            raise UserError("data.source: no shard is left for training: data.eval_source names them all")
        tokenizer.save(self.directory)
        scanned = foreign.scan_all(
            main + held,
            tokenizer.vocab,
            self.workers,
            lambda n, total: self.shown.update("reading shards", n / total, n),
        )
        streams = {MAIN: scanned[: len(main)], **({EVAL: scanned[len(main) :]} if held else {})}
        splits = make_splits(d, self.directory, streams)
        source = {MAIN: {"kind": "shards", "name": d.source}}
        return Index(shaping(d), source, _describe(d, tokenizer), streams, splits)


def _describe(data: DataSettings, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": data.tokenizer, "fingerprint": tokenizer.fingerprint, "vocab": tokenizer.vocab, "eot": tokenizer.eot,
        "files": tokenizer_files(data.tokenizer),
    }  # fmt: skip


def _first(texts: Iterator[str], characters: int) -> Iterator[str]:
    for text in texts:
        yield text[:characters]
        characters -= len(text)
        if characters <= 0:
            return
