"""The division into training and validation data, computed from the prepared tokens. A recipe reads
the first documents of a source (`Limit`), and these rules look at them alone:

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, cast

import numpy as np

from windlass.data.corpus import FEW, Corpus, Limit, with_limits
from windlass.data.items import Question, example_of
from windlass.data.locate import Member, SourceSpec
from windlass.data.order import splitmix
from windlass.data.sources import open_source
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.recipe import DataSettings, Recipe
from windlass.seeds import seed_bytes

LONG_TEXT = 400_000
# Another tool's validation shard, for example `val.bin`, `valid.bin`, `edufineweb_val_000000.npy`.
VALIDATION_NAME = re.compile(r"(^|[^a-z])(val(id(ation)?)?|test|dev|eval)([^a-z]|$)")


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
                shards, places = ([], part.edges) if part.text else (shards, part.ranges)
                digest = hashlib.sha256(places.astype("<i8").tobytes()).hexdigest()
                members[-1].append([part.text, shards, digest])
        content = json.dumps([description, members], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def held_out(
    groups: np.ndarray, characters: np.ndarray, fraction: float, *, are_examples: bool
) -> tuple[np.ndarray, np.ndarray]:
    """The documents of a source that are held out whole, bool [documents]; and the characters of
    each that train before a held-out end, int64 [documents], -1 if a document is not cut.

    `groups`: the hashes that decide, uint64 [documents].
    """
    whole, cuts = np.zeros(len(groups), bool), np.full(len(groups), -1)
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
    held: np.ndarray = hashes < bound
    if len(first) and first.min() >= bound:
        held |= hashes == first.min()
    return held


def draws_of(hashes: np.ndarray, purpose: str) -> np.ndarray:
    """The random numbers that choose texts by their hashes, both uint64 [n]."""
    key = np.frombuffer(seed_bytes(f"windlass/choose/{purpose}", 8), "<u8")[0]
    return splitmix(hashes ^ key)


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

    def from_ends(self, ranges: np.ndarray) -> np.ndarray:
        """Ranges relative to the end of their documents, which are equal in copies of a text."""
        return ranges - np.maximum(self.train[:, 1], self.val[:, 1])[:, None]

    def hold_out(self, held: np.ndarray) -> None:
        """Hold out whole documents (bool [documents])."""
        self.val[held] = self.train[held]
        keep(self.train, ~held)


def sizes_of(ranges: np.ndarray) -> np.ndarray:
    return ranges[:, 1] - ranges[:, 0]


def keep(ranges: np.ndarray, wanted: np.ndarray) -> None:
    """Empty the ranges of all but the `wanted` documents (bool [documents])."""
    ranges[~wanted, 1] = ranges[~wanted, 0]


def _divided(corpus: Corpus, limit: Limit, member: Member[Corpus]) -> Pieces:
    """A source of a member up to its limit, divided into training and validation data."""
    index, table, data = corpus.index, corpus.stream.table, member.data
    edges, texts = corpus.stream.edges, np.zeros(0, np.uint64)
    if len(table):
        count = limit.documents(table) or len(table)
        edges, texts = table.edges[: count + 1], table.field("text")[:count]
    train = np.stack([edges[:-1], edges[1:]], axis=1)
    # An end-of-text token does not begin a single text that is the only source.
    is_lone = len(member.val if limit.is_val else member.train) == 1
    if is_lone and index.single_text and index.tokenizer.eot is not None:
        train[:1, 0] += not index.tokenizer.begin
    cut = np.zeros(len(train), np.int64)
    pieces = Pieces(corpus, train, train[:, [1, 1]], texts, cut, limit)
    if limit.is_val:
        pieces.hold_out(np.ones(len(train), bool))
        sizes, last = table.characters[: len(texts)], len(texts) - 1
        over = int(sizes.sum()) - limit.most
        # a text ends at the limit
        if limit.most and len(sizes) and over > 0 and not index.masked:
            cut[last] = max(1, int(sizes[last]) - over)
            place = next(corpus.places_of([last], [int(cut[last])]))
            pieces.val[last, 1] = max(place, int(pieces.val[last, 0]) + 1)
    elif data.val_shards:
        _hold_out_shards(pieces, data)
    elif member.val or not data.val_fraction or not len(train):
        pass  # all of it trains
    elif len(texts):
        _hold_out_documents(pieces, data.val_fraction)
    else:
        # the shards of another tool with such a name, else the end of all tokens
        names = [Path(shard.file).name.lower() for shard in index.shards]
        held = np.array([VALIDATION_NAME.search(name) is not None for name in names])
        if held.any() and not held.all():
            pieces.hold_out(held)
        else:
            tokens = len(corpus.stream)
            place = tokens - max(1, int(tokens * Fraction(str(data.val_fraction))))
            pieces.val[:, 0] = train[:, 1] = np.clip(place, *train.T)
    return pieces


def _hold_out_documents(pieces: Pieces, fraction: float) -> None:
    """Hold out whole documents, or the ends of documents."""
    corpus, count = pieces.corpus, len(pieces.texts)
    sizes, groups = corpus.stream.table.characters[:count], corpus.stream.table.groups[:count]
    whole, cuts = held_out(groups, sizes, fraction, are_examples=corpus.index.masked)
    pieces.hold_out(whole)
    numbers = np.flatnonzero(cuts >= 0)
    places = [*corpus.places_of(numbers.tolist(), cuts[numbers].tolist())]
    pieces.cut[numbers] = np.maximum(1, cuts[numbers])
    starts = pieces.train[numbers, 0]
    pieces.val[numbers, 0] = np.maximum(np.array(places, np.int64), starts)
    pieces.train[numbers, 1] = pieces.val[numbers, 0]


def _hold_out_shards(pieces: Pieces, data: DataSettings) -> None:
    """Hold out the first `data.val_shards` shards, which may end inside a document."""
    stream = pieces.corpus.stream
    end = data.val_shards * data.shard_tokens if len(pieces.texts) else 0
    if not end and data.val_shards < len(stream.shards):
        end = int(stream.edges[data.val_shards])
    if not 0 < end < pieces.train[-1:, 1].sum():
        problem = f"data.val_shards = {data.val_shards} of {len(stream.shards)}"
        more = ", or raise data.max_tokens" * (data.max_tokens > 0)
        raise UserError(f"{problem}: lower it or data.shard_tokens{more}")
    first, last = pieces.train.T
    place = np.clip(end, first, last)  # the end of the held-out tokens of each document
    pieces.val, pieces.train = np.stack([first, place], axis=1), np.stack([place, last], axis=1)
    pieces.cut[(first < place) & (place < last)] = 1


def divide(
    members: Sequence[Member[Corpus]], sizes: tuple[int, int] = (0, 0), seed: int = 0
) -> Division:
    """The training and validation data of a recipe; UserError if nothing is left for training.

    `sizes`: the items of training and validation (`data.train_size`, `data.eval_size`), chosen by
    `seed`; 0: all.
    """
    groups = list[list[Pieces]]()
    for member in members:
        groups.append([_divided(source, limit, member) for source, limit in with_limits(member)])
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
        ranges = [p.train if purpose == "train" else p.val for p in examples]
        draws = [draws_of(p.texts, f"{purpose}/{seed}") for p in examples]
        present = [d[sizes_of(own) > 0] for d, own in zip(draws, ranges, strict=True)]
        flat = np.concatenate([np.zeros(0, np.uint64), *present])
        if 0 < size < len(flat):
            last = np.partition(flat, size - 1)[size - 1]
            for draw, own in zip(draws, ranges, strict=True):
                keep(own, draw <= last)
    train = [
        [_part(p, p.train, -p.cut) for p in group[: len(member.train)]]
        for group, member in zip(groups, members, strict=True)
    ]
    val = [[_part(p, p.val, p.cut) for p in group] for group in groups]
    if members[0].train and not any(part.tokens for parts in train for part in parts):
        names = ", ".join(corpus.spec.name for member in members for corpus in member.train)
        reason = "the validation data has it all" if shared else "it holds no text"
        setting = "data.mix" if members[0].name else "data.source"
        raise UserError(f"{setting}: nothing is left for training in {names}: {reason}")
    return Division(train, [[part for part in parts if part.tokens] for parts in val], shared)


def _leave_out_shared(pieces: list[Pieces]) -> int:
    """Do not train on texts and shards of the validation data; the number of such documents."""
    # hashes of texts held out whole, and of texts held out in part
    whole, in_part = [np.zeros(0, np.uint64)], dict[int, set[tuple[int, int]]]()
    for p in pieces:
        if len(p.texts):
            held = sizes_of(p.val) > 0
            is_part = held & (p.cut > 0) & (not p.limit.is_val)
            whole.append(p.texts[held & ~is_part])
            ranges = p.from_ends(p.val)[is_part].tolist()
            for text, (first, last) in zip(p.texts[is_part].tolist(), ranges, strict=True):
                in_part.setdefault(text, set()).add((first, last))
    texts, cut = np.unique(np.concatenate(whole)), np.array([*in_part], np.uint64)
    separate = [shard for p in pieces if p.limit.is_val for shard in p.corpus.index.shards]
    files = {key for shard in separate for key in (shard.file, shard.identity)}
    shared = 0
    for p in pieces:
        if len(p.texts):
            also = np.isin(p.texts, texts)
            ranges = p.from_ends(p.train)
            for place in np.flatnonzero(np.isin(p.texts, cut)).tolist():
                first, last = ranges[place].tolist()
                parts = in_part[int(p.texts[place])]
                also[place] |= any(start < last and first < stop for start, stop in parts)
        else:
            shards = [{s.file, s.identity} & files for s in p.corpus.index.shards]
            also = np.array([*map(bool, shards)], bool)
        shared += int((also & (sizes_of(p.train) > 0)).sum())
        keep(p.train, ~also)
    return shared


def _part(pieces: Pieces, ranges: np.ndarray, cut: np.ndarray) -> Part:
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


def eval_questions(recipe: Recipe) -> list[Question]:
    """The suite's questions: `eval.squad_items` or `data.eval_size`, chosen by `run.seed`."""
    data, separate, questions = recipe.data, suite_sources(recipe), list[Question]()
    setting = "data.eval_source" if separate else "data.source"
    setting = "eval.squad_file" if recipe.eval.squad_file else setting
    limits = [key for key in ("val_shards", "max_tokens") if getattr(data, key)]
    if limits and not separate:
        problem = f"data.{limits[0]} counts tokens, and the suite needs whole questions"
        raise UserError(f"{problem}; set it to 0, or set data.eval_source or eval.squad_file")
    how: dict[str, Any] = {"columns": tuple(data.columns.items()), "setting": setting}
    for source in separate or data.sources:
        if source.partition(":")[0] != "squad":
            problem = f"{setting}: {source!r} lacks questions"
            raise UserError(f"{problem}; write squad or squad:FILE.json")
        split = "validation" if separate else "train"
        spec, asked = SourceSpec(source, source, "squad", split=split, **how), list[Question]()
        for item in open_source(spec, lambda _: None).items():
            try:
                asked.append(cast(Question, example_of(item, spec)))
            except UserError:
                if data.on_bad_item == "stop":
                    raise
        if not separate:  # as training divides each source
            groups = np.array([question.group for question in asked], np.uint64)
            sizes = np.zeros(len(asked), np.int64)
            whole, _ = held_out(groups, sizes, data.val_fraction, are_examples=True)
            asked = [asked[i] for i in np.flatnonzero(whole)]
        questions += asked
    if not questions:
        remedy = "set eval.squad_file, data.eval_source or data.val_fraction"
        raise UserError(f"no questions to evaluate: {remedy}")
    name, count = Counter(question.id for question in questions).most_common(1)[0]
    if count > 1:
        raise UserError(f"{setting}: two questions have the id {name!r}")
    size = recipe.eval.squad_items or data.eval_size or len(questions)
    hashes = np.array([question.hash for question in questions], np.uint64)
    draws = draws_of(hashes, f"eval/{recipe.run.seed}")
    return [questions[i] for i in sorted(np.argsort(draws, kind="stable")[:size].tolist())]


def suite_sources(recipe: Recipe) -> list[str]:
    """The separate sources of the suite's questions; empty if they are held out from training."""
    data = recipe.data
    if recipe.eval.squad_file:
        return [f"squad:{recipe.eval.squad_file}"]
    if data.format == "squad" and not data.mix:
        return data.eval_sources or [source for source in data.sources if source == "squad"]
    named = [source for source in data.eval_sources if source.partition(":")[0] == "squad"]
    return named or ["squad"]
