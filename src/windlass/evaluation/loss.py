"""Validation loss: every sample once, weighted by tokens over all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from windlass.data.loader import eval_batches
from windlass.errors import UserError
from windlass.parallel.collectives import sum_async
from windlass.parallel.parallelize import unwrap
from windlass.recipe.settings import IGNORE_INDEX

if TYPE_CHECKING:
    from windlass.data.samples import Samples
    from windlass.parallel.dist import Ranks


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Dropout off inside the context; afterwards each module is as it was."""
    modules = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in modules:
            module.training = True


def evaluate_loss(
    model: Any,
    samples: Samples,
    ranks: Ranks,
    batch: int,
    limit: int = 0,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
    token_bytes: np.ndarray | None = None,
) -> dict[str, float] | None:
    """Mean cross-entropy over the unmasked labels of a validation set.

    Losses and tokens are added over ranks before the one division, so that neither the number of ranks nor the padding has
    an effect. All ranks make the same number of passes: where samples do not divide evenly, surplus rows are masked.

    Args:
        model: `model(tokens, labels)`, both [B, T], gives the summed loss over the labels that are not IGNORE_INDEX.
        samples: The validation set.
        ranks, autocast, poll: See `windlass.evaluation`.
        batch: Sequences in one forward pass of one rank.
        limit: Use the first so many samples; 0: all.
        token_bytes: Bytes of text that each token stands for [V]; adds `bits_per_byte`.

    Returns:
        `loss` (nats per token), `perplexity`, `tokens` and `samples` (over all ranks), `runtime_s`, `samples_per_s`, and
        `bits_per_byte` where the bytes are known.
    Raises UserError where every label is masked.
    """
    started, model = time.perf_counter(), unwrap(model)
    count = min(limit, len(samples)) if limit else len(samples)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    tokens = text_bytes = 0
    with evaluating(model), torch.no_grad():
        for micro in eval_batches(samples, ranks.rank, ranks.world, batch, limit_samples=count):
            unmasked = micro.labels[micro.labels != IGNORE_INDEX]
            tokens += unmasked.numel()
            if token_bytes is not None:
                text_bytes += int(token_bytes[unmasked.cpu().numpy()].sum())
            with autocast():
                total += model(micro.tokens.to(ranks.device), micro.labels.to(ranks.device)).detach()
            if poll is not None and sum_async([poll()], ranks).wait()[0]:
                return None
    loss_sum, all_tokens, all_bytes = sum_async([float(total), float(tokens), float(text_bytes)], ranks).wait()
    if not all_tokens:
        raise UserError("every label of the validation set is masked: look at data.eval_source")
    loss, runtime_s = loss_sum / all_tokens, time.perf_counter() - started
    result = {"loss": loss, "perplexity": math.exp(loss) if loss < 700 else math.inf}
    result |= {"tokens": int(all_tokens), "samples": count, "runtime_s": runtime_s, "samples_per_s": count / runtime_s}
    return result | ({"bits_per_byte": loss_sum / (math.log(2) * int(all_bytes))} if all_bytes else {})
