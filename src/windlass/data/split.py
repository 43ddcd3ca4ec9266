"""Divide prepared tokens into training and validation data. A recipe reads the first documents of a
source (`Corpus.documents_read`), and these rules look at them alone:

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np

from windlass.data.order import splitmix
from windlass.data.recipe_sources import Member, SourceSpec
from windlass.data.shards import FEW, Corpus, spans
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.seeds import seed_bytes

LONG_TEXT = 400_000
# Another tool's validation shard, for example `val.bin`, `valid.bin`, `edufineweb_val_000000.npy`.
VALIDATION_NAME = re.compile(r"(^|[^a-z])(val(id(ation)?)?|test|dev|eval)([^a-z]|$)")


class DocumentSet:
    """The documents of a training or validation set, end to end as one row of tokens.

    - `edges`: the first token of each document in the row, and its end, int64 [documents + 1];
    - `text`: a hash of the texts, equal for every tokenizer.
    """

    def __init__(
        self,
        corpora: list[Corpus],
        numbers: list[np.ndarray],  # of the documents in each corpus, int64 [n]
        ranges: list[np.ndarray],  # their first tokens and ends in the corpus, int64 [n, 2]
        text: str = "",
    ):
        self.corpora, self.numbers, self.text = corpora, numbers, text
        starts, stops = np.concatenate([np.zeros((0, 2), np.int64), *ranges]).T
        self.edges = np.append(0, np.cumsum(stops - starts))
        # Neighbours are one range: its corpus, its first token in the corpus, and in the row
        corpus = np.repeat(np.arange(len(corpora)), list(map(len, ranges)))
        is_next = (starts[1:] == stops[:-1]) & (corpus[1:] == corpus[:-1])
        begins = np.append(True, ~is_next)[: len(starts)]
        self._corpus, self._starts = corpus[begins], starts[begins]
        self._edges = np.append(self.edges[:-1][begins], self.edges[-1])

    def __len__(self) -> int:
        return int(self.edges[-1])

    @property
    def documents(self) -> int:
        """The number of documents; 0 with shards of other tools, which do not name them."""
        return len(self.edges) - 1 if all(c.has_documents for c in self.corpora) else 0

    def field(self, name: str) -> np.ndarray:
        """A field of the table for each document, int64 [documents]."""
        pairs = zip(self.corpora, self.numbers, strict=True)
        fields = [corpus.field(name)[own].astype(np.int64) for corpus, own in pairs]
        return np.concatenate([np.zeros(0, np.int64), *fields])

    @property
    def shards(self) -> np.ndarray:
        """The first token of each shard of the corpora, and the set's end, int64 [shards + 1]."""
        places, sizes = [np.zeros(0)], np.diff(self._edges)
        for number, corpus in enumerate(self.corpora):
            here = self._corpus == number
            there, rows = (
                np.stack([first[here], (first + sizes)[here]], axis=1).ravel()
                for first in (self._starts, self._edges[:-1])
            )
            places.append(np.interp(corpus.shard_edges[:-1], there, rows))
        return np.append(np.concatenate(places), len(self)).astype(np.int64)

    def read(self, start: int, stop: int) -> np.ndarray:
        """The tokens from `start` to `stop` of the row, as `Corpus.read`, int64 [stop - start]."""
        parts = [np.zeros(0, np.int64)]
        for number, begin, end in spans(self._edges, start, stop):
            first, corpus = int(self._starts[number]), self.corpora[self._corpus[number]]
            parts.append(corpus.read(first + begin, first + end))
        return np.concatenate(parts)


@dataclass(frozen=True)
class Division:
    """The training and validation data of a recipe, of each member."""

    train: list[DocumentSet]
    val: list[DocumentSet]
    shared: int = 0  # training documents left out, because the validation data has their texts

    def fingerprint(self, tokenizer: Tokenizer) -> str:
        """A hash of the tokens, their split and their tokenizer, equal in every directory."""
        description = tokenizer.describe().model_dump(exclude={"kind", "ends"})
        # the texts determine the tokens, in whatever shards
        sets = [[one.text, hash_of(one.edges.tobytes())] for one in (*self.train, *self.val)]
        return hash_of(json.dumps([description, sets], sort_keys=True).encode())


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def divide(
    members: Sequence[Member],
    by_source: Mapping[SourceSpec, Corpus],
    train_size: int = 0,
    eval_size: int = 0,
    seed: int = 0,
) -> Division:
    """The training and validation data of a recipe; UserError if nothing is left for training.

    `train_size` and `eval_size`: numbers of questions or conversations, chosen by `seed`; 0: all.
    """
    by_member = [[_divided(by_source[s], member) for s in member.sources] for member in members]
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
    groups = [(group, len(m.train)) for group, m in zip(by_member, members, strict=True)]
    train = [_set_of(group[:count], is_val=False) for group, count in groups]
    val = [_set_of(group, is_val=True) for group in by_member]
    if members[0].train and not any(map(len, train)):
        names = ", ".join(spec.name for member in members for spec in member.train)
        reason = "the validation data has it all" if shared else "it holds no text"
        setting = "data.mix" if members[0].name else "data.source"
        raise UserError(f"{setting}: nothing is left for training in {names}: {reason}")
    return Division(train, val, shared)


