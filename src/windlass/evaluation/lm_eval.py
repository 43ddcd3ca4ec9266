"""Hands a model to EleutherAI's evaluation harness (`lm-eval`), which has some thousand tasks.

Every rank walks through the same requests, and the model's passes and texts behind them are divided over the ranks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from windlass import hub
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError, require
from windlass.evaluation.generate import Sampling, generate_divided, prompt_ids, window
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import unwrap

MAX_TOKENS = 256  # to generate where a task does not say


class Interrupted(Exception):
    """Passes through the harness, which has no way to stop, where `poll` asked for one."""


def run_harness(
    tasks: str,
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    *,
    task_manager: Any = None,
    **how: Any,
) -> dict[str, Any] | None:
    """Measure tasks of the harness, their names joined by `+`: `TASK/METRIC` → number, and `runtime_s`.

    `how` are `autocast` and `poll`. Raises UserError where the harness is not installed, or there is no such task.
    """
    hub.prepare()
    require("lm_eval", f"the suite lm-eval:{tasks}")
    from lm_eval import simple_evaluate

    started = time.perf_counter()
    # The harness seeds the random generators: afterwards they are as before, so that measuring changes no training.
    python, numpy = random.getstate(), np.random.get_state()
    devices = [ranks.device] if ranks.device.type == "cuda" else []
    try:
        with hub.explained(f"the suite lm-eval:{tasks}"), torch.random.fork_rng(devices=devices):
            report = simple_evaluate(
                model=adapter(model, tokenizer, ranks, **how),
                tasks=[name for name in tasks.split("+") if name],
                task_manager=task_manager,
                log_samples=False,
            )
    except Interrupted:
        return None
    except KeyError as error:  # how the harness says that there is no such task
        raise UserError(f"the suite lm-eval:{tasks}: the harness has no task {error}") from None
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
    numbers = {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in (report["results"] if report else {}).items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
    }
    # Under a launcher the harness gives its results to each node's first process alone.
    numbers = ranks.broadcast_object("lm-eval results", numbers)
    return {**numbers, "runtime_s": time.perf_counter() - started}


def adapter(model: Any, tokenizer: Tokenizer, ranks: Ranks, **how: Any) -> Any:
    """The model as the harness calls it (`lm_eval.api.model.LM`); its methods raise `Interrupted` where `poll` asks to stop."""
    from lm_eval.api.model import LM

    start = prompt_ids(model, tokenizer, "")  # what stands before a text that nothing precedes

    def score(rows: list[Continuation]) -> list[tuple[float, bool]]:
        if not rows:
            return []
        scores = log_likelihoods(model, rows, ranks, **how)
        if scores is None:
            raise Interrupted
        return [(one.sum, one.greedy) for one in scores]

    class Adapter(LM):  # type: ignore[misc]
        """Texts in, log-likelihoods and texts out."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return score([encode_request(tokenizer, start, *request.args) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            context, sums = unwrap(model).context, []
            for request in requests:
                ids = tokenizer.encode(request.args[0]).tolist()
                starts = range(
                    0, len(ids), context
                )  # each token once, after those before it in its stretch
                rows = [Continuation(ids[i - 1 : i] or start, ids[i : i + context]) for i in starts]
                sums.append(sum(value for value, _greedy in score(rows)))
            return sums

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            return generate_until(
                model, tokenizer, ranks, [request.args for request in requests], **how
            )

    return Adapter()


def encode_request(
    tokenizer: Tokenizer, start: list[int], context: str, ending: str
) -> Continuation:
    """Context and ending tokenized together, cut where the context's own tokens end; its trailing spaces go to the ending."""
    stripped = context.rstrip()
    ending = context[len(stripped) :] + ending
    before = tokenizer.encode(stripped).tolist() if stripped else []
    both = tokenizer.encode(stripped + ending).tolist()
    if both[: len(before)] != before or len(both) == len(before):
        both = before + tokenizer.encode(ending).tolist()
    return Continuation(before or start, both[len(before) :])


def generate_until(
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    asked: Sequence[tuple[str, dict[str, Any]]],
    **how: Any,
) -> list[str]:
    """A text for each request (a context and the harness's settings), the same on every rank; all ranks call it together.

    Requests of equal settings are generated together. Raises Interrupted where `poll` cut it short.
    """
    samplings = []
    for _, settings in asked:
        given = (
            settings if settings.get("do_sample") else {"temperature": 0.0}
        )  # without it the likeliest tokens
        samplings.append(
            Sampling(
                int(settings.get("max_gen_toks", MAX_TOKENS)),
                float(given.get("temperature", 1.0)),
                int(given.get("top_k", 0)),
                float(given.get("top_p", 1.0)),
                stop=frozenset() if tokenizer.eot is None else frozenset({tokenizer.eot}),
            )
        )
    ids = [
        tokenizer.encode(context).tolist() or prompt_ids(model, tokenizer, "")
        for context, _ in asked
    ]
    texts: dict[int, str] = {}
    for sampling in dict.fromkeys(samplings):
        room = max(1, window(unwrap(model)) - sampling.max_tokens)
        prompts = {n: ids[n][-room:] for n, one in enumerate(samplings) if one == sampling}
        group = generate_divided(
            model, tokenizer, ranks, sampling, list(prompts), prompts.__getitem__, **how
        )
        if group is None:
            raise Interrupted
        texts |= group
    for number, (_, settings) in enumerate(asked):  # a text ends before the first of the stop texts
        text, until = texts[number], settings.get("until") or []
        places = [
            text.find(stop)
            for stop in ([until] if isinstance(until, str) else until)
            if stop and stop in text
        ]
        texts[number] = text[: min(places, default=len(text))]
    return [texts[number] for number in range(len(asked))]
