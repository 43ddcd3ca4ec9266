"""The data of a run: prepared tokens, divided and cut into samples, or the user's samples; and
what they are in numbers, for `windlass prepare`, a run's start and its ledger.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.chat import PLAIN_LAYOUT, Template
from windlass.data.mixture import MANY_EPOCHS, MixedSamples
from windlass.data.prepare import Prepared, prepare
from windlass.data.samples import (
    Batch,
    BestFitSamples,
    ExampleSamples,
    PackedSamples,
    Samples,
    Tokens,
    masks_documents,
    real_tokens,
)
from windlass.data.split import Division, Part, divide
from windlass.data.tokenizer import FOLDER, Tokenizer
from windlass.errors import UserError, plural
from windlass.recipe import DataSettings, Recipe

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks


@dataclass(frozen=True)
class Data:
    """The data of a run. A user's own has two sets of samples, a fingerprint and a vocabulary."""

    train: Samples
    val: Samples | None
    tokenizer: Tokenizer  # may be None in the user's `Data`; then Windlass generates no text
    fingerprint: str  # compared on resume: equal for equal tokens, split and tokenizer
    vocab: int
    # the layout of conversations (`data.format = "chat"`)
    template: Template | None = field(default=None, repr=False)
    # of prepared data: see `describe`
    prepared: Prepared | None = field(default=None, repr=False)
    division: Division | None = field(default=None, repr=False)

    def save_tokenizer(self, directory: Path) -> None:
        if self.tokenizer is not None:
            self.tokenizer.save(directory)
            if self.template is not None:
                self.template.save(directory / FOLDER)


def open_data(recipe: Recipe, ranks: Ranks | None = None, **how: Any) -> Data:
    """The data of a recipe, prepared and checked; arguments as `prepare`."""
    prepared = prepare(recipe, ranks, **how)
    rows = recipe.model.vocab
    if recipe.model.kind == "gpt" and rows and prepared.tokenizer.vocab > rows:
        ids = f"the tokenizer {recipe.data.tokenizer} has {prepared.tokenizer.vocab:,} ids"
        raise UserError(f"model.vocab = {rows:,}: {ids}; write that or 0")
    return open_samples(recipe, prepared)


def open_samples(recipe: Recipe, prepared: Prepared) -> Data:
    """Prepared data, divided and cut; `train` is None without training data (`only_val`)."""
    data, tokenizer, members = recipe.data, prepared.tokenizer, prepared.members
    if recipe.model.is_new:
        tokenizer.start = None  # of the model that the tokenizer comes from
    division = divide(members, (data.train_size, data.eval_size), recipe.run.seed)
    sets = list[Samples | None]()
    for is_val, parts in ((False, division.train), (True, division.val)):
        opened = dict[str, Samples]()
        for member, own in zip(members, parts, strict=True):
            samples = _samples(member.data, own, tokenizer, recipe.model.context, is_val)
            if samples is not None and len(samples):
                opened[member.name] = samples
            elif samples is not None and not (data.mix and is_val):
                which = ", ".join(filter(None, ("val" if is_val else "train", member.name)))
                problem = f"{getattr(samples, 'tokens', 0):,} tokens ({which}) are too few"
                if isinstance(samples, ExampleSamples) and samples.left_out:
                    problem = f"no item ({which}) fits, {samples.left_out:,} are left out: too few"
                places, size = ", ".join(map(str, prepared.directories)), recipe.model.context + 1
                raise UserError(f"{places}: {problem} for a sample of model.context + 1 = {size:,}")
        mixed = MixedSamples(opened, spread=is_val) if data.mix and opened else None
        sets.append(mixed or opened.get(""))
    train, val = sets
    kinds = {member.data.format for member in members}
    return Data(
        train,  # type: ignore[arg-type]
        val,
        tokenizer,
        division.fingerprint(tokenizer),
        tokenizer.vocab,
        prepared.template if kinds != {"text"} else None,
        prepared,
        division,
    )


