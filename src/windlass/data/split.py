"""Divide prepared tokens into training and validation data. A recipe reads the first documents of a
source (`documents_read`), and these rules look at them alone:

- A document is held out if the hash of its text is below `data.val_fraction`, so that copies of a
  text are on one side. If none of the first FEW is, the one with the smallest hash is, too.
- A text of over LONG_TEXT characters, and every text of a source with fewer than FEW documents,
  gives its last `data.val_fraction` characters, as nanoGPT cuts a text.
- If a source has fewer than FEW examples, a fraction with the smallest hashes is held out.
- A training text that the separate validation data also has is left out.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.order import splitmix
from windlass.data.recipe_sources import Member, SourceSpec
from windlass.data.shards import Corpus, Table
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.seeds import seed_bytes

FEW = 100
LONG_TEXT = 400_000
# Another tool's validation shard, for example `val.bin`, `valid.bin`, `edufineweb_val_000000.npy`.
VALIDATION_NAME = re.compile(r"(^|[^a-z])(val(id(ation)?)?|test|dev|eval)([^a-z]|$)")


def documents_read(table: Table, spec: SourceSpec) -> int | None:
    """The number of documents that a recipe reads: the first ones that have `spec.limit` tokens, or
    characters of separate validation data. None if the table has too few, or without a limit.

    Training reads at least FEW texts, or FEW groups of examples.
    """
    if not spec.limit:
        return None
    if spec.is_val:
        last = int(np.searchsorted(np.cumsum(table.characters), spec.limit))
    else:
        first = np.sort(np.unique(table.groups, return_index=True)[1])  # of each group
        few = int(first[FEW - 1]) if len(first) >= FEW else len(table)
        last = max(few, int(np.searchsorted(table.edges[1:], spec.limit)))
    return last + 1 if last < len(table) else None


class Need:
    """`documents_read` while the documents come, one after another."""

    def __init__(self, spec: SourceSpec, table: Table):
        """`table` has the documents before."""
        self._limit, self._is_val = spec.limit, spec.is_val
        self._characters = int(table.characters.sum())
        self._groups = set[int](np.unique(table.groups)[:FEW].tolist())

    def is_met(self, group: int, characters: int, tokens: int) -> bool:
        """Whether a document is the last that is needed; `tokens`: of all documents up to it."""
        self._characters += characters
        if self._is_val:
            return 0 < self._limit <= self._characters
        if len(self._groups) < FEW:
            self._groups.add(group)
        return len(self._groups) >= FEW and 0 < self._limit <= tokens


@dataclass(frozen=True)
class Part:
    """The documents of one source that a set has, end to end as one row of tokens."""

    corpus: Corpus
    ranges: np.ndarray  # int64 [n, 2]: first token and end of each range in the source's tokens
    # The documents' first tokens in the row, and its end, int64 [documents + 1]; for shards of
    # other tools, which do not name their documents, only the end.
    edges: np.ndarray
    numbers: np.ndarray  # of the documents in their source, int64 [documents]
    text: str = ""  # a hash of the texts, equal for every tokenizer; empty: unknown

    @property
    def tokens(self) -> int:
        return int(self.edges[-1])

    @property
    def documents(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True)
class Division:
    """The training and validation data of a recipe: for each member its parts."""

    train: list[list[Part]]
    val: list[list[Part]]
    shared: int = 0  # training documents left out, because the validation data has their texts

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """A hash of the tokens, their split and their tokenizer, equal in every directory."""
        description = tokenizer.describe().model_dump(exclude={"kind", "ends"})
        members = list[list[Any]]()
        for parts in (*self.train, *self.val):
            members.append([])
            for part in parts:
                shards = [(shard.identity, shard.tokens) for shard in part.corpus.index.shards]
                places = part.ranges
                if part.text:  # the texts determine the tokens, in whatever shards
                    shards, places = [], part.edges
                digest = hashlib.sha256(places.astype("<i8").tobytes()).hexdigest()
                members[-1].append([part.text, shards, digest])
        content = json.dumps([description, members], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def divide(
    members: Sequence[Member[Corpus]], train_size: int = 0, eval_size: int = 0, seed: int = 0
) -> Division:
    """The training and validation data of a recipe; UserError if nothing is left for training.

    `train_size` and `eval_size`: numbers of questions or conversations, chosen by `seed`; 0: all.
    """
    by_member = [[_divided(corpus, member) for corpus in member.sources] for member in members]
    sources = list(chain(*by_member))
    shared = 0
    # copies in one source have equal hashes
    if len(sources) > 1 or any(member.data.val_shards for member in members):
        shared = _leave_out_shared(sources)
    for source in sources:
        limit = source.corpus.spec.limit
        if limit and not source.corpus.index.masked:  # a text may end at the limit
            past = np.cumsum(sizes_of(source.train)) - limit
            source.train[:, 1] -= np.clip(past, 0, sizes_of(source.train))
    examples = [source for source in sources if source.corpus.index.masked]
    hashes = [source.texts for source in examples]
    _choose([source.train for source in examples], hashes, train_size, f"train/{seed}")
    _choose([source.val for source in examples], hashes, eval_size, f"eval/{seed}")
    train = [
        [_part(source, source.train, -source.cut) for source in group[: len(member.train)]]
        for group, member in zip(by_member, members, strict=True)
    ]
    val = [[_part(source, source.val, source.cut) for source in group] for group in by_member]
    if members[0].train and not any(part.tokens for part in chain(*train)):
        names = ", ".join(corpus.spec.name for member in members for corpus in member.train)
        reason = "the validation data has it all" if shared else "it holds no text"
        setting = "data.mix" if members[0].name else "data.source"
        raise UserError(f"{setting}: nothing is left for training in {names}: {reason}")
    return Division(train, [[part for part in parts if part.tokens] for parts in val], shared)


@dataclass
class SplitSource:
    """The tokens of each document that train, and the held-out ones.

    A shard of another tool, which does not name its documents, counts as one document.
    """

    corpus: Corpus
    train: np.ndarray  # first token and end of each document, int64 [documents, 2]
    val: np.ndarray  # the same of the held-out tokens
    texts: np.ndarray  # hashes of the documents, uint64; empty for shards of other tools
    cut: np.ndarray  # the characters before a held-out end, or 1; 0: the document is not cut

    def hold_out(self, held: np.ndarray) -> None:
        """Hold out whole documents (bool [documents])."""
        self.val[held] = self.train[held]
        keep_only(self.train, ~held)


def sizes_of(ranges: np.ndarray) -> np.ndarray:
    return ranges[:, 1] - ranges[:, 0]


def keep_only(ranges: np.ndarray, wanted: np.ndarray) -> None:
    """Empty the ranges of all but the `wanted` documents (bool [documents])."""
    ranges[~wanted, 1] = ranges[~wanted, 0]


def _divided(corpus: Corpus, member: Member[Corpus]) -> SplitSource:
    """A source of a member up to its limit, divided into training and validation data."""
    spec, index, table = corpus.spec, corpus.index, corpus.table
    edges, texts = corpus.edges, np.zeros(0, np.uint64)
    count = documents_read(table, spec) or len(table)
    if count:
        edges, texts = table.edges[: count + 1], table.field("text")[:count]
    train = np.stack([edges[:-1], edges[1:]], axis=1)
    is_lone = len(member.val if spec.is_val else member.train) == 1
    if is_lone and index.single_text and index.tokenizer.eot is not None:
        # An end-of-text token does not begin a single text that is the only source.
        train[:1, 0] += 0 if index.tokenizer.begin else 1
    source = SplitSource(corpus, train, train[:, [1, 1]], texts, np.zeros(len(train), np.int64))
    if not spec.is_val and (member.data.val_shards or not count):
        _hold_out_shards(source, member)
        return source
    characters = table.characters[:count]
    if spec.is_val:
        source.hold_out(np.ones(len(train), bool))
        over = int(characters.sum()) - spec.limit
        if spec.limit and count and over > 0 and not index.masked:  # end the last text at the limit
            last = np.array([count - 1])
            source.cut[last] = np.maximum(1, characters[last] - over)
            place = corpus.places_of(last, source.cut[last])
            source.val[last, 1] = np.maximum(place, source.val[last, 0] + 1)
    else:  # whole documents, or the ends of documents
        fraction, groups = member.held_fraction, table.groups[:count]
        whole, cuts = held_out(groups, characters, fraction, are_examples=index.masked)
        source.hold_out(whole)
        cut = np.flatnonzero(cuts >= 0)
        source.cut[cut] = np.maximum(1, cuts[cut])
        place = np.maximum(corpus.places_of(cut, cuts[cut]), source.train[cut, 0])
        source.val[cut, 0] = source.train[cut, 1] = place
    return source


def held_out(
    groups: np.ndarray, characters: np.ndarray, fraction: float, *, are_examples: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The documents of a source that are held out whole, bool [documents]; and the characters of
    each that train before a held-out end, int64 [documents], -1 if a document is not cut.

    `groups`: the hashes that decide, uint64 [documents].
    """
    whole = np.zeros(len(groups), bool)
    cuts = np.full(len(groups), -1)
    if not fraction:
        return whole, cuts
    if are_examples:
        distinct = np.unique(groups)
        if len(distinct) >= FEW:
            return _or_lowest(groups, groups[:FEW], fraction), cuts
        count = min(len(distinct) - 1, max(1, round(len(distinct) * fraction)))
        return (groups < distinct[count] if count > 0 else whole), cuts
    is_cut = (characters > LONG_TEXT) | (len(groups) < FEW)
    share = 1 - Fraction(str(fraction))
    cuts[is_cut] = [int(size * share) for size in characters[is_cut].tolist()]
    return _or_lowest(groups, groups[:FEW][~is_cut[:FEW]], fraction) & ~is_cut, cuts


