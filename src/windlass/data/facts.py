"""What a data set holds, in numbers: for `windlass prepare`, the first lines of a run, and its ledger."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.chat import PLAIN_LAYOUT
from windlass.data.samples import Samples, real_tokens
from windlass.data.shards import EVAL, MAIN, Index
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from windlass.data.prepare import Data

Facts = dict[str, Any]
SHOWN_SYMBOLS, MEASURED_SAMPLES = 1000, 16
ITEMS = {"text": "documents", "squad": "questions", "chat": "conversations"}


def describe(data: Data) -> Facts:
    """The facts of opened data, as JSON values: `vocab`, and for `train` and `val` their `samples` and `tokens_per_sample`.

    Of texts from several sources also `sources` and `eval_sources`, a row for each: `source`, `documents` and `tokens` that were
    read of it, tokens for `train` and `val`; of conversations `template` (how they are written down); with a character tokenizer
    `characters` (how many there are) and `symbols`. Of prepared data also `source`, `files` (how many), `items` (what they are), `tokenizer`, and for each split

    - `items`, `tokens` (in an epoch, padding not counted) and `label_tokens` (those that count in the loss);
    - `text` (of `val`: a hash of its text, equal for every tokenizer);
    - `lengths` of whole items in tokens (percentiles `50`, `90`, `99`, and `max`), `cut` (how many are longer than the context),
      `cut_tokens` (what they lost), `left_out` (items with nothing left to learn), where an item is a row.
    """
    facts: Facts = {"vocab": data.vocab}
    if index := data.index:
        files = {
            file["file"] for source in index.source.values() for file in source.get("files", ())
        }
        facts |= {
            "source": index.settings["source"],
            "files": len(files),
            "items": ITEMS[index.settings.get("format", "text")],
            "tokenizer": index.settings["tokenizer"],
        }
        facts |= {"template": index.template} if index.template else {}
        if index.tokenizer.kind == "char" and index.streams:
            ends = (
                0
                if index.tokenizer.eot is None
                else sum(index.documents(stem) for stem in index.streams)
            )
            characters = sum(shard.tokens for shard in index.shards) - ends
            facts |= {
                "characters": characters,
                "symbols": "".join(sorted(data.tokenizer.inner.get_vocab(with_added_tokens=False))),
            }
        for key, stream in (("sources", MAIN), ("eval_sources", EVAL)):
            stems = [stem for stem in index.streams if stem.startswith(stream)]
            facts |= {key: [_source(index, stem) for stem in stems]} if len(stems) > 1 else {}
    for name, samples in (("train", data.train), ("val", data.val)):
        if samples is None:
            continue
        split: Facts = {
            "samples": len(samples),
            "label_tokens": getattr(samples, "valid_tokens", None),
        }
        tokens = real_tokens(samples)
        if per_sample := tokens / len(samples) if tokens else _tokens_per_sample(samples):
            split["tokens_per_sample"] = round(per_sample, 3)
        split["tokens"] = getattr(samples, "tokens", split["label_tokens"])
        if index is not None and name in index.rows:
            rows = index.rows[name]
            split |= {"items": rows.items, "lengths": rows.lengths, "text": rows.text or None}
            split |= {"cut": rows.cut, "cut_tokens": rows.cut_tokens, "left_out": rows.left_out}
        elif index is not None:
            items = index.splits[name].documents
            split |= {"text": index.splits[name].text or None}
            split["items"] = (
                items if items > 1 else None
            )  # a text is one document, which says nothing
            if hasattr(samples, "lengths"):
                split |= {"items": len(samples), **samples.lengths}
        facts[name] = {key: value for key, value in split.items() if value is not None}
    return facts


def _tokens_per_sample(samples: Samples) -> float:
    """The mean over some samples of a user's own set, which does not tell; as the loader counts them."""
    places = np.unique(
        np.linspace(0, len(samples) - 1, min(len(samples), MEASURED_SAMPLES)).astype(np.int64)
    )
    if length := getattr(samples, "length", None):
        counts = sum(map(length, places.tolist()))
    else:
        counts = sum(
            int((samples.read(np.array([place]))[1] != IGNORE_INDEX).sum()) for place in places
        )
    return counts / max(1, len(places))