def _samples(
    data: DataSettings, parts: Sequence[Part], tokenizer: Tokenizer, context: int, is_val: bool
) -> Samples | None:
    if not parts:
        return None
    tokens = Tokens(parts)
    if data.format != "text":
        examples = ExampleSamples(tokens, context, pad=tokenizer.eot or 0)
        is_packed = data.packing == "best-fit" and len(examples)
        return BestFitSamples(examples, context) if is_packed else examples
    problem = ""  # the reason why documents cannot be apart
    if len(parts) == 1 and parts[0].corpus.index.single_text:
        problem = "the corpus is one text"
    elif any(part.tokens and not part.documents for part in parts):
        problem = "the shards do not name documents"
    if data.document_mask is True and problem and not is_val:  # one text needs no mask
        raise UserError(f'data.document_mask: {problem}: write "auto", or false')
    apart, following = data.document_mask is not False and not problem, (*tokenizer.first, 0)[0]
    return PackedSamples(tokens, context, ragged=is_val, apart=apart, following=following)


class DatasetSamples:
    """A map-style `torch.utils.data.Dataset` whose items are integer token tensors [T + 1]."""

    def __init__(self, dataset: Any, context: int):
        self.dataset, self.context = dataset, context

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, indices: np.ndarray) -> Batch[np.ndarray]:
        rows = np.stack([self.item(index) for index in indices.tolist()])
        return Batch(rows[:, :-1], rows[:, 1:])

    def item(self, index: int) -> np.ndarray:
        """Item `index`, int64 [T + 1]; UserError if it has another shape or type."""
        item = self.dataset[index]
        # numpy would read the items of any other object, such as a dataset, perhaps without end.
        is_row = hasattr(item, "__array__") or isinstance(item, list | tuple)
        item = np.asarray(item if is_row else None)
        if item.dtype.kind not in "iu" or item.shape != (self.context + 1,):
            raise UserError(
                f"data: item {index} of the dataset is {item.dtype} {list(item.shape)}; "
                f"it must hold integers [{self.context + 1}], model.context + 1 tokens"
            )
        return item.astype(np.int64)


def own_data(data: Any, recipe: Recipe, measured: bool = False) -> Data | None:
    """A user's `Data`, or its datasets, of which every item is read once for a fingerprint."""
    if isinstance(data, Data | None):
        return data
    pair = data if isinstance(data, tuple) else (None, data) if measured else (data, None)
    if len(pair) != 2:
        raise UserError("data: give one dataset, or a pair: (training, validation)")
    sets, digest, largest = list[Any](), hashlib.sha256(), 0
    for dataset in pair:
        if dataset is None:
            sets.append(None)
            continue
        if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
            raise UserError(
                f"data: {type(dataset).__name__} lacks a length or an index; Windlass reads samples "
                "in its own order, so give a map-style dataset"
            )
        samples = DatasetSamples(dataset, recipe.model.context)
        for index in range(len(samples)):
            row = samples.item(index)
            if row.min() < 0:
                raise UserError(f"data: item {index} of the dataset has a negative token")
            digest.update(row.tobytes())
            largest = max(largest, int(row.max()))
        sets.append(samples)
    train, val = sets
    return Data(train, val, None, digest.hexdigest()[:16], largest + 1)  # type: ignore[arg-type]


Facts = dict[str, Any]
UNITS = {"text": "documents", "squad": "questions", "chat": "conversations"}


