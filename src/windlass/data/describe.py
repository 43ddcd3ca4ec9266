"""Describe the data of a run: in numbers for its ledger, in words for the terminal."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import chain
from typing import Any, TypedDict

from windlass.data.batch import Samples, real_tokens
from windlass.data.mixture import MANY_EPOCHS
from windlass.data.prepare import Prepared
from windlass.data.run_data import Data
from windlass.data.samples import BestFitSamples, ExampleSamples
from windlass.data.split import Division, Part
from windlass.errors import plural

UNITS = {"text": "documents", "squad": "questions", "chat": "conversations"}


class SetFacts(TypedDict, total=False):
    """The training or the validation data, without numbers that do not apply."""

    samples: int
    items: int  # documents, questions or conversations
    tokens: int  # in an epoch, without padding
    label_tokens: int  # that count in the loss
    tokens_per_sample: float
    text: str  # a hash of the validation text, equal for every tokenizer
    cut: int  # examples longer than the context
    cut_tokens: int  # that these lose
    left_out: int  # examples that have nothing left to learn
    fill: float  # best-fit packing: the part of all rows that is tokens


class DataFacts(TypedDict, total=False):
    """The data of a run as JSON values, without facts that do not apply."""

    vocab: int
    train: SetFacts
    val: SetFacts
    source: str | list[str]
    files: int
    items: str  # the kind of item, in the plural
    tokenizer: str
    template: str  # the layout of conversations
    revision: str  # the commit of a data set of the Hub
    changed: list[str]  # sources that have changed since they were prepared
    shared: int  # training items left out, because the validation data has them
    unreadable: int  # items that `data.on_bad_item` left out
    mixture: list[dict[str, Any]]  # `mixture.shares_of_run`, once the run has a length


def describe(data: Data) -> DataFacts:
    facts = DataFacts(vocab=data.vocab)
    if data.prepared is not None and data.division is not None:
        facts.update(_describe_sources(data.prepared, data.division))
    if data.train is not None:  # also of the user's own data
        parts = data.division.train if data.division else []
        facts["train"] = _describe_set(data.train, list(chain(*parts)))
    if data.val is not None:
        parts = data.division.val if data.division else []
        facts["val"] = _describe_set(data.val, list(chain(*parts)))
        if data.division and (text := _text_of(list(chain(*parts)))):
            facts["val"]["text"] = text
    return facts


def _describe_sources(prepared: Prepared, division: Division) -> DataFacts:
    members = prepared.members
    names = [corpus.spec.name for member in members for corpus in member.train]
    indexes = list({corpus.directory: corpus.index for corpus in prepared.corpora}.values())
    files = {file["file"] for index in indexes for file in index.source.get("files", ())}
    chats = [index for index in indexes if index.template]
    units = {UNITS[member.data.format] for member in members}
    if sum(index.documents for index in chats) > sum(i.items - i.left_out for i in chats):
        units = {"rows"}  # each answer has one, as `Template.rows` says
    facts = DataFacts(
        source=names[0] if len(names) == 1 else names,
        files=len(files),
        items=units.pop() if len(units) == 1 else "items",
        tokenizer=members[0].data.tokenizer,
    )
    if chats:
        facts["template"] = chats[0].template
    if commits := [index.source["commit"] for index in indexes if index.source.get("commit")]:
        facts["revision"] = commits[0]
    if prepared.changed:
        facts["changed"] = prepared.changed
    if division.shared:
        facts["shared"] = division.shared
    if unreadable := sum(index.left_out for index in indexes):
        facts["unreadable"] = unreadable
    return facts


def _describe_set(samples: Samples, parts: list[Part]) -> SetFacts:
    """The facts of samples, from these parts of prepared sources, or from the user's data."""
    facts = SetFacts(samples=len(samples))
    read = real_tokens(samples)
    if read:
        facts["tokens_per_sample"] = round(read / len(samples), 3)
    tokens = getattr(samples, "tokens", read)
    if tokens is not None:
        facts["tokens"] = tokens
    labels = getattr(samples, "valid_tokens", None)
    if labels is not None:
        facts["label_tokens"] = labels
    examples: Any = samples
    if isinstance(samples, BestFitSamples):
        examples = samples.items
        facts["fill"] = round(samples.real_tokens / (len(samples) * samples.context), 6)
    documents = sum(part.documents for part in parts)
    if isinstance(examples, ExampleSamples):
        facts["items"] = len(examples)
        facts["left_out"] = examples.left_out
        facts["cut"] = examples.cut
        facts["cut_tokens"] = examples.cut_tokens
    elif documents > 1:  # the count of a single text says nothing
        facts["items"] = documents
    return facts


