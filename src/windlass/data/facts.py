"""The contents of a data set in numbers, for `windlass prepare`, a run's start and its ledger."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from windlass.data.chat import PLAIN_LAYOUT
from windlass.data.disk import StreamSamples
from windlass.data.division import source_number, stream_name
from windlass.data.mixture import MANY_EPOCHS
from windlass.data.packing import BestFitSamples
from windlass.data.samples import Samples, masks_documents, real_tokens
from windlass.data.shards import EVAL, MAIN, Index
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from windlass.data.prepare import Data

Facts = dict[str, Any]
SHOWN_SYMBOLS, MEASURED_SAMPLES = 1000, 16
UNITS = {"text": "documents", "squad": "questions", "chat": "conversations"}


def describe(data: Data) -> Facts:
    """The facts of opened data, as JSON values.

    - `vocab`; for `train` and `val` their `samples` and `tokens_per_sample`.
    - `changed`: sentences about files of the source that have changed since their preparation.
    - Prepared data: `source`, `files` (their number), `items` (their kind), `tokenizer`; for each
      split `items`, `tokens` (in an epoch, without padding), `label_tokens` (that count in the
      loss), and for `val` `text`, a hash of its text that is equal for every tokenizer.
    - Rows, or a document a row: `lengths` of whole items in tokens, by percentile; `cut` (items
      longer than the context), `cut_tokens` (lost by them), `left_out` (nothing left to learn).
    - Documents apart (`data.document_mask`, best-fit): `attended`, the mean length of the part of a
      token's document in its row.
    - Best-fit packing: `fill` (the part of all rows that is tokens) and `items_per_sample`.
    - Several sources: `sources` and `eval_sources`, each with `documents` and `tokens` read, and
      the tokens for `train` and `val`.
    - A streamed source: `revision` (a commit of the Hub), and `stream` with its `bytes` (local),
      `shard_tokens`, `disk_tokens` and, after a resume, its `place`.
    - A mixture, once the run's length is known: `mixture`, from `mixture.shares_of_run`.
    - Conversations: `template`, their layout in words.
    - A character tokenizer: `characters` (how many) and `symbols`.
    """
    facts: Facts = {"vocab": data.vocab}
    facts |= {"changed": list(data.changed)} if data.changed else {}
    if index := data.index:
        files = {f["file"] for source in index.source.values() for f in source.get("files", ())}
        facts |= {
            "source": index.settings["source"],
            "files": len(files),
            "items": UNITS[index.settings.get("format", "text")],
            "tokenizer": index.settings["tokenizer"],
        }
        if isinstance(data.train, StreamSamples) and index.stream is not None:
            train, source = data.train, index.stream
            facts |= {"files": len(source.files), "train": {"tokens_per_sample": train.context}}
            facts |= {"revision": source.revision} if source.revision else {}
            facts["stream"] = {
                "bytes": sum(file.bytes for file in source.files) or None,
                "shard_tokens": source.shard_tokens,
                "disk_tokens": train.limit * source.shard_tokens,
            }
        facts |= {"template": index.template} if index.template else {}
        if index.tokenizer.kind == "char" and index.streams:
            tokens = sum(shard.tokens for shard in index.shards)
            if index.tokenizer.eot is not None:
                tokens -= sum(index.documents(stream) for stream in index.streams)
            symbols = data.tokenizer.inner.get_vocab(with_added_tokens=False)
            facts |= {"characters": tokens, "symbols": "".join(sorted(symbols))}
        for key, kind in (("sources", MAIN), ("eval_sources", EVAL)):
            streams = [stream for stream in index.streams if stream.startswith(kind)]
            if kind == EVAL:  # the end of a single text belongs to the row of its text
                streams = [stream for stream in streams if not _is_end_of_text(index, stream)]
            if len(streams) > 1:
                facts[key] = [_source(index, stream) for stream in streams]
    for name, samples in (("train", data.train), ("val", data.val)):
        if samples is not None and name not in facts:
            split = _split(name, samples, index)
            facts[name] = {key: value for key, value in split.items() if value is not None}
    return facts


def _split(name: str, samples: Samples, index: Index | None) -> Facts:
    split: Facts = {"samples": len(samples), "label_tokens": getattr(samples, "valid_tokens", None)}
    tokens = real_tokens(samples)
    if per_sample := tokens / len(samples) if tokens else _tokens_per_sample(samples):
        split["tokens_per_sample"] = round(per_sample, 3)
    split["tokens"] = getattr(samples, "tokens", tokens)
    items: Any = samples
    if masks_documents(samples) and hasattr(samples, "attended"):
        split["attended"] = round(samples.attended, 3)
    if isinstance(samples, BestFitSamples):
        split |= samples.facts
        items = samples.items
    if index is not None and name in index.rows:
        rows = index.rows[name]
        keys = ("items", "lengths", "cut", "cut_tokens", "left_out")
        split |= {key: getattr(rows, key) for key in keys} | {"text": rows.text or None}
    elif index is not None:
        split["text"] = index.splits[name].text or None
        if hasattr(items, "lengths"):
            split |= {"items": items.documents, **items.lengths}
        elif index.splits[name].documents > 1:  # the count of a single text says nothing
            split["items"] = index.splits[name].documents
    return split


def _tokens_per_sample(samples: Samples) -> float:
    """The mean over some samples of a user's own set, as the loader counts them."""
    last, count = len(samples) - 1, min(len(samples), MEASURED_SAMPLES)
    places = np.unique(np.linspace(0, last, count).astype(np.int64))
    if length := getattr(samples, "length", None):
        tokens = sum(map(length, places.tolist()))
    else:
        labels = (samples.read(np.array([place]))[1] for place in places)
        tokens = sum(int((part != IGNORE_INDEX).sum()) for part in labels)
    return tokens / max(1, len(places))