def _or_lowest(hashes: np.ndarray, first: np.ndarray, fraction: float) -> np.ndarray:
    """The hashes below the fraction. If none of the `first` documents is, also their lowest hash,
    so that a small part of a source has validation data, too."""
    bound = np.uint64(int(Fraction(str(fraction)) * 2**64))
    is_held: np.ndarray = hashes < bound
    if len(first) and first.min() >= bound:
        is_held |= hashes == first.min()
    return is_held


def _hold_out_shards(source: SplitSource, member: Member[Corpus]) -> None:
    """Hold out the first `data.val_shards` shards, which may end inside a document; or another
    tool's shards by their names, else the end of all their tokens."""
    corpus, data, fraction = source.corpus, member.data, member.held_fraction
    names = [Path(shard.file).name.lower() for shard in corpus.index.shards]
    held = np.array([VALIDATION_NAME.search(name) is not None for name in names])
    first, last = source.train.T
    if data.val_shards:
        end = data.val_shards * data.shard_tokens if len(source.texts) else 0
        if not end and data.val_shards < len(names):
            end = int(corpus.edges[data.val_shards])
        if not 0 < end < last[-1:].sum():
            more = ", or raise data.max_tokens" if data.max_tokens else ""
            raise UserError(
                f"data.val_shards = {data.val_shards} of {len(names)}: "
                f"lower it or data.shard_tokens{more}"
            )
        place = np.clip(end, first, last)  # the end of the held-out tokens of each document
        source.val = np.stack([first, place], axis=1)
        source.train = np.stack([place, last], axis=1)
        source.cut[(first < place) & (place < last)] = 1
    elif held.any() and not held.all():
        if fraction:
            source.hold_out(held)
        else:  # there is other validation data, or none: they do not train either
            keep_only(source.train, ~held)
    elif fraction and len(held):
        tokens = corpus.index.tokens
        end = tokens - max(1, int(tokens * Fraction(str(fraction))))
        source.val[:, 0] = source.train[:, 1] = np.clip(end, first, last)


