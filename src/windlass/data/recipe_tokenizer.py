"""Find the tokenizer of a recipe, with its chat template: a copy beside prepared data, the one that
`data.tokenizer` names, or one that is learned from the training documents.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass import hub
from windlass.data import tokenizer_kinds
from windlass.data.chat import Template
from windlass.data.directory import directory_of, hash_of_key, lock_directory, tokenizer_key
from windlass.data.items import Item, example_of, text_of
from windlass.data.progress import Progress
from windlass.data.recipe_sources import Member, SourceSpec, root_of
from windlass.data.shards import INDEX
from windlass.data.sources import Source, describe_source, open_source
from windlass.data.split import FEW, held_out
from windlass.data.tokenizer import (
    DESCRIPTION,
    FOLDER,
    JSON_FILE,
    Tokenizer,
    probe_ids,
    stretches,
)
from windlass.errors import UserError
from windlass.fileio import sha256_of
from windlass.recipe import Recipe
from windlass.recipe.load import own_tokenizer

BPE_CHARACTERS = 50_000_000  # of the corpus at most, from which byte pairs are learned
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Tool: Question: Context: Answer: \n"


def open_tokenizer(
    recipe: Recipe,
    members: list[Member[SourceSpec]],
    files: list[str],
    renew: bool,
    progress: Progress,
) -> tuple[Tokenizer, Template]:
    """The tokenizer and the chat template of a recipe's sources.

    Windlass takes the copies beside prepared data, because their origin may have changed. With
    `renew` (`data.changed = "prepare"`) it opens an origin on this machine again: the corpus, or
    `tokenizer_files`.
    """
    data = recipe.data
    is_learned = tokenizer_kinds.is_learned(data.tokenizer)
    specs = [spec for member in members for spec in member.sources]
    saved = dict[str, Path]()  # the folders of copies, by the format of the source
    if not (renew and (is_learned or files)):
        for spec in specs:
            directory = directory_of(spec, recipe)
            if (directory / INDEX).is_file():
                saved.setdefault(spec.format, directory / FOLDER)
    if saved:
        tokenizer = tokenizer_kinds.load_tokenizer(next(iter(saved.values())))
    else:
        if is_learned:
            tokenizer = learn_tokenizer(recipe, members, progress)
        else:
            tokenizer = tokenizer_kinds.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)
        tokenizer = tokenizer_kinds.with_tokens(tokenizer, data.add_tokens)
    if "chat" in saved:
        return tokenizer, Template.of_directory(saved["chat"])
    template = Template()
    if any(spec.format == "chat" for spec in specs):
        if recipe.tokenizer.startswith("hf:"):
            place = hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
            template = Template.of_directory(place)
        template = template.with_settings(data)
    return tokenizer, template


def check_tokenizer(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Reject a tokenizer with other ids than the one that the model's weights were trained with."""
    model, wanted = recipe.model, recipe.data.tokenizer
    own = own_tokenizer(model, "")
    if own in (wanted, "") or model.from_scratch:
        return
    revision = f"@{model.revision}" if model.revision and own == f"hf:{model.name}" else ""
    try:
        trained = tokenizer_kinds.named_tokenizer(own + revision)
    except UserError:  # the model has none, or does not exist any more
        return
    ids, trained_ids = (t.inner.get_vocab(with_added_tokens=True) for t in (tokenizer, trained))
    same_probe = probe_ids(tokenizer.inner) == probe_ids(trained.inner)
    if trained_ids.items() <= ids.items() and same_probe:
        return  # the same, perhaps with added tokens
    raise UserError(
        f"data.tokenizer = {wanted} ({tokenizer.vocab:,} ids) is not the tokenizer of "
        f"{model.init_from or model.name} ({trained.vocab:,} ids), which its weights were trained "
        f"with; leave data.tokenizer out, or write {own}"
    )


def tokenizer_files(recipe: Recipe) -> list[str]:
    """The SHA-256 of the local files of tokenizer and template."""
    files = list[Path]()
    if recipe.data.chat_template:
        files.append(Path(recipe.data.chat_template).expanduser())
    place = recipe.data.tokenizer.partition(":")[2]
    if place:
        path = Path(place).expanduser()
        names = (path.name, JSON_FILE, *tokenizer_kinds.GPT2_FILES, *tokenizer_kinds.CONFIG_FILES)
        files += [
            (path.parent if path.is_file() else path) / name
            for name in (*names, "chat_template.jinja")
        ]
    return [sha256_of(file) for file in files if file.is_file()]


