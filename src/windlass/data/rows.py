"""Questions and conversations: sources -> examples -> hold-out -> rows in `.npz` files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from windlass import hub
from windlass.data import chat, conversations, squad, vocabulary
from windlass.data.conversations import Conversation
from windlass.data.files import JSON_LINES, find_files
from windlass.data.progress import Progress
from windlass.data.samples import Row, Rows, choose_places, length_percentiles
from windlass.data.shards import EVAL, MAIN, Index, RowsFile
from windlass.data.squad import Question
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import UserError
from windlass.recipe import Recipe

REMARKS = "remarks.txt"
SHOWN_REMARKS = 8
CHAT_CHARACTERS = "User: System: Assistant: \n"  # a character tokenizer needs the layout's too

Examples = Sequence[Question] | Sequence[Conversation]


def prepare_rows(
    recipe: Recipe, settings: dict[str, Any], directory: Path, progress: Progress
) -> Index:
    """Write rows, tokenizer and template; returns the index, not written yet."""
    data, context, is_chat = recipe.data, recipe.model.context, recipe.data.format == "chat"
    read: Any = partial(conversations.read_splits, notify=progress.note)
    splits: list[Any] = read(recipe) if is_chat else squad.read_splits(recipe)
    for i, (size, purpose) in enumerate(((data.train_size, "train"), (data.eval_size, "eval"))):
        keys = [getattr(example, "id", str(place)) for place, example in enumerate(splits[i])]
        places = choose_places(keys, size, recipe.run.seed, purpose)
        splits[i] = [splits[i][place] for place in places]
    tokenizer, template, layout = _tokenizer(recipe, splits[0], progress), chat.Template(), ""
    make_row: Any = partial(squad.row, tokenizer=tokenizer, context=context)
    if is_chat:
        if recipe.tokenizer.startswith("hf:"):
            place = hub.tokenizer_directory(recipe.tokenizer[3:], recipe.tokenizer_key)
            template = chat.Template.of_directory(place)
        make_row = partial(chat.row, template=template, tokenizer=tokenizer, context=context)
        layout = template.describe(recipe.tokenizer, [item for split in splits for item in split])
    files, remarks = dict[str, RowsFile](), list[str]()
    for name, examples in zip(("train", "val"), splits, strict=True):
        if not examples:
            continue
        rows: list[Row] = []
        for number, example in enumerate(examples, 1):
            row = make_row(example)
            rows += [row] if row else []
            remarks += example.remarks
            if row is None:
                remarks.append(f"{example.place}: left out, because it has nothing left to learn")
            elif (lost := row.whole - context - 1) > 0:
                cut = f"{lost:,} of {row.whole:,} tokens lost"
                remarks.append(f"{example.place}: cut at model.context = {context:,}, {cut}")
            progress.update(f"{data.format} rows ({name})", number / len(examples))
        if not rows:
            raise UserError(
                f"no question or conversation ({name}) fits model.context = {context}: "
                f"{remarks[-1]}"
            )
        files[name] = _write(directory, name, rows, examples, tokenizer.eot or 0, context)
    tokenizer.save(directory)
    template.save(directory / FOLDER)
    if remarks:
        path = directory / REMARKS
        more = [f"and {len(remarks) - SHOWN_REMARKS:,} more"] if remarks[SHOWN_REMARKS:] else []
        shown = [f"{len(remarks):,} remarks on items ({path}):", *remarks[:SHOWN_REMARKS], *more]
        progress.note("\n  ".join(shown))
        path.write_text("".join(f"{line}\n" for line in remarks), encoding="utf-8")
    origins = {}
    for stream, names in ((MAIN, data.sources), (EVAL, data.eval_sources)):
        paths = [str(path) for name in names for path in local_files(name, data.format)]
        origins[stream] = {"name": names, "files": [{"file": path} for path in paths]}
    saved = {"settings": settings, "source": origins, "tokenizer": tokenizer.describe()}
    return Index(**saved, rows=files, template=layout)


def local_files(source: str, kind: str) -> list[Path]:
    """The local files of a source of questions or conversations."""
    if source.startswith("hf:"):
        return [path for path in sorted(Path(source[3:]).expanduser().rglob("*")) if path.is_file()]
    if kind == "squad":
        return find_files(source.removeprefix("squad:")) if ":" in source else []
    return find_files(source, endings=JSON_LINES)


def _tokenizer(recipe: Recipe, examples: Examples, progress: Progress) -> Tokenizer:
    data, kind = recipe.data, vocabulary.kind_of(recipe.data.tokenizer)
    texts = dict.fromkeys(text for example in examples for text in example.texts)
    if kind == "bpe":
        progress.note(f"learning {data.tokenizer_vocab:,} byte pairs from the training set")
        return vocabulary.train_bpe(texts, data.tokenizer_vocab)
    if kind == "char":
        return vocabulary.char_tokenizer([*texts, squad.PROMPT, CHAT_CHARACTERS], with_eot=True)
    return vocabulary.named_tokenizer(recipe.tokenizer, recipe.tokenizer_key)


def _write(
    directory: Path, name: str, rows: list[Row], examples: Examples, pad: int, context: int
) -> RowsFile:
    """Write the rows of a split; their entry for the index."""
    packed, temporary, text = Rows(rows, pad), directory / f".{name}.tmp", ""
    packed.save(temporary)
    temporary.replace(directory / f"{name}.npz")
    if name == "val":
        content = json.dumps([list(example.content) for example in examples])
        text = hashlib.sha256(content.encode()).hexdigest()[:16]
    return RowsFile(
        text=text,
        items=len(packed),
        fingerprint=packed.fingerprint,
        tokens=packed.real_tokens,
        unmasked=packed.valid_tokens,
        left_out=len(examples) - len(packed),
        **length_percentiles([row.whole for row in rows], context + 1),
    )
