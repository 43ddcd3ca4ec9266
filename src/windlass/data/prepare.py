"""The data of a recipe: each source prepared by one process, checked by all, opened as samples.

A directory under `data.dir` has the tokens of one source by one tokenizer. It holds as much of the
source as a recipe has needed so far, and grows if another one needs more. Windlass divides it into
training and validation data when it reads the tokens, so that recipes share a directory.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from windlass.data.chat import Template
from windlass.data.corpus import Corpus, Limit, Table, scan_source, with_limits
from windlass.data.encode import Encoder, write_source
from windlass.data.locate import (
    Member,
    SourceSpec,
    check_tokenizer,
    data_dirs,
    directory_of,
    load_tokenizer,
    root_of,
    source_key,
    tokenizer_files,
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
from windlass.data.sources import changes, describe_source, open_source
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import RunFailed, UserError
from windlass.processes import usable_cores
from windlass.recipe import Recipe, as_recipe

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks


import hashlib
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from windlass import hub
from windlass.data import locate
from windlass.data.corpus import Need
from windlass.data.examples import example_of
from windlass.data.locate import (
    hash_of_key,
    tokenizer_key,
)
from windlass.data.records import Item, text_of
from windlass.data.sources import Source
from windlass.data.split import held_out
from windlass.data.tokenizer import DESCRIPTION, stretches
from windlass.recipe import DataSettings

BPE_CHARACTERS = 50_000_000  # of the corpus at most, from which byte pairs are learned
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Tool: Question: Context: Answer: \n"


def open_tokenizer(
    recipe: Recipe,
    wanted: list[Member[SourceSpec]],
    files: dict[str, str],
    choice: str,
    describe: Callable[[SourceSpec], Any],
    progress: Progress,
) -> tuple[Tokenizer, Template]:
    """The tokenizer and the chat template of a recipe's sources.

    Windlass prefers the ones saved beside prepared data, because their origin may have changed. If
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
        tokenizer = locate.load_tokenizer(next(iter(folders.values())))
    elif is_learned:
        learned = _learned(recipe, wanted, describe, progress)
        tokenizer = locate.with_tokens(learned, data.add_tokens)
    else:
        named = locate.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
        tokenizer = locate.with_tokens(named, data.add_tokens)
    if "chat" in folders:
        return tokenizer, Template.of_directory(folders["chat"])
    template = Template()
    if any(spec.format == "chat" for spec in specs):
        if recipe.tokenizer.startswith("hf:"):
            place = hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
            template = Template.of_directory(place)
        template = template.with_settings(data)
    return tokenizer, template


def _learned(
    recipe: Recipe,
    wanted: list[Member[SourceSpec]],
    describe: Callable[[SourceSpec], Any],
    progress: Progress,
) -> Tokenizer:
    """The tokenizer that the corpus makes, in a directory for each state of the corpus."""
    train = [spec for member in wanted for spec in member.train]
    val = [spec for member in wanted for spec in member.val]
    if any(spec.kind == "shards" for spec in train):
        problem = f"data.tokenizer: {recipe.data.tokenizer} needs the corpus"
        raise UserError(f"{problem}: use another for shards:")
    key = tokenizer_key(recipe) | {"now": [describe(spec) for spec in (*train, *val)]}
    directory = root_of(recipe) / f"tokenizer-{hash_of_key(key)}"
    with lock_directory(directory, progress.note):
        if not (directory / FOLDER / DESCRIPTION).is_file():
            of_train = [open_source(spec, progress.note) for spec in train]
            of_val = [open_source(spec, progress.note) for spec in val]
            learn_tokenizer(recipe.data, of_train, of_val, progress).save(directory)
    return locate.load_tokenizer(directory / FOLDER)


# -- learning


