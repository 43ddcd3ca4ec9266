"""What is trained on, and what is held out: computed from the prepared tokens when they are read.

- A document is held out if the hash of its text is below `data.val_fraction`. So copies of a text
  are on one side, and neither the order of documents nor limits, tokenizer or ranks change a choice.
  If none of the first FEW documents is, the one with the smallest hash is, too.
- A text of over LONG_TEXT characters, and every text of a source with fewer than FEW documents,
  gives its last `data.val_fraction` characters, as nanoGPT cuts a text.
- Of fewer than FEW questions or conversations the ones with the smallest hashes are held out.
- A training text that the separate validation data also has is left out.
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

from windlass.data.order import splitmix
from windlass.data.shards import Index, Stream
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
            tokens = self.stream.read(*places[part : part + 2].tolist())
            first = len(self.tokenizer.first) if part == 0 else 0
            wanted = limit - int(ends[part] - sizes[part])
            decode = self.tokenizer.decode
            count = bisect_left(
                range(1, len(tokens) - first + 1),
                True,
                key=lambda n: len(decode(tokens[first : first + n])) > wanted,
            )
            yield int(places[part]) + first + count


@dataclass(frozen=True)
class Member:
    """The sources of a recipe, or one source of a mixture."""

    name: str  # in the mixture
    data: DataSettings  # as if the member were the whole recipe
    train: list[Corpus]
    val: list[Corpus]  # separate validation data


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


def surely_held_out(first: np.ndarray, fraction: float) -> np.ndarray:
    """The hash that is held out as well, if the fraction holds out none of the `first` documents, so
    that a small part of a source has validation data, too; uint64 [0 or 1]."""
    none = len(first) and not held_out(first, fraction).any()
    return np.unique(first)[: int(none)]


def held_out_examples(hashes: np.ndarray, fraction: float) -> np.ndarray:
    """Which questions or conversations are held out, by the hashes of all groups of a source.

    Of fewer than FEW groups it is the given fraction, rounded, but at least one and not all.
    """
    groups = np.unique(hashes)
    if not fraction:
        return np.zeros(len(hashes), bool)
    if len(groups) >= FEW:
        also = np.isin(hashes, surely_held_out(hashes[:FEW], fraction))
        return held_out(hashes, fraction) | also
    count = min(len(groups) - 1, max(1, round(len(groups) * fraction)))
    result: np.ndarray = hashes < groups[count] if count > 0 else np.zeros(len(hashes), bool)
    return result


def trained_characters(characters: int, fraction: Fraction) -> int:
    """The first characters of a text that train, if its end is held out."""
    return int(characters * (1 - fraction))


# -- the pieces of a source


@dataclass
class Pieces:
    """The tokens of each document that train, and those held out; int64 [documents] each.

    A shard of another tool, which does not name its documents, counts as one document.
    """

    corpus: Corpus
    start: np.ndarray
    stop: np.ndarray
    val_start: np.ndarray
    val_stop: np.ndarray
    texts: np.ndarray  # hashes of the documents, uint64; empty for shards of other tools
    groups: np.ndarray  # hashes that decide what is held out
    cut: np.ndarray  # the characters before a held-out end, or 1; 0: the document is not cut

    @property
    def is_cut(self) -> np.ndarray:
        return self.cut > 0

    def keep(self, wanted: np.ndarray) -> None:
        """Train on the `wanted` documents only (bool [documents])."""
        self.stop[~wanted] = self.start[~wanted]

    def keep_val(self, wanted: np.ndarray) -> None:
        self.val_stop[~wanted] = self.val_start[~wanted]


def pieces_of(
    corpus: Corpus, data: DataSettings, *, is_val: bool, separate: bool, lone: bool
) -> Pieces:
    """The documents of a source.

    Args:
        is_val: all of it is validation data.
        separate: there is validation data from elsewhere, so all of it trains.
        lone: the only source; then an end-of-text token does not begin a single text.
    """
    index, stream, table = corpus.index, corpus.stream, corpus.stream.table
    edges = table.edges if len(table) else stream.edges
    start, stop = edges[:-1].copy(), edges[1:].copy()
    if lone and index.single_text and not index.tokenizer.begin and index.tokenizer.eot is not None:
        start[:1] += 1
    limit = data.max_documents if len(table) else 0
    if limit and is_val:
        limit = max(1, int(limit * data.val_fraction)) if data.val_fraction else 0
    if limit:
        start, stop = start[:limit], stop[:limit]
    count = len(start)
    texts = table.field("text")[:count] if len(table) else np.zeros(0, np.uint64)
    groups = table.field("group")[:count] if index.masked else texts
    none = np.zeros(count, np.int64)
    pieces = Pieces(corpus, start, stop, stop.copy(), stop.copy(), texts, groups, none)
    if is_val:
        pieces.val_start, pieces.stop = start.copy(), start.copy()
    elif data.val_shards:
        _hold_out_shards(pieces, data)
    elif separate or not data.val_fraction or not count:
        pass
    elif not len(table):
        _hold_out_end(pieces, data)
    elif index.masked:
        held = held_out_examples(table.field("group"), data.val_fraction)[:count]
        _hold_out(pieces, held)
    else:
        characters, few = table.characters[:count], len(table) < FEW
        is_cut = np.full(count, few) | (characters > LONG_TEXT)
        also = surely_held_out(texts[:FEW][~is_cut[:FEW]], data.val_fraction)
        held = held_out(texts, data.val_fraction) | np.isin(texts, also)
        _hold_out(pieces, held & ~is_cut)
        share, numbers = Fraction(str(data.val_fraction)), np.flatnonzero(is_cut)
        cuts = [trained_characters(size, share) for size in characters[numbers].tolist()]
        places = [*corpus.places_of(numbers.tolist(), cuts)]
        pieces.cut[numbers] = np.maximum(1, np.array(cuts, np.int64))
        pieces.val_start[numbers] = np.maximum(np.array(places, np.int64), start[numbers])
        pieces.stop[numbers] = pieces.val_start[numbers]
    return pieces


def _hold_out(pieces: Pieces, held: np.ndarray) -> None:
    """Hold out whole documents."""
    pieces.val_start[held] = pieces.start[held]
    pieces.stop[held] = pieces.start[held]


def _hold_out_shards(pieces: Pieces, data: DataSettings) -> None:
    """Hold out the first `data.val_shards` shards, which may end inside a document."""
    stream = pieces.corpus.stream
    end = data.val_shards * data.shard_tokens if len(pieces.texts) else 0
    if not end and data.val_shards < len(stream.shards):
        end = int(stream.edges[data.val_shards])
    if not 0 < end < len(stream):
        problem = f"data.val_shards = {data.val_shards} of {len(stream.shards)}"
        raise UserError(f"{problem}: lower it or data.shard_tokens")
    pieces.val_start, pieces.val_stop = pieces.start, np.minimum(pieces.stop, end)
    pieces.val_stop = np.maximum(pieces.val_start, pieces.val_stop)
    pieces.start = np.minimum(np.maximum(pieces.start, end), pieces.stop)
    pieces.cut[(pieces.val_stop > pieces.val_start) & (pieces.stop > pieces.start)] = 1


def _hold_out_end(pieces: Pieces, data: DataSettings) -> None:
    """Hold out the shards of another tool that it calls so, or the end of all tokens."""
    names = [Path(shard.file).name.lower() for shard in pieces.corpus.index.shards]
    held = np.array([VALIDATION_NAME.search(name) is not None for name in names])
    if held.any() and not held.all():
        _hold_out(pieces, held)
        return
    tokens = len(pieces.corpus.stream)
    place = tokens - max(1, int(tokens * Fraction(str(data.val_fraction))))
    pieces.val_start = np.minimum(np.maximum(pieces.start, place), pieces.stop)
    pieces.stop = pieces.val_start.copy()


# -- the division


def _pieces(members: Sequence[Member]) -> tuple[list[list[Pieces]], list[list[Pieces]], int]:
    """The pieces of each member's sources, before `data.max_tokens`, and of its separate validation
    data; and the number of training documents left out, because validation data has them."""
    own, evals = list[list[Pieces]](), list[list[Pieces]]()
    for member in members:
        lone = len(member.train) == 1
        how: dict[str, Any] = {"is_val": False, "separate": bool(member.val), "lone": lone}
        own.append([pieces_of(corpus, member.data, **how) for corpus in member.train])
        how = {"is_val": True, "separate": True, "lone": len(member.val) == 1}
        evals.append([pieces_of(corpus, member.data, **how) for corpus in member.val])
        _limit_val(member.data, evals[-1])
    by_shard = any(member.data.val_shards for member in members)
    if not by_shard and sum(map(len, (*own, *evals))) < 2:  # copies have equal hashes
        return own, evals, 0
    return own, evals, _leave_out_shared(own, evals)


def training_tokens(members: Sequence[Member]) -> list[list[int]]:
    """The tokens that each source of each member has for training, before any limit."""
    own, _, _ = _pieces(members)
    return [[int((p.stop - p.start).sum()) for p in pieces] for pieces in own]


def divide(
    members: Sequence[Member], tokenizer: Tokenizer, sizes: tuple[int, int] = (0, 0), seed: int = 0
) -> Division:
    """The training and validation data of a recipe; UserError if nothing is left for training.

    `sizes`: the items of training and validation (`data.train_size`, `data.eval_size`), chosen by
    `seed`; 0: all.
    """
    own, evals, shared = _pieces(members)
    for member, pieces in zip(members, own, strict=True):
        _limit(member.data, pieces)
    for size, purpose in zip(sizes, ("train", "eval"), strict=True):
        if size:
            _choose([p for group in (*own, *evals) for p in group], size, purpose, seed)
    train = [[_part(p, p.start, p.stop) for p in group] for group in own]
    val = [
        [_part(p, p.val_start, p.val_stop, is_val=True) for p in (*group, *separate)]
        for group, separate in zip(own, evals, strict=True)
    ]
    if members[0].train and not any(part.tokens for parts in train for part in parts):
        names = ", ".join(corpus.spec.name for member in members for corpus in member.train)
        reason = "the validation data has it all" if shared else "there is no text"
        raise UserError(f"data.source: nothing is left for training in {names}: {reason}")
    return Division(train, [[part for part in parts if part.tokens] for parts in val], shared)


def _leave_out_shared(own: list[list[Pieces]], evals: list[list[Pieces]]) -> int:
    """Do not train on texts and shards of the validation data; the number of such documents."""
    pieces = [p for group in own for p in group]
    separate = [p for group in evals for p in group]
    whole, ends = [np.zeros(0, np.uint64)], [np.zeros(0, np.uint64)]  # texts, held out so
    for p in (*pieces, *separate):
        if len(p.texts):
            held = p.val_stop > p.val_start
            whole.append(p.texts[held & ~p.is_cut])
            ends.append(p.texts[held & p.is_cut])
    texts, cut = np.unique(np.concatenate(whole)), np.unique(np.concatenate(ends))
    files = {key for p in separate for s in p.corpus.index.shards for key in (s.file, s.identity)}
    shared = 0
    for p in pieces:
        if len(p.texts):
            also = np.isin(p.texts, texts) | (np.isin(p.texts, cut) & ~p.is_cut)
        else:
            shards = [{s.file, s.identity} & files for s in p.corpus.index.shards]
            also = np.array([*map(bool, shards)], bool)
        shared += int((also & (p.stop > p.start)).sum())
        p.keep(~also)
    return shared


def _limit(data: DataSettings, pieces: list[Pieces]) -> None:
    """Apply `data.max_tokens`: equal parts of the sources, and of a shorter one all that it has."""
    if not data.max_tokens:
        return
    totals = [int((p.stop - p.start).sum()) for p in pieces]
    for p, tokens in zip(pieces, equal_parts(data.max_tokens, totals), strict=True):
        ends = np.cumsum(p.stop - p.start)
        last = int(np.searchsorted(ends, tokens))  # the document that reaches the limit
        kept = np.arange(len(ends)) <= last
        if last < len(ends) and (not len(p.texts) or len(ends) == 1 or p.is_cut[last]):
            p.stop[last] -= int(ends[last]) - tokens  # a text that may be cut
        p.keep(kept)
        if len(p.texts) and last < len(ends):
            has_val = (p.val_stop > p.val_start)[kept].any()
            p.keep_val(kept if has_val else np.arange(len(ends)) < FEW)


def _limit_val(data: DataSettings, separate: list[Pieces]) -> None:
    """Limit separate validation data to `data.val_fraction` of `data.max_tokens`, in characters."""
    characters = int(data.max_tokens * Fraction(str(data.val_fraction)))
    if not characters:
        return
    sizes = [p.corpus.stream.table.characters[: len(p.texts)] for p in separate]
    limits = equal_parts(characters, [int(size.sum()) for size in sizes])
    for p, size, limit in zip(separate, sizes, limits, strict=True):
        if len(p.texts):
            ends = np.cumsum(size)
            p.keep_val(np.arange(len(ends)) <= int(np.searchsorted(ends, limit)))
            if len(ends) == 1:
                p.val_stop[0] = max(p.val_start[0] + 1, next(p.corpus.places_of([0], [limit])))


def equal_parts(limit: int, totals: Sequence[int]) -> list[int]:
    """`limit` in equal parts; from a smaller total comes all of it, and more from the others."""
    parts, left = [0] * len(totals), limit
    order = sorted(range(len(totals)), key=totals.__getitem__)
    for place, number in enumerate(order):
        parts[number] = min(totals[number], left // (len(order) - place))
        left -= parts[number]
    return parts


def _choose(pieces: list[Pieces], size: int, purpose: str, seed: int) -> None:
    """Keep `size` documents, chosen by the seed and the hashes of their texts."""
    key = np.frombuffer(seed_bytes(f"windlass/choose/{purpose}/{seed}", 8), "<u8")[0]
    training = purpose == "train"
    pieces = [p for p in pieces if p.corpus.index.masked]
    present = [(p.stop > p.start) if training else (p.val_stop > p.val_start) for p in pieces]
    draws = [splitmix(p.texts ^ key) for p in pieces]
    own = [draw[here] for draw, here in zip(draws, present, strict=True)]
    flat = np.concatenate([np.zeros(0, np.uint64), *own])
    if len(flat) <= size:
        return
    last = np.partition(flat, size - 1)[size - 1]
    for p, draw, here in zip(pieces, draws, present, strict=True):
        (p.keep if training else p.keep_val)(here & (draw <= last))


def _part(pieces: Pieces, start: np.ndarray, stop: np.ndarray, is_val: bool = False) -> Part:
    """The part of a set, from the first token and the end of each document."""
    numbers = np.flatnonzero(stop > start)
    start, stop = start[numbers], stop[numbers]
    begins = np.append(True, start[1:] != stop[:-1])[: len(start)]
    ranges = np.stack([start[begins], stop[np.append(begins[1:], True)[: len(stop)]]], axis=1)
    edges = np.append(0, np.cumsum(stop - start))
    if not len(pieces.texts):
        return Part(pieces.corpus, ranges, edges[-1:], numbers[:0])
    places = pieces.cut[numbers] * (1 if is_val else -1)
    content = pieces.texts[numbers].tobytes() + places.astype("<i8").tobytes()
    text = hashlib.sha256(content).hexdigest()[:16]
    return Part(pieces.corpus, ranges, edges, numbers, text)
