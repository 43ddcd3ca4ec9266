"""Text to token ids and back; where a text begins and ends; the origins of tokenizers.

Every kind (bytes, characters, GPT-2, byte pairs, `tokenizer.json`) is an object of the `tokenizers`
library, saved as a `tokenizer.json` that `transformers` reads too. numpy and `tiktoken` encode
bytes, characters and GPT-2, with the same ids and faster. The text of a special token is plain
text, so `encode` never returns the end-of-text token.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ValidationError

from windlass import hub
from windlass.errors import UserError, first_line, require
from windlass.fileio import read_json, write_atomic
from windlass.recipe.load import own_tokenizer

if TYPE_CHECKING:
    from windlass.recipe import Recipe

FOLDER, DESCRIPTION, JSON_FILE = "tokenizer", "windlass.json", "tokenizer.json"
END_OF_TEXT, UNKNOWN = "<|endoftext|>", "\ufffd"
MARK = "\ufdd0"  # follows a character of a text that is not a special token (`windlass.data.chat`)
# GPT-2's cut of a text into words, before it merges pairs (Radford et al. 2019, released code).
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
GPT2_FILES, GPT2_NAME, GPT2_EOT = ("encoder.json", "vocab.bpe"), "openai-community/gpt2", 50256
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
LAYOUT_FILES = (*CONFIG_FILES, "chat_template.jinja")
OLDER_FILES = (
    *("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("vocab.json", "merges.txt", "vocab.txt"),
)
# The end of a text in well-known tokenizers, for a tokenizer without a configuration.
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
# Characters that are encoded at once: `tokenizers` needs 150 bytes for each, and the stack of
# `tiktoken` overflows on a million of white space.
STRETCH = 1 << 16
TAIL = 64  # characters before a stretch that can change its ids
# Distinct words from which byte pairs are learned: the library needs about 100 times their bytes.
BPE_WORD_BYTES, WORD = 5_000_000, re.compile(r"\w+|[^\w\s]+")
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
    begin: tuple[int, ...] = ()
    ends: frozenset[int] = frozenset()
    start: int | None = None


class Tokenizer:
    """A tokenizer of a kind: `byte`, `char`, `gpt2`, `bpe` or `hf`.

    Attributes:
        inner: The `tokenizers.Tokenizer` with the same ids.
        eot: The id that separates documents; None if the corpus is one text.
        begin: The ids before every text: the BOS of the post-processor; `encode` omits them.
        ends: The ids that end a generated text.
        start: The id before an empty prompt by the model's configuration, without `begin`.
        vocab: Number of ids, including the special ones.
        fingerprint: Equal for tokenizers that give the same ids for every document.
        special: Ids of the special tokens by text; only a chat template writes them.
        dtype: The type of ids in shards.
    """

    def __init__(
        self,
        kind: str,
        inner: Any,
        eot: int | None,
        ends: Iterable[Any] = (),
        start: Any = None,
    ):
        self.kind, self.inner, self.eot = kind, inner, eot
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # the text of a special token is plain text
        pieces = inner.get_vocab(with_added_tokens=True)
        self.vocab = max(pieces.values()) + 1
        # a model's configuration may have ids that its tokenizer does not have
        valid = set(pieces.values())
        self.ends = frozenset(i for i in (eot, *ends) if i in valid)
        self.start: int | None = start if start in valid else None
        self.begin: tuple[int, ...] = ()
        if inner.post_processor is not None:
            encoded = inner.encode("a")
            count = [*encoded.special_tokens_mask, 0].index(0)
            self.begin = tuple(encoded.ids[:count])
        content = [sorted(pieces.items()), eot, probe_ids(inner), self.begin]
        self.fingerprint = hashlib.sha256(json.dumps(content).encode()).hexdigest()
        added = inner.get_added_tokens_decoder().items()
        self.special: dict[str, int] = {t.content: i for i, t in added if t.special}
        if eot is not None:
            self.special[inner.id_to_token(eot)] = eot
        self.dtype = "uint16" if self.vocab <= 1 << 16 else "uint32"

    def __reduce__(self) -> Any:
        return Tokenizer, (self.kind, self.inner, self.eot, self.ends, self.start)

    @property
    def first(self) -> tuple[int, ...]:
        """The ids before a document."""
        return self.begin or (() if self.eot is None else (self.eot,))

    @property
    def last(self) -> tuple[int, ...]:
        """The ids after a document: the end of a text, unless it stands before the next one."""
        return () if self.eot is None or self.eot in self.first else (self.eot,)

    # -- texts

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

    def encode(self, text: str, before: str = "") -> np.ndarray:
        """Token ids of a text, int64 [n]; half a surrogate pair becomes "?".

        `before`: the end of the text that this one continues, for tokenizers that mark the start of
        a text. Raises UserError for a character that the tokenizer does not know.
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
        parts = list[np.ndarray]()
        for part in stretches(text.encode("utf-8", "replace").decode()):
            if self.kind == "gpt2":
                found = self._fast.encode_to_numpy(part, disallowed_special=())
            else:
                found = self._continue(part, before)
            parts.append(found.astype(np.int64))
            before = part
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.int64), *parts])

    def _continue(self, text: str, before: str) -> np.ndarray:
        """The ids of a stretch after the text `before`, by the library."""

        def encode(part: str) -> np.ndarray:
            try:
                found = self.inner.encode_batch_fast([part], add_special_tokens=False)[0].ids
            except Exception as error:  # the library raises a bare Exception
                raise UserError(f"the tokenizer cannot encode the text: {error}") from None
            ids = np.array(found, dtype=np.int64)
            return ids if self.eot is None else ids[ids != self.eot]

        if before and self._marks_start:
            tail = before[-TAIL:].encode("utf-8", "replace").decode()
            for head in (tail, "a", "\n"):
                alone, both = encode(head), encode(head + text)
                if np.array_equal(both[: len(alone)], alone):
                    return both[len(alone) :]
        return encode(text)

    @cached_property
    def _marks_start(self) -> bool:
        """Whether a text has other ids at the start of a text than after a line."""
        line, start, both = (probe_ids(self.inner, text) for text in ("a\n", "b", "a\nb"))
        return line + start != both

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

    # -- prompts, answers, conversations

    def prompt(self, text: str) -> list[int]:
        """The tokens from which a model generates; never empty.

        For an empty text: `begin`, else the model's start token, else the end-of-text token, else a
        line feed, else the first character.
        """
        if ids := [*self.begin, *self.encode(text).tolist()]:
            return ids
        if (first := self.eot if self.start is None else self.start) is not None:
            return [first]
        has_line_feed = self.kind != "char" or "\n" in self.inner.get_vocab()
        return self.encode("\n").tolist()[:1] if has_line_feed else [0]

    def encode_pair(self, prompt: str, answer: str) -> tuple[list[int], int]:
        """The tokens of prompt and answer after `begin`, and how many of them are not the answer's.

        Both are encoded as one text if this leaves the prompt's own tokens unchanged.
        """
        alone, both = ([*self.begin, *self.encode(t).tolist()] for t in (prompt, prompt + answer))
        if both[: len(alone)] != alone or len(both) == len(alone):
            both = alone + self.encode(answer, before=prompt or "a").tolist()
        return both, len(alone)

    def encode_marked(self, parts: Sequence[tuple[str | int, int]]) -> tuple[list[int], list[int]]:
        """The tokens of texts and special tokens (by id), each with the mark of its part.

        The joined texts are encoded together. A token over several parts has their largest mark.
        """
        parts = [part for part in parts if part[0] != ""]
        if self._bytes is None:
            return self._encode_spans(parts)
        ids, marks = list[int](), list[int]()
        for is_special, run in groupby(parts, lambda part: isinstance(part[0], int)):
            pieces, own = zip(*run, strict=True)
            if is_special:
                ids += pieces
                marks += own
                continue
            texts = [text.encode("utf-8", "replace") for text in pieces]
            tokens = self.encode(b"".join(texts).decode()).tolist()
            sizes = [len(self._bytes[i]) for i in tokens]
            by_byte = np.repeat(own, list(map(len, texts)))
            starts = np.cumsum([0, *sizes])[:-1]
            ids += tokens
            marks += np.maximum.reduceat(by_byte, starts).tolist() if tokens else []
        return ids, marks

    def _encode_spans(self, parts: Sequence[tuple[str | int, int]]) -> tuple[list[int], list[int]]:
        """`encode_marked` by the places of the library's tokens in the text."""
        inner, sentinels, sentinel_ids = self._sentinels
        texts = [sentinels[part] if isinstance(part, int) else part for part, _ in parts]
        text = "".join(texts).encode("utf-8", "replace").decode()
        found, done, before = [np.zeros((0, 3), np.int64)], 0, ""
        for part in stretches(text):
            encoded = inner.encode(before + part, add_special_tokens=False)
            rows = np.column_stack([encoded.ids, np.reshape(encoded.offsets, (-1, 2))])
            rows = rows[rows[:, 1] >= len(before)].astype(np.int64)
            rows[:, 1:] += done - len(before)
            found.append(rows)
            done, before = done + len(part), part[-TAIL:]
        # without a special token's text in the common vocabulary, which `encode` drops too
        rows = np.concatenate(found)
        special = np.flatnonzero(np.isin(rows[:, 0], list(self.special.values())))
        own = [n for n in special if self.special.get(text[slice(*rows[n, 1:])]) == rows[n, 0]]
        ids, start, stop = np.delete(rows, own, axis=0).T
        ends = np.cumsum(list(map(len, texts)))
        first = np.searchsorted(ends, start, "right")
        last = np.searchsorted(ends, np.maximum(stop, start + 1), "left")
        spans = np.stack([first, last + 1], axis=1).ravel()
        marks = np.maximum.reduceat([*(mark for _, mark in parts), False], spans)[::2]
        if given := [part for part in parts if isinstance(part[0], int)]:
            at = np.isin(ids, sentinel_ids)
            ids[at], marks[at] = zip(*given, strict=True)
        return ids.tolist(), marks.tolist()

    @cached_property
    def _sentinels(self) -> tuple[Any, dict[int, str], list[int]]:
        """A copy of the tokenizer with a random text for each special token; texts by id; ids."""
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

    def save(self, directory: Path) -> None:
        """Write the folder `directory/tokenizer`, for `load_tokenizer`."""
        folder = Path(directory) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / JSON_FILE, self.inner.to_str(pretty=True))
        write_atomic(folder / DESCRIPTION, self.describe().model_dump_json(indent=1) + "\n")

    def describe(self) -> Description:
        return Description.model_validate(self, from_attributes=True)