def learn_tokenizer(
    data: DataSettings, train: list[Source], val: list[Source], progress: Progress
) -> Tokenizer:
    """The tokenizer of the corpus: its characters, or byte pairs of its training text."""
    names = ", ".join(source.spec.name for source in train)
    if data.tokenizer == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from {names}")
        each, fraction = BPE_CHARACTERS // len(train), data.val_fraction * (not val)
        validated = {d.group for source in val for d in first_documents(source, BPE_CHARACTERS)}
        parts = (training_texts(source, fraction, validated, each) for source in train)
        return locate.train_bpe(itertools.chain.from_iterable(parts), data.tokenizer_vocab)
    characters: set[str] = set() if data.format == "text" else set(LAYOUT_CHARACTERS)
    for source in (*train, *val):
        for item in source.items():
            characters |= set().union(*texts_of(item, source.spec))
    if not characters:
        raise UserError(f"data.source: there is no text in {names}")
    alone = len(train) == 1 and all(source.single_text for source in (*train, *val))
    return locate.char_tokenizer(characters, with_eot=not alone)


def texts_of(item: Item, spec: SourceSpec) -> list[str]:
    """The texts of an item; none if it cannot be read and `data.on_bad_item` leaves it out."""
    try:
        return [text_of(item, spec)] if spec.format == "text" else example_of(item, spec).texts
    except UserError:
        if spec.on_bad_item == "stop":
            raise
        return []


class Document(NamedTuple):
    """A document or example of a source."""

    group: int  # the hash that decides whether it is held out
    characters: int
    texts: list[str]  # its characters, as far as a tokenizer may learn from them


def first_documents(source: Source, most: int) -> list[Document]:
    """The documents of a source up to a limit of `most` characters."""
    documents, spec, need, before = list[Document](), source.spec, Need(Limit(most)), 0
    is_text = spec.format == "text"
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
        documents.append(Document(group, size, texts))
        before += size
        if need.is_met(group, size, before):
            break
        digest, size, texts = hashlib.blake2b(digest_size=8), 0, []
    return documents


def training_texts(
    source: Source, fraction: float, validated: set[int], characters: int
) -> Iterator[str]:
    """The texts of the first documents that train, in parts of at most `STRETCH` characters:
    without what is held out, and without documents of the `validated` groups."""
    documents = first_documents(source, characters)
    groups = np.array([document.group for document in documents], np.uint64)
    sizes = np.array([document.characters for document in documents], np.int64)
    whole, cuts = held_out(groups, sizes, fraction, are_examples=source.spec.format != "text")
    rooms = np.where(cuts < 0, sizes, cuts) * ~whole
    for document, room in zip(documents, rooms.tolist(), strict=True):
        if document.group in validated:
            continue
        done = 0
        for text in document.texts:
            yield from stretches(text[: max(0, room - done)])
            done += len(text)


Todo = Literal["use", "extend", "renew"]


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
    files = tokenizer_files(recipe) if tokenizer is None else {}
    try:
        wanted = wanted_sources(recipe, only_val)
        notify = progress.note if ranks is None or ranks.main else lambda text: None
        if recipe.data.eval_split and not any(spec.kind == "hf" for w in wanted for spec in w.val):
            notify("data.eval_split does nothing: only sources hf:... have splits")
        if tokenizer is None:
            tokenizer, template = open_tokenizer(recipe, wanted, files, choice, describe, progress)
        check_tokenizer(recipe, tokenizer, notify)
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
    """The prepared data of a recipe, not checked; None if the recipe needs more. Raises as
    `prepare`."""
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
    """A source that has been prepared."""
    directory = directory_of(spec, recipe)
    index = Index.load(directory)
    assert index is not None
    return Corpus(directory, index, spec, tokenizer, int(recipe.data.cache_gb * 1e9), **how)


# -- one source


@dataclass(frozen=True)
class _Start:
    """What the sources of one start share."""

    recipe: Recipe
    choice: str  # `data.changed`, or `keep` if a run resumes
    tokenizer: Tokenizer
    template: Template
    files: dict[str, str]  # SHA-256 of the files of tokenizer and template
    describe: Callable[[SourceSpec], dict[str, Any] | None]  # a source as it is now
    progress: Progress


