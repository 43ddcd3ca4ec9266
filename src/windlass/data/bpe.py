"""Byte-pair tokenizers: GPT-2's own through `tiktoken`, any `tokenizer.json` through `tokenizers`, or one trained here."""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from windlass import hub
from windlass.data.tokenizer import END_OF_TEXT, Tokenizer, hash_of, save_description
from windlass.errors import UserError

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""How GPT-2 cuts a text into pieces before pairs are merged (Radford et al. 2019, released code)."""
GPT2_MERGES, GPT2_IDS = "vocab.bpe", "encoder.json"
RANKS_FILE, JSON_FILE = "gpt2.tiktoken", "tokenizer.json"
OLDER_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "merges.txt", "vocab.txt")
"""What a directory of `transformers` holds where it has no such file."""
LONGEST_PIECE = 400_000
"""Characters that go to `tiktoken` at once: its regular expressions run out of stack on a million of white space."""
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
"""How well-known tokenizers write the end of a text, where no configuration says it."""
PROBE = (
    "def f(x):\n\treturn x ** 2  # It's 3.14159, isn't it?\r\n\r\n    Žluťoučký kůň 12345 中文字符 "
    "Ελλάδα кот 🙂👩‍👩‍👧 e\u0301 ﬁ №  \u00a0end <|endoftext|></s>"
)
"""A text whose ids tell tokenizers with equal vocabularies apart."""


class Gpt2Tokenizer:
    """GPT-2's byte pairs: 50,256 pieces and the end of a text, id 50256."""

    def __init__(self, ranks: dict[bytes, int]):
        import tiktoken

        self._ranks = ranks
        self.eot = len(ranks)
        self.vocab = len(ranks) + 1
        self._encoding = tiktoken.Encoding(
            "gpt2", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: self.eot}
        )
        self.fingerprint = hash_of("gpt2", *sorted(ranks, key=ranks.__getitem__))

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [n]."""
        text = text.encode("utf-8", "replace").decode()
        none = np.zeros(0, dtype=np.int64)
        parts = [self._encoding.encode_to_numpy(piece, disallowed_special=()) for piece in pieces(text)]
        return np.concatenate([none, *parts]).astype(np.int64)

    def pieces(self, text: str) -> Iterable[str]:
        """The text in stretches that can be encoded one by one."""
        return pieces(text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids; bytes that are no UTF-8 become U+FFFD."""
        known = [int(i) for i in ids]
        raw = b"".join(
            self._encoding.decode_single_token_bytes(i) if i < self.vocab else b"\xef\xbf\xbd" for i in known
        )
        return raw.decode("utf-8", "replace")

    def byte_lengths(self) -> np.ndarray:
        """Bytes that each id stands for, int64 [V]."""
        sizes = np.zeros(self.vocab, dtype=np.int64)
        for piece, i in self._ranks.items():
            sizes[i] = len(piece)
        return sizes

    def save(self, directory: Path) -> None:
        """Write the pieces in the order of their ids, base64 a line."""
        folder = save_description(directory, "gpt2", fingerprint=self.fingerprint)
        lines = [f"{base64.b64encode(piece).decode()} {i}\n" for piece, i in sorted(self._ranks.items(), key=_by_id)]
        (folder / RANKS_FILE).write_text("".join(lines), encoding="ascii")


def _by_id(item: tuple[bytes, int]) -> int:
    return item[1]


def pieces(text: str) -> Iterator[str]:
    """A text in pieces short enough, cut after a line's end that stands alone between two words: no pair reaches over it.

    Where a stretch has no such place it is cut anyway, which changes tokens only in a run of 400,000 characters without one.
    """
    start = 0
    while len(text) - start > LONGEST_PIECE:
        stop = start + LONGEST_PIECE
        at = text.rfind("\n", start, stop)
        while at > start and (text[at - 1].isspace() or text[at + 1].isspace()):
            at = text.rfind("\n", start, at)
        cut = at + 1 if at > start else stop
        yield text[start:cut]
        start = cut
    if start < len(text):
        yield text[start:]


def _byte_letters() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: a printable Latin-1 byte is itself, the rest are counted up from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(b): b for b in printable}
    for place, b in enumerate(b for b in range(256) if b not in set(printable)):
        letters[chr(0x100 + place)] = b
    return letters


def gpt2(directory: str = "") -> Tokenizer:
    """GPT-2's tokenizer, from `vocab.bpe` and `encoder.json` in a directory or else through `tiktoken`'s download."""
    if directory:
        return Gpt2Tokenizer(_ranks_from_files(Path(directory).expanduser()))
    import tiktoken

    try:
        return Gpt2Tokenizer(dict(tiktoken.get_encoding("gpt2")._mergeable_ranks))
    except Exception as error:  # whatever the download's library raises
        raise UserError(
            f"data.tokenizer: GPT-2's vocabulary could not be downloaded ({type(error).__name__}: {_short(error)}); "
            'put vocab.bpe and encoder.json into a directory and write "gpt2:DIR"'
        ) from None


