"""The likelihood of given tokens: validation loss, and HellaSwag (arXiv 1905.07830)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from windlass.data.batch import Samples
from windlass.data.items import record_of
from windlass.data.loader import eval_batches
from windlass.data.mixture import MixedSamples
from windlass.data.recipe_sources import SourceSpec
from windlass.data.sources import open_source
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError
from windlass.evaluation.passes import PLAIN, Passes
from windlass.model.attention import documents_of
from windlass.model.loss import SourceSums, takes_sources
from windlass.model.modes import casting_once, evaluating, scalar
from windlass.model.sharding import unwrap
from windlass.parallel.collectives import sum_async, sum_over_stages
from windlass.parallel.ranks import Ranks
from windlass.recipe.settings import IGNORE_INDEX

HELLASWAG = "hf:Rowan/hellaswag"
TOKENS_PER_PASS = {"cpu": 2048, "cuda": 32768}
# In fp32 2 GB on a GPU. The C library reuses blocks of 32 MB; larger ones have new pages each time.
LOGITS_PER_PASS = {"cpu": 2**23, "cuda": 2**29}
LEAST_PER_PASS = 128  # tokens, however many logits each has


def evaluate_loss(
    model: Any,
    samples: Samples,
    ranks: Ranks,
    batch: int,
    limit: int = 0,
    *,
    whole: bool = False,
    token_bytes: np.ndarray | None = None,
    passes: Passes = PLAIN,
) -> dict[str, float] | None:
    """The loss of a validation set, or of its first `limit` samples (0: all); None if stopped.

    Args:
        model: `model(tokens, labels)`, both [B, T], returns the summed loss.
        whole: Also measure the rest, in `full_loss` and the other fields of all samples.
        token_bytes: UTF-8 bytes of each token, [V], for `bits_per_byte`.

    Returns `loss` (nats a token, over the unmasked labels), `perplexity`, `tokens` and `samples`
    (over all ranks), and `source.NAME.loss`. Neither world size nor padding has an effect.
    """
    model, mesh = unwrap(model), ranks.mesh
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
                    total += scalar(model(*here[:2], **sources, **documents_of(here, model)))
                if passes.stopped(ranks):
                    return None
                done = min(done + batch * mesh.data_world, end)
                passes.show(done, ends[-1])
            # The ranks of `cp` have the same rows; each has the loss of its own tokens.
            counts = [mesh.counts_rows * float(number) for number in (tokens, text_bytes)]
            own_sums = sum_over_stages(by_source.clone(), ranks).flatten().tolist()
            sums = sum_async([float(total), *counts, *own_sums], ranks).wait()
            results.append(_mean_loss(end, *sums[:3]) | source_losses(names, sums[3:]))
    # `full_loss`, and `source.web.full_loss`
    full = {re.sub(r"(\w+)$", r"full_\1", name): value for name, value in results[-1].items()}
    return results[0] | (full if len(ends) > 1 else {})


def _mean_loss(samples: int, loss_sum: float, tokens: float, text_bytes: float) -> dict[str, float]:
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
    return scores


def source_losses(names: Sequence[str], sums: Sequence[float]) -> dict[str, float]:
    """The losses of a mixture's sources; a source without labels has none."""
    pairs = zip(names, sums[::2], sums[1::2], strict=True)
    return {f"source.{name}.loss": loss / labels for name, loss, labels in pairs if labels}


class Continuation(NamedTuple):
    """A text and its ending, as token ids; neither is empty."""

    context: Sequence[int]
    ending: Sequence[int]


class Likelihood(NamedTuple):
    sum: float  # log-likelihood, in nats
    tokens: int  # scored
    greedy: bool  # whether each of them is the likeliest


def log_likelihoods(
    model: Any,
    rows: Sequence[Continuation],
    ranks: Ranks,
    passes: Passes = PLAIN,
) -> list[Likelihood] | None:
    """Log-likelihood of each ending after its context, of all rows on every rank; None if stopped.

    One rank scores a row, and a row longer than the model's context loses its beginning. Rows in a
    pass have similar lengths. Padding is at their end, so that a causal model does not see it.
    `model(tokens)` returns logits [B, T, V].
    """
    model, mesh, device = unwrap(model), ranks.mesh, ranks.device
    texts = [[*row.context, *row.ending][-(model.context + 1) :] for row in rows]
    counts = [min(len(row.ending), len(text) - 1) for row, text in zip(rows, texts, strict=True)]
    lengths = [len(text) - 1 for text in texts]  # the model does not read the last token
    groups = plan_passes(lengths, model.vocab, device.type)
    scored = list[int]()  # on this rank
    results = list[Tensor]()  # for each of them the sum, and whether greedy
    with evaluating(model), torch.no_grad():
        for first in range(0, len(groups), mesh.data_world):
            at = first + mesh.data_rank
            own = groups[at] if at < len(groups) else []
            # A rank without work in the last round takes part with one token.
            columns = [torch.tensor(texts[i]) for i in own] or [torch.tensor([0, 0])]
            batch = pad_sequence(columns, batch_first=True)
            if device.type == "cuda":
                batch = batch.pin_memory()
            batch = batch.to(device, non_blocking=True)
            with casting_once(passes.autocast):
                logits = model(batch[:, :-1])
            for row, i in enumerate(own):
                part = slice(lengths[i] - counts[i], lengths[i])
                results.append(score(logits[row, part], batch[row, 1:][part]))
            scored += own
            if passes.stopped(ranks):
                return None
            passes.show(min(first + mesh.data_world, len(groups)), len(groups))
    sums, greedy_rows = [0.0] * len(rows), [0.0] * len(rows)
    # the host waits for the device only here
    fetched = torch.stack(results).tolist() if results and mesh.counts_rows else []
    for i, (total, is_greedy) in zip(scored, fetched, strict=False):
        sums[i], greedy_rows[i] = total, is_greedy
    merged = sum_async([*sums, *greedy_rows], ranks).wait()
    return list(map(Likelihood, merged[: len(rows)], counts, map(bool, merged[len(rows) :])))


