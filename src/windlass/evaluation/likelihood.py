"""How likely a model finds given continuations: many rows in few passes, the same number of passes on every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from windlass.evaluation.loss import evaluating
from windlass.parallel.collectives import sum_async
from windlass.parallel.parallelize import unwrap
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

TOKENS_PER_PASS = {"cpu": 2048, "cuda": 32768}
LOGITS_PER_PASS = {"cpu": 2**26, "cuda": 2**29}  # in fp32 256 MB on a CPU, 2 GB on a GPU


@dataclass(frozen=True)
class Continuation:
    """A text and what follows it, as token ids; neither is empty."""

    context: Sequence[int]
    ending: Sequence[int]


class Likelihood(NamedTuple):
    """Of an ending."""

    sum: float  # log-likelihood, in nats
    tokens: int  # that were scored
    greedy: bool  # whether each of them was the likeliest


def log_likelihoods(
    model: Any,
    rows: Sequence[Continuation],
    ranks: Ranks,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> list[Likelihood] | None:
    """Log-likelihood of each ending after its context, the rows spread over ranks, each scored once; equal on every rank.

    A row longer than the model's context loses its beginning. Every rank calls it with the same rows. Rows in a pass are
    of similar length; padding is at their end, where a causal model does not see it. `model(tokens)` gives logits
    [B, T, V]; for the other arguments see `windlass.evaluation`.
    """
    model = unwrap(model)
    texts = [[*row.context, *row.ending][-(model.context + 1) :] for row in rows]
    counts = [min(len(row.ending), len(text) - 1) for row, text in zip(rows, texts, strict=True)]
    passes = plan_passes([len(text) - 1 for text in texts], model.vocab, ranks.device.type)
    sums, greedy = [0.0] * len(rows), [0.0] * len(rows)
    with evaluating(model), torch.no_grad():
        for first in range(0, len(passes), ranks.world):
            own = passes[first + ranks.rank] if first + ranks.rank < len(passes) else []
            batch = [(torch.tensor(texts[i]), counts[i]) for i in own] or [(torch.tensor([0, 0]), 1)]
            tokens = pad_sequence([text[:-1] for text, _ in batch], batch_first=True).to(ranks.device)
            masked = [text[1:].index_fill(0, torch.arange(len(text) - 1 - n), IGNORE_INDEX) for text, n in batch]
            with autocast():
                logits = model(tokens)
            labels = pad_sequence(masked, batch_first=True, padding_value=IGNORE_INDEX).to(ranks.device)
            for i, value, likeliest in zip(own, *_score(logits, labels), strict=False):
                sums[i], greedy[i] = value, likeliest
            if poll is not None and sum_async([poll()], ranks).wait()[0]:
                return None
    merged = sum_async([*sums, *greedy], ranks).wait()
    return list(map(Likelihood, merged[: len(rows)], counts, map(bool, merged[len(rows) :])))


def plan_passes(lengths: Sequence[int], vocab: int, device: str) -> list[list[int]]:
    """Rows in passes, longest first: as many as the bounds on tokens and logits allow, the padding included."""
    limit = max(1, min(TOKENS_PER_PASS[device], LOGITS_PER_PASS[device] // vocab))
    passes: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not passes or (len(passes[-1]) + 1) * lengths[passes[-1][0]] > limit:
            passes.append([])
        passes[-1].append(i)
    return passes


def _score(logits: Tensor, labels: Tensor) -> tuple[list[float], list[float]]:
    """Summed log-likelihood of each row's labels [B, T], and 1 where all of them were the likeliest tokens, else 0."""
    unmasked = labels != IGNORE_INDEX
    row = unmasked.nonzero()[:, 0]
    chosen = logits[unmasked].to(torch.promote_types(logits.dtype, torch.float32))  # [M, V]: endings only
    wanted = labels[unmasked]
    scores = chosen.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - chosen.logsumexp(-1)
    sums = torch.zeros(len(labels), dtype=torch.float64, device=logits.device).index_add_(0, row, scores.double())
    misses = torch.zeros(len(labels), device=logits.device).index_add_(0, row, (chosen.argmax(-1) != wanted).float())
    return sums.tolist(), (misses == 0).double().tolist()