def learn_tokenizer(
    recipe: Recipe, members: list[Member[SourceSpec]], progress: Progress
) -> Tokenizer:
    """The characters of a corpus, or byte pairs of its training text; saved for other recipes."""
    kind = recipe.data.tokenizer
    train = [spec for member in members for spec in member.train]
    val = [spec for member in members for spec in member.val]
    if any(spec.kind == "shards" for spec in train):
        problem = f"data.tokenizer = {kind} cannot be learned from token shards"
        raise UserError(f"{problem}; name the tokenizer that wrote them")
    now = [describe_source(spec) for spec in (*train, *val)]
    key = tokenizer_key(recipe) | {"now": now}
    directory = root_of(recipe) / f"tokenizer-{hash_of_key(key)}"
    with lock_directory(directory, progress.note):
        if not (directory / FOLDER / DESCRIPTION).is_file():
            learn = learn_byte_pairs if kind == "bpe" else learn_characters
            learn(recipe, members, progress).save(directory)
        return tokenizer_kinds.load_tokenizer(directory / FOLDER)


def learn_characters(
    recipe: Recipe, members: list[Member[SourceSpec]], progress: Progress
) -> Tokenizer:
    """A tokenizer with all characters of training and validation data."""
    specs = [spec for member in members for spec in member.sources]
    sources = [open_source(spec, progress.note) for spec in specs]
    characters = set[str]()
    for source in sources:
        for item in source.items():
            characters.update(*texts_of(item, source.spec))
    if not characters:
        raise UserError("data.source: there is no text")
    if recipe.data.formats != {"text"}:
        characters.update(LAYOUT_CHARACTERS)
    count = sum(len(member.train) for member in members)
    is_one_text = count == 1 and all(source.single_text for source in sources)
    return tokenizer_kinds.char_tokenizer(characters, with_eot=not is_one_text)


def learn_byte_pairs(
    recipe: Recipe, members: list[Member[SourceSpec]], progress: Progress
) -> Tokenizer:
    """Byte pairs of the first training documents, each source with an equal part."""
    train = [
        (open_source(spec, progress.note), member.held_fraction)
        for member in members
        for spec in member.train
    ]
    val = [open_source(spec, progress.note) for member in members for spec in member.val]
    progress.note(f"learning {recipe.data.tokenizer_vocab:,} byte pairs")
    validated = {
        document.group for source in val for document in first_documents(source, BPE_CHARACTERS)
    }
    texts = itertools.chain.from_iterable(
        training_texts(source, fraction, validated, BPE_CHARACTERS // len(train))
        for source, fraction in train
    )
    return tokenizer_kinds.bpe_tokenizer(texts, recipe.data.tokenizer_vocab)


class Document(NamedTuple):
    group: int  # the hash that decides whether it is held out
    characters: int
    texts: list[str]  # up to the limit


def training_texts(
    source: Source, fraction: float, validated: set[int], characters: int
) -> Iterator[str]:
    """The training texts among the first documents, without `validated` groups, in parts
    of at most `STRETCH` characters."""
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


def first_documents(source: Source, characters: int) -> list[Document]:
    """The first documents of a source that have `characters`, of at least FEW groups."""
    spec = source.spec
    documents, groups = list[Document](), set[int]()
    before = size = 0
    texts, digest = list[str](), hashlib.blake2b(digest_size=8)
    for item in source.items():
        for text in texts_of(item, spec):
            texts.append(text[: max(0, characters - before - size)])
            size += len(text)
            if spec.format == "text":
                digest.update(text.encode("utf-8", "replace"))
        if item.more or not size:
            continue
        if spec.format == "text":
            group = int.from_bytes(digest.digest(), "little")
        else:
            group = example_of(item, spec).group
        documents.append(Document(group, size, texts))
        groups.add(group)
        before += size
        if before >= characters and len(groups) >= FEW:
            break
        size, texts, digest = 0, [], hashlib.blake2b(digest_size=8)
    return documents


def texts_of(item: Item, spec: SourceSpec) -> list[str]:
    """The texts of an item; none if it cannot be read and `data.on_bad_item` leaves it out."""
    try:
        return [text_of(item, spec)] if spec.format == "text" else example_of(item, spec).texts
    except UserError:
        if spec.on_bad_item == "stop":
            raise
        return []
