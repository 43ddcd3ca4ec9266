"""The data of a recipe: each source prepared by one process, checked by all ranks.

A directory under `data.dir` has the tokens of one source by one tokenizer, as far as any recipe has
needed them. Windlass divides them into training and validation data when it reads them.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from windlass import hub
from windlass.data import locate
from windlass.data.chat import PLAIN_LAYOUT, Template
from windlass.data.corpus import Corpus, Limit, Need, Table, scan_source, with_limits
from windlass.data.encode import Encoder, write_source
from windlass.data.items import Item, example_of, text_of
from windlass.data.locate import (
    Member,
    SourceSpec,
    data_dirs,
    directory_of,
    load_tokenizer,
    root_of,
    wanted_sources,
)
from windlass.data.progress import Progress
from windlass.data.shards import (
    INDEX,
    Index,
    file_states,
    lock_directory,
    prepare_again,
    remember,
    verify,
)
from windlass.data.sources import Source, changes, describe_source, open_source
from windlass.data.split import held_out
from windlass.data.tokenizer import DESCRIPTION, FOLDER, Tokenizer, stretches
from windlass.errors import RunFailed, UserError
from windlass.processes import usable_cores
from windlass.recipe import Recipe, as_recipe

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks

BPE_CHARACTERS = 50_000_000  # of the corpus at most, from which byte pairs are learned
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Tool: Question: Context: Answer: \n"


def open_tokenizer(
    recipe: Recipe,
    wanted: list[Member[SourceSpec]],
    files: list[str],
    choice: str,
    describe: Callable[[SourceSpec], Any],
    progress: Progress,
) -> tuple[Tokenizer, Template]:
    """The tokenizer and the chat template of a recipe's sources.

    Windlass prefers the copies beside prepared data, because their origin may have changed. If
    `data.changed` (`choice`) is "prepare", it opens the origin again.
    """
    data, specs = recipe.data, [spec for member in wanted for spec in member.sources]
    is_learned = locate.is_learned(data.tokenizer)
    folders = dict[str, Path]()  # of saved tokenizers, by the format of the source
    if choice != "prepare" or not (is_learned or files):
        for spec in specs:
            directory = directory_of(spec, recipe)
            if (directory / INDEX).is_file():
                folders.setdefault(spec.format, directory / FOLDER)
    if folders:
        tokenizer = load_tokenizer(next(iter(folders.values())))
    else:
        if is_learned:
            tokenizer = learned_tokenizer(recipe, wanted, describe, progress)
        else:
            tokenizer = locate.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
        tokenizer = locate.with_tokens(tokenizer, data.add_tokens)
    if "chat" in folders:
        return tokenizer, Template.of_directory(folders["chat"])
    template = Template()
    if any(spec.format == "chat" for spec in specs):
        if recipe.tokenizer.startswith("hf:"):
            place = hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
            template = Template.of_directory(place)
        template = template.with_settings(data)
    return tokenizer, template


def learned_tokenizer(
    recipe: Recipe,
    wanted: list[Member[SourceSpec]],
    describe: Callable[[SourceSpec], Any],
    progress: Progress,
) -> Tokenizer:
    """The characters of a corpus, or byte pairs of its training text."""
    data = recipe.data
    specs = [spec for member in wanted for spec in member.train]
    val_specs = [spec for member in wanted for spec in member.val]
    if any(spec.kind == "shards" for spec in specs):
        problem = f"data.tokenizer = {data.tokenizer} cannot be learned from token shards"
        raise UserError(f"{problem}; name the tokenizer that wrote them")
    key = locate.tokenizer_key(recipe) | {"now": [describe(spec) for spec in (*specs, *val_specs)]}
    directory = root_of(recipe) / f"tokenizer-{locate.hash_of_key(key)}"
    with lock_directory(directory, progress.note):
        if (directory / FOLDER / DESCRIPTION).is_file():
            return load_tokenizer(directory / FOLDER)
        train = [open_source(spec, progress.note) for spec in specs]
        val = [open_source(spec, progress.note) for spec in val_specs]
        names = ", ".join(spec.name for spec in specs)
        if data.tokenizer == "bpe":
            progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from {names}")
            each = BPE_CHARACTERS // len(train)
            fractions = [locate.held_fraction(member) for member in wanted for _ in member.train]
            documents = itertools.chain(*(first_documents(s, BPE_CHARACTERS) for s in val))
            validated = {group for group, _, _ in documents}
            parts = (
                training_texts(source, fraction, validated, each)
                for source, fraction in zip(train, fractions, strict=True)
            )
            texts = itertools.chain.from_iterable(parts)
            tokenizer = locate.train_bpe(texts, data.tokenizer_vocab)
        else:
            characters: set[str] = set(LAYOUT_CHARACTERS) if data.formats != {"text"} else set()
            for source in (*train, *val):
                for item in source.items():
                    characters |= set().union(*texts_of(item, source.spec))
            if not characters:
                setting = "data.mix" if data.mix else "data.source"
                raise UserError(f"{setting}: {names} hold no text")
            alone = len(train) == 1 and all(source.single_text for source in (*train, *val))
            tokenizer = locate.char_tokenizer(characters, with_eot=not alone)
        tokenizer.save(directory)
    return load_tokenizer(directory / FOLDER)


def texts_of(item: Item, spec: SourceSpec) -> list[str]:
    """The texts of an item; none if it cannot be read and `data.on_bad_item` leaves it out."""
    try:
        return [text_of(item, spec)] if spec.format == "text" else example_of(item, spec).texts
    except UserError:
        if spec.on_bad_item == "stop":
            raise
        return []


def first_documents(source: Source, most: int) -> list[tuple[int, int, list[str]]]:
    """The first documents with `most` characters: the hash that decides whether each is held out,
    its characters, and its texts up to the limit."""
    spec, need, before = source.spec, Need(Limit(most)), 0
    documents, is_text = list[tuple[int, int, list[str]]](), spec.format == "text"
    digest, size, texts = hashlib.blake2b(digest_size=8), 0, list[str]()
    for item in source.items():
        for text in texts_of(item, spec):
            texts.append(text[: max(0, most - before - size)])
            size += len(text)
            digest.update(text.encode("utf-8", "replace") if is_text else b"")
        if item.more or not size:
            continue
        group = (
            int.from_bytes(digest.digest(), "little") if is_text else example_of(item, spec).group
        )
        documents.append((group, size, texts))
        before += size
        if need.is_met(group, size, before):
            break
        digest, size, texts = hashlib.blake2b(digest_size=8), 0, []
    return documents


def training_texts(
    source: Source, fraction: float, validated: set[int], characters: int
) -> Iterator[str]:
    """The training texts among the first documents, without those of `validated` groups, in parts
    of at most `STRETCH` characters."""
    documents = first_documents(source, characters)
    groups = np.array([group for group, _, _ in documents], np.uint64)
    sizes = np.array([size for _, size, _ in documents], np.int64)
    whole, cuts = held_out(groups, sizes, fraction, are_examples=source.spec.format != "text")
    rooms = np.where(cuts < 0, sizes, cuts) * ~whole
    for (group, _, texts), room in zip(documents, rooms.tolist(), strict=True):
        done = 0
        for text in texts if group not in validated else ():
            yield from stretches(text[: max(0, room - done)])
            done += len(text)


@dataclass(frozen=True)
class Prepared:
    """The prepared data of a recipe, checked."""

    members: list[Member[Corpus]] = field(repr=False)
    tokenizer: Tokenizer = field(repr=False)
    template: Template = field(repr=False)
    seconds: float = 0.0  # to prepare, wait and check

    @property
    def corpora(self) -> list[Corpus]:
        return [corpus for member in self.members for corpus in member.sources]

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
        tokenizer: The tokenizer of a run, with its `template`; the corpus may then be gone.
        resuming: A run continues, so Windlass only warns of a source that has changed.
        only_val: Leave out training data if the validation data is separate.

    Raises:
        UserError: Source, tokenizer or directory cannot be used, a shard is missing or changed, or
            a source has changed since it was prepared (`data.changed`).
        RunFailed: The disk is full or fails.
    """
    recipe, started, progress = as_recipe(recipe), time.perf_counter(), Progress()
    choice = "keep" if resuming else recipe.data.changed
    describe = cache(describe_source)  # it reads the files, and a start asks several times
    files = locate.tokenizer_files(recipe) if tokenizer is None else []
    try:
        wanted = wanted_sources(recipe, only_val)
        notify = progress.note if ranks is None or ranks.main else lambda text: None
        if recipe.data.eval_split and not any(spec.kind == "hf" for w in wanted for spec in w.val):
            notify("data.eval_split does nothing: only sources hf:... have splits")
        if tokenizer is None:
            tokenizer, template = open_tokenizer(recipe, wanted, files, choice, describe, progress)
        locate.check_tokenizer(recipe, tokenizer)
        start = _Start(recipe, choice, tokenizer, template or Template(), files, describe, progress)
        members = list[Member[Corpus]]()
        for member in wanted:
            corpora = [_prepare_source(spec, limit, start) for spec, limit in with_limits(member)]
            members.append(member.opened(corpora))
        for corpus in (corpus for member in members for corpus in member.val):
            if not corpus.index.tokens:
                setting, name = corpus.spec.setting, corpus.spec.name
                raise UserError(f"{setting}: there is nothing to read in {name}")
        prepared = Prepared(members, tokenizer, start.template)
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
    """The prepared data of a recipe, not checked; None if the recipe needs more."""
    if unprepared(recipe):
        return None
    folder = data_dirs(recipe)[0] / FOLDER
    tokenizer, members = load_tokenizer(folder), list[Member[Corpus]]()
    for member in wanted_sources(recipe):
        members.append(member.opened([_open(spec, recipe, tokenizer) for spec in member.sources]))
    return Prepared(members, tokenizer, Template.of_directory(folder))


