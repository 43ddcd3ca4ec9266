"""What is trained on, and what is held out: computed from the prepared tokens when they are read.

- A document is held out if the hash of its text is below `data.val_fraction`. So copies of a text
  are on one side, and neither the order of documents nor limits, tokenizer or ranks change a choice.
  If none of the first FEW documents is, the one with the smallest hash is, too.
- A text of over LONG_TEXT characters, and every text of a source with fewer than FEW documents,
  gives its last `data.val_fraction` characters, as nanoGPT cuts a text.
- If a source has fewer than FEW questions or conversations, a fraction with the smallest hashes is
  held out.
- A training text that the separate validation data also has is left out.
- A recipe reads the first documents of a source (`Limit`); the rules look at these alone.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from windlass.data.locate import Member
from windlass.data.order import splitmix
from windlass.data.shards import Index, Row, Stream, Table
from windlass.data.sources import SourceSpec
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.recipe import DataSettings
from windlass.seeds import seed_bytes

FEW = 100
LONG_TEXT = 400_000
# Another tool's validation shard, for example `val.bin`, `valid.bin`, `edufineweb_val_000000.npy`.
VALIDATION_NAME = re.compile(r"(^|[^a-z])(val(id(ation)?)?|test|dev|eval)([^a-z]|$)")


@dataclass(frozen=True)
class Corpus:
    """One prepared source."""

    directory: Path
    index: Index
    spec: SourceSpec
    tokenizer: Tokenizer
    cache_bytes: int = 0  # of remote shards on this machine's disk

    @cached_property
    def stream(self) -> Stream:
        return Stream(self.directory, self.index, self.cache_bytes)

    def places_of(self, documents: Sequence[int], characters: Sequence[int]) -> Iterator[int]:
        """The token of the source up to which each document has at most so many characters."""
        parts = self.stream.table.parts(documents)
        for (places, sizes), limit in zip(parts, characters, strict=True):
            ends = np.cumsum(sizes)
            part = int(np.searchsorted(ends, limit, side="right"))
            if part == len(sizes):
                yield int(places[-1])
                continue
            start, stop = places[part : part + 2].tolist()
            start += len(self.tokenizer.first) if part == 0 else 0
            yield self._place(start, stop, limit - int(ends[part] - sizes[part]))

    def _place(self, start: int, stop: int, characters: int) -> int:
        """The token up to which those from `start` on have at most so many characters."""
        tokens, decode = self.stream.read(start, stop), self.tokenizer.decode
        counts = range(1, len(tokens) + 1)
        return start + bisect_left(counts, True, key=lambda n: len(decode(tokens[:n])) > characters)


@dataclass(frozen=True)
class Part:
    """The documents of one source that a set has, end to end as one row of tokens."""

    corpus: Corpus
    ranges: np.ndarray  # int64 [n, 2]: first token and end of each range in the source's tokens
    # The documents' first tokens in the row, and its end, int64 [documents + 1]; for shards of other
    # tools, which do not name their documents, only the end.
    edges: np.ndarray
    numbers: np.ndarray  # of the documents in their source, int64 [documents]
    text: str = ""  # a hash of the texts, equal for every tokenizer; empty: unknown

    @property
    def tokens(self) -> int:
        return int(self.edges[-1])

    @property
    def documents(self) -> int:
        return len(self.numbers)

    @property
    def identity(self) -> list[Any]:
        """What determines the tokens of the row."""
        shards = [(shard.identity, shard.tokens) for shard in self.corpus.index.shards]
        shards, places = ([], self.edges) if self.text else (shards, self.ranges)
        return [self.text, shards, hashlib.sha256(places.astype("<i8").tobytes()).hexdigest()]


@dataclass(frozen=True)
class Division:
    """The training and validation data of a recipe: for each member its parts."""

    train: list[list[Part]]
    val: list[list[Part]]
    shared: int = 0  # training documents left out, because the validation data has their texts

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """A hash of the tokens, their split and their tokenizer, equal in every directory."""
        description = tokenizer.describe().model_dump(exclude={"kind", "ends"})
        members = [[part.identity for part in parts] for parts in (*self.train, *self.val)]
        content = json.dumps([description, members], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


# -- the rules


def held_out(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which documents are held out by their hashes (uint64 [n]), bool [n]."""
    result: np.ndarray = hashes < np.uint64(int(Fraction(str(fraction)) * 2**64))
    return result


def _or_lowest(hashes: np.ndarray, first: np.ndarray, fraction: float) -> np.ndarray:
    """As `held_out`. If it holds out none of the `first` documents, it holds out their lowest hash,
    so that a small part of a source has validation data, too."""
    held = held_out(hashes, fraction)
    if len(first) and not held_out(first, fraction).any():
        held |= hashes == first.min()
    return held


