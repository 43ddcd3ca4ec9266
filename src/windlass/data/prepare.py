"""The data of a recipe: each source prepared by one process, checked by all, opened as samples.

A directory under `data.dir` has the tokens of one source by one tokenizer. It holds as much of the
source as a recipe has needed so far, and grows if another one needs more. What is held out is
computed when the tokens are read, so recipes, studies and evaluations share a directory.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import hub
from windlass.data import tokenizer as tokenizers
from windlass.data.chat import Template
from windlass.data.encode import Encoder, learn_tokenizer, write_source
from windlass.data.foreign import scan_source
from windlass.data.locate import (
    Wanted,
    directory_of,
    hash_of_key,
    root_of,
    source_key,
    tokenizer_key,
    wanted_sources,
)
from windlass.data.need import Need
from windlass.data.progress import Progress
from windlass.data.shards import INDEX, Index, file_states, prepare_again, remember, verify
from windlass.data.sources import SourceSpec, changes, describe_source, open_source
from windlass.data.split import Corpus, Member, equal_parts
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import RunFailed, UserError
from windlass.fileio import LockHeld, acquire_lock, locked
from windlass.processes import usable_cores
from windlass.recipe import DataSettings, Recipe, as_recipe

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

LOCK = ".lock"


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a recipe, checked."""

    members: list[Member] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    template: Template | None = None
    is_new: bool = False  # this process has written some of it
    seconds: float = 0.0  # to prepare, wait and check
    changed: Sequence[str] = ()  # sources that have changed since, in sentences

    @property
    def corpora(self) -> list[Corpus]:
        return [corpus for member in self.members for corpus in (*member.train, *member.val)]

    @property
    def directories(self) -> list[Path]:
        return list(dict.fromkeys(corpus.directory for corpus in self.corpora))


def prepare(
    recipe: Recipe | str | Path,
    ranks: Ranks | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    template: Template | None = None,
    resuming: bool = False,
    only_val: bool = False,
) -> Prepared:
    """Prepare the data of a recipe as far as it needs them, and check them.

    One process of a file system prepares. The others wait for it, or go on if it is killed. All
    `ranks` call this together.

    Args:
        tokenizer: A run's own, with its `template`; then the corpus that made it may be gone.
        resuming: A run continues, so a source that has changed is only remarked on.
        only_val: Leave out training data if the validation data is separate.

    Raises:
        UserError: Source, tokenizer or directory cannot be used, a shard is missing or changed, or
            a source has changed since it was prepared (`data.changed`).
        RunFailed: The disk is full or fails.
    """
    recipe, started, progress = as_recipe(recipe), time.perf_counter(), Progress()
    work = _Preparation(recipe, progress, resuming)
    try:
        wanted = wanted_sources(recipe, only_val)
        work.open_tokenizer(wanted, tokenizer, template)
        members = [work.member(member) for member in wanted]
        is_rank_0 = os.environ.get("RANK", "0") == "0"
        notify = progress.note if is_rank_0 else lambda text: None
        tokenizers.check_tokenizer(recipe, work.tokenizer, notify)
        done = Prepared(members, work.tokenizer, work.template)
        for corpus in {corpus.directory: corpus for corpus in done.corpora}.values():
            tick = lambda part: progress.update("checking SHA-256", part)  # noqa: E731
            verify(corpus.directory, corpus.index, tick, ranks)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        remedy = "committed shards stay: start again to resume"
        raise RunFailed(f"{root_of(recipe)}: {error.strerror}; {remedy}") from None
    finally:
        progress.close()
    seconds = time.perf_counter() - started
    return Prepared(members, work.tokenizer, work.template, work.is_new, seconds, work.changed)


def find_prepared(recipe: Recipe) -> Prepared | None:
    """The prepared data of a recipe, not checked; None if some is missing. Raises as `prepare`."""
    wanted, places = wanted_sources(recipe), dict[Path, Index]()
    for spec in (spec for member in wanted for spec in (*member.train, *member.val)):
        directory = directory_of(spec, recipe)
        if (index := Index.load(directory)) is None:
            return None
        places[directory] = index
    folder = next(iter(places)) / FOLDER
    tokenizer, template = tokenizers.load_tokenizer(folder), Template.of_directory(folder)
    cache = int(recipe.data.cache_gb * 1e9)

    def corpus(spec: SourceSpec) -> Corpus:
        place = directory_of(spec, recipe)
        return Corpus(place, places[place], spec, tokenizer, cache)

    members = [
        Member(w.name, w.data, [corpus(spec) for spec in w.train], [corpus(spec) for spec in w.val])
        for w in wanted
    ]
    return Prepared(members, tokenizer, template)


