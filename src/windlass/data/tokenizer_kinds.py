"""Make a tokenizer of each kind: `byte`, `char`, `gpt2`, `bpe`, and `hf` from a `tokenizer.json`; or
load one that `Tokenizer.save` wrote.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from windlass import hub
from windlass.data.tokenizer import (
    DESCRIPTION,
    END_OF_TEXT,
    JSON_FILE,
    LEARNED,
    Description,
    Tokenizer,
    byte_letters,
    valid,
)
from windlass.errors import UserError, first_line, require
from windlass.fileio import read_json

GPT2_FILES, GPT2_NAME = ("encoder.json", "vocab.bpe"), "openai-community/gpt2"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
# The end of a text in common tokenizers, for a tokenizer without a configuration.
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
# Distinct words from which byte pairs are learned: the library needs about 100 times their bytes.
BPE_WORD_BYTES, WORD = 5_000_000, re.compile(r"\w+|[^\w\s]+")


def named_tokenizer(setting: str, key: str = "data.tokenizer") -> Tokenizer:
    """A tokenizer without corpus: `byte`, `gpt2`, `gpt2:DIR`, `hf:...`; `key`: the setting."""
    kind, _, place = setting.partition(":")
    if kind in LEARNED:
        remedy = "prepare the data first, or use another for shards:"
        raise UserError(f"data.tokenizer: {kind} needs the corpus; {remedy}")
    if kind == "byte":
        return byte_tokenizer()
    return gpt2_tokenizer(place) if kind == "gpt2" else hf_tokenizer(place, key)


def byte_tokenizer() -> Tokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of a text."""
    inner = _byte_level(byte_letters(), [], cut=False)
    return Tokenizer("byte", inner, _add_end(inner))


def char_tokenizer(characters: Iterable[str], with_eot: bool) -> Tokenizer:
    """One id a character, sorted by code point, then the end of a text if `with_eot`."""
    from tokenizers import Regex, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Inner

    alphabet = sorted(set(valid("".join(characters))))
    inner = Inner(models.WordLevel(vocab={character: i for i, character in enumerate(alphabet)}))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    inner.decoder = decoders.Fuse()
    return Tokenizer("char", inner, _add_end(inner) if with_eot else None)


def gpt2_tokenizer(directory: str = "") -> Tokenizer:
    """GPT-2's 50,256 pieces, from `vocab.bpe` and `encoder.json` in a directory, or the Hub."""
    require("tiktoken", 'data.tokenizer = "gpt2"')
    if not directory:
        return Tokenizer("gpt2", _read_json(hub.tokenizer_directory(GPT2_NAME) / JSON_FILE), 50256)
    from tokenizers import models

    try:
        folder = Path(directory).expanduser()
        ids, merges = models.BPE.read_file(*(str(folder / name) for name in GPT2_FILES))
        ids.pop(END_OF_TEXT, None)
        inner = _byte_level(ids, merges)
    except Exception as error:  # the library raises a bare Exception
        problem = f"no vocab.bpe and encoder.json in {directory}: {first_line(error)}"
        raise UserError(f"data.tokenizer: {problem}") from None
    return Tokenizer("gpt2", inner, _add_end(inner))


def bpe_tokenizer(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte pairs learned from texts (Sennrich et al., arXiv 1508.07909) in bounded memory."""
    from tokenizers import trainers

    def first_texts() -> Iterator[str]:
        words, size = set[str](), 0
        for text in texts:
            new = {word for word in WORD.findall(text) if word not in words}
            words |= new
            size += sum(len(word.encode("utf-8", "replace")) for word in new)
            yield valid(text)
            if size > BPE_WORD_BYTES:
                return

    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        initial_alphabet=sorted(byte_letters()),
        special_tokens=[END_OF_TEXT],
        show_progress=False,
    )
    inner = _byte_level()
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
    if not file.is_file():
        remedy = f"AutoTokenizer.from_pretrained({place!r}).save_pretrained(DIR) writes one"
        raise UserError(f"data.tokenizer: {place} has no {JSON_FILE}; {remedy}; or name another")
    inner = _read_json(file)
    ends = list[int | None]()  # by the tokenizer's configuration
    for config in CONFIG_FILES:
        token = read_json(folder / config).get("eos_token") or ""
        end = inner.token_to_id(token["content"] if isinstance(token, dict) else token)
        if end is not None:
            ends.append(end)
    usual = [inner.token_to_id(token) for token in END_TOKENS]
    eot = next((end for end in (*ends, *usual) if end is not None), None)
    of_model = read_json(folder / "generation_config.json").get("eos_token_id")
    ends += of_model if isinstance(of_model, list) else [of_model]
    start = read_json(folder / "config.json").get("bos_token_id")
    return Tokenizer("hf", inner, eot, ends, start)


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


def with_tokens(tokenizer: Tokenizer, texts: list[str]) -> Tokenizer:
    """A tokenizer with more special tokens (`data.add_tokens`)."""
    from tokenizers import AddedToken

    if not texts:
        return tokenizer
    inner = tokenizer.inner
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return Tokenizer(tokenizer.kind, inner, tokenizer.eot, tokenizer.ends, tokenizer.start)


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
