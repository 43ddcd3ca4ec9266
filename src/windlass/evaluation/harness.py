"""Tasks of EleutherAI's harness (`lm-eval`), which gives every rank the same requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass import hub
from windlass.data.chat import rendered_tokens
from windlass.errors import UserError, require
from windlass.evaluation.generate import Sampling, generate_divided, window
from windlass.evaluation.likelihood import Continuation, log_likelihoods
from windlass.evaluation.passes import Passes
from windlass.recipe.settings import EvalSettings

MAX_TOKENS = 256  # to generate if a task does not say


def run_harness(
    passes: Passes, tasks: str, settings: EvalSettings, task_manager: Any = None
) -> dict[str, Any]:
    """The scores `TASK/METRIC` of tasks, joined by `+`."""
    hub.detect_offline()
    require("lm_eval", f"the suite lm-eval:{tasks}")
    from lm_eval import simple_evaluate

    if settings.lm_eval_tasks:
        folder = Path(settings.lm_eval_tasks).expanduser()
        if not folder.is_dir():
            problem = "is not a directory with task files"
            raise UserError(f"eval.lm_eval_tasks: {settings.lm_eval_tasks} {problem}")
        from lm_eval.tasks import TaskManager

        task_manager = TaskManager(include_path=str(folder))
    limit = settings.lm_eval_limit
    try:
        with hub.explained(f"the suite lm-eval:{tasks}"):
            report = simple_evaluate(
                model=adapter(passes, chat=settings.lm_eval_chat),
                tasks=[name for name in tasks.split("+") if name],
                num_fewshot=None if settings.lm_eval_few_shot < 0 else settings.lm_eval_few_shot,
                limit=(int(limit) if limit >= 1 else limit) or None,
                apply_chat_template=settings.lm_eval_chat,
                task_manager=task_manager,
                log_samples=False,
            )
    except KeyError as error:  # the harness's error for an unknown task
        raise UserError(f"the suite lm-eval:{tasks}: the harness lacks the task {error}") from None
    numbers = {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in (report["results"] if report else {}).items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
    }
    # Under a launcher the harness returns results to each node's first process only.
    return dict(passes.ranks.broadcast_object("lm-eval results", numbers))


def adapter(passes: Passes, chat: bool = False) -> Any:
    """The model for the harness, with the tokens of its `HFLM`.

    `chat`: the texts are conversations in the chat template.
    """
    from lm_eval.api.model import TemplateLM

    tokenizer, template = passes.tokenizer, passes.template if chat else None

    class Adapter(TemplateLM):  # type: ignore[misc]
        tokenizer_name = tokenizer.fingerprint  # of the harness's cache
        eot_token_id = tokenizer.prompt("")[-1]  # before a text without a context

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Any:
            if add_special_tokens is False:
                return tokenizer.encode(string).tolist()
            return rendered_tokens(string, tokenizer) if template else tokenizer.prompt(string)

        def chat_template(self, chat_template: Any = False) -> str:
            return template.source if template else ""

        def apply_chat_template(
            self, chat_history: list[dict[str, Any]], add_generation_prompt: bool = True
        ) -> str:
            assert template is not None
            return template.text(chat_history, tokenizer, ask=add_generation_prompt)

        def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[Any]:
            # An ending lacks tokens if its text merges with the context's last one.
            rows = [
                Continuation(context, ending or self.tok_encode(texts[1], False))
                for texts, context, ending in requests
            ]
            scores = log_likelihoods(passes, rows) if rows else []
            return [(score.sum, score.greedy) for score in scores]

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            sums, context = list[float](), passes.model.context
            for request in requests:
                ids = self.tok_encode(request.args[0])
                windows = get_rolling_token_windows(ids, self.prefix_token_id, context, 1)
                rows = [(request.args, *make_disjoint_window(window)) for window in windows]
                sums.append(sum(value for value, _greedy in self._loglikelihood_tokens(rows)))
            return sums

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            return generate_until(passes, [request.args for request in requests], self.tok_encode)

    return Adapter()


def generate_until(
    passes: Passes, requests: Sequence[tuple[str, Any]], encode: Callable[[str], list[int]]
) -> list[str]:
    """A text for each request (context and settings), on every rank."""
    samplings, prompts = list[Sampling](), list[list[int]]()
    for context, settings in requests:
        # the likeliest tokens unless `do_sample` is set
        options = settings if settings.get("do_sample") else {"temperature": 0.0}
        sampling = Sampling(
            max_tokens=int(settings.get("max_gen_toks", MAX_TOKENS)),
            temperature=float(options.get("temperature", 1.0)),
            top_k=int(options.get("top_k", 0)),
            top_p=float(options.get("top_p", 1.0)),
            stop=passes.stop,
        )
        samplings.append(sampling)
        prompts.append(encode(context)[-max(1, window(passes.model) - sampling.max_tokens) :])
    answers: dict[int, str] = {}
    for sampling in dict.fromkeys(samplings):
        numbers = [number for number, other in enumerate(samplings) if other == sampling]
        answers |= generate_divided(passes, sampling, numbers, prompts.__getitem__)
    texts = []
    for number, (_, settings) in enumerate(requests):  # a text ends before its first stop text
        until = settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        text = answers[number]
        places = [text.find(stop) for stop in stops if stop and stop in text]
        texts.append(text[: min(places, default=len(text))])
    return texts
