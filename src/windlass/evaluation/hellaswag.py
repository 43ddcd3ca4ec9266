"""HellaSwag (arXiv 1905.07830): which of four endings a model finds likeliest."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
    """A context, its four endings, and the number of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_items(file: str = "", limit: int = 0) -> list[Item]:
    """The first `limit` (0: all) validation items, of a JSONL file or through `datasets`; raises UserError."""
    if file:
        try:
            lines = Path(file).read_text(encoding="utf-8").split("\n")
        except OSError as error:
            raise UserError(f"eval.hellaswag_file: {file} cannot be read: {error.strerror}") from None
        rows = ((f"{file}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip())
        items = [_item(line, where) for where, line in itertools.islice(rows, limit or None)]
    else:
        hub.prepare()
        with hub.explained(f"HellaSwag (the data set {HUB_NAME}; or give a JSONL as eval.hellaswag_file)"):
            from datasets import load_dataset

            data = load_dataset(HUB_NAME, split="validation")
            items = [_item(row, HUB_NAME) for row in (data.select(range(limit)) if limit else data)]
    if not items:
        raise UserError(f"eval.hellaswag_file: {file} has no items")
    return items


def _item(row: str | dict[str, Any], where: str) -> Item:
    try:
        fields = json.loads(row) if isinstance(row, str) else row
        item = Item(fields["ctx"], tuple(fields["endings"]), int(fields["label"]))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where}: not a HellaSwag item, which has ctx, endings and label") from None
    if not item.context or not 0 <= item.label < len(item.endings) or not all(item.endings):
        raise UserError(f"{where}: a HellaSwag item needs a context, endings, and the number of one of them as label")
    return item


def continuations(items: Sequence[Item], tokenizer: Tokenizer) -> list[Continuation]:
    """Each ending after its context, item by item, ending by ending: one text, cut where the context's tokens end."""
    rows = []
    for item in items:
        context = tokenizer.encode_with_bos(item.context)
        both = [tokenizer.encode_pair(item.context, " " + ending, context)[0] for ending in item.endings]
        rows += [Continuation(context, ids[len(context) :]) for ids in both]
    return rows


def evaluate_hellaswag(
    model: Any,
    items: Sequence[Item],
    rows: Sequence[Continuation],
    ranks: Ranks,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Accuracy over the items, each scored once, spread over all ranks; `rows` are the `continuations` of `items`.

    Returns:
        `acc` (the ending with the largest summed log-likelihood is the right one), `acc_norm` (the largest per character of
        the ending, as EleutherAI's harness defines it), `acc_per_token` (the largest per token, which llm.c reports),
        `items`, `tokens`, `runtime_s`, `samples_per_s`, `tokens_per_s`.
    """
    scores = log_likelihoods(model, rows, ranks, autocast=autocast, poll=poll)
    if scores is None:
        return None
    right = {"acc": 0, "acc_norm": 0, "acc_per_token": 0}
    first = 0
    for item in items:
        endings = range(first, first + len(item.endings))
        divisors = {
            "acc": [1 for _ in endings],
            "acc_norm": [len(ending) for ending in item.endings],
            "acc_per_token": [scores.counts[i] for i in endings],
        }
        for name, lengths in divisors.items():
            normalised = [scores.sums[i] / length for i, length in zip(endings, lengths, strict=True)]
            right[name] += normalised.index(max(normalised)) == item.label
        first += len(item.endings)
    return {
        **{name: count / len(items) for name, count in right.items()},
        "items": len(items),
        "tokens": scores.tokens,
        "runtime_s": scores.runtime_s,
        "samples_per_s": len(items) / scores.runtime_s,
        "tokens_per_s": scores.tokens / scores.runtime_s,
    }
