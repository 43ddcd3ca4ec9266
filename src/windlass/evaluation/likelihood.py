"""The likelihood of given tokens: a validation set's loss, and endings after their contexts."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from windlass.data.batch import Samples
from windlass.data.loader import eval_batches
from windlass.data.mixture import MixedSamples
from windlass.errors import UserError
from windlass.evaluation.passes import Passes
from windlass.model.attention import documents_of
from windlass.model.loss import SourceSums, takes_sources
from windlass.model.modes import casting_once, evaluating, scalar_loss
from windlass.parallel.collectives import sum_async
from windlass.recipe.settings import IGNORE_INDEX

TOKENS_PER_PASS = {"cpu": 2048, "cuda": 32768}
# In fp32 2 GB on a GPU. The C library reuses blocks of 32 MB; larger ones have new pages each time.
LOGITS_PER_PASS = {"cpu": 2**23, "cuda": 2**29}
LEAST_PER_PASS = 128  # tokens, however many logits each has


def evaluate_loss(
    passes: Passes,
    samples: Samples,
    batch: int,
    limit: int = 0,
    *,
    whole: bool = False,
    token_bytes: np.ndarray | None = None,
) -> dict[str, float]:
    """The loss of a validation set, or of its first `limit` samples (0: all).

    Args:
        passes: `model(tokens, labels)`, both [B, T], returns the summed loss.
        whole: Also measure the rest, in `full_loss` and the other fields of all samples.
        token_bytes: UTF-8 bytes of each token, [V], for `bits_per_byte`.

    Returns `loss` (nats a token, over the unmasked labels), `perplexity`, `tokens` and `samples`
    (over all ranks), and `source.NAME.loss`. Neither world size nor padding has an effect.
    """
    model, ranks, mesh = passes.model, passes.ranks, passes.ranks.mesh
    mixed = isinstance(samples, MixedSamples) and takes_sources(model)
    names = samples.names if mixed else []  # type: ignore[attr-defined]
    by_source = torch.zeros((len(names), 2), dtype=torch.float64, device=ranks.device)
    count = min(limit, len(samples)) if limit else len(samples)
    ends = [count, len(samples)] if whole and count < len(samples) else [count]
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    tokens = text_bytes = done = 0
    results: list[dict[str, float]] = []
    with evaluating(model), torch.no_grad():
        # the rest begins a new pass, so that the first sum does not depend on it
        for first, end in itertools.pairwise([0, *ends]):
            for rows in eval_batches(samples, mesh.data_rank, mesh.data_world, batch, first, end):
                unmasked = rows.labels[rows.labels != IGNORE_INDEX]
                tokens += unmasked.numel()
                if token_bytes is not None:
                    text_bytes += int(token_bytes[unmasked.numpy()].sum())
                here = rows.to(ranks.device)
                sources = {"by_source": SourceSums(here.sources, by_source)} if names else {}
                with casting_once(passes.autocast):
                    total += scalar_loss(model(*here[:2], **sources, **documents_of(here, model)))
                passes.check()
                done = min(done + batch * mesh.data_world, end)
                passes.show(done, ends[-1])
            # The ranks of `cp` have the same rows; each has the loss of its own tokens.
            counts = [mesh.counts_rows * float(number) for number in (tokens, text_bytes)]
            # Only the last stage of a pipeline has losses by source.
            own_sums = (mesh.sizes.pp * by_source).flatten().tolist()
            sums = sum_async([float(total), *counts, *own_sums], ranks.mesh).wait()
            results.append(loss_scores(end, sums, names))
    # `full_loss`, and `source.web.full_loss`
    full = {re.sub(r"(\w+)$", r"full_\1", name): value for name, value in results[-1].items()}
    return results[0] | (full if len(ends) > 1 else {})


def loss_scores(samples: int, sums: Sequence[float], names: Sequence[str]) -> dict[str, float]:
    """Scores by the sums of losses, labels and bytes, and of losses and labels of each source."""
    loss_sum, tokens, text_bytes, *by_source = sums
    if not tokens:
        raise UserError("every label of the validation set is masked: check data.eval_source")
    loss = loss_sum / tokens
    scores = {
        "loss": loss,
        "perplexity": math.exp(loss) if loss < 700 else math.inf,
        "tokens": int(tokens),
        "samples": samples,
    }
    if text_bytes:
        scores["bits_per_byte"] = loss_sum / (math.log(2) * int(text_bytes))
    pairs = zip(names, by_source[::2], by_source[1::2], strict=True)
    return scores | {f"source.{name}.loss": own / labels for name, own, labels in pairs if labels}


class Continuation(NamedTuple):
    """A text and its ending, as token ids; neither is empty."""

    context: Sequence[int]
    ending: Sequence[int]


class Likelihood(NamedTuple):
    sum: float  # log-likelihood, in nats
    tokens: int  # scored
    greedy: bool  # whether each of them is the likeliest


def log_likelihoods(passes: Passes, rows: Sequence[Continuation]) -> list[Likelihood]:
    """Log-likelihood of each ending after its context, of all rows on every rank.

    One rank scores a row, and a row longer than the model's context loses its beginning. Rows in a
    pass have similar lengths. Padding is at their end, so that a causal model does not see it.
    `model(tokens)` returns logits [B, T, V].
    """
    model, ranks = passes.model, passes.ranks
    mesh, device = ranks.mesh, ranks.device
    texts = [[*row.context, *row.ending][-(model.context + 1) :] for row in rows]
    counts = [min(len(row.ending), len(text) - 1) for row, text in zip(rows, texts, strict=True)]
    lengths = [len(text) - 1 for text in texts]  # the model does not read the last token
    # The longest come first, within the limits on tokens (with padding) and on logits.
    logits_limit = LOGITS_PER_PASS[device.type] // model.vocab
    most = min(TOKENS_PER_PASS[device.type], max(LEAST_PER_PASS, logits_limit))
    groups = list[list[int]]()
    for i in sorted(range(len(texts)), key=lambda i: (-lengths[i], i)):
        if not groups or (len(groups[-1]) + 1) * lengths[groups[-1][0]] > most:
            groups.append([])
        groups[-1].append(i)
    scored = list[int]()  # on this rank
    results = list[Tensor]()  # for each of them the sum, and whether greedy
    with evaluating(model), torch.no_grad():
        for first in range(0, len(groups), mesh.data_world):
            at = first + mesh.data_rank
            members = groups[at] if at < len(groups) else []
            # A rank without work in the last round takes part with one token.
            columns = [torch.tensor(texts[i]) for i in members] or [torch.tensor([0, 0])]
            batch = pad_sequence(columns, batch_first=True)
            if device.type == "cuda":
                batch = batch.pin_memory()
            batch = batch.to(device, non_blocking=True)
            with casting_once(passes.autocast):
                logits = model(batch[:, :-1])
            for row, i in enumerate(members):
                part = slice(lengths[i] - counts[i], lengths[i])
                results.append(score(logits[row, part], batch[row, 1:][part]))
            scored += members
            passes.check()
            passes.show(min(first + mesh.data_world, len(groups)), len(groups))
    sums, greedy_rows = [0.0] * len(rows), [0.0] * len(rows)
    # the host waits for the device only here
    fetched = torch.stack(results).tolist() if results and mesh.counts_rows else []
    for i, (total, is_greedy) in zip(scored, fetched, strict=False):
        sums[i], greedy_rows[i] = total, is_greedy
    merged = sum_async([*sums, *greedy_rows], ranks.mesh).wait()
    return list(map(Likelihood, merged[: len(rows)], counts, map(bool, merged[len(rows) :])))


def score(logits: Tensor, wanted: Tensor) -> Tensor:
    """The log-likelihood of the tokens of one ending, and whether they are greedy [2]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    greedy = (logits.argmax(-1) == wanted).all().double()
    return torch.stack([scores.double().sum(), greedy])
