"""Hands a model to EleutherAI's evaluation harness (`lm-eval`), which knows some thousand tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from windlass import hub
from windlass.errors import UserError
from windlass.evaluate.generate import generate, window
from windlass.evaluate.likelihood import Continuation, log_likelihoods
from windlass.evaluate.sampling import Sampling
from windlass.evaluate.stream import text_after
from windlass.parallel.wrap import unwrap

if TYPE_CHECKING:
    from windlass.data.tokenizer import Tokenizer
    from windlass.parallel.mesh import Ranks

MAX_TOKENS = 256
"""Tokens to generate where a task does not say."""


def run_harness(
    tasks: str,
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    *,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    limit: int | None = None,
    task_manager: Any = None,
) -> dict[str, Any]:
    """Measure tasks of the harness, their names joined by `+`; all ranks call it together.

    Every rank walks through the same requests, and the model's passes behind them are shared out.

    Returns:
        `TASK/METRIC` → number, and `runtime_s`.

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
    with hub.explained(f"--suite lm-eval:{tasks}"):
        try:
            found = simple_evaluate(
                model=adapter(model, tokenizer, ranks, autocast),
                tasks=names,
                limit=limit,
                task_manager=task_manager,
                log_samples=False,
            )
        except KeyError as error:  # how the harness says that there is no such task
            raise UserError(f"--suite lm-eval:{tasks}: the harness has no task {error}") from None
    numbers = {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in found["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and "stderr" not in metric
    }
    return {**numbers, "runtime_s": time.perf_counter() - started}


def adapter(
    model: Any, tokenizer: Tokenizer, ranks: Ranks, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> Any:
    """The model as the harness calls it (`lm_eval.api.model.LM`)."""
    from lm_eval.api.model import LM

    eot = [] if tokenizer.eot is None else [tokenizer.eot]
    start = eot or [int(i) for i in tokenizer.encode("\n")]

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
            return [_generate(model, tokenizer, ranks, autocast, start, *request.args) for request in requests]

    def score(rows: list[Continuation]) -> list[tuple[float, bool]]:
        if not rows:
            return []
        found = log_likelihoods(model, rows, ranks, autocast=autocast)
        assert found is not None
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


def _generate(
    model: Any, tokenizer: Tokenizer, ranks: Ranks, autocast: Any, start: list[int], context: str, how: dict[str, Any]
) -> str:
    """One text, cut before the first of the stop texts; made by every rank alike."""
    stops = how.get("until") or []
    stops = [stops] if isinstance(stops, str) else list(stops)
    sampling = Sampling(
        max_tokens=int(how.get("max_gen_toks", MAX_TOKENS)),
        temperature=float(how.get("temperature", 0.0)) if how.get("do_sample") else 0.0,
        stop=frozenset() if tokenizer.eot is None else frozenset({tokenizer.eot}),
    )
    room = max(1, window(unwrap(model)) - sampling.max_tokens)
    ids = ([int(i) for i in tokenizer.encode(context)] or start)[-room:]
    made = generate(model, [ids], sampling, ranks, vocab=tokenizer.vocab, autocast=autocast)
    text = text_after(tokenizer, ids, (made or [[]])[0])
    return text[: min((text.find(stop) for stop in stops if stop and stop in text), default=len(text))]
