"""Hands a model to EleutherAI's evaluation harness (`lm-eval`), which knows some thousand tasks."""

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
from windlass.evaluation.generate import Sampling, generate, text_after, window
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.parallel.parallelize import unwrap

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.dist import Ranks

MAX_TOKENS = 256
"""Tokens to generate where a task does not say."""


class Interrupted(Exception):
    """Goes through the harness, which knows no stop, when `poll` asked for one."""


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
    """Measure tasks of the harness, their names joined by `+`; all ranks call it together.

    Every rank walks through the same requests, and the model's passes and texts behind them are shared out. The generators
    of random numbers, which the harness seeds, are afterwards as they were.

    Returns:
        `TASK/METRIC` → number, and `runtime_s`; None where `poll`, asked between passes, cut it short.

    Raises:
        UserError: The harness is not installed, or there is no such task.
    """
    hub.prepare()
    try:
        from lm_eval import simple_evaluate
    except ImportError as error:
        raise UserError(f"--suite lm-eval needs the package {error.name}: pip install 'windlass[lm-eval]'") from None
    started = time.perf_counter()
    names = [name for name in tasks.split("+") if name]
    with hub.explained(f"--suite lm-eval:{tasks}"), _own_random_numbers(ranks.device):
        try:
            found = simple_evaluate(
                model=adapter(model, tokenizer, ranks, autocast, poll),
                tasks=names,
                limit=limit,
                task_manager=task_manager,
                log_samples=False,
            )
        except Interrupted:
            return None
        except KeyError as error:  # how the harness says that there is no such task
            raise UserError(f"--suite lm-eval:{tasks}: the harness has no task {error}") from None
    # Under a launcher the harness gives its results to each node's first process alone.
    numbers = ranks.broadcast_object("lm-eval results", _numbers(found["results"]) if found else None)
    return {**numbers, "runtime_s": time.perf_counter() - started}


def _numbers(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """`TASK/METRIC` → number, of what the harness found."""
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in results.items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
        if "stderr" not in metric and metric not in ("alias", "sample_len")
    }


@contextmanager
def _own_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn or seeded inside leaves no trace outside: a training goes on as if nothing had been measured."""
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

    start = _start(tokenizer)

    class Adapter(LM):  # type: ignore[misc]
        """Texts in, log-likelihoods and texts out."""

        def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
            return score([_pair(tokenizer, start, *request.args) for request in requests])

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            context = unwrap(model).context
            pieces, owner = [], []
            for number, request in enumerate(requests):
                ids = [int(i) for i in tokenizer.encode(request.args[0])]
                for first in range(
                    0, len(ids), context
                ):  # each token once, after as much as the window holds of its piece
                    pieces.append(Continuation(ids[first - 1 : first] or start, ids[first : first + context]))
                    owner.append(number)
            sums = [0.0] * len(requests)
            for number, (value, _greedy) in zip(owner, score(pieces), strict=True):
                sums[number] += value
            return sums

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            asked = [request.args for request in requests]
            return write_texts(model, tokenizer, ranks, asked, autocast=autocast, poll=poll)

    def score(rows: list[Continuation]) -> list[tuple[float, bool]]:
        if not rows:
            return []
        found = log_likelihoods(model, rows, ranks, autocast=autocast, poll=poll)
        if found is None:
            raise Interrupted
        return list(zip(found.sums, found.greedy, strict=True))

    return Adapter()


def _pair(tokenizer: Tokenizer, start: list[int], context: str, ending: str) -> Continuation:
    """Context and ending tokenized together, cut where the context's own tokens end; its trailing spaces go to the ending."""
    kept = context.rstrip()
    ending = context[len(kept) :] + ending
    before = [int(i) for i in tokenizer.encode(kept)] if kept else []
    both = [int(i) for i in tokenizer.encode(kept + ending)]
    if both[: len(before)] != before or len(both) == len(before):
        both = before + [int(i) for i in tokenizer.encode(ending)]
    return Continuation(before or start, both[len(before) :])


def write_texts(
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    asked: Sequence[tuple[str, dict[str, Any]]],
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    poll: Callable[[], bool] | None = None,
) -> list[str]:
    """A text for each request (a context and the harness's settings), the same on every rank; all ranks call it together.

    Requests of equal settings are made in batches, each on one rank. Raises Interrupted where `poll` cut it short.
    """
    groups: dict[Sampling, list[int]] = {}
    for number, (_, how) in enumerate(asked):
        groups.setdefault(_sampling(how, tokenizer), []).append(number)
    own: list[tuple[int, str]] = []
    for sampling, numbers in groups.items():
        # Dealt out in the order of length, so that the ranks have about the same work.
        mine = sorted(numbers, key=lambda n: (len(asked[n][0]), n))[ranks.rank :: ranks.world]
        room = max(1, window(unwrap(model)) - sampling.max_tokens)
        prompts = [([int(i) for i in tokenizer.encode(asked[n][0])] or _start(tokenizer))[-room:] for n in mine]
        made = generate(
            model, prompts, sampling, ranks, indices=mine, vocab=tokenizer.vocab, autocast=autocast, poll=poll
        )
        if made is None:
            raise Interrupted
        for number, prompt, ids in zip(mine, prompts, made, strict=True):
            own.append((number, _before(asked[number][1].get("until"), text_after(tokenizer, prompt, ids))))
    found = dict(pair for part in ranks.all_gather_object("lm-eval", own) for pair in part)
    return [found[number] for number in range(len(asked))]


def _start(tokenizer: Tokenizer) -> list[int]:
    """What stands before a text that nothing precedes: the end-of-text token, or a newline."""
    return [int(i) for i in tokenizer.encode("\n")] if tokenizer.eot is None else [tokenizer.eot]


def _sampling(how: dict[str, Any], tokenizer: Tokenizer) -> Sampling:
    """What a request's settings come to here; without `do_sample` the likeliest tokens are taken."""
    sampled = bool(how.get("do_sample"))
    return Sampling(
        max_tokens=int(how.get("max_gen_toks", MAX_TOKENS)),
        temperature=float(how.get("temperature", 1.0)) if sampled else 0.0,
        top_k=int(how.get("top_k", 0)) if sampled else 0,
        top_p=float(how.get("top_p", 1.0)) if sampled else 1.0,
        stop=frozenset() if tokenizer.eot is None else frozenset({tokenizer.eot}),
    )


def _before(until: str | Sequence[str] | None, text: str) -> str:
    """The text up to the first of the stop texts."""
    stops = [until] if isinstance(until, str) else until or []
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]
