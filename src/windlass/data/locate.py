"""The tokenizers and sources that a recipe names, and the directory that has a source's tokens: its
name has a hash of all settings that determine the tokens, except for the state of the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from windlass import hub
from windlass.data.tokenizer import (
    DESCRIPTION,
    END_OF_TEXT,
    JSON_FILE,
    Description,
    Tokenizer,
    byte_letters,
    probe_ids,
)
from windlass.errors import UserError, first_line, require
from windlass.fileio import read_json, sha256_of
from windlass.recipe import DataSettings, Recipe
from windlass.recipe.load import own_tokenizer

GPT2_FILES, GPT2_NAME = ("encoder.json", "vocab.bpe"), "openai-community/gpt2"
CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
LAYOUT_FILES = (*CONFIG_FILES, "chat_template.jinja")
# The end of a text in common tokenizers, for a tokenizer without a configuration.
END_TOKENS = (END_OF_TEXT, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")
# Distinct words from which byte pairs are learned: the library needs about 100 times their bytes.
BPE_WORD_BYTES, WORD = 5_000_000, re.compile(r"\w+|[^\w\s]+")


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


def with_tokens(tokenizer: Tokenizer, texts: list[str]) -> Tokenizer:
    """A tokenizer with more special tokens (`data.add_tokens`)."""
    from tokenizers import AddedToken

    if not texts:
        return tokenizer
    inner = tokenizer.inner
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in texts])
    return Tokenizer(tokenizer.kind, inner, tokenizer.eot, tokenizer.ends, tokenizer.start)


def check_tokenizer(recipe: Recipe, tokenizer: Tokenizer) -> None:
    """Reject a tokenizer with other ids than the one that the model's weights were trained with."""
    model, own, wanted = recipe.model, own_tokenizer(recipe.model, ""), recipe.data.tokenizer
    if own in (wanted, "") or model.from_scratch:
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
    raise UserError(f"{text}, {remedy}")


def tokenizer_files(recipe: Recipe) -> list[str]:
    """The SHA-256 of the local files of tokenizer and template."""
    data, kind = recipe.data, recipe.data.tokenizer.partition(":")[0]
    files = [Path(data.chat_template).expanduser()] if data.chat_template else []
    if place := data.tokenizer.partition(":")[2]:
        path = Path(place).expanduser()
        names = GPT2_FILES if kind == "gpt2" else (path.name, JSON_FILE, *LAYOUT_FILES)
        files += [(path.parent if path.is_file() else path) / name for name in names]
    return [sha256_of(file) for file in files if file.is_file()]


def byte_tokenizer() -> Tokenizer:
    """The bytes of UTF-8 as ids 0 to 255, and 256 for the end of a text."""
    inner = _byte_level(byte_letters(), [], cut=False)
    return Tokenizer("byte", inner, _add_end(inner))


def char_tokenizer(characters: Iterable[str], with_eot: bool) -> Tokenizer:
    """One id a character, sorted by code point, then the end of a text if `with_eot`."""
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


