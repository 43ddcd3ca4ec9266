"""The data of a recipe: each source prepared by one process, checked by all, opened as samples.

A directory under `data.dir` has the tokens of one source by one tokenizer. It holds as much of the
source as a recipe has needed so far, and grows if another one needs more. What is held out is
computed when the tokens are read, so recipes, studies and evaluations share a directory.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import hub
from windlass.data import vocabulary
from windlass.data.chat import Template
from windlass.data.encode import Encoder, write_source
from windlass.data.foreign import scan_source
from windlass.data.integrity import file_states, remember, verify
from windlass.data.learn import learn_tokenizer
from windlass.data.locate import (
    Member,
    data_dirs,
    directory_of,
    hash_of_key,
    root_of,
    source_key,
    tokenizer_key,
    wanted_sources,
)
from windlass.data.progress import Progress
from windlass.data.shards import INDEX, Index, Table, prepare_again
from windlass.data.sources import SourceSpec, changes, describe_source, open_source
from windlass.data.split import Corpus, Limit, Need, limits_of
from windlass.data.tokenizer import DESCRIPTION, FOLDER, Tokenizer
from windlass.errors import RunFailed, UserError
from windlass.fileio import LockHeld, acquire_lock, locked
from windlass.processes import usable_cores
from windlass.recipe import Recipe, as_recipe

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

LOCK = ".lock"


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a recipe, checked."""

    members: list[Member[Corpus]] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    template: Template | None = None
    is_new: bool = False  # this process has written some of it
    seconds: float = 0.0  # to prepare, wait and check
    changed: Sequence[str] = ()  # sources that have changed since, in sentences

    @property
    def corpora(self) -> list[Corpus]:
        return [corpus for member in self.members for corpus in member.sources]

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
        notify = progress.note if ranks is None or ranks.main else lambda text: None
        if recipe.data.eval_split and not any(spec.kind == "hf" for w in wanted for spec in w.val):
            notify("data.eval_split has no effect: only sources hf:... have splits")
        work.open_tokenizer(wanted, tokenizer, template)
        members = work.members(wanted)
        vocabulary.check_tokenizer(recipe, work.tokenizer, notify)
        own = work.tokenizer, work.template, work.is_new
        prepared = Prepared(members, *own, changed=work.changed)
        for corpus in {corpus.directory: corpus for corpus in prepared.corpora}.values():
            tick = lambda part: progress.update("checking SHA-256", part)  # noqa: E731
            verify(corpus.directory, corpus.index, tick, ranks)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        remedy = "committed shards stay: start again to resume"
        raise RunFailed(f"{root_of(recipe)}: {error.strerror}; {remedy}") from None
    finally:
        progress.close()
    return replace(prepared, seconds=time.perf_counter() - started)


def find_prepared(recipe: Recipe) -> Prepared | None:
    """The prepared data of a recipe, not checked; None if the recipe needs more. Raises as
    `prepare`."""
    if unprepared(recipe):
        return None
    folder, members = data_dirs(recipe)[0] / FOLDER, list[Member[Corpus]]()
    tokenizer = vocabulary.load_tokenizer(folder)
    for wanted in wanted_sources(recipe):
        train = [_open(spec, recipe, tokenizer) for spec in wanted.train]
        val = [_open(spec, recipe, tokenizer) for spec in wanted.val]
        members.append(Member(wanted.name, wanted.data, train, val))
    return Prepared(members, tokenizer, Template.of_directory(folder))


def unprepared(recipe: Recipe) -> list[Path]:
    """The directories of sources that are not prepared as far as a recipe reads them."""
    missing = dict[Path, None]()
    for wanted in wanted_sources(recipe):
        for spec, limit in zip(wanted.sources, limits_of(wanted), strict=True):
            directory = directory_of(spec, recipe)
            index = Index.load(directory)
            if index is None or not _is_enough(directory, index, limit):
                missing[directory] = None
    return list(missing)


def _is_enough(directory: Path, index: Index, limit: Limit) -> bool:
    return index.complete or limit.documents(Table(directory, index)) is not None


