"""HellaSwag (arXiv 1905.07830): which of four endings the model finds the likeliest."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from windlass.data.items import record_of
from windlass.data.recipe_sources import SourceSpec
from windlass.data.sources import open_source
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.evaluation.passes import Passes

HELLASWAG = "hf:Rowan/hellaswag"


class Item(NamedTuple):  # `items_hash` is of the repr
    """A text with four endings, as EleutherAI's harness writes them."""

    context: str
    endings: tuple[str, ...]  # four
    label: int  # the number of the right ending


def read_items(file: str = "", limit: int = 0) -> list[Item]:
    """The first `limit` (0: all) items, from a JSONL file or `datasets`; UserError if none."""
    if file and not Path(file).expanduser().is_file():
        raise UserError(f"eval.hellaswag_file: {file} does not exist")
    place = file or HELLASWAG
    setting = "eval.hellaswag_file" if file else "eval.hellaswag_file is empty"
    spec = SourceSpec(place, place, "chat", split="validation", setting=setting)
    items = []
    for record in islice(open_source(spec).items(), limit or None):
        try:
            row = record_of(record)
            # the endings continue the second part, a new sentence
            text = f"{row['ctx_a']} {row['ctx_b'].capitalize()}" if "ctx_a" in row else row["ctx"]
            if row.get("activity_label"):
                text = f"{row['activity_label']}: {text}"
            context, *endings = map(_without_tags, (text, *row["endings"]))
            label = int(row["label"])
            if not all((context, *endings)) or not 0 <= label < len(endings):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            expected = "a HellaSwag item has ctx, endings, and as label the number of one"
            raise UserError(f"{record.place}: {expected}") from None
        items.append(Item(context, tuple(endings), label))
    if not items:
        raise UserError(f"eval.hellaswag_file: {file} is empty")
    return items


def _without_tags(text: str) -> str:
    """A text without the tags of WikiHow, such as `[header]`."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def continuations(items: Sequence[Item], tokenizer: Tokenizer) -> list[Continuation]:
    """Each item with each ending, cut after the tokens of the context, whose last spaces go to the
    ending."""
    rows = []
    for item in items:
        stripped = item.context.rstrip()
        before = tokenizer.prompt(stripped)
        for text in item.endings:
            ending = f"{item.context[len(stripped) :]} {text}"
            rest = tokenizer.prompt(stripped + ending)[len(before) :]
            # an ending lacks tokens if its text merges with the context's last one
            rest = rest or tokenizer.encode(ending, continues=True).tolist()
            rows.append(Continuation(before, rest))
    return rows


def evaluate_hellaswag(
    passes: Passes, items: Sequence[Item], rows: Sequence[Continuation]
) -> dict[str, float]:
    """Accuracy over the items, and `items`; `rows` are their `continuations`.

    The model's answer is the ending with the largest log-likelihood: in sum (`acc`), per byte
    (`acc_norm`), or per token (`acc_per_token`, as llm.c).
    """
    rest = iter(log_likelihoods(passes, rows))
    right = Counter[str]()
    for item in items:
        endings = list(islice(rest, len(item.endings)))
        pairs = list(zip(endings, item.endings, strict=True))
        normalised = {
            "acc": [ending.sum for ending in endings],
            "acc_norm": [ending.sum / len(text.encode()) for ending, text in pairs],
            "acc_per_token": [ending.sum / ending.tokens for ending in endings],
        }
        for name, values in normalised.items():
            right[name] += values.index(max(values)) == item.label
    return {name: number / len(items) for name, number in right.items()} | {"items": len(items)}