def unprepared(recipe: Recipe) -> list[Path]:
    """The directories of sources that are not prepared as far as a recipe reads them."""
    missing = dict[Path, None]()
    for member in wanted_sources(recipe):
        for spec, limit in with_limits(member):
            directory = directory_of(spec, recipe)
            index = Index.load(directory)
            if index is None or not _is_enough(directory, index, limit):
                missing[directory] = None
    return list(missing)


def _is_enough(directory: Path, index: Index, limit: Limit) -> bool:
    return index.complete or limit.documents(Table(directory, index)) is not None


def _open(spec: SourceSpec, recipe: Recipe, tokenizer: Tokenizer, **how: Any) -> Corpus:
    directory = directory_of(spec, recipe)
    index = Index.load(directory)
    assert index is not None
    return Corpus(directory, index, spec, tokenizer, int(recipe.data.cache_gb * 1e9), **how)


Todo = Literal["use", "extend", "renew"]


@dataclass(frozen=True)
class _Start:
    """Values shared by all sources in one `prepare` call."""

    recipe: Recipe
    choice: str  # `data.changed`, or `keep` if a run resumes
    tokenizer: Tokenizer
    template: Template
    files: list[str]  # SHA-256 of the files of tokenizer and template
    describe: Callable[[SourceSpec], dict[str, Any] | None]  # a source as it is now
    progress: Progress


