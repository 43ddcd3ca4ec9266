"""Hands a model to EleutherAI's evaluation harness (`lm-eval`), which has some thousand tasks.

Every rank walks through the same requests, and the model's passes and texts behind them are divided over the ranks.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from windlass import hub
from windlass.errors import UserError
from windlass.evaluation.generate import Sampling, generate_divided, prompt_ids, window
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.parallel.parallelize import unwrap

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.dist import Ranks

MAX_TOKENS = 256
"""Tokens to generate where a task does not say."""


class Interrupted(Exception):
    """Passes through the harness, which has no way to stop, where `poll` asked for one."""


def run_harness(
    tasks: str,
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
    limit: int | None = None,
    task_manager: Any = None,
) -> dict[str, Any] | None:
    """Measure tasks of the harness, their names joined by `+`: `TASK/METRIC` → number, and `runtime_s`.

    Raises:
        UserError: The harness is not installed, or there is no such task.
    """
    hub.prepare()
    try:
        from lm_eval import simple_evaluate
    except ImportError as error:
        raise UserError(f"--suite lm-eval needs the package {error.name}: pip install 'windlass[lm-eval]'") from None
    started = time.perf_counter()
    with hub.explained(f"--suite lm-eval:{tasks}"), restored_generators(ranks.device):
        try:
            report = simple_evaluate(
                model=adapter(model, tokenizer, ranks, autocast, poll),
                tasks=[name for name in tasks.split("+") if name],
                limit=limit,
                task_manager=task_manager,
                log_samples=False,
            )
        except Interrupted:
            return None
        except KeyError as error:  # how the harness says that there is no such task
            raise UserError(f"--suite lm-eval:{tasks}: the harness has no task {error}") from None
    numbers = {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in (report["results"] if report else {}).items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if "stderr" not in metric and metric not in ("alias", "sample_len")
    }
    # Under a launcher the harness gives its results to each node's first process alone.
    numbers = ranks.broadcast_object("lm-eval results", numbers)
    return {**numbers, "runtime_s": time.perf_counter() - started}


@contextmanager
def restored_generators(device: torch.device) -> Iterator[None]:
    """Random generators, which the harness seeds, are afterwards as they were: a training is not changed by measuring."""
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def adapter(
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> Any:
    """The model as the harness calls it (`lm_eval.api.model.LM`); its methods raise `Interrupted` where `poll` asks to stop."""
    from lm_eval.api.model import LM

    start = prompt_ids(model, tokenizer, "")  # what stands before a text that nothing precedes

    def score(rows: list[Continuation]) -> list[tuple[float, bool]]:
        if not rows:
            return []
        scores = log_likelihoods(model, rows, ranks, autocast=autocast, poll=poll)
        if scores is None:
            raise Interrupted
        return list(zip(scores.sums, scores.greedy, strict=True))

    class Adapter(LM):  # type: ignore[misc]
        """Texts in, log-likelihoods and texts out."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return score([encode_request(tokenizer, start, *request.args) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            context = unwrap(model).context
            rows, owners = [], []
            for number, request in enumerate(requests):
                ids = tokenizer.encode(request.args[0]).tolist()
                # Each token once, after as much as the window holds of its stretch.
                for first in range(0, len(ids), context):
                    rows.append(Continuation(ids[first - 1 : first] or start, ids[first : first + context]))
                    owners.append(number)
            sums = [0.0] * len(requests)
            for number, (value, _greedy) in zip(owners, score(rows), strict=True):
                sums[number] += value
            return sums

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            asked = [request.args for request in requests]
            return generate_until(model, tokenizer, ranks, asked, autocast=autocast, poll=poll)

    return Adapter()


def encode_request(tokenizer: Tokenizer, start: list[int], context: str, ending: str) -> Continuation:
    """Context and ending tokenized together, cut where the context's own tokens end; its trailing spaces go to the ending."""
    stripped = context.rstrip()
    ending = context[len(stripped) :] + ending
    before = tokenizer.encode(stripped).tolist() if stripped else []
    both = tokenizer.encode(stripped + ending).tolist()
    if both[: len(before)] != before or len(both) == len(before):
        both = before + tokenizer.encode(ending).tolist()
    return Continuation(before or start, both[len(before) :])


def generate_until(
    model: Any, tokenizer: Tokenizer, ranks: Ranks, asked: Sequence[tuple[str, dict[str, Any]]], **how: Any
) -> list[str]:
    """A text for each request (a context and the harness's settings), the same on every rank; all ranks call it together.

    Requests of equal settings are generated together. Raises Interrupted where `poll` cut it short.
    """
    groups: dict[Sampling, list[int]] = {}
    for number, (_, settings) in enumerate(asked):
        groups.setdefault(_sampling(settings, tokenizer), []).append(number)
    texts: dict[int, str] = {}
    for sampling, numbers in groups.items():
        longest = max(1, window(unwrap(model)) - sampling.max_tokens)

        def prompt(number: int, longest: int = longest) -> list[int]:
            return (tokenizer.encode(asked[number][0]).tolist() or prompt_ids(model, tokenizer, ""))[-longest:]

        sizes = {number: len(asked[number][0]) for number in numbers}
        group = generate_divided(model, tokenizer, ranks, sampling, sizes, prompt, **how)
        if group is None:
            raise Interrupted
        texts |= group
    return [_cut(texts[number], settings.get("until") or []) for number, (_, settings) in enumerate(asked)]


def _sampling(settings: dict[str, Any], tokenizer: Tokenizer) -> Sampling:
    """Of a request's settings; without `do_sample` the likeliest tokens are taken."""
    sampled = bool(settings.get("do_sample"))
    return Sampling(
        max_tokens=int(settings.get("max_gen_toks", MAX_TOKENS)),
        temperature=float(settings.get("temperature", 1.0)) if sampled else 0.0,
        top_k=int(settings.get("top_k", 0)) if sampled else 0,
        top_p=float(settings.get("top_p", 1.0)) if sampled else 1.0,
        stop=frozenset() if tokenizer.eot is None else frozenset({tokenizer.eot}),
    )


def _cut(text: str, until: str | Sequence[str]) -> str:
    """The text up to the first of the stop texts."""
    until = [until] if isinstance(until, str) else until
    return text[: min((text.find(stop) for stop in until if stop and stop in text), default=len(text))]