def _is_end_of_text(index: Index, stream: str) -> bool:
    """Whether a stream of validation data is the end of a single text, which trains up to it."""
    of = index.source.get(stream_name(MAIN, source_number(stream)))
    return of is not None and index.source[stream]["name"] == of["name"]


def _source(index: Index, stream: str) -> Facts:
    """What is read of a source, and for which split."""
    counts, streams = dict.fromkeys(("train", "val"), 0), [stream]
    end = stream_name(EVAL, source_number(stream))
    if end in index.streams and end != stream and _is_end_of_text(index, end):
        streams.append(end)
    for name, split in index.splits.items():
        counts[name] += sum(p.stop - p.start for p in split.ranges if p.stream in streams)
    tokens = sum(shard.tokens for name in streams for shard in index.streams[name])
    source = {"source": index.source[stream]["name"], "documents": index.documents(stream)}
    return source | {"tokens": tokens, **counts}


def warnings(facts: Facts) -> list[str]:
    """Warnings about changed files, about a makeshift chat template, about sources from which
    nothing is used, and about sources of a mixture that a run repeats often."""
    texts, template = [*facts.get("changed", ())], facts.get("template", "")
    if template.startswith(PLAIN_LAYOUT) and facts["tokenizer"].startswith("hf:"):
        texts += [f"conversations are written as {template}; a model trained to chat has its own"]
    texts += repeated(facts.get("mixture", ()))
    uses = ("sources", "train", "trained on"), ("eval_sources", "val", "evaluated")
    for key, split, use in uses:
        for row in facts.get(key, ()):
            if not row[split]:
                reason = "all of it is held out" if row["tokens"] else "it has no text"
                texts.append(f"data.{key[:-1]}: {row['source']} is not {use}: {reason}")
    return texts


def lines(facts: Facts, context: int) -> dict[str, str]:
    """The facts in words, a line each; those that do not apply are missing."""
    shown: dict[str, str] = {}
    unit = facts.get("items", "samples")
    if "source" in facts:
        source, files = facts["source"], facts["files"]
        names = ", ".join(source) if isinstance(source, list) else source
        shown["data"] = f"{names}{f' ({files:,} files)' if files > 1 else ''}"
        shown["data"] += f" at commit {facts['revision']}" if "revision" in facts else ""
    if rows := [*facts.get("sources", ()), *facts.get("eval_sources", ())]:
        shown["sources"] = _source_table(rows)
    if mixture := facts.get("mixture"):
        shown["mixture"] = mixture_table(mixture)
    for name, title in (("train", "training"), ("val", "validation")):
        shown[title] = _in_words(facts[name], facts) if name in facts else "none"
    kind = [facts["tokenizer"]] if "tokenizer" in facts else []
    shown["tokenizer"] = ", ".join([*kind, f"{facts['vocab']:,} ids"])
    if "symbols" in facts:
        symbols = repr(facts["symbols"])
        shown["characters"] = f"{facts['characters']:,}"
        cut = len(symbols) > SHOWN_SYMBOLS
        shown["symbols"] = f"{symbols[:SHOWN_SYMBOLS]}..." if cut else symbols
    if "template" in facts:
        shown["template"] = facts["template"]
    if sizes := facts["train"].get("lengths"):
        shown["lengths"] = (
            f"half up to {sizes['50']:,} tokens, 90 % up to {sizes['90']:,}, "
            f"99 % up to {sizes['99']:,}, the longest {sizes['max']:,}"
        )
    if attended := facts["train"].get("attended"):
        each = f"{attended:,.0f} of {context:,} in the mean"
        shown["attention"] = f"within documents: a token's part of a row has {each}"
    packed = [_packing(facts[name], unit) for name in ("train", "val") if name in facts]
    if any(packed):
        shown["packing"] = f"rows of {context:,} tokens: {'; validation: '.join(packed)}"
    if cuts := [text for name in ("train", "val") if (text := _cut(facts.get(name, {}), unit))]:
        shown["cut"] = f"at model.context = {context:,}: {'; validation: '.join(cuts)}"
    return shown