def score(logits: Tensor, wanted: Tensor) -> Tensor:
    """The log-likelihood of the tokens of one ending, and whether they are greedy [2]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = logits.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    greedy = (logits.argmax(-1) == wanted).all().double()
    return torch.stack([scores.double().sum(), greedy])


def plan_passes(lengths: Sequence[int], vocab: int, device: str) -> list[list[int]]:
    """Texts in passes, longest first, within the limits on tokens (with padding) and on logits."""
    most = min(TOKENS_PER_PASS[device], max(LEAST_PER_PASS, LOGITS_PER_PASS[device] // vocab))
    passes = list[list[int]]()
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not passes or (len(passes[-1]) + 1) * lengths[passes[-1][0]] > most:
            passes.append([])
        passes[-1].append(i)
    return passes


def encode_request(
    tokenizer: Tokenizer, start: list[int], context: str, ending: str
) -> Continuation:
    """A text cut after the tokens of its context; spaces at its end go to the ending."""
    stripped = context.rstrip()
    ending = context[len(stripped) :] + ending
    if not stripped:
        return Continuation(start, tokenizer.encode(ending).tolist())
    before, both = tokenizer.prompt(stripped), tokenizer.prompt(stripped + ending)
    rest = both[len(before) :] or tokenizer.encode(ending, before=stripped).tolist()
    return Continuation(before, rest)


@dataclass(frozen=True)
class Item:
    """A text with four endings, as EleutherAI's harness writes them."""

    context: str
    endings: tuple[str, ...]  # four
    label: int  # the number of the right ending


def read_items(file: str = "", limit: int = 0) -> list[Item]:
    """The first `limit` (0: all) items, from a JSONL file or `datasets`; UserError if none."""
    if file and not Path(file).is_file():
        raise UserError(f"eval.hellaswag_file: {file} does not exist")
    place = file or HELLASWAG
    setting = "eval.hellaswag_file" if file else "eval.hellaswag_file is empty"
    spec = SourceSpec(place, place, "chat", split="validation", setting=setting)
    items = []
    for record in itertools.islice(open_source(spec).items(), limit or None):
        try:
            items.append(_item(record_of(record)))
        except (ValueError, KeyError, TypeError):
            expected = "a HellaSwag item has ctx, endings, and as label the number of one"
            raise UserError(f"{record.place}: {expected}") from None
    if not items:
        raise UserError(f"eval.hellaswag_file: {file} is empty")
    return items


def _item(row: dict[str, Any]) -> Item:
    # the endings continue the second part, a new sentence
    text = f"{row['ctx_a']} {row['ctx_b'].capitalize()}" if "ctx_a" in row else row["ctx"]
    if row.get("activity_label"):
        text = f"{row['activity_label']}: {text}"
    item = Item(_without_tags(text), tuple(map(_without_tags, row["endings"])), int(row["label"]))
    if not item.context or not all(item.endings) or not 0 <= item.label < len(item.endings):
        raise ValueError
    return item


def _without_tags(text: str) -> str:
    """A text without the tags of WikiHow, such as `[header]`."""
    text = re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". "))
    return text.replace("  ", " ")


def continuations(items: Sequence[Item], tokenizer: Tokenizer) -> list[Continuation]:
    pairs = [(item.context, f" {ending}") for item in items for ending in item.endings]
    return [encode_request(tokenizer, [], *pair) for pair in pairs]


def evaluate_hellaswag(
    model: Any,
    items: Sequence[Item],
    rows: Sequence[Continuation],
    ranks: Ranks,
    passes: Passes = PLAIN,
) -> dict[str, float] | None:
    """Accuracy over the items, and `items`; `rows` are their `continuations`. None if stopped.

    The model's answer is the ending with the largest log-likelihood: in sum (`acc`), per byte
    (`acc_norm`), or per token (`acc_per_token`, as llm.c).
    """
    scores = log_likelihoods(model, rows, ranks, passes)
    if scores is None:
        return None
    right = {"acc": 0, "acc_norm": 0, "acc_per_token": 0}
    rest = iter(scores)
    for item in items:
        endings = list(itertools.islice(rest, len(item.endings)))
        pairs = list(zip(endings, item.endings, strict=True))
        normalised = {
            "acc": [ending.sum for ending in endings],
            "acc_norm": [ending.sum / len(text.encode()) for ending, text in pairs],
            "acc_per_token": [ending.sum / ending.tokens for ending in endings],
        }
        for name, values in normalised.items():
            right[name] += values.index(max(values)) == item.label
    return {name: number / len(items) for name, number in right.items()} | {"items": len(items)}
