"""Describe the data of a run: in numbers for its ledger, in words for the terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from windlass.data.batch import Samples, unpadded_tokens
from windlass.data.open import Data
from windlass.data.samples import ExampleSamples
from windlass.data.split import DocumentSet, hash_of
from windlass.errors import plural

MANY_EPOCHS = 4  # more repetitions of text are worth much less than new text (arXiv 2305.16264)
UNITS = {"text": "documents", "squad": "questions", "chat": "conversations"}
Facts = dict[str, Any]


def describe(data: Data) -> Facts:
    """The data of a run as JSON values, without facts that do not apply.

    A mixture's `mixture` (`mixture.shares_of_run`) is added once the run has a length.
    """
    facts: Facts = {"vocab": data.vocab}
    train, val = list[DocumentSet](), list[DocumentSet]()
    if data.prepared is not None and data.division is not None:
        train, val = data.division.train, list(filter(len, data.division.val))
        members = data.prepared.members
        names = [spec.name for member in members for spec in member.train]
        indexes = list({c.directory: c.index for c in data.prepared.corpora}.values())
        chats = [index for index in indexes if index.template]
        units = {UNITS[member.data.format] for member in members}
        if sum(index.rows for index in chats) > sum(i.items - i.left_out for i in chats):
            units = {"rows"}  # each answer has one, as `Template.rows` says
        facts["source"] = names[0] if len(names) == 1 else names
        facts["files"] = len({f["file"] for i in indexes for f in i.source.get("files", ())})
        facts["items"] = units.pop() if len(units) == 1 else "items"  # their kind
        facts["tokenizer"] = members[0].data.tokenizer
        commits = [index.source["commit"] for index in indexes if "commit" in index.source]
        optional = {
            "template": chats[0].template if chats else "",  # the layout of conversations
            "revision": commits[0] if commits else "",  # of the Hub
            "changed": data.prepared.changed,  # sources that have changed since
            "shared": data.division.shared,  # training items that the validation data has, too
            "unreadable": sum(index.left_out for index in indexes),  # `data.on_bad_item`
        }
        facts |= {name: value for name, value in optional.items() if value}
    if data.train is not None:
        facts["train"] = _describe_set(data.train, train)
    if data.val is not None:
        facts["val"] = _describe_set(data.val, val)
        if val and all(one.documents for one in val):
            # a hash of the validation text, equal for every tokenizer
            text = " ".join(one.text for one in val)
            facts["val"]["text"] = text if len(val) == 1 else hash_of(text.encode())[:16]
    return facts


def _describe_set(samples: Samples, sets: list[DocumentSet]) -> Facts:
    """The facts of samples, from these sets of prepared documents, or from the user's data."""
    facts: Facts = {"samples": len(samples)}
    read = unpadded_tokens(samples)
    if read:
        facts["tokens_per_sample"] = round(read / len(samples), 3)
    counts = {
        "tokens": getattr(samples, "tokens", read),  # in an epoch, without padding
        "label_tokens": getattr(samples, "valid_tokens", None),  # that count in the loss
    }
    facts |= {name: count for name, count in counts.items() if count is not None}
    documents = sum(one.documents for one in sets)
    if isinstance(samples, ExampleSamples):
        if samples.document_mask:  # the part of all rows that is tokens
            facts["fill"] = round(samples.unpadded_tokens / (len(samples) * samples.context), 6)
        facts["items"] = len(samples.sizes)
        facts["left_out"] = samples.left_out
        facts["cut"] = samples.cut
        facts["cut_tokens"] = samples.cut_tokens
    elif documents > 1:  # the count of a single text says nothing
        facts["items"] = documents
    return facts


def warnings(facts: Facts) -> list[str]:
    """Warnings about the sources of a recipe."""
    texts = [*facts.get("changed", ())]
    if shared := facts.get("shared"):
        shown = plural(shared, facts["items"].removesuffix("s"))
        texts.append(f"{shown} left out of training, because the validation data has the texts")
    if unreadable := facts.get("unreadable"):
        texts.append(f"{plural(unreadable, 'item')} could not be read: see left-out.txt")
    return texts + repeated(facts.get("mixture", ()))


def lines(facts: Facts, context: int) -> dict[str, str]:
    """The facts in words, a line each, without facts that do not apply."""
    shown: dict[str, str] = {}
    if "source" in facts:
        source, files = facts["source"], facts["files"]
        shown["data"] = source if isinstance(source, str) else ", ".join(source)
        shown["data"] += f" ({files:,} files)" if files > 1 else ""
        shown["data"] += f" at commit {facts['revision']}" if "revision" in facts else ""
    if mixture := facts.get("mixture"):
        shown["mixture"] = mixture_table(mixture)
    units = facts.get("items", "samples")
    unit = units.removesuffix("s")
    for name, heading in (("train", "training"), ("val", "validation")):
        subset, parts = facts.get(name), list[str]()
        if subset is None:
            shown[heading] = "none"
            continue
        if items := subset["samples"] if units == "samples" else subset.get("items"):
            parts.append(plural(items, unit))
        if tokens := subset.get("tokens"):
            parts.append(f"{tokens:,} tokens")
            if (labels := subset.get("label_tokens")) and units not in ("documents", "samples"):
                parts.append(f"{labels:,} of them ({labels / tokens:.0%}) count in the loss")
        if "fill" in subset:
            filled = f"{100 * subset['fill']:.1f} % filled"
            parts.append(f"{subset['samples']:,} rows of {context:,} tokens, {filled}")
        if cut := subset.get("cut"):
            lost = subset["cut_tokens"]
            fraction = lost / (subset["tokens"] + lost)
            size = f"model.context = {context:,}"
            parts.append(f"{cut:,} cut at {size}, {lost:,} tokens lost ({fraction:.1%})")
        if left_out := subset.get("left_out"):
            parts.append(f"{plural(left_out, unit)} left out: nothing is left to learn")
        shown[heading] = ", ".join(parts)
    kind = f"{facts['tokenizer']}, " if "tokenizer" in facts else ""
    shown["tokenizer"] = f"{kind}{facts['vocab']:,} ids"
    if "template" in facts:
        shown["template"] = facts["template"]
    return shown


def repeated(mixture: Iterable[Facts]) -> list[str]:
    """A warning for each source of a mixture that is read more than MANY_EPOCHS times."""
    why = f"after about {MANY_EPOCHS} epochs repeated text teaches little (arXiv 2305.16264)"
    return [
        f"data.mix: the run reads {row['name']} {row['epochs']:.3g} times, and {why}: "
        "lower its weight"
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