def describe(data: Data) -> Facts:
    """The facts of opened data, as JSON values, without facts that do not apply.

    - `items`: the kind of item, and for each split their number; `files`: the number of files.
    - For each split `tokens` in an epoch, without padding, and `label_tokens`, which count in the
      loss; for `val` `text`, a hash of its text that is equal for every tokenizer.
    - `shared`: training items left out, because the validation data has them; `unreadable`: items
      that `data.on_bad_item` left out; `unused`: sources without training data.
    - Examples: `cut` (items longer than the context), `cut_tokens` (lost by them),
      `left_out` (nothing left to learn).
    - Documents apart: `attended`, the mean length of the part of a token's document in its row.
    - Best-fit packing: `fill` (the part of all rows that is tokens) and `items_per_sample`.
    - A mixture, once the run has a length: `mixture`, from `mixture.shares_of_run`.
    """
    facts: Facts = {"vocab": data.vocab}
    if data.prepared is not None:
        assert data.division is not None
        members = data.prepared.members
        corpora = {corpus.directory: corpus for corpus in data.prepared.corpora}
        indexes = [corpus.index for corpus in corpora.values()]
        names = [corpus.spec.name for member in members for corpus in member.train]
        files = {file["file"] for index in indexes for file in index.source.get("files", ())}
        units = {UNITS[member.data.format] for member in members}
        commits = (index.source.get("commit") for index in indexes)
        chats = [index for index in indexes if index.template]
        unused = [p.corpus.spec for p in chain(*data.division.train) if not p.tokens]
        rows = sum(index.documents for index in chats)
        if rows > sum(index.items - index.left_out for index in chats):
            units = {"rows"}  # each answer has one, as `Template.rows` says
        facts |= {
            "source": names[0] if len(names) == 1 else names,
            "files": len(files),
            "items": units.pop() if len(units) == 1 else "items",
            "tokenizer": members[0].data.tokenizer,
            "changed": list(data.prepared.changed) or None,
            "shared": data.division.shared or None,
            "unused": [f"{spec.setting}: {spec.name}" for spec in unused] or None,
            "unreadable": sum(index.left_out for index in indexes) or None,
            "revision": next(filter(None, commits), None),
            "template": chats[0].template if chats else None,
        }
    for name, samples in (("train", data.train), ("val", data.val)):
        facts[name] = None if samples is None else _present(_split(name, samples, data))
    return _present(facts)


def _present(facts: Facts) -> Facts:
    return {key: value for key, value in facts.items() if value is not None}


def _split(name: str, samples: Samples, data: Data) -> Facts:
    split: Facts = {"samples": len(samples), "label_tokens": getattr(samples, "valid_tokens", None)}
    if tokens := real_tokens(samples):
        split["tokens_per_sample"] = round(tokens / len(samples), 3)
    split["tokens"] = getattr(samples, "tokens", tokens)
    if masks_documents(samples) and hasattr(samples, "attended"):
        split["attended"] = round(samples.attended, 3)
    items: Any = samples
    if isinstance(samples, BestFitSamples):
        items, places_in_rows = samples.items, len(samples) * samples.context
        split["fill"] = round(samples.real_tokens / places_in_rows, 6)
        split["items_per_sample"] = round(samples.documents_per_row, 3)
    if data.division is None:
        return split
    parts = list(chain(*(data.division.val if name == "val" else data.division.train)))
    if name == "val" and all(part.text for part in parts):
        joined = " ".join(part.text for part in parts)
        is_one = len(parts) == 1
        split["text"] = joined if is_one else hashlib.sha256(joined.encode()).hexdigest()[:16]
    documents = sum(part.documents for part in parts)
    if isinstance(items, ExampleSamples):
        split |= {"items": len(items), "left_out": items.left_out}
        split |= {"cut": items.cut, "cut_tokens": items.cut_tokens}
    elif documents > 1:  # the count of a single text says nothing
        split["items"] = documents
    return split


def warnings(facts: Facts) -> list[str]:
    """Warnings about the sources of a recipe."""
    texts, template = [*facts.get("changed", ())], facts.get("template", "")
    if template.startswith(PLAIN_LAYOUT) and facts["tokenizer"].startswith("hf:"):
        texts += [f"conversations are written as {template}; a model trained to chat has its own"]
    if shared := facts.get("shared"):
        shown = plural(shared, facts["items"].removesuffix("s"))
        texts.append(f"{shown} left out of training, because the validation data has the texts")
    if unreadable := facts.get("unreadable"):
        texts.append(f"{unreadable:,} items could not be read; left-out.txt lists them")
    if unused := facts.get("unused"):
        texts.append(f"nothing is left for training in {', '.join(unused)}")
    texts += repeated(facts.get("mixture", ()))
    return texts