def _ranks_from_files(folder: Path) -> dict[bytes, int]:
    for name in (GPT2_MERGES, GPT2_IDS):
        if not (folder / name).is_file():
            raise UserError(
                f"data.tokenizer: there is no {name} in {folder}; GPT-2's tokenizer is vocab.bpe and encoder.json"
            )
    letters = _byte_letters()
    try:
        ids = json.loads((folder / GPT2_IDS).read_text(encoding="utf-8"))
        ids.pop(END_OF_TEXT, None)
        ranks = {bytes(letters[c] for c in piece): int(i) for piece, i in ids.items()}
        lines = (folder / GPT2_MERGES).read_text(encoding="utf-8").split("\n")
        merges = [line.split() for line in lines if line.strip() and not line.startswith("#version")]
        merged = [bytes(letters[c] for c in first + second) for first, second in merges]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"data.tokenizer: {folder} does not hold GPT-2's vocab.bpe and encoder.json: {error}") from None
    in_order = sorted(ranks, key=ranks.__getitem__)
    if sorted(ranks.values()) != list(range(len(ranks))) or in_order[256:] != merged:
        raise UserError(f"data.tokenizer: vocab.bpe and encoder.json in {folder} do not belong together")
    return ranks


class JsonTokenizer:
    """A tokenizer of the `tokenizers` library, as it lies in a `tokenizer.json`."""

    def __init__(self, inner: Any, eot: int | None, kind: str):
        self._inner, self.eot, self._kind = inner, eot, kind
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # what looks like a special token in a text is text
        pieces = inner.get_vocab(with_added_tokens=True)
        self.vocab = max(pieces.values()) + 1
        probe = inner.encode(PROBE, add_special_tokens=False).ids
        self.fingerprint = hash_of("json", json.dumps([sorted(pieces.items()), eot, probe]))
        self.special = {token.content: i for i, token in inner.get_added_tokens_decoder().items() if token.special}
        """Texts and ids of the special tokens: what a chat template writes, and a user does not."""
        if eot is not None:
            self.special[inner.id_to_token(eot)] = eot
        begun = inner.encode("a")
        self.start = tuple(begun.ids[: [*begun.special_tokens_mask, 0].index(0)])
        """What the tokenizer puts before a text (its post-processor says so, as in `transformers`): `encode` does not."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids of a text, int64 [n]."""
        text = text.encode("utf-8", "replace").decode()
        ids = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        found = np.array(ids, dtype=np.int64)
        return found if self.eot is None else found[found != self.eot]

    def drop_start(self) -> None:
        """Put nothing before a text any more, nor where it is saved."""
        if self.start:
            self._inner.post_processor, self.start = None, ()

    def encode_marked(self, parts: Sequence[tuple[str | int, bool]]) -> tuple[list[int], list[bool]]:
        """The tokens of texts and special tokens (by id) in one sequence, each with the mark of what it stands for.

        They are those of the parts' texts joined, special tokens recognised in the parts that are ids and in no other. A
        token that reaches over two parts is marked where one of them is.
        """
        inner, sentinels = self._marking
        texts = [sentinels[part][0] if isinstance(part, int) else part for part, _ in parts]
        marked = [mark for text, (_, mark) in zip(texts, parts, strict=True) for _ in text]
        whole = "".join(texts).encode("utf-8", "replace").decode()
        special = iter([(part, mark) for part, mark in parts if isinstance(part, int)])
        stand_ins = {i for _, i in sentinels.values()}
        ids: list[int] = []
        marks: list[bool] = []
        found = inner.encode(whole, add_special_tokens=False)
        for i, (start, stop) in zip(found.ids, found.offsets, strict=True):
            if i not in stand_ins and self.special.get(whole[start:stop]) == i:
                continue  # a special token's text out of the common vocabulary: `encode` has none either
            token, mark = next(special) if i in stand_ins else (i, any(marked[start : max(stop, start + 1)]))
            ids.append(token)
            marks.append(mark)
        return ids, marks

    @cached_property
    def _marking(self) -> tuple[Any, dict[int, tuple[str, int]]]:
        """A copy that takes the special tokens for text, and stand-ins for tokens; id → stand-in's text and id.

        A stand-in cuts a text as its token does. It is a text that nobody can guess.
        """
        from tokenizers import AddedToken
        from tokenizers import Tokenizer as Inner

        copy = Inner.from_str(self._inner.to_str())
        copy.post_processor = None  # it would leave the white space out of the tokens' places
        copy.encode_special_tokens = True
        known, nonce = self._inner.get_added_tokens_decoder(), secrets.token_hex(8)
        sentinels: dict[int, tuple[str, int]] = {}
        for i in self.special.values():
            flags = {name: getattr(known[i], name) for name in ("lstrip", "rstrip", "normalized") if i in known}
            text = f"\U000f0010{nonce}-{i}\U000f0011"
            copy.add_tokens([AddedToken(text, **{"normalized": False, **flags})])
            sentinels[i] = (text, int(copy.token_to_id(text) or 0))
        return copy, sentinels

    def pieces(self, text: str) -> Iterable[str]:
        """The text as a whole: what a normaliser does to its parts is not known."""
        return [text]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of token ids."""
        parts: list[str] = []
        known: list[int] = []
        for i in [*map(int, ids), self.vocab]:
            if i < self.vocab:
                known.append(i)
                continue
            parts += [self._inner.decode(known, skip_special_tokens=False), "\ufffd"]
            known = []
        return "".join(parts[:-1])

    def byte_lengths(self) -> np.ndarray:
        """Bytes that each id stands for when it is decoded after another token, int64 [V]; 0 for special tokens.

        Where a tokenizer puts a space before a text, as sentencepiece does, that space is counted in the first token.
        """
        sizes = np.zeros(self.vocab, dtype=np.int64)
        # The decoder says what pieces are made of: stand-ins for bytes, or text with "\u2581" for spaces.
        decoder, cutter = _state(self._inner.decoder), _state(self._inner.pre_tokenizer)
        letters = _byte_letters() if '"ByteLevel"' in decoder + cutter else {}
        space = " " if "\u2581" in decoder else "\u2581"
        for piece, i in self._inner.get_vocab(with_added_tokens=False).items():
            if letters and all(c in letters for c in piece):
                sizes[i] = len(piece)
            elif not letters and re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
                sizes[i] = 1  # a byte on its own, as sentencepiece writes it
            else:
                sizes[i] = len(piece.replace("\u2581", space).encode())
        for i, token in self._inner.get_added_tokens_decoder().items():
            sizes[i] = len(token.content.encode())  # as it stands, whatever the pieces are made of
        sizes[list(self.special.values())] = 0
        return sizes

    def save(self, directory: Path) -> None:
        """Write the `tokenizer.json`."""
        folder = save_description(directory, self._kind, fingerprint=self.fingerprint, eot=self.eot)
        self._inner.save(str(folder / JSON_FILE))


def _state(part: Any) -> str:
    """The settings of a part of a tokenizer of `tokenizers`, as JSON; empty where it has none."""
    return "" if part is None else json.dumps(json.loads(part.__getstate__()), ensure_ascii=False)


def hugging_face(place: str) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`, of a directory, or of a name on the Hub (`NAME` or `NAME@REVISION`).

    A directory without a `tokenizer.json` is read through `transformers`, which makes one of older files.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the threads are ours
    path = Path(place).expanduser()
    folder = hub.tokenizer_directory(place)
    file = path if path.is_file() else folder / JSON_FILE
    if file.is_file():
        inner = _read_json(file)
        return JsonTokenizer(inner, _end_of_text(inner, file.parent), "hf")
    hub.prepare()
    with hub.explained(f"data.tokenizer: {place}"):
        from transformers import AutoTokenizer

        try:
            whole = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        except (ImportError, UserError):
            raise
        except Exception as error:  # a library behind it, at files that it does not know
            raise UserError(
                f"data.tokenizer: {place} has no {JSON_FILE}, and transformers finds no tokenizer there: {_short(error)}"
            ) from None
    if not hasattr(whole, "backend_tokenizer"):
        raise UserError(f"data.tokenizer: {place} has no fast tokenizer (a {JSON_FILE}); use another")
    return JsonTokenizer(whole.backend_tokenizer, whole.eos_token_id, "hf")


def _read_json(file: Path) -> Any:
    from tokenizers import Tokenizer as Inner

    try:
        return Inner.from_file(str(file))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(
            f"data.tokenizer: {file} is no tokenizer of the `tokenizers` library: {_short(error)}"
        ) from None


def _end_of_text(inner: Any, folder: Path) -> int | None:
    """The id of the end-of-text token: as the configuration beside the file says, or by its usual names."""
    names: list[str] = []
    for config in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            said = json.loads((folder / config).read_text(encoding="utf-8")).get("eos_token")
        except (OSError, ValueError, AttributeError):
            continue
        names += [said["content"] if isinstance(said, dict) else said] if said else []
    for name in [*names, *END_TOKENS]:
        found = inner.token_to_id(name)
        if found is not None:
            return int(found)
    return None


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte pairs learned from texts (Sennrich et al., arXiv 1508.07909): `vocab` ids, of which 0 ends a text."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers, trainers

    inner = Inner(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    inner.train_from_iterator((t.encode("utf-8", "replace").decode() for t in texts), trainer)
    return JsonTokenizer(inner, inner.token_to_id(END_OF_TEXT), "bpe")


def load(kind: str, folder: Path, saved: dict[str, Any]) -> Tokenizer:
    """A tokenizer that `save` wrote; raises KeyError, OSError or UserError where it is not whole."""
    if kind == "gpt2":
        lines = (folder / RANKS_FILE).read_text(encoding="ascii").splitlines()
        pairs = (line.split() for line in lines)
        try:
            return Gpt2Tokenizer({base64.b64decode(piece): int(i) for piece, i in pairs})
        except ValueError as error:
            raise UserError(f"{folder / RANKS_FILE} is not what was saved ({error}); prepare the data again") from None
    return JsonTokenizer(_read_json(folder / JSON_FILE), saved["eot"], kind)


def _short(error: Exception) -> str:
    return str(error).strip().split("\n")[0][:200]