@dataclass
class SplitSource:
    """The tokens of each document that train, and the held-out ones.

    A shard of another tool, which does not name its documents, counts as one document.
    """

    corpus: Corpus
    train: np.ndarray  # first token and end of each document, int64 [documents, 2]
    val: np.ndarray  # the same of the held-out tokens
    texts: np.ndarray  # hashes of the documents, uint64
    # The characters before a held-out end, of another tool's shard the tokens; 1 if the beginning
    # is held out; 0: the document is not cut
    cut: np.ndarray

    def hold_out(self, held: np.ndarray) -> None:
        """Hold out whole documents (bool [documents])."""
        self.val[held] = self.train[held]
        keep_only(self.train, ~held)


def sizes_of(ranges: np.ndarray) -> np.ndarray:
    return ranges[:, 1] - ranges[:, 0]


def keep_only(ranges: np.ndarray, wanted: np.ndarray) -> None:
    """Empty the ranges of all but the `wanted` documents (bool [documents])."""
    ranges[~wanted, 1] = ranges[~wanted, 0]


def _divided(corpus: Corpus, member: Member) -> SplitSource:
    """A source of a member up to its limit, divided into training and validation data."""
    spec, index = corpus.spec, corpus.index
    count = corpus.documents_read or corpus.documents
    if not corpus.has_documents:
        hashes = [int(hash_of(shard.identity.encode())[:16], 16) for shard in index.shards]
        edges, texts = corpus.shard_edges, np.array(hashes, np.uint64)
    else:
        edges, texts = corpus.document_edges[: count + 1], corpus.field("text")[:count]
    train = np.stack([edges[:-1], edges[1:]], axis=1)
    is_lone = len(member.val if spec.is_val else member.train) == 1
    if is_lone and index.single_text and index.tokenizer.eot is not None:
        # An end-of-text token does not begin a single text that is the only source.
        train[:1, 0] += 0 if index.tokenizer.begin else 1
    source = SplitSource(corpus, train, train[:, [1, 1]], texts, np.zeros(len(train), np.int64))
    characters = corpus.characters[:count]
    if spec.is_val:
        source.hold_out(np.ones(len(train), bool))
        over = int(characters.sum()) - spec.limit
        if spec.limit and count and over > 0 and not index.masked:  # end the last text at the limit
            last = np.array([count - 1])
            source.cut[last] = np.maximum(1, characters[last] - over)
            place = corpus.places_of(last, source.cut[last])
            source.val[last, 1] = np.maximum(place, source.val[last, 0] + 1)
    elif member.data.val_shards or not corpus.has_documents:
        _hold_out_shards(source, member)
    else:  # whole documents, or the ends of documents
        fraction, groups = member.held_fraction, corpus.groups[:count]
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


def _hold_out_shards(source: SplitSource, member: Member) -> None:
    """Hold out the first `data.val_shards` shards, which may end inside a document; or another
    tool's shards by their names, else the end of all their tokens."""
    corpus, data, fraction = source.corpus, member.data, member.held_fraction
    names = [Path(shard.file).name.lower() for shard in corpus.index.shards]
    held = np.array([VALIDATION_NAME.search(name) is not None for name in names], bool)
    first, last = source.train.T
    if data.val_shards:
        end = data.val_shards * data.shard_tokens
        if not corpus.has_documents:
            end = int(corpus.shard_edges[: data.val_shards + 1][-1])
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
        place = np.clip(tokens - max(1, int(tokens * Fraction(str(fraction)))), first, last)
        source.cut = np.where(place < last, place - first, 0)
        source.val[:, 0] = source.train[:, 1] = place


def _leave_out_shared(sources: list[SplitSource]) -> int:
    """Do not train on texts and shards of the validation data; the number of such documents."""
    # the hashes of held-out texts, and the characters of each that may train: those before the cut
    texts, characters = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for source in sources:
        held = sizes_of(source.val) > 0
        texts.append(source.texts[held])
        characters.append(source.cut[held] * (not source.corpus.spec.is_val))
    held_texts, number = np.unique(np.concatenate(texts), return_inverse=True)
    allowed = np.full(len(held_texts), np.iinfo(np.int64).max)
    np.minimum.at(allowed, number, np.concatenate(characters))  # the least of each text
    count = 0
    for source in sources:
        shared = np.isin(source.texts, held_texts)
        places = np.searchsorted(held_texts, source.texts[shared])
        cut = source.cut[shared]
        shared[shared] = (cut == 0) | (cut > allowed[places])
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


def _set_of(sources: Sequence[SplitSource], is_val: bool) -> DocumentSet:
    """The documents of the sources that train, or that are held out."""
    corpora, numbers, ranges, texts = list[Corpus](), list[np.ndarray](), list[np.ndarray](), b""
    for source in sources:
        tokens = source.val if is_val else source.train
        chosen = np.flatnonzero(sizes_of(tokens) > 0)
        if len(chosen):
            corpora.append(source.corpus)
            numbers.append(chosen)
            ranges.append(tokens[chosen])
            cut = source.cut[chosen] if is_val else -source.cut[chosen]
            texts += source.texts[chosen].tobytes() + cut.tobytes()
    return DocumentSet(corpora, numbers, ranges, hash_of(texts)[:16])