def _in_words(split: Facts, facts: Facts) -> str:
    if "stream" in facts and split is facts["train"]:
        stream = facts["stream"]
        size = f" from {size_in_words(stream['bytes'])}" if stream["bytes"] else ""
        shards = f"streamed{size}, in shards of {stream['shard_tokens']:,} tokens"
        return f"{shards}, at most {stream['disk_tokens']:,} on the disk"
    items = split.get("items") if "source" in facts else split["samples"]
    parts = [count(items, facts.get("items", "samples"))] if items else []
    tokens, labels = split.get("tokens"), split.get("label_tokens")
    if tokens:
        parts.append(f"{tokens:,} tokens")
        if labels and facts.get("items") in ("questions", "conversations"):
            parts.append(f"{labels:,} of them ({labels / tokens:.0%}) count in the loss")
    return ", ".join(parts)


def size_in_words(size: int) -> str:
    """Bytes with a decimal unit: `1.5 TB`, `39 kB`."""
    power = min(4, max(0, len(str(size)) - 1) // 3)
    return f"{size / 1000**power:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def describe_place(place: Sequence[int]) -> str:
    """A shard and its place in the source (`StreamSamples.place`), in words."""
    shard, epoch, file, group, row, _ = place
    text = f"shard {shard + 1:,} begins: file {file + 1:,}, row group {group + 1:,}"
    return f"{text}, row {row + 1:,}" + (f", epoch {epoch + 1:,} of the source" if epoch else "")


def repeated(mixture: Iterable[Facts]) -> list[str]:
    """A warning for each source of a mixture that is read more than MANY_EPOCHS times."""
    return [
        f"data.mix: the run reads {row['name']} {row['epochs']:.3g} times, and after about "
        f"{MANY_EPOCHS} epochs repeated text teaches little (arXiv 2305.16264): lower its weight, "
        "or set its epochs"
        for row in mixture
        if row["epochs"] > MANY_EPOCHS
    ]


def mixture_table(rows: Iterable[Facts]) -> str:
    """The sources of a mixture over the whole run; a share for each stage."""
    head = ("source", "share", "samples", "tokens", "epochs")
    return _table(
        [
            head,
            *(
                (
                    row["name"],
                    " -> ".join(f"{100 * weight:.4g} %" for weight in row["weights"]),
                    f"{row['samples']:,}",
                    "?" if row["tokens"] is None else f"{row['tokens']:,}",
                    f"{row['epochs']:.3g}",
                )
                for row in rows
            ),
        ]
    )


def _source_table(rows: list[Facts]) -> str:
    head = ("source", "documents", "tokens", "trained", "held out")
    keys = ("documents", "tokens", "train", "val")
    return _table([head, *((row["source"], *(f"{row[key]:,}" for key in keys)) for row in rows)])


def _table(cells: list[tuple[str, ...]]) -> str:
    first, *widths = (max(map(len, column)) for column in zip(*cells, strict=True))
    return "\n".join(
        "  ".join([name.ljust(first), *(n.rjust(w) for n, w in zip(numbers, widths, strict=True))])
        for name, *numbers in cells
    )


def count(number: int, items: str) -> str:
    """`1 document`, `2 documents`."""
    return f"{number:,} {items if number != 1 else items.removesuffix('s')}"


def _packing(split: Facts, unit: str) -> str:
    """How full the rows of a split are, in words; empty if it has no best-fit rows."""
    if "fill" not in split:
        return ""
    filled = f"{split['samples']:,} rows, {100 * split['fill']:.1f} % filled"
    return f"{filled}, {split['items_per_sample']:.3g} {unit} in each"


def _cut(split: Facts, unit: str) -> str:
    """What a split lost to the context, in words; empty if nothing."""
    parts = []
    if cut := split.get("cut", 0):
        lost, items = split["cut_tokens"], count(split["items"], unit)
        fraction = lost / (split["tokens"] + lost)
        parts.append(f"{cut:,} of {items} cut, {lost:,} tokens lost ({fraction:.1%})")
    if left_out := split.get("left_out", 0):
        parts.append(f"{count(left_out, unit)} left out: they have nothing left to learn")
    return ", ".join(parts)
