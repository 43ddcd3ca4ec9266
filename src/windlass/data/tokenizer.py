"""Text to token ids and back, and the tokens at the edges of a text. The text of a special token is
plain text, so `encode` never returns the end-of-text token.
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
LEARNED = ("char", "bpe")  # kinds that are learned from the corpus
END_OF_TEXT, UNKNOWN = "<|endoftext|>", "\ufffd"
ESCAPE = "\ufdd0"  # after each character of a special token's text that is plain text (`chat.py`)
# GPT-2's cut of a text into words, before it merges pairs (Radford et al. 2019, released code).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Characters that are encoded at once: `tokenizers` needs 150 bytes for each, and the stack of
# `tiktoken` overflows on a million of white space.
STRETCH = 1 << 16
TAIL = 64  # characters before a stretch that can change its ids
# Tokenizers with equal vocabularies differ in the ids of this text.
PROBE = (
    "def f(x):\n\treturn x ** 2  # It's 3.14159, isn't it?\r\n\r\n    Žluťoučký kůň 12345 中文字符 "
    "Ελλάδα кот 🙂👩‍👩‍👧 e\u0301 ﬁ №  \u00a0end <|endoftext|></s>"
)


# Texts and special tokens (ids), each with its mark, for example whether it has a loss.
MarkedPieces = Sequence[tuple[str | int, int]]


class Description(BaseModel):
    kind: str
    fingerprint: str
    vocab: int
    eot: int | None
    begin: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    start: int | None = None


class Tokenizer:
    """A tokenizer of a kind: `byte`, `char`, `gpt2`, `bpe` or `hf`.

    Attributes:
        inner: The `tokenizers.Tokenizer`; numpy and tiktoken give the same ids faster.
        eot: The id that separates documents; None if the corpus is one text.
        begin: The ids before every text: the BOS of the post-processor; `encode` omits them.
        ends: The ids that end a generated text.
        start: The id before an empty prompt by the model's configuration, without `begin`.
        fingerprint: Equal for tokenizers that give the same ids for every document.
        special: Ids of the special tokens by text; only a chat template writes them.
    """

    def __init__(
        self, kind: str, inner: Any, eot: int | None, ends: Iterable[Any] = (), start: Any = None
    ):
        self.kind, self.inner, self.eot = kind, inner, eot
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # the text of a special token is plain text
        vocabulary = inner.get_vocab(with_added_tokens=True)
        self.vocab = max(vocabulary.values()) + 1
        # a model's configuration may have ids that its tokenizer does not have
        self.ends = frozenset({eot, *ends}.intersection(vocabulary.values()))
        self.start: int | None = start if start in vocabulary.values() else None
        self.begin: tuple[int, ...] = ()
        if inner.post_processor is not None:
            encoded = inner.encode("a")
            count = [*encoded.special_tokens_mask, 0].index(0)
            self.begin = tuple(encoded.ids[:count])
        content = [sorted(vocabulary.items()), eot, probe_ids(inner), self.begin]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        added = inner.get_added_tokens_decoder().items()
        self.special: dict[str, int] = {t.content: i for i, t in added if t.special}
        if eot is not None:
            self.special[inner.id_to_token(eot)] = eot

    @property
    def first(self) -> tuple[int, ...]:
        """The ids before a document."""
        return self.begin or (() if self.eot is None else (self.eot,))

    @property
    def last(self) -> tuple[int, ...]:
        """The ids after a document: the end of a text, unless it stands before the next one."""
        return () if self.eot is None or self.eot in self.first else (self.eot,)

    def prompt(self, text: str) -> list[int]:
        """The tokens from which a model generates. For an empty text: `begin`, else the model's
        start token, else the end-of-text token, else a line feed, else the first character."""
        if ids := [*self.begin, *self.encode(text).tolist()]:
            return ids
        if (first := self.eot if self.start is None else self.start) is not None:
            return [first]
        has_line_feed = self.kind != "char" or "\n" in self.inner.get_vocab()
        return self.encode("\n").tolist()[:1] if has_line_feed else [0]

    def encode(self, text: str, continues: bool = False) -> np.ndarray:
        """Token ids of a text, int64 [n]; half a surrogate pair becomes "?".

        `continues`: it has no start, which some tokenizers mark, because another text precedes it.
        Raises UserError for a character that the tokenizer does not know.
        """
        if self.kind == "byte":
            return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int64)
        if self.kind == "char":
            points = np.frombuffer(text.encode("utf-32-le", "replace"), "<u4").astype(np.int64)
            ids: np.ndarray = self._id_of_point[np.minimum(points, len(self._id_of_point) - 1)]
            if (ids < 0).any():
                missing = ", ".join(repr(chr(int(c))) for c in np.unique(points[ids < 0])[:8])
                raise UserError(f"the character tokenizer's corpus has no {missing}")
            return ids
        parts = [np.zeros(0, np.int64)]
        for stretch in stretches(valid(text)):
            for head in ("a", "\n", "") if continues and self._marks_start else ("",):
                alone = self._encode_stretch(head) if head else parts[0]
                both = self._encode_stretch(head + stretch)
                if np.array_equal(both[: len(alone)], alone):
                    break
            parts.append(both[len(alone) :])
            continues = True
        return np.concatenate(parts)

    def _encode_stretch(self, text: str) -> np.ndarray:
        if self.kind == "gpt2":
            ids: np.ndarray = self._tiktoken.encode_to_numpy(text, disallowed_special=())
            return ids.astype(np.int64)
        try:
            encoded = self.inner.encode_batch_fast([text], add_special_tokens=False)[0]
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"the tokenizer cannot encode the text: {error}") from None
        ids = np.array(encoded.ids, dtype=np.int64)
        return ids if self.eot is None else ids[ids != self.eot]

    @cached_property
    def _marks_start(self) -> bool:
        """Whether a text has other ids at the start of a text than after a line."""
        line, start, both = (probe_ids(self.inner, text) for text in ("a\n", "b", "a\nb"))
        return line + start != both

    @cached_property
    def _id_of_point(self) -> np.ndarray:
        """The id of each code point, or -1; the last one is for all above."""
        points = sorted(map(ord, self.inner.get_vocab(with_added_tokens=False)))
        ids = np.full(points[-1] + 2, -1, dtype=np.int64)
        ids[points] = np.arange(len(points))
        return ids

    @cached_property
    def _tiktoken(self) -> Any:
        import tiktoken

        letters, vocabulary = byte_letters(), self.inner.get_vocab(with_added_tokens=False)
        special = set(self.special.values())
        ranks = {
            bytes(letters[letter] for letter in piece): i
            for piece, i in vocabulary.items()
            if i not in special
        }
        return tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens=self.special
        )

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """The tokens of `begin`, prompt and answer, and how many of them are not the answer's."""
        alone, both = ([*self.begin, *self.encode(t).tolist()] for t in (prompt, prompt + answer))
        # one text, if this leaves the prompt's own tokens unchanged
        if both[: len(alone)] != alone or len(both) == len(alone):
            both = alone + self.encode(answer, continues=True).tolist()
        return both, len(alone)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Matches the text of special tokens, unless it is escaped; the longest one, as
        `tokenizers` does."""
        texts = sorted(self.special, key=len, reverse=True)
        return re.compile(f"(?:{'|'.join(map(re.escape, texts)) or '(?!)'})(?!{ESCAPE})")

    def pieces(self, text: str) -> Iterator[str | int]:
        """The special tokens (ids) of a text, and the texts between them."""
        done = 0
        for match in self.special_pattern.finditer(text):
            if match.start() > done:
                yield text[done : match.start()]
            yield self.special[match[0]]
            done = match.end()
        if done < len(text):
            yield text[done:]

    def encode_marked(self, pieces: MarkedPieces) -> tuple[list[int], list[int]]:
        """The tokens of the joined pieces, each with the mark of its piece; a token over several
        pieces has their largest mark."""
        pieces = [piece for piece in pieces if piece[0] != ""]
        by_bytes = self.kind in ("byte", "char", "gpt2")  # which is faster
        return self._encode_by_bytes(pieces) if by_bytes else self._encode_by_offsets(pieces)

    def _encode_by_bytes(self, pieces: MarkedPieces) -> tuple[list[int], list[int]]:
        """`encode_marked` for a tokenizer whose tokens have whole bytes of the text each."""
        ids, marks = list[int](), list[int]()
        for is_special, run in groupby(pieces, lambda piece: isinstance(piece[0], int)):
            values, by_piece = zip(*run, strict=True)
            if is_special:
                ids += values
                marks += by_piece
                continue
            texts = [text.encode("utf-8", "replace") for text in values]
            run_ids = self.encode(b"".join(texts).decode())
            sizes = self.byte_lengths[run_ids]
            by_byte = np.repeat(by_piece, list(map(len, texts)))
            ids += run_ids.tolist()
            marks += np.maximum.reduceat(by_byte, np.cumsum(sizes) - sizes).tolist()
        return ids, marks

    def _encode_by_offsets(self, pieces: MarkedPieces) -> tuple[list[int], list[int]]:
        """`encode_marked` by the characters that the library gives for each token."""
        library, stand_ins, stand_in_ids = self._stand_ins
        texts = [stand_ins[piece] if isinstance(piece, int) else piece for piece, _ in pieces]
        text = valid("".join(texts))
        encoded, done, before = [np.zeros((0, 3), np.int64)], 0, ""
        for stretch in stretches(text):
            encoding = library.encode(before + stretch, add_special_tokens=False)
            # id, first character and end of each token
            tokens = np.column_stack([encoding.ids, np.reshape(encoding.offsets, (-1, 2))])
            tokens = tokens[tokens[:, 1] >= len(before)].astype(np.int64)
            tokens[:, 1:] += done - len(before)
            encoded.append(tokens)
            done, before = done + len(stretch), stretch[-TAIL:]
        tokens = np.concatenate(encoded)
        # without a special token's text in the common vocabulary, which `encode` drops too
        special = np.flatnonzero(np.isin(tokens[:, 0], list(self.special.values())))
        dropped = [
            n for n in special if self.special.get(text[slice(*tokens[n, 1:])]) == tokens[n, 0]
        ]
        ids, start, stop = np.delete(tokens, dropped, axis=0).T
        ends = np.cumsum(list(map(len, texts)))
        first = np.searchsorted(ends, start, "right")
        last = np.searchsorted(ends, np.maximum(stop, start + 1), "left")
        spans = np.stack([first, last + 1], axis=1).ravel()
        marks = np.maximum.reduceat([*(mark for _, mark in pieces), False], spans)[::2]
        if given := [piece for piece in pieces if isinstance(piece[0], int)]:
            is_stand_in = np.isin(ids, stand_in_ids)
            ids[is_stand_in], marks[is_stand_in] = zip(*given, strict=True)
        return ids.tolist(), marks.tolist()

    @cached_property
    def _stand_ins(self) -> tuple[Any, dict[int, str], list[int]]:
        """A copy of the library's tokenizer with a random text for each special token, which no
        text of a user is; these texts by the special token's id; their ids in the copy."""
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Inner

        copy: Any = Inner.from_str(self.inner.to_str())
        copy.post_processor = None  # it would drop white space from the tokens' offsets
        copy.encode_special_tokens = True
        added, nonce = self.inner.get_added_tokens_decoder(), secrets.token_hex(8)
        texts = {i: f"\U000f0010{nonce}-{i}\U000f0011" for i in self.special.values()}
        for i, text in texts.items():
            names = ("lstrip", "rstrip", "normalized") if i in added else ()
            flags = {name: getattr(added[i], name) for name in names}
            copy.add_tokens([AddedToken(text, **{"normalized": False, **flags})])
        return copy, texts, [copy.token_to_id(text) for text in texts.values()]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; an id without a token (a padded vocabulary) becomes U+FFFD."""
        text = ""
        for valid_ids, run in groupby(map(int, ids), lambda i: i < self.vocab):
            part = list(run)  # the library would drop an id without a token
            decoded = self.inner.decode(part, skip_special_tokens=False) if valid_ids else None
            text += UNKNOWN * len(part) if decoded is None else decoded
        return text

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """UTF-8 bytes of each id, decoded after another token, int64 [V]; 0 for special tokens."""
        sizes = np.zeros(self.vocab, dtype=np.int64)
        # Pieces are letters for bytes, or text with "\u2581" for spaces, as the decoder says.
        state = json.loads(self.inner.to_str())
        decoder = json.dumps(state["decoder"], ensure_ascii=False)
        is_byte_level = '"ByteLevel"' in decoder + json.dumps(state["pre_tokenizer"])
        letters = byte_letters() if is_byte_level else {}
        space = " " if "\u2581" in decoder else "\u2581"
        for piece, i in self.inner.get_vocab(with_added_tokens=False).items():
            if letters and letters.keys() >= set(piece):
                sizes[i] = len(piece)
            elif not letters and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
                sizes[i] = 1  # a single byte, as sentencepiece writes it
            else:
                sizes[i] = len(piece.replace("\u2581", space).encode())
        for i, token in self.inner.get_added_tokens_decoder().items():
            sizes[i] = len(token.content.encode())
        sizes[list(self.special.values())] = 0
        return sizes

    def save(self, directory: Path) -> None:
        folder = Path(directory) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / JSON_FILE, self.inner.to_str(pretty=True))
        write_atomic(folder / DESCRIPTION, self.describe().model_dump_json(indent=1) + "\n")

    def describe(self) -> Description:
        return Description.model_validate(self, from_attributes=True)


def valid(text: str) -> str:
    """A text with "?" in place of half a surrogate pair, which UTF-8 does not have."""
    return text.encode("utf-8", "replace").decode()


def stretches(text: str) -> Iterator[str]:
    """A text in parts of at most STRETCH characters, cut at places that change no ids, if there are
    any."""
    start = 0
    while len(text) - start > STRETCH:
        stop = cut_place(text, start, start + STRETCH)
        yield text[start:stop]
        start = stop
    if start < len(text):
        yield text[start:]


def cut_place(text: str, start: int, stop: int) -> int:
    """The last place up to `stop` at which a cut changes no token; else `stop`.

    No tokenizer's piece crosses the place before a single line feed or space between two words.
    """
    for mark, after_word, offset in (("\n", True, 0), ("\n", False, 1), (" ", False, 0)):
        at = text.rfind(mark, start + 1, stop)
        while at >= 0:
            left, right = text[at - 1], text[at + 1]
            if (left.isalnum() if after_word else not left.isspace()) and right.isalnum():
                return at + offset
            at = text.rfind(mark, start + 1, at)
    return stop


def probe_ids(inner: Any, text: str = PROBE) -> list[int]:
    """The ids of a text; none if the tokenizer does not know all of its characters."""
    try:
        return list(inner.encode(text, add_special_tokens=False).ids)
    except Exception:  # the library raises a bare Exception
        return []


def byte_letters() -> dict[str, int]:
    """GPT-2's letter for each byte: itself in printable Latin-1, else from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + place): b for place, b in enumerate(rest)}