def _prepare_source(spec: SourceSpec, limit: Limit, start: _Start) -> Corpus:
    """A source, prepared as far as the limit."""
    recipe, tokenizer, directory = start.recipe, start.tokenizer, directory_of(spec, start.recipe)
    todo, _, change = _look(spec, directory, limit, start)
    if todo == "use":
        return _open(spec, recipe, tokenizer, change=change)
    with lock_directory(directory, start.progress.note):
        todo, index, change = _look(spec, directory, limit, start)  # another process may be done
        if todo == "renew":
            # the index first, so that a kill leaves none without its shards
            written = *directory.glob("shard-*"), *directory.glob(".*.new")
            for path in (directory / INDEX, *written):
                path.unlink(missing_ok=True)
            index, change = None, ""
        if todo != "use":
            _write(spec, directory, index, limit, start)
    return _open(spec, recipe, tokenizer, change=change, is_new=todo != "use")


def _look(
    spec: SourceSpec, directory: Path, limit: Limit, start: _Start
) -> tuple[Todo, Index | None, str]:
    """What to do for a source, the index of its directory, and a sentence on a change since."""
    index = Index.load(directory)
    if index is None:
        return "renew", None, ""
    change, is_enough = _change(spec, directory, index, start), _is_enough(directory, index, limit)
    is_other = index.tokenizer.fingerprint != start.tokenizer.fingerprint
    return decide(directory, change, is_other, is_enough, start.choice), index, change


def decide(
    directory: Path, change: str, is_other_tokenizer: bool, is_enough: bool, choice: str
) -> Todo:
    """What to do for a source whose directory has tokens already.

    Args:
        change: A sentence on a change of the source, or of a file of the tokenizer; may be empty.
        is_other_tokenizer: Another tokenizer than the recipe's wrote the tokens.
        is_enough: The recipe needs no more tokens of the source.
        choice: `data.changed` ("stop", "keep", "prepare"); "keep" if a run resumes.

    Raises:
        UserError: Something has changed, and the recipe does not choose, or its choice cannot be.
    """
    if choice == "prepare" and (change or is_other_tokenizer):
        return "renew"
    if is_other_tokenizer:
        problem = f"{directory} was prepared with another tokenizer"
        raise UserError(f"{problem}; {prepare_again(directory)}, or give another data.dir")
    if change and not (choice == "keep" and is_enough):
        keep = 'data.changed="keep" trains on the prepared tokens, ' * is_enough
        raise UserError(f'{change}; {keep}data.changed="prepare" prepares it again')
    return "use" if is_enough else "extend"


def _change(spec: SourceSpec, directory: Path, index: Index, start: _Start) -> str:
    """A sentence on the first change since a source was prepared; empty if nothing has changed."""
    since = f"has changed since {directory} was prepared"
    now = start.describe(spec)
    if now and (change := changes(index.source, now)):
        return f"{spec.setting}: {spec.name} {since}: {change}"
    before, template = index.key.get("files", {}), start.recipe.as_written.data.chat_template
    for path, digest in start.files.items():
        if before.get(path, digest) != digest:
            is_template = path == str(Path(template).expanduser())
            setting = "data.chat_template" if is_template else "data.tokenizer"
            return f"{setting}: {path} {since}"
    return ""


def _write(
    spec: SourceSpec, directory: Path, index: Index | None, limit: Limit, start: _Start
) -> None:
    """Write the tokens of a source after the tokens that `index` has."""
    recipe, tokenizer, progress = start.recipe, start.tokenizer, start.progress
    resumed = index is not None
    if index is not None and (commit := index.source.get("commit")):
        spec = replace(spec, revision=commit)  # the Hub may have a newer one
    source = None if spec.kind == "shards" else open_source(spec, progress.note)
    tokenizer.save(directory)
    if spec.format != "text":
        start.template.save(directory / FOLDER)
    layout = ""
    if spec.format == "chat":
        layout = start.template.describe(recipe.as_written.data, recipe.tokenizer)
    index = index or Index(
        key=source_key(spec, recipe) | {"files": start.files},
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
    if not resumed:  # else files of an earlier process are read once before they are used
        remember(directory, file_states(directory, index))
