"""How likely a model finds given continuations: many rows in few passes, the same number of passes on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from windlass.evaluation.lockstep import StopAgreement, evaluating
from windlass.parallel import collectives
from windlass.parallel.parallelize import unwrap
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

TOKENS_PER_PASS = {"cpu": 2048, "cuda": 32768}
LOGITS_PER_PASS = {"cpu": 2**26, "cuda": 2**29}
"""Logits of one pass: 256 MB on a CPU, 2 GB on a GPU in fp32."""


@dataclass(frozen=True)
class Continuation:
    """A text and what follows it, as token ids; neither is empty."""

    context: Sequence[int]
    ending: Sequence[int]


@dataclass(frozen=True)
class Likelihoods:
    """What `log_likelihoods` measured, in the order of its rows and the same on every rank."""

    sums: list[float]
    """Log-likelihood of each ending, in nats."""
    counts: list[int]
    """Tokens of each ending that were scored."""
    greedy: list[bool]
    """Whether each token of the ending was the likeliest."""
    tokens: int
    """Tokens read, padding not counted."""
    runtime_s: float


def log_likelihoods(
    model: Any,
    rows: Sequence[Continuation],
    ranks: Ranks,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> Likelihoods | None:
    """Log-likelihood of each ending after its context, the rows spread over ranks, each scored once.

    A row longer than the model's context loses its beginning. Every rank calls it with the same rows. Rows in a pass are
    of similar length; padding is at their end, where a causal model does not see it. `model(tokens)` gives logits
    [B, T, V]; for the other arguments see `windlass.evaluation.lockstep`.
    """
    started, model = time.perf_counter(), unwrap(model)
    texts = [[*row.context, *row.ending][-(model.context + 1) :] for row in rows]
    counts = [min(len(row.ending), len(text) - 1) for row, text in zip(rows, texts, strict=True)]
    passes = plan_passes([len(text) - 1 for text in texts], model.vocab, ranks.device.type)
    sums, greedy = [0.0] * len(rows), [0.0] * len(rows)
    agreement = StopAgreement(ranks, poll)
    with evaluating(model), torch.no_grad():
        for first in range(0, len(passes), ranks.world):
            mine = passes[first + ranks.rank] if first + ranks.rank < len(passes) else []
            # A rank without work in the last round takes part with one token, so that sharded parameters are gathered.
            tokens, labels = _batch([(texts[i], counts[i]) for i in mine] or [([0, 0], 1)], ranks.device)
            with autocast():
                logits = model(tokens)
            for i, value, likeliest in zip(mine, *_score(logits, labels), strict=False):
                sums[i], greedy[i] = value, likeliest
            if agreement.stop():
                return None
    agreement.finish()
    merged = collectives.sum_async([*sums, *greedy], ranks).wait()
    return Likelihoods(
        sums=[float(x) for x in merged[: len(rows)]],
        counts=counts,
        greedy=[bool(x) for x in merged[len(rows) :]],
        tokens=sum(len(text) - 1 for text in texts),
        runtime_s=time.perf_counter() - started,
    )


def plan_passes(lengths: Sequence[int], vocab: int, device: str) -> list[list[int]]:
    """Rows in passes, longest first: as many as the bounds on tokens and logits allow, the padding included."""
    limit = max(1, min(TOKENS_PER_PASS[device], LOGITS_PER_PASS[device] // vocab))
    passes: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not passes or (len(passes[-1]) + 1) * lengths[passes[-1][0]] > limit:
            passes.append([])
        passes[-1].append(i)
    return passes


def _batch(rows: Sequence[tuple[list[int], int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Tokens and labels [B, T] of texts, each with the number of its last tokens that are scored."""
    width = max(len(tokens) for tokens, _ in rows) - 1
    tokens = torch.zeros(len(rows), width, dtype=torch.int64)
    labels = torch.full((len(rows), width), IGNORE_INDEX, dtype=torch.int64)
    for place, (row, count) in enumerate(rows):
        tokens[place, : len(row) - 1] = torch.tensor(row[:-1])
        labels[place, len(row) - 1 - count : len(row) - 1] = torch.tensor(row[-count:])
    return tokens.to(device), labels.to(device)


def _score(logits: Tensor, labels: Tensor) -> tuple[list[float], list[float]]:
    """Summed log-likelihood of each row's labels, and 1 where all of them were the likeliest tokens, else 0."""
    unmasked = labels != IGNORE_INDEX
    row = unmasked.nonzero()[:, 0]
    chosen = logits[unmasked].to(torch.promote_types(logits.dtype, torch.float32))  # [M, V]: endings only
    wanted = labels[unmasked]
    scores = chosen.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - chosen.logsumexp(-1)
    sums = torch.zeros(len(labels), dtype=torch.float64, device=logits.device).index_add_(0, row, scores.double())
    misses = torch.zeros(len(labels), device=logits.device).index_add_(0, row, (chosen.argmax(-1) != wanted).float())
    return sums.tolist(), (misses == 0).double().tolist()
