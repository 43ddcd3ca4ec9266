"""Prepare the data of a recipe: one process writes the tokens of each source, as far as the recipe
needs them, and all ranks check them. Reading divides them into training and validation data.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.data.chat import PLAIN_LAYOUT, Template
from windlass.data.encode import Encoder, write_source
from windlass.data.external_shards import index_shards
from windlass.data.progress import Progress
from windlass.data.recipe_sources import (
    Member,
    SourceSpec,
    directory_of,
    lock_directory,
    members_of,
    root_of,
    source_key,
)
from windlass.data.recipe_tokenizer import check_tokenizer, open_tokenizer, tokenizer_files
from windlass.data.shards import INDEX, Corpus, Index, bad_shard, located, prepare_again
from windlass.data.sources import changes, describe_source, open_source
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.data.tokenizer_kinds import load_tokenizer
from windlass.errors import RunFailed, UserError
from windlass.fileio import read_json, sha256_of, write_atomic
from windlass.processes import usable_cores
from windlass.recipe import Recipe, as_recipe

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks

VERIFIED = "verified.json"
# Of each file whose SHA-256 was checked: its size, time of change (ns) and SHA-256.
States = dict[str, list[int | str]]


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

    All `ranks` call this together: one process of a file system prepares, and the others wait.

    Args:
        tokenizer: The tokenizer of a run, with its `template`; the corpus may then be gone.
        resuming: A run continues, so Windlass only warns of a source that has changed.
        only_val: Leave out training data if the validation data is separate.

    Raises:
        UserError: Source, tokenizer or directory cannot be used, a shard is missing or changed, or
            a source has changed since it was prepared (`data.changed`).
        RunFailed: The disk is full or fails.
    """
    recipe = as_recipe(recipe)
    progress = Progress()
    choice = "keep" if resuming else recipe.data.changed
    try:
        members = members_of(recipe, only_val)
        has_splits = any(spec.kind == "hf" for member in members for spec in member.val)
        if recipe.data.eval_split and not has_splits and (ranks is None or ranks.main):
            progress.note("data.eval_split does nothing: only sources hf:... have splits")
        files = list[str]()
        if tokenizer is None:
            files = tokenizer_files(recipe)
            renew = choice == "prepare"
            tokenizer, template = open_tokenizer(recipe, members, files, renew, progress)
        check_tokenizer(recipe, tokenizer)
        template = template or Template()
        preparation = _Preparation(recipe, choice, tokenizer, template, files, progress)
        specs = [spec for member in members for spec in member.sources]
        by_source = {spec: preparation.corpus(spec) for spec in specs}
        prepared = Prepared(members, by_source, tokenizer, template)
        for directory, index in {c.directory: c.index for c in prepared.corpora}.items():
            _verify(directory, index, lambda part: progress.update("checking SHA-256", part), ranks)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        remedy = "committed shards stay: start again to resume"
        raise RunFailed(f"{root_of(recipe)}: {error.strerror}; {remedy}") from None
    finally:
        progress.close()
    return prepared


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a recipe, checked."""

    members: list[Member] = field(repr=False)
    by_source: dict[SourceSpec, Corpus] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    template: Template = field(repr=False)

    @property
    def corpora(self) -> list[Corpus]:
        return list(self.by_source.values())

    @property
    def directories(self) -> list[Path]:
        return list(dict.fromkeys(corpus.directory for corpus in self.corpora))

    @property
    def is_new(self) -> bool:
        """Whether this process has written some of it."""
        return any(corpus.is_new for corpus in self.corpora)

    @property
    def changed(self) -> list[str]:
        """The sources that have changed since, in sentences."""
        return list(dict.fromkeys(corpus.change for corpus in self.corpora if corpus.change))


def find_prepared(recipe: Recipe) -> Prepared | None:
    """The prepared data of a recipe, not checked and without its chat template, for a plan. None if
    the recipe needs more."""
    members, by_source = members_of(recipe), dict[SourceSpec, Corpus]()
    tokenizer: Tokenizer | None = None
    for spec in (spec for member in members for spec in member.sources):
        directory = directory_of(spec, recipe)
        if (index := Index.load(directory)) is None:
            return None
        tokenizer = tokenizer or load_tokenizer(directory / FOLDER)
        by_source[spec] = Corpus(directory, index, spec, tokenizer)
        if not by_source[spec].is_enough:
            return None
    assert tokenizer is not None
    return Prepared(members, by_source, tokenizer, Template())


@dataclass(frozen=True)
class _Preparation:
    """What all sources of one `prepare` call share."""

    recipe: Recipe
    choice: str  # `data.changed`, or `keep` if a run resumes
    tokenizer: Tokenizer
    template: Template
    files: list[str]  # SHA-256 of the files of tokenizer and template
    progress: Progress

    def corpus(self, spec: SourceSpec) -> Corpus:
        """A source, prepared as far as its limit."""
        directory, now = directory_of(spec, self.recipe), describe_source(spec)
        corpus = self._find(spec, directory, now)
        if corpus is None or not corpus.is_enough:
            with lock_directory(directory, self.progress.note):
                # another process may have prepared it meanwhile
                corpus = self._find(spec, directory, now)
                if corpus is None:
                    # the index first, so that a kill leaves none without its shards
                    (directory / INDEX).unlink(missing_ok=True)
                    for path in (*directory.glob("shard-*"), *directory.glob(".*.new")):
                        path.unlink(missing_ok=True)
                if corpus is None or not corpus.is_enough:
                    index = self._write(spec, directory, corpus.index if corpus else None, now)
                    corpus = Corpus(directory, index, spec, self.tokenizer, is_new=True)
        if spec.is_val and not corpus.index.tokens:
            raise UserError(f"{spec.setting}: there is nothing to read in {spec.name}")
        return corpus

    def _find(self, spec: SourceSpec, directory: Path, now: dict[str, Any]) -> Corpus | None:
        """What is prepared of a source described as `now`; None if all of it is to be prepared."""
        index, change = Index.load(directory), ""
        if index is None:
            return None
        since = f"changed since {directory} was prepared"
        if self.files and index.key.get("files", self.files) != self.files:
            change = f"the files of data.tokenizer or data.chat_template have {since}"
        elif now and (difference := changes(index.source, now)):
            change = f"{spec.setting}: {spec.name} has {since}: {difference}"
        is_other = index.tokenizer.fingerprint != self.tokenizer.fingerprint
        if self.choice == "prepare" and (change or is_other):
            return None
        if is_other:
            problem = f"{directory} was prepared with another tokenizer"
            raise UserError(f"{problem}; {prepare_again(directory)}, or give another data.dir")
        corpus = Corpus(directory, index, spec, self.tokenizer, change=change)
        if change and not (self.choice == "keep" and corpus.is_enough):
            keep = 'data.changed="keep" trains on the prepared tokens, '
            keep = keep if corpus.is_enough else ""
            raise UserError(f'{change}; {keep}data.changed="prepare" prepares it again')
        return corpus

    def _write(
        self, spec: SourceSpec, directory: Path, old: Index | None, now: dict[str, Any]
    ) -> Index:
        """Write the shards of a source, after the full ones of `old`."""
        recipe, tokenizer, template, source = self.recipe, self.tokenizer, self.template, None
        if spec.kind != "shards":
            commit = old.source.get("commit") if old else ""  # the Hub may have a newer one
            pinned = replace(spec, revision=commit) if commit else spec
            source = open_source(pinned, self.progress.note)
            if tokenizer.eot is None and not source.single_text:
                problem = f"{recipe.data.tokenizer} lacks a token that ends a document"
                raise UserError(f"data.tokenizer: {problem}; use another")
        layout = ""
        tokenizer.save(directory)
        if spec.format != "text":
            template.save(directory / FOLDER)
        if spec.format == "chat":
            name = recipe.as_written.data.chat_template or recipe.tokenizer
            layout = f"the chat template of {name}"
            if not template.source:
                layout = f"{PLAIN_LAYOUT} ({recipe.tokenizer} lacks a chat template)"
        index = old or Index(
            key=source_key(spec, recipe) | {"files": self.files},
            source=source.description if source else now,
            tokenizer=tokenizer.describe(),
            template=layout,
            single_text=source is not None and source.single_text,
            masked=spec.format != "text",
            shard_tokens=recipe.data.shard_tokens,
        )
        if source is None:
            index = index_shards(spec, directory, index, recipe.data.workers, self.progress)
        else:
            encoder = Encoder(spec, tokenizer, template)
            workers = recipe.data.workers or usable_cores()
            index = write_source(source, directory, index, encoder, workers, self.progress)
        if old is None:  # After a resume, `_verify` must still hash the earlier process's files.
            _remember(directory, _states(directory, index))
        return index


def _verify(
    directory: Path, index: Index, tick: Callable[[float], None], ranks: Ranks | None = None
) -> None:
    """Check each file that changed since the last check; the ranks of a host divide them."""
    rank, world = (ranks.env.local_rank, ranks.env.local_world) if ranks else (0, 1)
    verified: States = read_json(directory / VERIFIED)
    states, problem = verified, ""
    while True:
        try:
            states = _states(directory, index)
            files = [
                file for file in list(states)[rank::world] if verified.get(file) != states[file]
            ]
            with ThreadPoolExecutor(4) as pool:
                digests = pool.map(lambda file: sha256_of(located(directory, file)), files)
                for done, (file, sha256) in enumerate(zip(files, digests, strict=True), 1):
                    if sha256 != states[file][2]:
                        problem = f"is damaged (SHA-256); {prepare_again(directory)}"
                        raise bad_shard(located(directory, file), problem)
                    tick(done / len(files))
        except UserError as error:
            newest = Index.load(directory) or index
            if newest != index:  # another process has extended the directory meanwhile
                index = newest
                continue
            problem = str(error)
        break
    if ranks:
        problem = next(filter(None, ranks.all_gather_object("damaged shards", problem)), "")
    if problem:
        raise UserError(problem)
    if rank == 0 and states != verified:
        _remember(directory, states)


def _states(directory: Path, index: Index) -> States:
    """The state of each local file; UserError for a wrong size."""
    states: States = {}
    for shard in index.shards:
        for file, (size, sha256) in shard.files(index.row).items():
            path = located(directory, file)
            if not path.is_file() or (stat := path.stat()).st_size != size:
                problem = f"is missing or has not {size:,} bytes"
                raise bad_shard(path, f"{problem}; bring it back, or {prepare_again(directory)}")
            states[file] = [size, stat.st_mtime_ns, sha256]
    return states


def _remember(directory: Path, states: States) -> None:
    """Record that the files were checked, or written, in these states."""
    if os.access(directory, os.W_OK):
        write_atomic(directory / VERIFIED, json.dumps(states, indent=1) + "\n")