def _leave_out_shared(sources: list[SplitSource]) -> int:
    """Do not train on texts and shards of the validation data; the number of such documents."""
    # the hashes of held-out texts, and the characters of each that may train: those before the cut
    texts, characters = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for source in sources:
        if len(source.texts):
            held = sizes_of(source.val) > 0
            texts.append(source.texts[held])
            cut = source.cut[held]
            characters.append(np.zeros_like(cut) if source.corpus.spec.is_val else cut)
    held_texts, number = np.unique(np.concatenate(texts), return_inverse=True)
    allowed = np.full(len(held_texts), np.iinfo(np.int64).max)
    np.minimum.at(allowed, number, np.concatenate(characters))  # the least of each text
    separate = [source.corpus.index for source in sources if source.corpus.spec.is_val]
    files = {key for index in separate for s in index.shards for key in (s.file, s.identity)}
    count = 0
    for source in sources:
        if len(source.texts):
            shared = np.isin(source.texts, held_texts)
            places = np.searchsorted(held_texts, source.texts[shared])
            cut = source.cut[shared]
            shared[shared] = (cut == 0) | (cut > allowed[places])
        else:
            shards = source.corpus.index.shards
            shared = np.array([bool(files & {s.file, s.identity}) for s in shards], bool)
        count += int((shared & (sizes_of(source.train) > 0)).sum())
        keep_only(source.train, ~shared)
    return count


def _choose(ranges: list[np.ndarray], hashes: list[np.ndarray], size: int, purpose: str) -> None:
    """Keep `size` documents (0: all) of the sources, by the lowest random numbers."""
    draws = [draws_of(texts, purpose) for texts in hashes]
    present = [draw[sizes_of(documents) > 0] for draw, documents in zip(draws, ranges, strict=True)]
    flat = np.concatenate([np.zeros(0, np.uint64), *present])
    if 0 < size < len(flat):
        last = np.partition(flat, size - 1)[size - 1]
        for draw, documents in zip(draws, ranges, strict=True):
            keep_only(documents, draw <= last)


def draws_of(hashes: np.ndarray, purpose: str) -> np.ndarray:
    """The random numbers that choose texts by their hashes, both uint64 [n]."""
    key = np.frombuffer(seed_bytes(f"windlass/choose/{purpose}", 8), "<u8")[0]
    return splitmix(hashes ^ key)


def _part(source: SplitSource, ranges: np.ndarray, cut: np.ndarray) -> Part:
    """The documents whose range is not empty, as ranges of neighbours end to end."""
    numbers = np.flatnonzero(sizes_of(ranges) > 0)
    start, stop = ranges[numbers].T
    begins = np.append(True, start[1:] != stop[:-1])[: len(start)]
    ends = np.append(begins[1:], True)[: len(stop)]
    joined = np.stack([start[begins], stop[ends]], axis=1)
    edges = np.append(0, np.cumsum(stop - start))
    if not len(source.texts):
        return Part(source.corpus, joined, edges[-1:], numbers[:0])
    content = source.texts[numbers].tobytes() + cut[numbers].astype("<i8").tobytes()
    text = hashlib.sha256(content).hexdigest()[:16]
    return Part(source.corpus, joined, edges, numbers, text)
