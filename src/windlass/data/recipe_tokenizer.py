"""Find the tokenizer of a recipe, with its chat template: a copy beside prepared data, the one that
`data.tokenizer` names, or one that is learned from the training documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from windlass import hub
from windlass.data import tokenizer_kinds
from windlass.data.chat import Template
from windlass.data.encode import parts_of
from windlass.data.items import Item, example_of, text_of
from windlass.data.progress import Progress
from windlass.data.recipe_sources import (
    Member,
    SourceSpec,
    directory_of,
    hash_of_key,
    lock_directory,
    root_of,
    tokenizer_key,
)
from windlass.data.shards import INDEX
from windlass.data.sources import Source, describe_source, open_source
from windlass.data.split import FEW, held_out
from windlass.data.tokenizer import DESCRIPTION, FOLDER, JSON_FILE, LEARNED, Tokenizer, probe_ids
from windlass.errors import UserError
from windlass.fileio import sha256_of
from windlass.recipe import Recipe
from windlass.recipe.load import own_tokenizer

BPE_CHARACTERS = 50_000_000  # of the corpus at most, from which byte pairs are learned
# A character tokenizer needs the characters of the plain layout and of a question's prompt, too.
LAYOUT_CHARACTERS = "User: System: Assistant: Tool: Question: Context: Answer: \n"


def open_tokenizer(
    recipe: Recipe,
    members: list[Member],
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
    is_learned = data.tokenizer in LEARNED
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
    expected = own_tokenizer(model, "")
    if expected in (wanted, "") or model.from_scratch:
        return
    revision = f"@{model.revision}" if model.revision and expected == f"hf:{model.name}" else ""
    try:
        trained = tokenizer_kinds.named_tokenizer(expected + revision)
    except UserError:  # the model has none, or does not exist any more
        return
    ids, trained_ids = (t.inner.get_vocab(with_added_tokens=True) for t in (tokenizer, trained))
    same_probe = probe_ids(tokenizer.inner) == probe_ids(trained.inner)
    if trained_ids.items() <= ids.items() and same_probe:
        return  # the same, perhaps with added tokens
    raise UserError(
        f"data.tokenizer = {wanted} ({tokenizer.vocab:,} ids) is not the tokenizer of "
        f"{model.init_from or model.name} ({trained.vocab:,} ids), which its weights were trained "
        f"with; leave data.tokenizer out, or write {expected}"
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


def learn_tokenizer(recipe: Recipe, members: list[Member], progress: Progress) -> Tokenizer:
    """The characters of a corpus, or byte pairs of its training text; saved for other recipes."""
    data, kind = recipe.data, recipe.data.tokenizer
    train = [spec for member in members for spec in member.train]
    val = [spec for member in members for spec in member.val]
    if any(spec.kind == "shards" for spec in (*train, *val)):
        problem = f"data.tokenizer = {kind} cannot be learned from token shards"
        raise UserError(f"{problem}; name the tokenizer that wrote them")
    now = [describe_source(spec) for spec in (*train, *val)]
    directory = root_of(recipe) / f"tokenizer-{hash_of_key(tokenizer_key(recipe) | {'now': now})}"
    with lock_directory(directory, progress.note):
        if not (directory / FOLDER / DESCRIPTION).is_file():
            sources = [open_source(spec, progress.note) for spec in (*train, *val)]
            if kind == "char":
                characters = set[str]()
                for source in sources:
                    for item in source.items():
                        characters.update(*texts_of(item, source.spec))
                if not characters:
                    raise UserError("data.source: there is no text")
                if data.formats != {"text"}:
                    characters.update(LAYOUT_CHARACTERS)
                is_one_text = len(train) == 1 and all(source.single_text for source in sources)
                tokenizer = tokenizer_kinds.char_tokenizer(characters, with_eot=not is_one_text)
            else:
                fractions = [member.held_fraction for member in members for _ in member.train]
                progress.note(f"learning {data.tokenizer_vocab:,} byte pairs")
                texts = _training_texts(sources[: len(train)], fractions, sources[len(train) :])
                tokenizer = tokenizer_kinds.bpe_tokenizer(texts, data.tokenizer_vocab)
            tokenizer.save(directory)
        return tokenizer_kinds.load_tokenizer(directory / FOLDER)


def _training_texts(
    train: list[Source], fractions: list[float], val: list[Source]
) -> Iterator[str]:
    """The training texts among the first documents of each source, in parts; without those of
    `val` and those that are held out, a fraction of each source."""
    validated = {group for source in val for group, _, _ in _documents(source, 0)}
    first, rooms = list[list[tuple[int, int, list[str]]]](), list[list[int]]()
    for source, fraction in zip(train, fractions, strict=True):
        first.append(_first_documents(source, BPE_CHARACTERS // len(train)))
        groups = np.array([group for group, _, _ in first[-1]], np.uint64)
        sizes = np.array([size for _, size, _ in first[-1]], np.int64)
        whole, cuts = held_out(groups, sizes, fraction, are_examples=source.spec.format != "text")
        validated.update(groups[whole].tolist())
        rooms.append(np.where(cuts < 0, sizes, cuts).tolist())
    for (group, _, texts), room in zip(chain(*first), chain(*rooms), strict=True):
        done = room if group in validated else 0
        for text in texts:
            yield text[: max(0, room - done)]
            done += len(text)


def _first_documents(source: Source, characters: int) -> list[tuple[int, int, list[str]]]:
    """The first `_documents` that have `characters`, of at least FEW groups."""
    documents, size = list[tuple[int, int, list[str]]](), 0
    for document in _documents(source, characters):
        documents.append(document)
        size += document[1]
        if size >= characters and len({group for group, _, _ in documents}) >= FEW:
            break
    return documents


def _documents(source: Source, characters: int) -> Iterator[tuple[int, int, list[str]]]:
    """Each document as far as a limit: its group (the hash that decides whether it is held out),
    its characters, and its texts in parts, without what follows the first `characters`."""
    before, size, texts = 0, 0, list[str]()
    for item in parts_of(source):
        for text in texts_of(item, source.spec):
            texts.append(text[: max(0, characters - before - size)])
            size += len(text)
        if size and not item.more:
            is_text = source.spec.format == "text"
            yield item.digest if is_text else example_of(item, source.spec).group, size, texts
            before, size, texts = before + size, 0, []
            if source.spec.is_val and 0 < source.spec.limit <= before:
                return


def texts_of(item: Item, spec: SourceSpec) -> list[str]:
    """The texts of an item; none if it cannot be read and `data.on_bad_item` leaves it out."""
    try:
        return [text_of(item, spec)] if spec.format == "text" else example_of(item, spec).texts
    except UserError:
        if spec.on_bad_item == "stop":
            raise
        return []