def _source(index: Index, stem: str) -> Facts:
    """What was read of a source, and what it is for."""
    shards, counts = index.streams[stem], dict.fromkeys(("train", "val"), 0)
    for name, split in index.splits.items():
        counts[name] += sum(part.stop - part.start for part in split.ranges if part.stream == stem)
    about = {"source": index.source[stem]["name"], "documents": index.documents(stem)}
    return about | {"tokens": sum(shard.tokens for shard in shards), **counts}


def warnings(facts: Facts) -> list[str]:
    """A sentence for each of several sources of which nothing is used, and for a chat template that is a makeshift."""
    texts, template = [], facts.get("template", "")
    if template.startswith(PLAIN_LAYOUT) and facts["tokenizer"].startswith("hf:"):
        texts = [
            f"conversations are written as {template}; a model that was trained to chat brings its own"
        ]
    for key, split, use in (
        ("sources", "train", "trained on"),
        ("eval_sources", "val", "evaluated"),
    ):
        for row in facts.get(key, ()):
            if not row[split]:
                why = "all of it is held out" if row["tokens"] else "no text was read of it"
                texts.append(f"data.{key.removesuffix('s')}: {row['source']} is not {use}: {why}")
    return texts


def lines(facts: Facts, context: int) -> dict[str, str]:
    """The facts in words, a line each: `data`, `tokenizer`, `training`, `validation`, and `lengths` and `cut` where items are rows."""
    shown: dict[str, str] = {}
    unit = facts.get("items", "samples")
    if "source" in facts:
        source, files = facts["source"], facts["files"]
        names = ", ".join(source) if isinstance(source, list) else source
        shown["data"] = f"{names}{f' ({files:,} files)' if files > 1 else ''}"
    if rows := [*facts.get("sources", ()), *facts.get("eval_sources", ())]:
        head = ("source", "documents", "tokens", "trained", "held out")
        cells = [
            head,
            *(
                (r["source"], *(f"{r[k]:,}" for k in ("documents", "tokens", "train", "val")))
                for r in rows
            ),
        ]
        widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
        shown["sources"] = "\n".join(
            "  ".join(
                [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(head)))]
            )
            for row in cells
        )
    for name, title in (("train", "training"), ("val", "validation")):
        if split := facts.get(name):
            items = split.get("items") if "source" in facts else split["samples"]
            parts = [count(items, unit)] if items else []
            tokens, labels = split.get("tokens"), split.get("label_tokens")
            parts += [f"{tokens:,} tokens"] if tokens else []
            if tokens and labels and facts.get("items") in ("questions", "conversations"):
                parts[-1] += f", {labels:,} of them ({labels / tokens:.0%}) count in the loss"
            shown[title] = ", ".join(parts)
    shown.setdefault("validation", "none")
    shown["tokenizer"] = ", ".join(
        [*([facts["tokenizer"]] if "tokenizer" in facts else []), f"{facts['vocab']:,} ids"]
    )
    if "symbols" in facts:
        symbols = repr(facts["symbols"])
        shown["characters"] = f"{facts['characters']:,}"
        shown["symbols"] = (
            symbols if len(symbols) <= SHOWN_SYMBOLS else f"{symbols[:SHOWN_SYMBOLS]}..."
        )
    shown |= {"template": facts["template"]} if "template" in facts else {}
    if sizes := facts["train"].get("lengths"):
        shares = {"half": "50", "90 %": "90", "99 %": "99"}
        lengths = [
            f"{share} up to {sizes[key]:,}{' tokens' * (key == '50')}"
            for share, key in shares.items()
        ]
        shown["lengths"] = f"{', '.join(lengths)}, the longest {sizes['max']:,}"
    if cuts := [text for name in ("train", "val") if (text := _cut(facts.get(name, {}), unit))]:
        shown["cut"] = f"at model.context = {context:,}: {'; validation: '.join(cuts)}"
    return shown


def count(number: int, items: str) -> str:
    """`1 document`, `2 documents`."""
    return f"{number:,} {items if number != 1 else items.removesuffix('s')}"


def _cut(split: Facts, unit: str) -> str:
    """What a split lost to the context, in words; empty where it lost nothing."""
    parts = []
    if cut := split.get("cut", 0):
        lost = split["cut_tokens"]
        share = lost / (split["tokens"] + lost)
        parts.append(
            f"{cut:,} of {count(split['items'], unit)} cut, {lost:,} tokens lost ({share:.1%})"
        )
    if left := split.get("left_out", 0):
        parts.append(f"{count(left, unit)} left out: nothing to learn is left of them")
    return ", ".join(parts)