def _text_of(parts: list[Part]) -> str:
    """A hash of the texts of parts; empty if one does not name its texts."""
    if not all(part.text for part in parts):
        return ""
    if len(parts) == 1:
        return parts[0].text
    joined = " ".join(part.text for part in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def warnings(facts: DataFacts) -> list[str]:
    """Warnings about the sources of a recipe."""
    texts = [*facts.get("changed", ())]
    if shared := facts.get("shared"):
        shown = plural(shared, facts["items"].removesuffix("s"))
        texts.append(f"{shown} left out of training, because the validation data has the texts")
    if unreadable := facts.get("unreadable"):
        texts.append(f"{unreadable:,} items could not be read; left-out.txt lists them")
    return texts + repeated(facts.get("mixture", ()))


def lines(facts: DataFacts, context: int) -> dict[str, str]:
    """The facts in words, a line each, without facts that do not apply."""
    shown: dict[str, str] = {}
    if "source" in facts:
        source, files = facts["source"], facts["files"]
        shown["data"] = source if isinstance(source, str) else ", ".join(source)
        if files > 1:
            shown["data"] += f" ({files:,} files)"
        if "revision" in facts:
            shown["data"] += f" at commit {facts['revision']}"
    if mixture := facts.get("mixture"):
        shown["mixture"] = mixture_table(mixture)
    units = facts.get("items", "samples")
    shown["training"] = _size(facts.get("train"), units)
    shown["validation"] = _size(facts.get("val"), units)
    kind = f"{facts['tokenizer']}, " if "tokenizer" in facts else ""
    shown["tokenizer"] = f"{kind}{facts['vocab']:,} ids"
    if "template" in facts:
        shown["template"] = facts["template"]
    sets = [facts[name] for name in ("train", "val") if name in facts]
    if packed := [_fill(own) for own in sets if "fill" in own]:
        shown["packing"] = f"rows of {context:,} tokens: {'; validation: '.join(packed)}"
    if cuts := [text for own in sets if (text := _lost(own, units))]:
        shown["cut"] = f"at model.context = {context:,}: {'; validation: '.join(cuts)}"
    return shown


def _size(own: SetFacts | None, units: str) -> str:
    if own is None:
        return "none"
    parts = list[str]()
    if items := own["samples"] if units == "samples" else own.get("items"):
        parts.append(plural(items, units.removesuffix("s")))
    if tokens := own.get("tokens"):
        parts.append(f"{tokens:,} tokens")
        if (labels := own.get("label_tokens")) and units not in ("documents", "samples"):
            parts.append(f"{labels:,} of them ({labels / tokens:.0%}) count in the loss")
    return ", ".join(parts)


def _fill(own: SetFacts) -> str:
    return f"{own['samples']:,} rows, {100 * own['fill']:.1f} % filled"


def _lost(own: SetFacts, units: str) -> str:
    """What examples lose to the context."""
    unit = units.removesuffix("s")
    parts = list[str]()
    if cut := own.get("cut"):
        lost = own["cut_tokens"]
        fraction = lost / (own["tokens"] + lost)
        every = plural(own["items"], unit)
        parts.append(f"{cut:,} of {every} cut, {lost:,} tokens lost ({fraction:.1%})")
    if left_out := own.get("left_out"):
        parts.append(f"{plural(left_out, unit)} left out: they have nothing left to learn")
    return ", ".join(parts)


def repeated(mixture: Iterable[dict[str, Any]]) -> list[str]:
    """A warning for each source of a mixture that is read more than MANY_EPOCHS times."""
    why = f"after about {MANY_EPOCHS} epochs repeated text teaches little (arXiv 2305.16264)"
    advice = f"{why}: lower its weight"
    return [
        f"data.mix: the run reads {row['name']} {row['epochs']:.3g} times, and {advice}"
        for row in mixture
        if row["epochs"] > MANY_EPOCHS
    ]


def mixture_table(rows: Iterable[dict[str, Any]]) -> str:
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