def held_out_examples(groups: np.ndarray, fraction: float) -> np.ndarray:
    """Which questions or conversations are held out, by the hashes of all groups of a source.

    Of fewer than FEW groups it is the given fraction, rounded, but at least one and not all.
    """
    distinct = np.unique(groups)
    if len(distinct) >= FEW and fraction:
        return _or_lowest(groups, groups[:FEW], fraction)
    count = min(len(distinct) - 1, max(1, round(len(distinct) * fraction))) if fraction else 0
    return groups < distinct[count] if count > 0 else np.zeros(len(groups), bool)


def held_out_texts(
    hashes: np.ndarray, characters: np.ndarray, fraction: float
) -> tuple[np.ndarray, np.ndarray]:
    """Which documents of a source are held out whole, bool [documents]; and how many characters of
    each train before a held-out end, int64 [documents], or -1 if the document is not cut."""
    cuts = np.full(len(hashes), -1)
    if not fraction:
        return np.zeros(len(hashes), bool), cuts
    is_cut = (characters > LONG_TEXT) | (len(hashes) < FEW)
    held = _or_lowest(hashes, hashes[:FEW][~is_cut[:FEW]], fraction) & ~is_cut
    share = 1 - Fraction(str(fraction))
    cuts[is_cut] = [int(size * share) for size in characters[is_cut].tolist()]
    return held, cuts


def training_characters(
    groups: np.ndarray, characters: np.ndarray, fraction: float, *, are_examples: bool
) -> np.ndarray:
    """The first characters of each document that train, int64 [documents]."""
    if are_examples:
        return np.where(held_out_examples(groups, fraction), 0, characters)
    held, cuts = held_out_texts(groups, characters, fraction)
    return np.where(held, 0, np.where(cuts >= 0, cuts, characters))


# -- limits


@dataclass(frozen=True)
class Limit:
    """How much of a source a recipe reads: its first documents, until they have `most` tokens, or
    characters if it is separate validation data. 0: all of it.

    The first FEW texts or groups decide how validation data is held out, so training reads these in
    any case.
    """

    most: int
    in_characters: bool = False

    def documents(self, table: Table) -> int | None:
        """The number of documents that are read; None if the table has too few."""
        if self.in_characters:
            last = int(np.searchsorted(np.cumsum(table.characters), self.most))
        else:
            first = np.sort(np.unique(table.groups, return_index=True)[1])  # of each group
            few = int(first[FEW - 1]) if len(first) >= FEW else len(table)
            last = max(few, int(np.searchsorted(table.edges[1:], self.most)))
        return last + 1 if self.most and last < len(table) else None


class Need:
    """Counts the documents that are written, until a recipe has enough of them."""

    def __init__(self, limit: Limit, table: Table):
        self._limit, self._characters = limit, int(table.characters.sum())
        self._groups = set(np.unique(table.groups)[:FEW].tolist())  # FEW at most

    def is_met(self, row: Row, tokens: int) -> bool:
        """Whether a row that is written is the last that is needed; `tokens`: written in all."""
        self._characters += row.characters
        if row.more:
            return False
        if self._limit.in_characters:
            return 0 < self._limit.most <= self._characters
        if len(self._groups) < FEW:
            self._groups.add(row.group or row.text)
        return len(self._groups) >= FEW and 0 < self._limit.most <= tokens