class _Preparation:
    """The preparation of one recipe."""

    def __init__(self, recipe: Recipe, progress: Progress, resuming: bool):
        self.recipe, self.progress, self.resuming = recipe, progress, resuming
        self.tokenizer: Tokenizer
        self.template = Template()
        self.is_new, self.changed = False, list[str]()

    def open_tokenizer(
        self, wanted: list[Wanted], tokenizer: Tokenizer | None, template: Template | None
    ) -> None:
        """The given tokenizer, the one saved beside prepared data, or a new one."""
        recipe = self.recipe
        specs = [spec for member in wanted for spec in (*member.train, *member.val)]
        saved = (directory_of(spec, recipe) for spec in specs)
        folder = next((place / FOLDER for place in saved if (place / INDEX).is_file()), None)
        if tokenizer is not None:
            self.tokenizer, self.template = tokenizer, template or Template()
        elif folder is not None:
            self.tokenizer = tokenizers.load_tokenizer(folder)
            self.template = Template.of_directory(folder)
        elif tokenizers.is_learned(recipe.data.tokenizer):
            self.tokenizer = self._learned(wanted)
        else:
            self.tokenizer = tokenizers.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
            if recipe.tokenizer.startswith("hf:"):
                place = hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
                self.template = Template.of_directory(place)

    def _learned(self, wanted: list[Wanted]) -> Tokenizer:
        """The tokenizer that the corpus makes, in a directory of its own."""
        recipe = self.recipe
        if any(spec.kind == "shards" for member in wanted for spec in member.train):
            problem = f"data.tokenizer: {recipe.data.tokenizer} needs the corpus"
            raise UserError(f"{problem}: use another for shards:")
        directory = root_of(recipe) / f"tokenizer-{hash_of_key(tokenizer_key(recipe))}"
        with _lock(directory, self.progress):
            if not (directory / FOLDER).is_dir():
                train, val = (
                    [open_source(spec, self.progress.note) for m in wanted for spec in specs(m)]
                    for specs in (lambda m: m.train, lambda m: m.val)
                )
                learn_tokenizer(recipe.data, train, val, self.progress).save(directory)
        return tokenizers.load_tokenizer(directory / FOLDER)

    def member(self, wanted: Wanted) -> Member:
        """Prepare the sources of a member as far as its limits need them."""
        val = [self.corpus(spec, wanted, True, wanted.data.max_tokens) for spec in wanted.val]
        train, limit = list[Corpus](), wanted.data.max_tokens
        for spec in wanted.train:
            train.append(self.corpus(spec, wanted, False, -(-limit // len(wanted.train))))
        while limit and len(train) > 1:  # what a source lacks, the others give
            read = [Need(wanted.data, False, limit).counted(corpus) for corpus in train]
            totals = [
                need.done if corpus.index.complete else 1 << 62
                for need, corpus in zip(read, train, strict=True)
            ]
            parts = equal_parts(limit, totals)
            short = [i for i, part in enumerate(parts) if read[i].done < min(part, totals[i])]
            if not short:
                break
            for i in short:
                train[i] = self.corpus(wanted.train[i], wanted, False, parts[i])
        return Member(wanted.name, wanted.data, train, val)

    def corpus(self, spec: SourceSpec, wanted: Wanted, is_val: bool, tokens: int) -> Corpus:
        """A source, prepared as far as it is needed."""
        directory = directory_of(spec, self.recipe)
        if (found := self._found(spec, directory, wanted.data, is_val, tokens)) is not None:
            return found
        with _lock(directory, self.progress):
            if (found := self._found(spec, directory, wanted.data, is_val, tokens)) is not None:
                return found
            index = Index.load(directory)
            if index is not None and self._stale(spec, index):
                _clear(directory)
                index = None
            self.is_new = True
            self._write(spec, directory, index, Need(wanted.data, is_val, tokens))
        return self._open(spec, directory)

    def _open(self, spec: SourceSpec, directory: Path) -> Corpus:
        index = Index.load(directory)
        assert index is not None
        cache = int(self.recipe.data.cache_gb * 1e9)
        return Corpus(directory, index, spec, self.tokenizer, cache)

    def _found(
        self, spec: SourceSpec, directory: Path, data: DataSettings, is_val: bool, tokens: int
    ) -> Corpus | None:
        """A source that is prepared far enough; None if there is something to write."""
        index = Index.load(directory)
        if index is None:
            return None
        stale, setting = self._stale(spec, index), self.recipe.data.changed
        if stale and setting == "prepare" and not self.resuming:
            return None
        corpus = self._open(spec, directory)
        if index.tokenizer.fingerprint != self.tokenizer.fingerprint:
            problem = f"{directory} was prepared with another tokenizer"
            raise UserError(f"{problem}; {prepare_again(directory)}, or give another data.dir")
        is_enough = index.complete or Need(data, is_val, tokens).counted(corpus).is_met
        if not stale:
            return corpus if is_enough else None
        text = (
            f"{spec.setting}: {spec.name} has changed since it was prepared in {directory}: {stale}"
        )
        if not is_enough or not (setting == "keep" or self.resuming):
            keep = 'data.changed="keep" trains on the prepared tokens, ' * is_enough
            raise UserError(f'{text}; {keep}data.changed="prepare" prepares it again')
        if text not in self.changed:
            self.changed.append(text)
        return corpus

    @staticmethod
    def _stale(spec: SourceSpec, index: Index) -> str:
        """What has changed of a source, as part of a sentence; empty if nothing has."""
        now = describe_source(spec)
        return changes(index.source, now) if now else ""

    def _write(self, spec: SourceSpec, directory: Path, index: Index | None, need: Need) -> None:
        """Write the tokens of a source, after those that `index` has."""
        recipe, tokenizer, progress = self.recipe, self.tokenizer, self.progress
        resumed = index is not None
        is_foreign = spec.kind == "shards"
        source = None if is_foreign else open_source(spec, progress.note)
        tokenizer.save(directory)
        if spec.format != "text":
            self.template.save(directory / FOLDER)
        new = Index(
            key=source_key(spec, recipe),
            source=source.description if source else describe_source(spec) or {},
            tokenizer=tokenizer.describe(),
            template=self.template.describe(recipe.tokenizer) if spec.format == "chat" else "",
            single_text=source is not None and source.single_text,
            masked=spec.format != "text",
            shard_tokens=recipe.data.shard_tokens,
        )
        if source is None:
            index = scan_source(spec, recipe.data, directory, new, progress)
        else:
            if tokenizer.eot is None and not source.single_text:
                problem = f"{recipe.data.tokenizer} has no token that ends a document"
                raise UserError(f"data.tokenizer: {problem}; use another")
            index = index or new
            whole = index.model_copy(update={"shards": index.full_shards})
            need.counted(Corpus(directory, whole, spec, tokenizer))
            encoder = Encoder(spec, tokenizer, self.template)
            workers = recipe.data.workers or usable_cores()
            index = write_source(source, directory, index, encoder, need, workers, progress)
            if not index.tokens and index.complete:
                raise UserError(f"{spec.setting}: there is nothing to read in {spec.name}")
        if not resumed:  # else files of an earlier process are read once before they are used
            remember(directory, file_states(directory, index))


def _clear(directory: Path) -> None:
    """Remove prepared data, the index first."""
    for path in [directory / INDEX, *directory.glob("shard-*"), *directory.glob(".*.new")]:
        path.unlink(missing_ok=True)


def _lock(directory: Path, progress: Progress) -> AbstractContextManager[Any]:
    """Hold a directory's lock, which the kernel releases when the process ends."""
    try:
        return acquire_lock(directory / LOCK, seconds=1) or nullcontext()
    except LockHeld:
        progress.note(f"waiting for another process that prepares or checks {directory}")
        return locked(directory / LOCK)
    except OSError as error:
        raise UserError(
            f"{directory} cannot be written ({error.strerror}); give another data.dir"
        ) from None