def _open(spec: SourceSpec, recipe: Recipe, tokenizer: Tokenizer) -> Corpus:
    """A source that has been prepared."""
    directory = directory_of(spec, recipe)
    index = Index.load(directory)
    assert index is not None
    return Corpus(directory, index, spec, tokenizer, int(recipe.data.cache_gb * 1e9))


class _Preparation:
    """The preparation of one recipe."""

    def __init__(self, recipe: Recipe, progress: Progress, resuming: bool):
        self.recipe, self.progress, self.resuming = recipe, progress, resuming
        self.tokenizer: Tokenizer
        self.template, self.files = Template(), dict[str, str]()  # SHA-256 of tokenizer files
        self.is_new, self.changed = False, list[str]()
        # of the sources now; it reads the files, and each source is looked at several times
        self._describe = cache(describe_source)

    def open_tokenizer(
        self,
        wanted: list[Member[SourceSpec]],
        tokenizer: Tokenizer | None,
        template: Template | None,
    ) -> None:
        """The given tokenizer, the one saved beside prepared data, or a new one."""
        recipe, folders = self.recipe, dict[str, Path]()  # of prepared sources, by format
        for spec in (spec for member in wanted for spec in member.sources):
            if ((place := directory_of(spec, recipe)) / INDEX).is_file():
                folders.setdefault(spec.format, place / FOLDER)
        saved = next(iter(folders.values()), None)
        is_learned = vocabulary.is_learned(recipe.data.tokenizer)
        if tokenizer is None:
            self.files = tokenizer_key(recipe).get("files", {})
        if self.prepares_again and (is_learned or self.files):
            saved, folders = None, {}  # it may have changed
        if tokenizer is not None:
            self.tokenizer, self.template = tokenizer, template or Template()
            return
        if saved is not None:
            self.tokenizer = vocabulary.load_tokenizer(saved)
        elif is_learned:
            self.tokenizer = vocabulary.with_tokens(self._learned(wanted), recipe.data.add_tokens)
        else:
            named = vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
            self.tokenizer = vocabulary.with_tokens(named, recipe.data.add_tokens)
        if "chat" in folders:
            self.template = Template.of_directory(folders["chat"])
        elif any(member.data.format == "chat" for member in wanted):
            if recipe.tokenizer.startswith("hf:"):
                place = hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
                self.template = Template.of_directory(place)
            self.template = self.template.with_settings(recipe.data)

    def _learned(self, wanted: list[Member[SourceSpec]]) -> Tokenizer:
        """The tokenizer that the corpus makes, in a directory of its own for each state of it."""
        recipe, train = self.recipe, [spec for member in wanted for spec in member.train]
        if any(spec.kind == "shards" for spec in train):
            problem = f"data.tokenizer: {recipe.data.tokenizer} needs the corpus"
            raise UserError(f"{problem}: use another for shards:")
        val = [spec for member in wanted for spec in member.val]
        key = tokenizer_key(recipe) | {"now": [self._describe(spec) for spec in (*train, *val)]}
        directory = root_of(recipe) / f"tokenizer-{hash_of_key(key)}"
        with _lock(directory, self.progress):
            if not (directory / FOLDER / DESCRIPTION).is_file():
                note = self.progress.note
                sources = [[open_source(spec, note) for spec in specs] for specs in (train, val)]
                tokenizer = learn_tokenizer(recipe.data, sources[0], sources[1], self.progress)
                tokenizer.save(directory)
        return vocabulary.load_tokenizer(directory / FOLDER)

    @property
    def prepares_again(self) -> bool:
        return self.recipe.data.changed == "prepare" and not self.resuming

    def _again(self, text: str, is_usable: bool = True) -> bool:
        """Whether to prepare again what a sentence says has changed, or to keep it if `is_usable`.

        UserError with both choices if the recipe makes none.
        """
        if self.prepares_again:
            return True
        if not is_usable or not (self.recipe.data.changed == "keep" or self.resuming):
            keep = 'data.changed="keep" trains on the prepared tokens, ' * is_usable
            raise UserError(f'{text}; {keep}data.changed="prepare" prepares it again')
        if text not in self.changed:
            self.changed.append(text)
        return False

    def members(self, wanted: list[Member[SourceSpec]]) -> list[Member[Corpus]]:
        """Prepare all sources as far as the limits of the recipe need them."""
        members = list[Member[Corpus]]()
        for w in wanted:
            corpora = [*map(self._corpus, w.sources, limits_of(w))]
            train, val = corpora[: len(w.train)], corpora[len(w.train) :]
            members.append(Member(w.name, w.data, train, val))
        for corpus in (corpus for member in members for corpus in member.val):
            if not corpus.index.tokens:
                setting, name = corpus.spec.setting, corpus.spec.name
                raise UserError(f"{setting}: there is nothing to read in {name}")
        return members

    def _corpus(self, spec: SourceSpec, limit: Limit) -> Corpus:
        """A source, prepared as far as it is needed."""
        directory = directory_of(spec, self.recipe)
        if (corpus := self._found(spec, directory, limit)) is not None:
            return corpus
        with _lock(directory, self.progress):
            if (corpus := self._found(spec, directory, limit)) is not None:
                return corpus
            index = Index.load(directory)
            if index is None or self._stale(spec, index, directory):
                # the index first, so that a kill leaves none without its shards
                written = *directory.glob("shard-*"), *directory.glob(".*.new")
                for path in (directory / INDEX, *written):
                    path.unlink(missing_ok=True)
                index = None
            self.is_new = True
            self._write(spec, directory, index, limit)
        return _open(spec, self.recipe, self.tokenizer)

    def _found(self, spec: SourceSpec, directory: Path, limit: Limit) -> Corpus | None:
        """A source that is prepared far enough; None if there is something to write."""
        index = Index.load(directory)
        if index is None:
            return None
        stale = self._stale(spec, index, directory)
        if stale and self.prepares_again:
            return None
        corpus = _open(spec, self.recipe, self.tokenizer)
        if index.tokenizer.fingerprint != self.tokenizer.fingerprint:
            problem = f"{directory} was prepared with another tokenizer"
            raise UserError(f"{problem}; {prepare_again(directory)}, or give another data.dir")
        is_enough = _is_enough(directory, index, limit)
        if stale:
            self._again(stale, is_enough)
        return corpus if is_enough else None

    def _stale(self, spec: SourceSpec, index: Index, directory: Path) -> str:
        """A sentence on what has changed since a source was prepared; empty if nothing has."""
        since, old = f"since {directory} was prepared", index.key.get("files", {})
        if text := self._change(spec, index.source, since):
            return text
        for path, digest in self.files.items():
            if old.get(path, digest) != digest:
                is_template = path == str(Path(self.recipe.data.chat_template).expanduser())
                setting = "data.chat_template" if is_template else "data.tokenizer"
                return f"{setting}: {path} has changed {since}"
        is_other = index.tokenizer.fingerprint != self.tokenizer.fingerprint
        return f"data.tokenizer: it has changed {since}" * (is_other and self.prepares_again)

    def _change(self, spec: SourceSpec, then: dict[str, Any], since: str) -> str:
        change = changes(then, now) if (now := self._describe(spec)) else ""
        return change and f"{spec.setting}: {spec.name} has changed {since}: {change}"

    def _write(self, spec: SourceSpec, directory: Path, index: Index | None, limit: Limit) -> None:
        """Write the tokens of a source, after those that `index` has."""
        recipe, tokenizer, progress = self.recipe, self.tokenizer, self.progress
        resumed = index is not None
        if index is not None and (commit := index.source.get("commit")):
            spec = replace(spec, revision=commit)  # the Hub may have a newer one
        source = None if spec.kind == "shards" else open_source(spec, progress.note)
        tokenizer.save(directory)
        if spec.format != "text":
            self.template.save(directory / FOLDER)
        layout = ""
        if spec.format == "chat":
            layout = self.template.describe(recipe.as_written.data, recipe.tokenizer)
        new = Index(
            key=source_key(spec, recipe) | {"files": self.files},
            source=source.description if source else describe_source(spec) or {},
            tokenizer=tokenizer.describe(),
            template=layout,
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
            need = Need(limit, Table(directory, whole))
            encoder = Encoder(spec, tokenizer, self.template)
            workers = recipe.data.workers or usable_cores()
            index = write_source(source, directory, index, encoder, need, workers, progress)
        if not resumed:  # else files of an earlier process are read once before they are used
            remember(directory, file_states(directory, index))


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
