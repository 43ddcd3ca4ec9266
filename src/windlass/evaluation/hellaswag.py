"""HellaSwag (arXiv 1905.07830): which of four endings a model finds likeliest."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
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
    """A beginning, its four endings, and the number of the right one."""

    context: str
    endings: tuple[str, ...]
    label: int


def read_items(file: str = "", limit: int = 0) -> list[Item]:
    """The first `limit` (0: all) validation items, of a JSONL file or through `datasets`; raises UserError."""
    try:
        return list(_read_items(file, limit, Path(file).stat().st_mtime_ns if file else 0))
    except OSError as error:
        raise UserError(f"eval.hellaswag_file: {file} cannot be read: {error.strerror}") from None


@lru_cache(maxsize=1)  # each evaluation of a training reads the same items
def _read_items(file: str, limit: int, _changed: int) -> tuple[Item, ...]:
    if file:
        lines = Path(file).read_text(encoding="utf-8").split("\n")
        rows = [(f"{file}, line {n}", line) for n, line in enumerate(lines, 1) if line.strip()]
        items = [_item(line, where) for where, line in (rows[:limit] if limit else rows)]
    else:
        hub.prepare()
        with hub.explained(f"HellaSwag (the data set {HUB_NAME}; or give a JSONL as eval.hellaswag_file)"):
            from datasets import load_dataset

            found = load_dataset(HUB_NAME, split="validation")
            items = [_item(row, HUB_NAME) for row in (found.select(range(limit)) if limit else found)]
    if not items:
        raise UserError(f"eval.hellaswag_file: {file} has no items")
    return tuple(items)


def _item(row: str | dict[str, Any], where: str) -> Item:
    try:
        fields = json.loads(row) if isinstance(row, str) else row
        item = Item(fields["ctx"], tuple(fields["endings"]), int(fields["label"]))
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{where}: no HellaSwag item, which has ctx, endings and label") from None
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


_tokenized: list[tuple[Sequence[Item], Tokenizer, list[Continuation]]] = []
"""The items last measured on, their tokenizer, and `continuations` of the two."""


def _continuations(items: Sequence[Item], tokenizer: Tokenizer) -> list[Continuation]:
    """As `continuations`, but made only once where the same items are measured on again and again."""
    if not _tokenized or _tokenized[0][1] is not tokenizer or list(_tokenized[0][0]) != list(items):
        _tokenized[:] = [(tuple(items), tokenizer, continuations(items, tokenizer))]
    return _tokenized[0][2]


def evaluate_hellaswag(
    model: Any,
    tokenizer: Tokenizer,
    items: Sequence[Item],
    ranks: Ranks,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> dict[str, float] | None:
    """Accuracy over the items, each scored once, spread over all ranks.

    Returns:
        `acc` (the ending with the largest summed log-likelihood is the right one), `acc_norm` (the largest per token of
        the ending), `items`, `tokens`, `runtime_s`, `samples_per_s`, `tokens_per_s`; None where `poll` cut it short.
        The published `acc_norm` of EleutherAI's harness divides by the ending's characters instead of its tokens.
    """
    found = log_likelihoods(model, _continuations(items, tokenizer), ranks, autocast=autocast, poll=poll)
    if found is None:
        return None
    right = right_norm = first = 0
    for item in items:
        sums = found.sums[first : first + len(item.endings)]
        means = [s / n for s, n in zip(sums, found.counts[first:], strict=False)]
        right += sums.index(max(sums)) == item.label
        right_norm += means.index(max(means)) == item.label
        first += len(item.endings)
    return {
        "acc": right / len(items),
        "acc_norm": right_norm / len(items),
        "items": len(items),
        "tokens": found.tokens,
        "runtime_s": found.runtime_s,
        "samples_per_s": len(items) / found.runtime_s,
        "tokens_per_s": found.tokens / found.runtime_s,
    }
