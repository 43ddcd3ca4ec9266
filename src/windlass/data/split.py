"""What is trained on, and what is held out: computed from the prepared tokens when they are read.

- A document is held out if the hash of its text is below `data.val_fraction`. So copies of a text
  are on one side, and neither the order of documents nor limits, tokenizer or ranks change a choice.
  If none of the first FEW documents is, the one with the smallest hash is, too.
- A text of over LONG_TEXT characters, and every text of a source with fewer than FEW documents,
  gives its last `data.val_fraction` characters, as nanoGPT cuts a text.
- If a source has fewer than FEW questions or conversations, a fraction with the smallest hashes is
  held out.
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

from windlass.data.locate import Member
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
    if not fraction:
        return np.zeros(len(hashes), bool), np.full(len(hashes), -1)
    share = 1 - Fraction(str(fraction))
    is_cut = (characters > LONG_TEXT) | (len(hashes) < FEW)
    held = _or_lowest(hashes, hashes[:FEW][~is_cut[:FEW]], fraction) & ~is_cut
    cuts = np.full(len(hashes), -1)
    cuts[is_cut] = [int(size * share) for size in characters[is_cut].tolist()]
    return held, cuts


def training_tokens(
    data: DataSettings, tokens: np.ndarray, characters: np.ndarray, groups: np.ndarray
) -> np.ndarray:
    """The tokens of each document that train, estimated from the document alone, int64
    [documents]."""
    fraction = 0.0 if data.val_shards else data.val_fraction
    is_cut = (characters > LONG_TEXT) & (fraction > 0)
    before = np.where(is_cut, (tokens * (1 - fraction)).astype(np.int64), tokens)
    result: np.ndarray = before * (is_cut | ~held_out(groups, fraction))
    return result


def needed_documents(
    data: DataSettings, sources: int, tokens: np.ndarray, characters: np.ndarray, groups: np.ndarray
) -> int:
    """How many first documents of a source `data.max_tokens` needs, as `Need` prepares them.

    A directory may have more for another recipe.
    """
    first = np.sort(np.unique(groups, return_index=True)[1])  # of each group
    if len(first) < FEW:
        return len(groups)
    wanted = part_of(data, sources) + data.val_shards * data.shard_tokens
    ends = np.cumsum(training_tokens(data, tokens, characters, groups))
    return max(int(first[FEW - 1]), int(np.searchsorted(ends, wanted))) + 1


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


def pieces_of(corpus: Corpus, member: Member[Corpus], *, is_val: bool) -> Pieces:
    """The documents of a member's source for training, or for validation alone.

    An end-of-text token does not begin a single text that is the only source.
    """
    data, index, stream, table = member.data, corpus.index, corpus.stream, corpus.stream.table
    edges = table.edges if len(table) else stream.edges
    train, count = np.stack([edges[:-1], edges[1:]], axis=1), len(edges) - 1
    eot_begins = not index.tokenizer.begin and index.tokenizer.eot is not None
    is_lone = len(member.val if is_val else member.train) == 1
    if is_lone and index.single_text and eot_begins:
        train[:1, 0] += 1
    texts = table.field("text") if len(table) else np.zeros(0, np.uint64)
    pieces = Pieces(corpus, train, train[:, [1, 1]], texts, np.zeros(count, np.int64))
    if is_val:
        pieces.hold_out(np.ones(count, bool))
    elif data.val_shards:
        _hold_out_shards(pieces, data)
    elif member.val or not data.val_fraction or not count:
        pass
    elif not len(table):
        _hold_out_end(pieces, data)
    elif index.masked:
        pieces.hold_out(held_out_examples(table.field("group"), data.val_fraction))
    else:
        held, cuts = held_out_texts(texts, table.characters, data.val_fraction)
        pieces.hold_out(held)
        numbers = np.flatnonzero(cuts >= 0)
        places = [*corpus.places_of(numbers.tolist(), cuts[numbers].tolist())]
        pieces.cut[numbers] = np.maximum(1, cuts[numbers])
        pieces.val[numbers, 0] = np.maximum(np.array(places, np.int64), train[numbers, 0])
        pieces.train[numbers, 1] = pieces.val[numbers, 0]
    if len(table) and not is_val and data.max_tokens:
        groups = table.field("group") if index.masked else texts
        sizes = np.diff(table.edges)
        number = needed_documents(data, len(member.train), sizes, table.characters, groups)
        for ranges in (pieces.train, pieces.val):
            keep(ranges, np.arange(count) < number)
    return pieces


def _hold_out_shards(pieces: Pieces, data: DataSettings) -> None:
    """Hold out the first `data.val_shards` shards, which may end inside a document."""
    stream = pieces.corpus.stream
    end = data.val_shards * data.shard_tokens if len(pieces.texts) else 0
    if not end and data.val_shards < len(stream.shards):
        end = int(stream.edges[data.val_shards])
    if not 0 < end < len(stream):
        problem = f"data.val_shards = {data.val_shards} of {len(stream.shards)}"
        raise UserError(f"{problem}: lower it or data.shard_tokens")
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


def _pieces(
    members: Sequence[Member[Corpus]],
) -> tuple[list[list[Pieces]], list[list[Pieces]], int]:
    """The pieces of each member's sources, before `data.max_tokens`, and of its separate validation
    data; and the number of training documents left out, because validation data has them."""
    own, evals = list[list[Pieces]](), list[list[Pieces]]()
    for member in members:
        own.append([pieces_of(corpus, member, is_val=False) for corpus in member.train])
        evals.append([pieces_of(corpus, member, is_val=True) for corpus in member.val])
        if val_characters(member.data, len(member.val)):
            _limit_val(member.data, evals[-1])
    by_shard = any(member.data.val_shards for member in members)
    several = sum(map(len, (*own, *evals))) > 1  # copies in one source have equal hashes
    return own, evals, _leave_out_shared(own, evals) if by_shard or several else 0


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
    own, evals, shared = _pieces(members)
    for member, pieces in zip(members, own, strict=True):
        if member.data.max_tokens:
            _limit(member.data, pieces)
    examples = [p for group in (*own, *evals) for p in group if p.corpus.index.masked]
    for size, purpose in zip(sizes, ("train", "eval"), strict=True):
        if size:
            ranges = [p.train if purpose == "train" else p.val for p in examples]
            _choose([p.texts for p in examples], ranges, size, f"{purpose}/{seed}")
    train = [[_part(p, p.train, -p.cut) for p in group] for group in own]
    val = [
        [_part(p, p.val, p.cut) for p in (*group, *separate)]
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
            held = sizes_of(p.val) > 0
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
        shared += int((also & (sizes_of(p.train) > 0)).sum())
        keep(p.train, ~also)
    return shared


def _limit(data: DataSettings, pieces: list[Pieces]) -> None:
    """Apply `data.max_tokens`, in equal parts of the sources."""
    tokens = part_of(data, len(pieces))
    for p in pieces:
        ends = np.cumsum(sizes_of(p.train))
        kept, last = _up_to(tokens, ends)
        if last < len(ends) and (not len(p.texts) or len(ends) == 1 or p.is_cut[last]):
            p.train[last, 1] -= int(ends[last]) - tokens  # a text that may be cut
        keep(p.train, kept)
        if len(p.texts) and last < len(ends):
            has_val = sizes_of(p.val)[kept].any()
            keep(p.val, kept if has_val else np.arange(len(ends)) < FEW)


def _limit_val(data: DataSettings, separate: list[Pieces]) -> None:
    """Apply the limit of separate validation data, in equal parts of the sources."""
    limit = val_characters(data, len(separate))
    for p in separate:
        size = p.corpus.stream.table.characters
        if len(p.texts):
            keep(p.val, _up_to(limit, np.cumsum(size))[0])
            if len(size) == 1:
                p.val[0, 1] = max(p.val[0, 0] + 1, next(p.corpus.places_of([0], [limit])))


def _up_to(limit: int, ends: np.ndarray) -> tuple[np.ndarray, int]:
    """Which documents come up to a limit, with the one that reaches it, and the number of that."""
    last = int(np.searchsorted(ends, limit))
    return np.arange(len(ends)) <= last, last


def part_of(data: DataSettings, sources: int) -> int:
    """The training tokens of each source at most, by `data.max_tokens`; 0: no limit."""
    return -(-data.max_tokens // max(1, sources))


def val_characters(data: DataSettings, sources: int) -> int:
    """The characters of each separate validation source at most: `data.val_fraction` of
    `data.max_tokens`; 0: no limit."""
    return -(-int(data.max_tokens * Fraction(str(data.val_fraction))) // max(1, sources))


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
