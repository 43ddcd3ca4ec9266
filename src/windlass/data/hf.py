"""Data sets of Hugging Face's `datasets`: by name, streamed or downloaded, or from a directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from windlass import hub
from windlass.data.corpus import Corpus
from windlass.data.readers import as_text
from windlass.errors import RunFailed, UserError

BATCH_ROWS = 1000


def open_dataset(place: str, split: str, text_key: str, streaming: bool) -> Corpus:
    """The documents of a split.

    Args:
        place: `NAME`, `NAME:CONFIG` or a directory (written by `save_to_disk`, or holding files that `datasets` reads).
        split: `train`, `validation`, also with `datasets`' slices such as `train[:1%]` (not when streaming).
        text_key: The column that holds the text.
        streaming: Read the documents as they come instead of downloading all of them first.

    Raises:
        UserError: There is no such data set, configuration, split or column; it cannot be reached.
    """
    if not Path(place).expanduser().is_dir():
        hub.prepare()
    what = f"data.source: hf:{place}, split {split!r}"
    with hub.explained(what), _told(f"{what} cannot be loaded", UserError):
        found = _load(place, split, streaming)
    columns = found.column_names
    if columns is not None and text_key not in columns:
        raise UserError(f"hf:{place} has no column {text_key!r}; it has {', '.join(columns)}: set data.text_key")
    where = f"hf:{place}, {split}"
    rows = None if streaming or not hasattr(found, "__len__") else len(found)

    def read(start: int, corpus: Corpus) -> Iterator[str]:
        with _told(f"reading {where} broke off; start again to go on", RunFailed):
            yield from _texts(found, start, rows, text_key, where, corpus)

    return Corpus(where, read, {"kind": "hf", "split": split, "rows": rows}, bytes_total=rows or 0)


@contextmanager
def _told(what: str, kind: type[Exception]) -> Iterator[None]:
    """Turn whatever the libraries behind `datasets` raise into one sentence."""
    try:
        yield
    except (UserError, RunFailed, OSError, ValueError, ImportError) as error:
        if kind is UserError or isinstance(error, UserError):
            raise
        raise kind(f"{what} ({type(error).__name__}: {_cause(error)})") from error
    except Exception as error:
        raise kind(f"{what} ({type(error).__name__}: {_cause(error)})") from error


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().split("\n")[0][:200]


def _load(place: str, split: str, streaming: bool) -> Any:
    import datasets

    folder = Path(place).expanduser()
    if not folder.is_dir():
        name, _, config = place.partition(":")
        return datasets.load_dataset(name, config or None, split=split, streaming=streaming)
    if (folder / "state.json").is_file():
        whole = datasets.load_from_disk(str(folder))
    elif (folder / "dataset_dict.json").is_file():
        splits = datasets.load_from_disk(str(folder))
        if split not in splits:
            raise UserError(
                f"hf:{place} has no split {split!r}; it has {', '.join(splits)}: set data.split or eval_split"
            )
        whole = splits[split]
    else:
        return datasets.load_dataset(str(folder), split=split, streaming=streaming)
    return whole.to_iterable_dataset() if streaming else whole


def _texts(found: Any, start: int, rows: int | None, text_key: str, where: str, corpus: Corpus) -> Iterator[str]:
    """The texts from row `start` on; where the number of rows is known, rows stand for bytes in the progress."""
    if rows is None:
        chosen = found.skip(start) if start else found
        for number, row in enumerate(chosen, start):
            if text_key not in row:
                raise UserError(f"{where}, row {number:,}, has no {text_key!r}: set data.text_key")
            yield as_text(row[text_key], text_key, f"{where}, row {number:,}")
        return
    column = found.select_columns([text_key]).with_format(None)
    for first in range(start, rows, BATCH_ROWS):
        corpus.bytes_read = first
        for value in column[first : first + BATCH_ROWS][text_key]:
            yield as_text(value, text_key, where)
