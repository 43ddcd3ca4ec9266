"""Text to token ids and back: bytes, characters, GPT-2, `tokenizer.json`, byte pairs.

Every kind is an object of the `tokenizers` library, saved as a `tokenizer.json` that `transformers`
reads too. numpy and `tiktoken` encode bytes, characters and GPT-2, with the same ids and faster.
The text of a special token is plain text, so `encode` never returns the end-of-text token.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from windlass.errors import UserError
from windlass.fileio import write_atomic

FOLDER, DESCRIPTION, JSON_FILE = "tokenizer", "windlass.json", "tokenizer.json"
END_OF_TEXT, UNKNOWN = "<|endoftext|>", "\ufffd"
MARK = "\ufdd0"  # follows a character of a text that is not a special token (`windlass.data.chat`)
# GPT-2's cut of a text into words, before it merges pairs (Radford et al. 2019, released code).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
STRETCH = 1 << 20  # characters of a text that one worker encodes at once
LONGEST_PIECE = 400_000  # characters: `tiktoken`'s stack overflows on a million of white space
# Tokenizers with equal vocabularies differ in the ids of this text.
PROBE = (
    "def f(x):\n\treturn x ** 2  # It's 3.14159, isn't it?\r\n\r\n    Žluťoučký kůň 12345 中文字符 "
    "Ελλάδα кот 🙂👩‍👩‍👧 e\u0301 ﬁ №  \u00a0end <|endoftext|></s>"
)


class Description(BaseModel):
    """The description beside a saved `tokenizer.json`, and in the index of the data."""

    kind: str
    fingerprint: str
    vocab: int
    eot: int | None
    start: int | None = None


class Tokenizer:
    """A tokenizer of a kind: `byte`, `char`, `gpt2`, `bpe` or `hf`.

    Attributes:
        inner: The `tokenizers.Tokenizer` with the same ids.
        eot: The id that separates documents; None if the corpus is one text.
        start: The id before an empty prompt by the model's configuration, without a BOS.
        bos: The ids that the post-processor puts before a text; `encode` does not.
        vocab: Number of ids, including the special ones.
        fingerprint: Equal for tokenizers that give the same ids for every text.
        special: Ids of the special tokens by text; only a chat template writes them.
        dtype: The type of ids in shards.
    """

    def __init__(self, kind: str, inner: Any, eot: int | None, start: int | None = None):
        self.kind, self.inner, self.eot, self.start = kind, inner, eot, start
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # the text of a special token is plain text
        pieces = inner.get_vocab(with_added_tokens=True)
        self.vocab = max(pieces.values()) + 1
        content = [sorted(pieces.items()), eot, inner.encode(PROBE, add_special_tokens=False).ids]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        added = inner.get_added_tokens_decoder().items()
        self.special: dict[str, int] = {t.content: i for i, t in added if t.special}
        if eot is not None:
            self.special[inner.id_to_token(eot)] = eot
        self.dtype = "uint16" if self.vocab <= 1 << 16 else "uint32"
        encoded = inner.encode("a")
        self.bos: tuple[int, ...] = tuple(encoded.ids[: [*encoded.special_tokens_mask, 0].index(0)])

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches unmarked special tokens; the longest one, as `tokenizers` does."""
        texts = sorted(self.special, key=len, reverse=True)
        return re.compile(f"(?:{'|'.join(map(re.escape, texts)) or '(?!)'})(?!{MARK})")

    @cached_property
    def _fast(self) -> Any:
        """For characters the id of each code point or -1; for GPT-2 the encoding of `tiktoken`."""
        if self.kind == "char":
            characters = self.inner.get_vocab(with_added_tokens=False)
            points = np.array(sorted(map(ord, characters)), dtype=np.int64)
            ids = np.full(int(points[-1]) + 2, -1, dtype=np.int64)
            ids[points] = np.arange(len(points))
            return ids
        import tiktoken

        ranks = {piece: i for i, piece in enumerate(self._bytes or ()) if i != self.eot}
        special = {END_OF_TEXT: len(ranks)}
        return tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )

    @cached_property
    def _bytes(self) -> list[bytes] | None:
        """The UTF-8 bytes of each id for bytes, characters and GPT-2; None for other kinds."""
        if self.kind not in ("byte", "char", "gpt2"):
            return None
        letters = byte_letters()
        table = [b""] * self.vocab
        for piece, i in self.inner.get_vocab(with_added_tokens=False).items():
            table[i] = piece.encode() if self.kind == "char" else bytes(letters[c] for c in piece)
        if self.eot is not None:
            table[self.eot] = END_OF_TEXT.encode()
        return table

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [n]; half a surrogate pair becomes "?".

        Raises UserError for a character that is not in the corpus of a character tokenizer.
        """
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)
        if self.kind == "char":
            raw = np.frombuffer(text.encode("utf-32-le", "replace"), dtype="<u4")
            points = raw.astype(np.int64)
            ids: np.ndarray = self._fast[np.minimum(points, len(self._fast) - 1)]
            if (ids < 0).any():
                missing = ", ".join(repr(chr(int(c))) for c in np.unique(points[ids < 0])[:8])
                raise UserError(f"the character tokenizer's corpus has no {missing}")
            return ids
        text = text.encode("utf-8", "replace").decode()
        if self.kind == "gpt2":
            encode = self._fast.encode_to_numpy
            parts = [encode(part, disallowed_special=()) for part in cut_at_lines(text)]
            return np.concatenate([np.zeros(0, dtype=np.int64), *parts]).astype(np.int64)
        encoded = self.inner.encode_batch_fast([text], add_special_tokens=False)[0]
        ids = np.array(encoded.ids, dtype=np.int64)
        return ids if self.eot is None else ids[ids != self.eot]

    def stretches(self, text: str) -> Iterable[str]:
        """The text in parts with the same ids one by one, so that workers share a long text."""
        if self.kind in ("byte", "char"):
            return (text[i : i + STRETCH] for i in range(0, len(text), STRETCH))
        # other normalisers may work across a cut
        return cut_at_lines(text) if self.kind == "gpt2" else [text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; an id without a token (a padded vocabulary) becomes U+FFFD."""
        if (table := self._bytes) is not None:
            raw = b"".join(table[i] if i < self.vocab else UNKNOWN.encode() for i in map(int, ids))
            return raw.decode("utf-8", "replace")
        text = ""
        for valid, run in groupby(map(int, ids), lambda i: i < self.vocab):
            part = list(run)  # the library would drop an id without a token
            decoded = self.inner.decode(part, skip_special_tokens=False) if valid else None
            text += UNKNOWN * len(part) if decoded is None else decoded
        return text

    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of each id, decoded after another token, int64 [V]; 0 for special tokens."""
        sizes = np.zeros(self.vocab, dtype=np.int64)
        if self._bytes is not None:
            sizes[:] = [len(piece) for piece in self._bytes]
        else:
            # Pieces are letters for bytes, or text with "\u2581" for spaces, as the decoder says.
            state = json.loads(self.inner.to_str())
            decoder = json.dumps(state["decoder"], ensure_ascii=False)
            pre_tokenizer = json.dumps(state["pre_tokenizer"])
            letters = byte_letters() if '"ByteLevel"' in decoder + pre_tokenizer else {}
            space = " " if "\u2581" in decoder else "\u2581"
            for piece, i in self.inner.get_vocab(with_added_tokens=False).items():
                sizes[i] = len(piece.replace("\u2581", space).encode())
                if letters and letters.keys() >= set(piece):
                    sizes[i] = len(piece)
                elif not letters and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
                    sizes[i] = 1  # a single byte, as sentencepiece writes it
            for i, token in self.inner.get_added_tokens_decoder().items():
                sizes[i] = len(token.content.encode())
        sizes[list(self.special.values())] = 0
        return sizes

    # -- prompts, answers, conversations

    @property
    def first(self) -> int | None:
        """The id before a text; None for a tokenizer without special tokens."""
        return next((i for i in (*self.bos, self.start, self.eot) if i is not None), None)

    def encode_with_bos(self, text: str) -> list[int]:
        """BOS, if the tokenizer writes one, and the text's tokens."""
        return [*self.bos, *self.encode(text).tolist()]

    def encode_prompt(self, text: str) -> list[int]:
        """The tokens from which a model generates.

        For an empty text: BOS (the tokenizer's or the configuration's), else EOS, else a line feed,
        else the first character.
        """
        if text and (ids := self.encode_with_bos(text)):
            return ids
        if self.first is not None:
            return list(self.bos) or [self.first]
        if self.kind == "char" and "\n" not in self.inner.get_vocab():
            return [0]
        return self.encode("\n").tolist()[:1]

    def encode_pair(
        self, prompt: str, answer: str, prompt_ids: list[int] | None = None
    ) -> tuple[list[int], int]:
        """The tokens of prompt and answer, and how many of them are the prompt's (`prompt_ids`).

        Both are encoded as one text if this leaves the prompt's own tokens unchanged.
        """
        alone = self.encode_with_bos(prompt) if prompt_ids is None else prompt_ids
        both = self.encode_with_bos(prompt + answer)
        if both[: len(alone)] != alone or len(both) == len(alone):
            # After a letter, because some tokenizers put a space before a text.
            letter, after = self.encode("a").tolist(), self.encode("a" + answer).tolist()
            same = after[: len(letter)] == letter
            both = alone + (after[len(letter) :] if same else self.encode(answer).tolist())
        return both, len(alone)

    def encode_marked(
        self, parts: Sequence[tuple[str | int, bool]]
    ) -> tuple[list[int], list[bool]]:
        """The tokens of texts and special tokens (by id), each with the mark of its part.

        The joined texts are encoded together. A token over two parts is marked if one of them is.
        """
        ids, marks = list[int](), list[bool]()
        if self._bytes is not None:
            for part, mark in parts:
                tokens = [part] if isinstance(part, int) else self.encode(part).tolist()
                ids += tokens
                marks += [mark] * len(tokens)
            return ids, marks
        inner, sentinels = self._sentinels
        texts = [sentinels[part] if isinstance(part, int) else part for part, _ in parts]
        marked = [mark for text, (_, mark) in zip(texts, parts, strict=True) for _ in text]
        whole = "".join(texts).encode("utf-8", "replace").decode()
        special = iter([(part, mark) for part, mark in parts if isinstance(part, int)])
        sentinel_ids = {inner.token_to_id(text) for text in sentinels.values()}
        encoded = inner.encode(whole, add_special_tokens=False)
        for i, (start, stop) in zip(encoded.ids, encoded.offsets, strict=True):
            if i not in sentinel_ids and self.special.get(whole[start:stop]) == i:
                # a special token's text in the common vocabulary, which `encode` drops too
                continue
            own = i, any(marked[start : max(stop, start + 1)])
            token, mark = next(special) if i in sentinel_ids else own
            ids.append(token)
            marks.append(mark)
        return ids, marks

    @cached_property
    def _sentinels(self) -> tuple[Any, dict[int, str]]:
        """A copy of the tokenizer with a random text for each special token, and these by id."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Inner

        copy = Inner.from_str(self.inner.to_str())
        copy.post_processor = None  # it would drop white space from the tokens' offsets
        copy.encode_special_tokens = True
        added, nonce = self.inner.get_added_tokens_decoder(), secrets.token_hex(8)
        texts = {i: f"\U000f0010{nonce}-{i}\U000f0011" for i in self.special.values()}
        for i, text in texts.items():
            names = ("lstrip", "rstrip", "normalized") if i in added else ()
            flags = {name: getattr(added[i], name) for name in names}
            copy.add_tokens([AddedToken(text, **{"normalized": False, **flags})])
        return copy, texts

    def save(self, directory: Path) -> None:
        """Write `directory/tokenizer`, for `load_tokenizer`."""
        folder = Path(directory) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / JSON_FILE, self.inner.to_str(pretty=True))
        write_atomic(folder / DESCRIPTION, self.describe().model_dump_json(indent=1) + "\n")

    def describe(self) -> Description:
        return Description.model_validate(self, from_attributes=True)


def cut_at_lines(text: str) -> Iterator[str]:
    """A text in parts of at most `LONGEST_PIECE`, cut at a line's end, which no pair crosses.

    A run of 400,000 characters without such a place is cut anyway, which can change tokens.
    """
    start = 0
    while len(text) - start > LONGEST_PIECE:
        stop = start + LONGEST_PIECE
        at = text.rfind("\n", start, stop)
        while at > start and (text[at - 1].isspace() or text[at + 1].isspace()):
            at = text.rfind("\n", start, at)
        end = at + 1 if at > start else stop
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself in printable Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + place): b for place, b in enumerate(rest)}