def _prepare_source(spec: SourceSpec, limit: Limit, start: _Start) -> Corpus:
    """A source, prepared as far as the limit."""
    recipe, tokenizer, progress = start.recipe, start.tokenizer, start.progress
    directory = directory_of(spec, recipe)
    todo, _, change = _look(spec, directory, limit, start)
    if todo == "use":
        return _open(spec, recipe, tokenizer, change=change)
    with lock_directory(directory, progress.note):
        todo, index, change = _look(spec, directory, limit, start)  # another process may be done
        if todo == "use":
            return _open(spec, recipe, tokenizer, change=change)
        if todo == "renew":
            # the index first, so that a kill leaves none without its shards
            written = *directory.glob("shard-*"), *directory.glob(".*.new")
            for path in (directory / INDEX, *written):
                path.unlink(missing_ok=True)
            index, change = None, ""
        resumed = index is not None
        commit = index.source.get("commit") if index else ""  # the Hub may have a newer one
        pinned = replace(spec, revision=commit) if commit else spec
        source = None if spec.kind == "shards" else open_source(pinned, progress.note)
        tokenizer.save(directory)
        if spec.format != "text":
            start.template.save(directory / FOLDER)
        layout = ""
        if spec.format == "chat":
            layout = f"{PLAIN_LAYOUT} ({recipe.tokenizer} lacks a chat template)"
            if start.template.source:
                name = recipe.as_written.data.chat_template or recipe.tokenizer
                layout = f"the chat template of {name}"
                if start.template.lacks_end(tokenizer):
                    end = tokenizer.inner.id_to_token(tokenizer.eot)
                    layout += f", with {end} at the end of each answer"
        index = index or Index(
            key=locate.source_key(spec, recipe) | {"files": start.files},
            source=source.description if source else describe_source(spec) or {},
            tokenizer=tokenizer.describe(),
            template=layout,
            single_text=source is not None and source.single_text,
            masked=spec.format != "text",
            shard_tokens=recipe.data.shard_tokens,
        )
        if source is None:
            index = scan_source(spec, recipe.data, directory, index, progress)
        else:
            if tokenizer.eot is None and not source.single_text:
                problem = f"{recipe.data.tokenizer} lacks a token that ends a document"
                raise UserError(f"data.tokenizer: {problem}; use another")
            encoder = Encoder(spec, tokenizer, start.template)
            workers = recipe.data.workers or usable_cores()
            index = write_source(source, directory, index, encoder, limit, workers, progress)
        if not resumed:  # After a resume, `verify` must still hash the earlier process's files.
            remember(directory, file_states(directory, index))
    return _open(spec, recipe, tokenizer, change=change, is_new=True)


