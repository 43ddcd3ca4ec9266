"""From text to token ids and back: bytes, characters, GPT-2's byte pairs, `tokenizers` files, or byte pairs trained here.

A tokenizer is saved beside the shards that it made, so that a data directory or a run can be read offline and for good.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from windlass.errors import UserError
from windlass.recipe.settings import DataSettings

if TYPE_CHECKING:
    from windlass.recipe import Recipe

END_OF_TEXT = "<|endoftext|>"
"""How the end-of-text token is written in decoded text."""
STRETCH = 1 << 20
"""Characters in a stretch."""
FOLDER, DESCRIPTION = "tokenizer", "windlass.json"


class Tokenizer(Protocol):
    """What the rest of Windlass knows of a tokenizer."""

    @property
    def vocab(self) -> int:
        """Number of token ids, the end-of-text token included."""

    @property
    def eot(self) -> int | None:
        """The id that separates documents; None where a corpus is one text and needs none."""

    @property
    def fingerprint(self) -> str:
        """Equal for tokenizers that turn every text into the same ids."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [n]; never the end-of-text token, whatever the text says."""

    def pieces(self, text: str) -> Iterable[str]:
        """The text in stretches that can be encoded one by one with the same result, so that many can share the work."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; an id that stands for nothing (padding of the vocabulary) becomes U+FFFD."""

    def byte_lengths(self) -> np.ndarray:
        """Bytes of UTF-8 text that each id stands for, int64 [V]; 0 for the end-of-text token."""

    def save(self, directory: Path) -> None:
        """Write what `load_tokenizer` needs into `directory/tokenizer`."""


def stretches(text: str) -> Iterable[str]:
    """A text cut anywhere: for tokenizers whose tokens are no longer than a character."""
    return (text[i : i + STRETCH] for i in range(0, len(text), STRETCH))


def hash_of(kind: str, *parts: str | bytes) -> str:
    """A fingerprint over the parts, which cannot run into each other."""
    digest = hashlib.sha256(f"windlass/tokenizer/{kind}".encode())
    for part in parts:
        raw = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()


def save_description(directory: Path, kind: str, **fields: object) -> Path:
    """Write the description of a tokenizer; returns the folder for whatever else belongs to it."""
    folder = Path(directory) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / DESCRIPTION
    partial = target.with_suffix(".tmp")
    partial.write_text(json.dumps({"kind": kind, **fields}, ensure_ascii=True, indent=1) + "\n", encoding="utf-8")
    partial.replace(target)
    return folder


class ByteTokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of a text."""

    vocab = 257
    eot = 256
    fingerprint = hash_of("byte")

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [n]."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)

    def pieces(self, text: str) -> Iterable[str]:
        """The text in stretches that can be encoded one by one."""
        return stretches(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        text: list[bytes] = []
        for i in ids:
            text.append(bytes([i]) if i < 256 else END_OF_TEXT.encode() if i == self.eot else b"\xef\xbf\xbd")
        return b"".join(text).decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray:
        """Bytes that each id stands for, int64 [V]."""
        return np.array([1] * 256 + [0], dtype=np.int64)

    def save(self, directory: Path) -> None:
        """Write the description."""
        save_description(directory, "byte", fingerprint=self.fingerprint)


class CharTokenizer:
    """One id a character: those of the corpus, sorted by code point; the end of a text after them where it is needed."""

    def __init__(self, characters: str, with_eot: bool):
        if not characters:
            raise UserError("a character tokenizer needs a corpus with at least one character")
        self.characters = "".join(sorted(set(characters)))
        points = np.array([ord(c) for c in self.characters], dtype=np.int64)
        self._ids = np.full(int(points[-1]) + 1, -1, dtype=np.int64)
        self._ids[points] = np.arange(len(points))
        self.eot = len(points) if with_eot else None
        self.vocab = len(points) + int(with_eot)
        self.fingerprint = hash_of("char", self.characters, str(with_eot))

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [n]; raises UserError for a character that the corpus does not have."""
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)
        ids = self._ids[np.minimum(points, len(self._ids) - 1)]
        unknown = points[(ids < 0) | (points >= len(self._ids))]
        if unknown.size:
            named = ", ".join(repr(chr(int(c))) for c in np.unique(unknown)[:8])
            raise UserError(
                f"the character tokenizer does not know {named}: the corpus it was made from has none of them"
            )
        return ids

    def pieces(self, text: str) -> Iterable[str]:
        """The text in stretches that can be encoded one by one."""
        return stretches(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        return "".join(self._text(int(i)) for i in ids)

    def _text(self, i: int) -> str:
        if i < len(self.characters):
            return self.characters[i]
        return END_OF_TEXT if i == self.eot else "\ufffd"

    def byte_lengths(self) -> np.ndarray:
        """Bytes that each id stands for, int64 [V]."""
        sizes = [len(c.encode("utf-8", "surrogatepass")) for c in self.characters]
        return np.array(sizes + [0] * (self.eot is not None), dtype=np.int64)

    def save(self, directory: Path) -> None:
        """Write the characters."""
        save_description(
            directory, "char", fingerprint=self.fingerprint, characters=self.characters, with_eot=self.eot is not None
        )


def starting(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text from its beginning: those that the tokenizer puts before texts, if any, and the text's."""
    return [*getattr(tokenizer, "start", ()), *(int(i) for i in tokenizer.encode(text))]


def prompt_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens from which a model goes on; without a text those that a text begins after."""
    found = starting(tokenizer, text) if text else []
    start = [*getattr(tokenizer, "start", ())] or ([] if tokenizer.eot is None else [tokenizer.eot])
    return found or start or [int(i) for i in tokenizer.encode("\n")[:1]]


def joined(tokenizer: Tokenizer, prompt: str, answer: str, alone: list[int] | None = None) -> tuple[list[int], int]:
    """The tokens of prompt and answer in one sequence, and how many of them are the prompt's.

    Tokenized as one text where the prompt's own tokens (`alone`, where they are known) stay what they are in generation,
    else piece by piece.
    """
    alone = starting(tokenizer, prompt) if alone is None else alone
    both = starting(tokenizer, prompt + answer)
    if both[: len(alone)] != alone or len(both) == len(alone):
        # After a letter, so that what the tokenizer puts before a text is not put before the answer.
        letter, after = tokenizer.encode("a").tolist(), tokenizer.encode("a" + answer).tolist()
        split = after[: len(letter)] == letter
        both = alone + (after[len(letter) :] if split else tokenizer.encode(answer).tolist())
    return both, len(alone)


def as_trained(tokenizer: Tokenizer, recipe: Recipe) -> Tokenizer:
    """The tokenizer as a recipe's model knows it: from texts alone it learns no token that stands before a text."""
    begun = recipe.model.init_from or (recipe.model.kind == "hf" and not recipe.model.from_scratch)
    if recipe.data.format == "text" and not begun and hasattr(tokenizer, "drop_start"):
        tokenizer.drop_start()
    return tokenizer


def kind_of(setting: str) -> str:
    """The part of `data.tokenizer` before the colon; raises UserError where there is no such tokenizer."""
    kind, colon, place = setting.partition(":")
    known = {"byte", "char", "bpe", "gpt2"} if not colon else {"gpt2", "hf"}
    if kind not in known or (colon and not place):
        raise UserError(
            f"data.tokenizer: there is no tokenizer {setting!r}; write byte, char, gpt2, gpt2:DIR (with vocab.bpe and "
            "encoder.json), hf:NAME_OR_DIR, or bpe (trained on the corpus)"
        )
    return kind


def load_tokenizer(data: DataSettings, directory: str | Path | None = None) -> Tokenizer:
    """The tokenizer saved in `directory`, or, where none is saved, the one that `data.tokenizer` names.

    Raises:
        UserError: What is saved is of another kind than the recipe's, was changed since, or nothing is saved and the
            tokenizer is one that is made from the corpus (`char`, `bpe`).
    """
    wanted = kind_of(data.tokenizer)
    folder = None if directory is None else Path(directory) / FOLDER
    if folder is not None and (folder / DESCRIPTION).is_file():
        return _load_saved(folder, wanted)
    if wanted in ("char", "bpe") and directory is None:
        raise UserError(
            f'data.tokenizer = "{wanted}" is made from the corpus, and shards that others wrote come with none: name the one '
            "that they were made with (byte, gpt2, gpt2:DIR, hf:NAME_OR_DIR)"
        )
    if wanted in ("char", "bpe"):
        raise UserError(
            f'data.tokenizer = "{wanted}" is made from the corpus, and there is none saved in {directory}: '
            "run `windlass prepare` first"
        )
    return named_tokenizer(data.tokenizer)


def named_tokenizer(setting: str) -> Tokenizer:
    """The tokenizer of a setting that needs no corpus: `byte`, `gpt2`, `gpt2:DIR`, `hf:NAME_OR_DIR`."""
    from windlass.data import bpe

    kind, place = kind_of(setting), setting.partition(":")[2]
    if kind == "byte":
        return ByteTokenizer()
    return bpe.gpt2(place) if kind == "gpt2" else bpe.hugging_face(place)


def tokenizer_files(setting: str) -> dict[str, str]:
    """The SHA-256 of each local file that a setting names, by path; empty where it names none."""
    from windlass.data import bpe

    kind, place = kind_of(setting), setting.partition(":")[2]
    path = Path(place).expanduser()
    names = {"gpt2": (bpe.GPT2_MERGES, bpe.GPT2_IDS), "hf": (bpe.JSON_FILE,)}.get(kind, ())
    if kind == "hf" and not (path / bpe.JSON_FILE).is_file():
        names = bpe.OLDER_FILES
    files = [path] if place and path.is_file() else [path / name for name in names if place]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def layout_files(setting: str) -> dict[str, str]:
    """The SHA-256 of each local file beside an `hf:` tokenizer that says how texts begin and end, and its chat template."""
    kind, _, place = setting.partition(":")
    if kind != "hf":
        return {}
    path = Path(place).expanduser()
    folder = path.parent if path.is_file() else path
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.is_file()}


def _load_saved(folder: Path, wanted: str) -> Tokenizer:
    from windlass.data import bpe

    try:
        saved = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
        kind, fingerprint = saved["kind"], saved["fingerprint"]
        if kind != wanted:
            raise UserError(
                f"{folder} holds a tokenizer of kind {kind}, and data.tokenizer is {wanted}: wrong tokenizer"
            )
        if kind == "byte":
            tokenizer: Tokenizer = ByteTokenizer()
        elif kind == "char":
            tokenizer = CharTokenizer(saved["characters"], saved["with_eot"])
        else:
            tokenizer = bpe.load(kind, folder, saved)
    except (KeyError, TypeError, OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"the tokenizer saved in {folder} cannot be read ({error}); prepare the data again") from None
    if tokenizer.fingerprint != fingerprint:
        raise UserError(f"the tokenizer saved in {folder} was changed after it was saved; prepare the data again")
    return tokenizer