def train_bpe(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Byte pairs learned from texts (Sennrich et al., arXiv 1508.07909) in bounded memory."""
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

    inner, letters = _byte_level(), sorted(byte_letters())
    how: dict[str, Any] = {"special_tokens": [END_OF_TEXT], "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=letters, **how)
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
        remedy = f"AutoTokenizer.from_pretrained({place!r}).save_pretrained(DIR) writes one"
        raise UserError(f"data.tokenizer: {place} has no {JSON_FILE}; {remedy}; or name another")
    inner, eos = _read_json(file), list[int]()
    for config in CONFIG_FILES:
        token = read_json(folder / config).get("eos_token") or ""
        i = inner.token_to_id(token["content"] if isinstance(token, dict) else token)
        eos += [] if i is None else [i]
    usual = (i for i in map(inner.token_to_id, END_TOKENS) if i is not None)
    start = read_json(folder / "config.json").get("bos_token_id")
    return Tokenizer("hf", inner, next(iter([*eos, *usual]), None), [*eos, *ends], start)


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


S = TypeVar("S")  # SourceSpec before a source is prepared, then Corpus
T = TypeVar("T")
DOWNLOADS = ".downloads"  # hidden, so that a source `data/` does not contain it


@dataclass(frozen=True)
class SourceSpec:
    """One source, and how its items are read."""

    name: str  # as the recipe writes it
    place: str  # the same with its path located
    format: str = "text"
    text_key: str = "text"  # may be nested: "doc.text"
    split: str = "train"
    revision: str = ""
    streaming: bool = False
    sha256: str = ""
    separator: str = ""
    special_tokens: bool = False
    columns: tuple[tuple[str, str], ...] = ()  # names of keys, and the keys that have these names
    answers: str = "auto"
    on_bad_item: str = "stop"
    setting: str = "data.source"  # for messages
    downloads: Path = Path("data", DOWNLOADS)

    @property
    def kind(self) -> str:
        """`stdlib`, `https`, `hf`, `squad`, `shards`, or `files` for a path."""
        kind, colon, _ = self.place.partition(":")
        if kind in ("http", "https"):
            return "https"
        named = ("hf", "squad", "shards") if colon else ("stdlib", "squad")
        return kind if kind in named else "files"

    @property
    def path(self) -> str:
        return self.place if self.kind == "files" else self.place.partition(":")[2]

    @property
    def key(self) -> dict[str, Any]:
        """The settings that determine the items and do not have their default."""
        key: dict[str, Any] = {"name": self.name, "format": self.format}
        names = ("text_key", "split", "revision", "sha256", "separator", "special_tokens")
        for name in (*names, "columns", "answers", "on_bad_item"):
            if getattr(self, name) != getattr(SourceSpec, name):
                key[name] = getattr(self, name)
        return key | ({"python": platform.python_version()} if self.kind == "stdlib" else {})

    @property
    def slug(self) -> str:
        """The source as a short name for a directory: `stdlib`, `input`, `c4-en`."""
        place = re.sub(r"^(hf|shards|squad):", "", self.name).split("?")[0].rstrip("/*")
        name = re.sub(r"[^A-Za-z0-9]+", "-", place.rsplit("/", 1)[-1].split(".")[0])
        return name.strip("-").lower()[:40] or "corpus"


@dataclass(frozen=True)
class Member(Generic[S]):
    """The sources of a recipe, or one source of a mixture."""

    name: str  # in the mixture
    data: DataSettings  # as if the member were the whole recipe
    train: list[S]
    val: list[S]  # separate validation data

    @property
    def sources(self) -> list[S]:
        return [*self.train, *self.val]

    def opened(self, sources: list[T]) -> Member[T]:
        count = len(self.train)
        return Member(self.name, self.data, sources[:count], sources[count:])


def wanted_sources(recipe: Recipe, only_val: bool = False) -> list[Member[SourceSpec]]:
    """The sources of a recipe; with `only_val` its separate validation data alone, if any."""
    members, written = list[Member[SourceSpec]](), recipe.as_written.data
    for number in range(len(written.mix) or 1):
        # the names as written, and the places with absolute paths
        data, located = written.part(number), recipe.data.part(number)
        same = ("format", "text_key", "streaming", "separator", "special_tokens", "answers")
        shared: dict[str, Any] = {key: getattr(data, key) for key in (*same, "on_bad_item")}
        shared["columns"] = tuple(data.columns.items())
        shared["downloads"] = root_of(recipe) / DOWNLOADS
        part = f"data.mix.{written.mix[number].name}." if written.mix else "data."
        shared["setting"] = f"{part}source"
        own = {key: getattr(data, key) for key in ("split", "revision", "sha256")}
        names = zip(data.sources, located.sources, strict=True)
        train = [SourceSpec(name, place, **own, **shared) for name, place in names]
        shared["setting"] = f"{part}eval_source"
        if any(data.eval_sources):
            shared["split"] = data.eval_split or data.split
            names = zip(data.eval_sources, located.eval_sources, strict=True)
            val = [SourceSpec(name, place, **shared) for name, place in names]
        elif data.eval_split and data.sources[0].startswith("hf:"):
            how: dict[str, Any] = {"split": data.eval_split, "setting": "data.eval_split"}
            val = [replace(spec, sha256="", **how) for spec in train]
        else:
            questions = [spec for spec in train if spec.name == "squad"]
            val = [SourceSpec(q.name, q.place, split="validation", **shared) for q in questions]
        name = written.mix[number].name if written.mix else ""
        members.append(Member(name, data, [] if only_val and val else train, val))
    return members


def root_of(recipe: Recipe) -> Path:
    """`data.dir`, or `data` in the directory that the recipe's paths start from."""
    if recipe.data.dir:
        return Path(recipe.data.dir).expanduser()
    return (recipe.home or Path()) / "data"


def directory_of(spec: SourceSpec, recipe: Recipe) -> Path:
    return root_of(recipe) / f"{spec.slug}-{hash_of_key(source_key(spec, recipe))}"


def data_dirs(recipe: Recipe) -> list[Path]:
    """The directories of all sources of a recipe, prepared or not."""
    specs = [spec for member in wanted_sources(recipe) for spec in member.sources]
    return list(dict.fromkeys(directory_of(spec, recipe) for spec in specs))


def source_key(spec: SourceSpec, recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokens of a source."""
    key, data = tokenizer_key(recipe) | {"source": spec.key}, recipe.as_written.data
    if spec.format == "chat" and data.chat_template:
        key["chat_template"] = data.chat_template
    if spec.format == "chat" and data.chat_template_kwargs:
        key["chat_template_kwargs"] = data.chat_template_kwargs
    if spec.name.startswith("shards:") and data.shards_dtype != "auto":
        key["dtype"] = data.shards_dtype
    return key


def tokenizer_key(recipe: Recipe) -> dict[str, Any]:
    """The settings that determine the tokenizer; a learned one depends on its sources, too."""
    data = recipe.as_written.data
    key: dict[str, Any] = {"tokenizer": recipe.as_written.tokenizer}
    if data.add_tokens:
        key["add_tokens"] = data.add_tokens
    if is_learned(data.tokenizer):
        members = wanted_sources(recipe)
        key["train"] = [spec.key for member in members for spec in member.train]
        key["val"] = [spec.key for member in members for spec in member.val]
        if data.tokenizer == "bpe":
            key["vocab"] = data.tokenizer_vocab
            key["held_out"] = [held_fraction(member) for member in members]
    return key


def held_fraction(member: Member[S]) -> float:
    """The fraction of a member's sources that is held out; 0 if its validation data is separate."""
    return 0.0 if member.val else member.data.val_fraction


def hash_of_key(key: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:8]