def _look(
    spec: SourceSpec, directory: Path, limit: Limit, start: _Start
) -> tuple[Todo, Index | None, str]:
    """What to do for a source, the index of its directory, and a sentence on a change since."""
    index = Index.load(directory)
    if index is None:
        return "renew", None, ""
    now, change, since = start.describe(spec), "", f"changed since {directory} was prepared"
    if start.files and index.key.get("files", start.files) != start.files:
        change = f"the files of data.tokenizer or data.chat_template have {since}"
    elif now and (difference := changes(index.source, now)):
        change = f"{spec.setting}: {spec.name} has {since}: {difference}"
    is_other = index.tokenizer.fingerprint != start.tokenizer.fingerprint
    is_enough = _is_enough(directory, index, limit)
    return decide(directory, change, is_other, is_enough, start.choice), index, change


def decide(
    directory: Path, change: str, is_other_tokenizer: bool, is_enough: bool, choice: str
) -> Todo:
    """What to do for a directory that has tokens; `change` is a sentence on a change, or ''."""
    if choice == "prepare" and (change or is_other_tokenizer):
        return "renew"
    if is_other_tokenizer:
        problem = f"{directory} was prepared with another tokenizer"
        raise UserError(f"{problem}; {prepare_again(directory)}, or give another data.dir")
    if change and not (choice == "keep" and is_enough):
        keep = 'data.changed="keep" trains on the prepared tokens, ' * is_enough
        raise UserError(f'{change}; {keep}data.changed="prepare" prepares it again')
    return "use" if is_enough else "extend"