def lines(facts: Facts, context: int) -> dict[str, str]:
    """The facts in words, a line each, without facts that do not apply."""
    shown: dict[str, str] = {}
    if "source" in facts:
        source, files = facts["source"], facts["files"]
        names = ", ".join(source) if isinstance(source, list) else source
        shown["data"] = f"{names}{f' ({files:,} files)' if files > 1 else ''}"
        shown["data"] += f" at commit {facts['revision']}" if "revision" in facts else ""
    if mixture := facts.get("mixture"):
        shown["mixture"] = mixture_table(mixture)
    units = facts.get("items", "samples")
    unit, packed, cuts = units.removesuffix("s"), list[str](), list[str]()
    for name, title in (("train", "training"), ("val", "validation")):
        if (split := facts.get(name)) is None:
            shown[title] = "none"
            continue
        items = split.get("items") if "source" in facts else split["samples"]
        parts = [plural(items, unit)] if items else []
        if tokens := split.get("tokens"):
            parts.append(f"{tokens:,} tokens")
            if (labels := split.get("label_tokens")) and units not in ("documents", "samples"):
                parts.append(f"{labels:,} of them ({labels / tokens:.0%}) count in the loss")
        shown[title] = ", ".join(parts)
        if "fill" in split:
            full = f"{split['samples']:,} rows, {100 * split['fill']:.1f} % filled"
            packed.append(f"{full}, {split['items_per_sample']:.3g} {units} in each")
        parts = []  # what it lost to the context
        if cut := split.get("cut", 0):
            lost, every = split["cut_tokens"], plural(split["items"], unit)
            fraction = lost / (split["tokens"] + lost)
            parts.append(f"{cut:,} of {every} cut, {lost:,} tokens lost ({fraction:.1%})")
        if left_out := split.get("left_out", 0):
            parts.append(f"{plural(left_out, unit)} left out: they have nothing left to learn")
        cuts += [", ".join(parts)] * bool(parts)
    kind = f"{facts['tokenizer']}, " if "tokenizer" in facts else ""
    shown["tokenizer"] = f"{kind}{facts['vocab']:,} ids"
    if "template" in facts:
        shown["template"] = facts["template"]
    if packed:
        shown["packing"] = f"rows of {context:,} tokens: {'; validation: '.join(packed)}"
    if cuts:
        shown["cut"] = f"at model.context = {context:,}: {'; validation: '.join(cuts)}"
    return shown


def repeated(mixture: Iterable[Facts]) -> list[str]:
    """A warning for each source of a mixture that is read more than MANY_EPOCHS times."""
    why = f"after about {MANY_EPOCHS} epochs repeated text teaches little (arXiv 2305.16264)"
    advice = f"{why}: lower its weight"
    return [
        f"data.mix: the run reads {row['name']} {row['epochs']:.3g} times, and {advice}"
        for row in mixture
        if row["epochs"] > MANY_EPOCHS
    ]


def mixture_table(rows: Iterable[Facts]) -> str:
    """The sources of a mixture over the whole run; a share for each stage."""
    cells: list[tuple[str, ...]] = [("source", "share", "samples", "tokens", "epochs")]
    for row in rows:
        shares = " -> ".join(f"{100 * weight:.4g} %" for weight in row["weights"])
        tokens = "?" if row["tokens"] is None else f"{row['tokens']:,}"
        cells.append((row["name"], shares, f"{row['samples']:,}", tokens, f"{row['epochs']:.3g}"))
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *(n.rjust(w) for n, w in zip(numbers, widths, strict=True))])
        for name, *numbers in cells
    )