def stretches(text: str) -> Iterator[str]:
    """A text in parts of at most STRETCH characters, cut where `encode` gives the same ids.

    A stretch ends after a line, else after a word. A run of STRETCH characters without such a place
    is cut anyway, which can change the tokens there.
    """
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


# -- the origins: a name in the recipe, a directory with a saved one, or the corpus


def is_learned(setting: str) -> bool:
    """Whether `data.tokenizer` is learned from the corpus."""
    return setting in ("char", "bpe")


def load_tokenizer(folder: Path) -> Tokenizer:
    """A tokenizer from `Tokenizer.save`; UserError if it is damaged or has changed."""
    again = "prepare the data again"
    try:
        saved = Description.model_validate_json((folder / DESCRIPTION).read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(f"{folder} cannot be read ({first_line(error)}); {again}") from None
    inner = _read_json(folder / JSON_FILE)
    tokenizer = Tokenizer(saved.kind, inner, saved.eot, saved.ends, saved.start)
    if tokenizer.fingerprint != saved.fingerprint:
        raise UserError(f"{folder / JSON_FILE} was changed after it was saved; {again}")
    return tokenizer


def named_tokenizer(setting: str, key: str = "data.tokenizer") -> Tokenizer:
    """A tokenizer without corpus: `byte`, `gpt2`, `gpt2:DIR`, `hf:...`; `key`: the setting."""
    kind, _, place = setting.partition(":")
    if is_learned(kind):
        remedy = "prepare the data first, or use another for shards:"
        raise UserError(f"data.tokenizer: {kind} needs the corpus; {remedy}")
    if kind == "byte":
        return byte_tokenizer()
    return gpt2_tokenizer(place) if kind == "gpt2" else hf_tokenizer(place, key)


def check_tokenizer(recipe: Recipe, tokenizer: Tokenizer, notify: Callable[[str], None]) -> None:
    """Raise UserError if `tokenizer` gives other ids than the tokenizer of the model's weights.

    Windlass only warns if the weights are not used.
    """
    model, own, wanted = recipe.model, own_tokenizer(recipe.model, ""), recipe.data.tokenizer
    if own in (wanted, ""):
        return
    revision = f"@{model.revision}" if model.revision and own == f"hf:{model.name}" else ""
    try:
        trained = named_tokenizer(own + revision)
    except UserError:  # the model has none, or does not exist any more
        return
    ids, trained_ids = (t.inner.get_vocab(with_added_tokens=True) for t in (tokenizer, trained))
    same_probe = probe_ids(tokenizer.inner) == probe_ids(trained.inner)
    if trained_ids.items() <= ids.items() and same_probe:
        return  # the same, perhaps with added tokens
    other = f"the tokenizer of {model.init_from or model.name} ({trained.vocab:,} ids)"
    text = f"data.tokenizer = {wanted} ({tokenizer.vocab:,} ids) is not {other}"
    remedy = f"which its weights were trained with; leave data.tokenizer out, or write {own}"
    if not model.from_scratch:
        raise UserError(f"{text}, {remedy}")
    notify(f"{text}; its weights are not used, so this may be intended")


def tokenizer_files(setting: str) -> dict[str, str]:
    """The SHA-256 of each local file of a setting, by path; empty without local files."""
    kind, _, place = setting.partition(":")
    if not place:
        return {}
    path = Path(place).expanduser()
    names = GPT2_FILES if kind == "gpt2" else (JSON_FILE, *LAYOUT_FILES, *OLDER_FILES)
    files = [path / name for name in names]
    if path.is_file():
        files = [path, *(path.parent / name for name in LAYOUT_FILES)]
    hashes = {}
    for file in files:
        if file.is_file():
            with file.open("rb") as stream:
                hashes[str(file)] = hashlib.file_digest(stream, "sha256").hexdigest()
    return hashes


def byte_tokenizer() -> Tokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of a text."""
    inner = _byte_level(byte_letters(), [], cut=False)
    return Tokenizer("byte", inner, _add_end(inner))


def char_tokenizer(characters: Iterable[str], with_eot: bool) -> Tokenizer:
    """One id a character, sorted by code point, then the end of a text if `with_eot`.

    It has no unknown token, so the exported tokenizer raises on an unknown character, too.
    """
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    alphabet = sorted(set("".join(characters).encode("utf-8", "replace").decode()))
    if not alphabet:
        raise UserError("a character tokenizer needs a corpus with at least one character")
    inner = Inner(models.WordLevel(vocab={character: i for i, character in enumerate(alphabet)}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return Tokenizer("char", inner, _add_end(inner) if with_eot else None)


def gpt2_tokenizer(directory: str = "") -> Tokenizer:
    """GPT-2's 50,256 pieces, from `vocab.bpe` and `encoder.json` in a directory, or the Hub."""
    require("tiktoken", 'data.tokenizer = "gpt2"')
    if not directory:
        file = hub.tokenizer_directory(GPT2_NAME) / JSON_FILE
        return Tokenizer("gpt2", _read_json(file), GPT2_EOT)
    from tokenizers import models

    try:
        folder = Path(directory).expanduser()
        ids, merges = models.BPE.read_file(*(str(folder / name) for name in GPT2_FILES))
        ids.pop(END_OF_TEXT, None)
        inner = _byte_level(ids, merges)
        return Tokenizer("gpt2", inner, _add_end(inner))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(
            f"data.tokenizer: no vocab.bpe and encoder.json in {directory}: {first_line(error)}"
        ) from None


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte pairs learned from texts (Sennrich et al., arXiv 1508.07909); id 0 ends a text.

    The texts are short, for example `stretches`. For a bounded memory only the first ones are used,
    up to `BPE_WORD_BYTES` of distinct words.
    """
    from tokenizers import trainers

    def first_texts() -> Iterator[str]:
        words, size = set[str](), 0
        for text in texts:
            new = {word for word in WORD.findall(text) if word not in words}
            words |= new
            size += sum(len(word.encode("utf-8", "replace")) for word in new)
            yield text.encode("utf-8", "replace").decode()
            if size > BPE_WORD_BYTES:
                return

    inner = _byte_level()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(byte_letters()),
        show_progress=False,
    )
    inner.train_from_iterator(first_texts(), trainer)
    return Tokenizer("bpe", inner, inner.token_to_id(END_OF_TEXT))


def hf_tokenizer(place: str, key: str = "data.tokenizer") -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, a directory, or the Hub's `NAME[@REVISION]`."""
    # The library would warn about a fork after its threads started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    path = Path(place).expanduser()
    file = path if path.is_file() else hub.tokenizer_directory(place, key) / JSON_FILE
    folder = file.parent
    if (folder / DESCRIPTION).is_file():  # a run's tokenizer, also of bytes and characters
        return load_tokenizer(folder)
    ends = read_json(folder / "generation_config.json").get("eos_token_id")
    ends = ends if isinstance(ends, list) else [ends]
    if not file.is_file():
        hub.prepare()
        try:
            if path.is_dir() and not any((path / name).is_file() for name in OLDER_FILES):
                # before an import that takes seconds
                raise FileNotFoundError(f"{path} has no files of a tokenizer")
            from transformers import AutoTokenizer

            whole: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            return Tokenizer("hf", whole.backend_tokenizer, whole.eos_token_id, ends)
        except Exception as error:  # of any kind, from the libraries behind it
            problem = f"{place} has no {JSON_FILE} nor another tokenizer's files"
            raise UserError(f"data.tokenizer: {problem}; name one: {first_line(error)}") from None
    inner, eos = _read_json(file), list[int]()
    for config in CONFIG_FILES:
        token = read_json(folder / config).get("eos_token") or ""
        i = inner.token_to_id(token["content"] if isinstance(token, dict) else token)
        eos += [] if i is None else [i]
    known = (i for i in map(inner.token_to_id, END_TOKENS) if i is not None)
    eot = next(iter([*eos, *known]), None)
    start = read_json(folder / "config.json").get("bos_token_id")
    return Tokenizer("hf", inner, eot, [*eos, *ends], start)


def _byte_level(ids: dict[str, int] | None = None, merges: Any = None, cut: bool = True) -> Any:
    """Byte pairs of the `tokenizers` library; `cut`: no pair crosses a word's end."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    inner = Inner(models.BPE(vocab=ids, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)
    inner.decoder = decoders.ByteLevel()
    return inner


def _add_end(inner: Any) -> int:
    from tokenizers import AddedToken

    inner.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return int(inner.token_to_id(END_OF_TEXT))


def _read_json(file: Path) -> Any:
    from tokenizers import Tokenizer as Inner

    try:
        return Inner.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        problem = f"{file} is not a tokenizer.json: {first_line(error)}"
        raise UserError(f"data.tokenizer: {problem}") from None
