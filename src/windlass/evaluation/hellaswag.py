"""HellaSwag (arXiv 1905.07830): which of four endings a model finds likeliest."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass import hub
from windlass.errors import UserError
from windlass.evaluation.likelihood import Continuation, log_likelihoods

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.dist import Ranks

HUB_NAME = "Rowan/hellaswag"


@dataclass(frozen=True)
class Item:
    """A context, its endings (four of them), and the number of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_items(file: str = "", limit: int = 0) -> list[Item]:
    """The first `limit` (0: all) validation items, of a JSONL file or through `datasets`; raises UserError."""
    rows: Iterable[tuple[str, Any]]
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise UserError(f"eval.hellaswag_file: {file} cannot be read: {error.strerror}") from None
        rows = ((f"{file}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip())
    else:
        hub.prepare()
        with hub.explained(f"HellaSwag (the data set {HUB_NAME}; or give a JSONL as eval.hellaswag_file)"):
            from datasets import load_dataset

            rows = ((HUB_NAME, row) for row in load_dataset(HUB_NAME, split="validation"))
    items = []
    for where, row in itertools.islice(rows, limit or None):
        try:
            fields = json.loads(row) if isinstance(row, str) else row
            item = Item(fields["ctx"], tuple(fields["endings"]), int(fields["label"]))
            if not item.context or not all(item.endings) or not 0 <= item.label < len(item.endings):
                raise ValueError
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{where}: a HellaSwag item has ctx, endings, and as label the number of one") from None
        items.append(item)
    if not items:
        raise UserError(f"eval.hellaswag_file: {file} has no items")
    return items


def continuations(items: Sequence[Item], tokenizer: Tokenizer) -> list[Continuation]:
    """Each ending after its context, item by item, ending by ending: one text, cut where the context's tokens end."""
    rows = []
    for item in items:
        context = tokenizer.encode_with_bos(item.context)
        both = [tokenizer.encode_pair(item.context, " " + ending, context)[0] for ending in item.endings]
        rows += [Continuation(context, ids[len(context) :]) for ids in both]
    return rows


def evaluate_hellaswag(
    model: Any, items: Sequence[Item], rows: Sequence[Continuation], ranks: Ranks, **how: Any
) -> dict[str, float] | None:
    """Accuracy over the items, each scored once, spread over all ranks; `rows` are the `continuations` of `items`.

    Returns:
        `acc` (the ending with the largest summed log-likelihood is the right one), `acc_norm` (the largest per character of
        the ending, as EleutherAI's harness defines it), `acc_per_token` (the largest per token, which llm.c reports),
        `items`, `runtime_s`, `samples_per_s`. `how` are `autocast` and `poll`.
    """
    started = time.perf_counter()
    scores = log_likelihoods(model, rows, ranks, **how)
    if scores is None:
        return None
    right, first = {"acc": 0, "acc_norm": 0, "acc_per_token": 0}, 0
    for item in items:
        endings = scores[first : first + len(item.endings)]
        first += len(endings)
        normalised = {
            "acc": [ending.sum for ending in endings],
            "acc_norm": [ending.sum / len(text) for ending, text in zip(endings, item.endings, strict=True)],
            "acc_per_token": [ending.sum / ending.tokens for ending in endings],
        }
        for name, values in normalised.items():
            right[name] += values.index(max(values)) == item.label
    count, runtime_s = len(items), time.perf_counter() - started
    accuracies = {name: number / count for name, number in right.items()}
    return {**accuracies, "items": count, "runtime_s": runtime_s, "samples_per_s": count / runtime_s}