def limits_of(member: Member[Any]) -> list[Limit]:
    """The limits of a member's sources, training first: `data.max_tokens`, and for separate
    validation data `data.val_fraction` of it, in equal parts of the sources."""
    most = member.data.max_tokens
    characters = int(most * Fraction(str(member.data.val_fraction)))
    train, val = len(member.train), len(member.val)
    of_train = Limit(-(-most // max(1, train)))
    of_val = Limit(-(-characters // max(1, val)), in_characters=True)
    return [of_train] * train + [of_val] * val


# -- the pieces of a source


@dataclass
class Pieces:
    """The tokens of each document that train, and those held out.

    A shard of another tool, which does not name its documents, counts as one document.
    """

    corpus: Corpus
    train: np.ndarray  # first token and end of each document, int64 [documents, 2]
    val: np.ndarray  # the same of the held-out tokens
    texts: np.ndarray  # hashes of the documents, uint64; empty for shards of other tools
    cut: np.ndarray  # the characters before a held-out end, or 1; 0: the document is not cut
    limit: Limit
    is_val: bool = False  # separate validation data

    @property
    def is_cut(self) -> np.ndarray:
        return self.cut > 0

    def hold_out(self, held: np.ndarray) -> None:
        """Hold out whole documents (bool [documents])."""
        self.val[held] = self.train[held]
        keep(self.train, ~held)


def sizes_of(ranges: np.ndarray) -> np.ndarray:
    """The tokens of each document, int64 [documents]."""
    return ranges[:, 1] - ranges[:, 0]


def keep(ranges: np.ndarray, wanted: np.ndarray) -> None:
    """Empty the ranges of all but the `wanted` documents (bool [documents])."""
    ranges[~wanted, 1] = ranges[~wanted, 0]


def _pieces_of(corpus: Corpus, limit: Limit, *, is_lone: bool, is_val: bool = False) -> Pieces:
    """The documents of a source up to its limit, before any is held out.

    An end-of-text token does not begin a single text that is the only source (`is_lone`).
    """
    index, stream, table = corpus.index, corpus.stream, corpus.stream.table
    edges, texts = stream.edges, np.zeros(0, np.uint64)
    if len(table):
        count = limit.documents(table) or len(table)
        edges, texts = table.edges[: count + 1], table.field("text")[:count]
    ranges = np.stack([edges[:-1], edges[1:]], axis=1)
    eot_begins = not index.tokenizer.begin and index.tokenizer.eot is not None
    if is_lone and index.single_text and eot_begins:
        ranges[:1, 0] += 1
    cut = np.zeros(len(ranges), np.int64)
    return Pieces(corpus, ranges, ranges[:, [1, 1]], texts, cut, limit, is_val)


def _validation_pieces(corpus: Corpus, limit: Limit, member: Member[Corpus]) -> Pieces:
    """A source of separate validation data. A text ends at the limit."""
    pieces = _pieces_of(corpus, limit, is_lone=len(member.val) == 1, is_val=True)
    pieces.hold_out(np.ones(len(pieces.train), bool))
    table, last = corpus.stream.table, len(pieces.texts) - 1
    over = int(table.characters[: last + 1].sum()) - limit.most
    if limit.most and len(pieces.texts) and over > 0:
        pieces.cut[last] = max(1, int(table.characters[last]) - over)
        place = next(corpus.places_of([last], [int(pieces.cut[last])]))
        pieces.val[last, 1] = max(place, int(pieces.val[last, 0]) + 1)
    return pieces


def _training_pieces(corpus: Corpus, limit: Limit, member: Member[Corpus]) -> Pieces:
    """A source of training data, divided unless the validation data is separate."""
    data, table = member.data, corpus.stream.table
    pieces = _pieces_of(corpus, limit, is_lone=len(member.train) == 1)
    count = len(pieces.texts)
    if data.val_shards:
        _hold_out_shards(pieces, data)
    elif member.val or not data.val_fraction or not len(pieces.train):
        pass
    elif not count:
        _hold_out_end(pieces, data)
    elif corpus.index.masked:
        pieces.hold_out(held_out_examples(table.groups[:count], data.val_fraction))
    else:
        characters = table.characters[:count]
        held, cuts = held_out_texts(pieces.texts, characters, data.val_fraction)
        pieces.hold_out(held)
        numbers = np.flatnonzero(cuts >= 0)
        places = [*corpus.places_of(numbers.tolist(), cuts[numbers].tolist())]
        pieces.cut[numbers] = np.maximum(1, cuts[numbers])
        starts = pieces.train[numbers, 0]
        pieces.val[numbers, 0] = np.maximum(np.array(places, np.int64), starts)
        pieces.train[numbers, 1] = pieces.val[numbers, 0]
    return pieces


def _hold_out_shards(pieces: Pieces, data: DataSettings) -> None:
    """Hold out the first `data.val_shards` shards, which may end inside a document."""
    stream = pieces.corpus.stream
    end = data.val_shards * data.shard_tokens if len(pieces.texts) else 0
    if not end and data.val_shards < len(stream.shards):
        end = int(stream.edges[data.val_shards])
    if not 0 < end < pieces.train[-1:, 1].sum():
        problem = f"data.val_shards = {data.val_shards} of {len(stream.shards)}"
        remedy = "lower it or data.shard_tokens" + ", or raise data.max_tokens" * bool(
            data.max_tokens
        )
        raise UserError(f"{problem}: {remedy}")
    first, last = pieces.train.T
    place = np.clip(end, first, last)  # where the held-out tokens of each document end
    pieces.val, pieces.train = np.stack([first, place], axis=1), np.stack([place, last], axis=1)
    pieces.cut[(first < place) & (place < last)] = 1


def _hold_out_end(pieces: Pieces, data: DataSettings) -> None:
    """Hold out the shards of another tool that it calls so, or the end of all tokens."""
    names = [Path(shard.file).name.lower() for shard in pieces.corpus.index.shards]
    held = np.array([VALIDATION_NAME.search(name) is not None for name in names])
    if held.any() and not held.all():
        pieces.hold_out(held)
        return
    tokens = len(pieces.corpus.stream)
    place = tokens - max(1, int(tokens * Fraction(str(data.val_fraction))))
    pieces.val[:, 0] = pieces.train[:, 1] = np.clip(place, *pieces.train.T)


# -- the division


def divide(
    members: Sequence[Member[Corpus]],
    tokenizer: Tokenizer,
    sizes: tuple[int, int] = (0, 0),
    seed: int = 0,
) -> Division:
    """The training and validation data of a recipe; UserError if nothing is left for training.

    `sizes`: the items of training and validation (`data.train_size`, `data.eval_size`), chosen by
    `seed`; 0: all.
    """
    groups = list[list[Pieces]]()
    for member in members:
        limited = list(zip(member.sources, limits_of(member), strict=True))
        count = len(member.train)
        groups.append([_training_pieces(*pair, member) for pair in limited[:count]])
        groups[-1] += [_validation_pieces(*pair, member) for pair in limited[count:]]
    pieces = [p for group in groups for p in group]
    by_shard = any(member.data.val_shards for member in members)
    # copies in one source have equal hashes
    shared = _leave_out_shared(pieces) if by_shard or len(pieces) > 1 else 0
    for p in pieces:
        if p.limit.most and not p.corpus.index.masked:  # a text may end at the limit
            past = np.cumsum(sizes_of(p.train)) - p.limit.most
            p.train[:, 1] -= np.clip(past, 0, sizes_of(p.train))
    examples = [p for p in pieces if p.corpus.index.masked]
    for size, purpose in zip(sizes, ("train", "eval"), strict=True):
        if size:
            ranges = [p.train if purpose == "train" else p.val for p in examples]
            _choose([p.texts for p in examples], ranges, size, f"{purpose}/{seed}")
    train = [
        [_part(p, p.train, -p.cut) for p in group[: len(member.train)]]
        for group, member in zip(groups, members, strict=True)
    ]
    val = [[_part(p, p.val, p.cut) for p in group] for group in groups]
    if members[0].train and not any(part.tokens for parts in train for part in parts):
        names = ", ".join(corpus.spec.name for member in members for corpus in member.train)
        reason = "the validation data has it all" if shared else "there is no text"
        raise UserError(f"data.source: nothing is left for training in {names}: {reason}")
    return Division(train, [[part for part in parts if part.tokens] for parts in val], shared)


def _leave_out_shared(pieces: list[Pieces]) -> int:
    """Do not train on texts and shards of the validation data; the number of such documents."""
    whole, ends = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]  # texts, held out so
    for p in pieces:
        if len(p.texts):
            held = sizes_of(p.val) > 0
            whole.append(p.texts[held & ~p.is_cut])
            ends.append(p.texts[held & p.is_cut])
    texts, cut = np.unique(np.concatenate(whole)), np.unique(np.concatenate(ends))
    separate = [shard for p in pieces if p.is_val for shard in p.corpus.index.shards]
    files = {key for shard in separate for key in (shard.file, shard.identity)}
    shared = 0
    for p in pieces:
        if len(p.texts):
            also = np.isin(p.texts, texts) | (np.isin(p.texts, cut) & ~p.is_cut)
        else:
            shards = [{s.file, s.identity} & files for s in p.corpus.index.shards]
            also = np.array([*map(bool, shards)], bool)
        shared += int((also & (sizes_of(p.train) > 0)).sum())
        keep(p.train, ~also)
    return shared


def _choose(texts: list[np.ndarray], ranges: list[np.ndarray], size: int, purpose: str) -> None:
    """Keep `size` documents, chosen by the purpose with its seed, and the hashes of their texts."""
    key = np.frombuffer(seed_bytes(f"windlass/choose/{purpose}", 8), "<u8")[0]
    draws = [splitmix(hashes ^ key) for hashes in texts]
    present = [d[sizes_of(own) > 0] for d, own in zip(draws, ranges, strict=True)]
    flat = np.concatenate([np.zeros(0, np.uint64), *present])
    if len(flat) <= size:
        return
    last = np.partition(flat, size - 1)[size - 1]
    for draw, own in zip(draws, ranges, strict=True):
        keep(own, draw <= last)


def _part(pieces: Pieces, ranges: np.ndarray, cut: np.ndarray) -> Part:
    """The part of a set that has the `ranges` of a source's documents."""
    numbers = np.flatnonzero(sizes_of(ranges) > 0)
    start, stop = ranges[numbers].T
    begins = np.append(True, start[1:] != stop[:-1])[: len(start)]
    ranges = np.stack([start[begins], stop[np.append(begins[1:], True)[: len(stop)]]], axis=1)
    edges = np.append(0, np.cumsum(stop - start))
    if not len(pieces.texts):
        return Part(pieces.corpus, ranges, edges[-1:], numbers[:0])
    content = pieces.texts[numbers].tobytes() + cut[numbers].astype("<i8").tobytes()
    text = hashlib.sha256(content).hexdigest()[:16]
    return Part(pieces.corpus, ranges, edges, numbers, text)
