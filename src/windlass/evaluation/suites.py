"""The suites of a recipe, measured on a model: loss, HellaSwag, SQuAD, and tasks of EleutherAI's
harness (`lm-eval`), which gives every rank the same requests.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import string
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from windlass import hub
from windlass.data.chat import Template, stop_tokens, text_tokens
from windlass.data.examples import Question, question_prompt
from windlass.data.samples import Samples, Subset
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError, require
from windlass.evaluation import likelihood
from windlass.evaluation.generate import Sampling, generate_divided, window
from windlass.evaluation.likelihood import (
    Continuation,
    evaluate_hellaswag,
    evaluate_loss,
    log_likelihoods,
)
from windlass.evaluation.questions import eval_questions
from windlass.fileio import write_atomic
from windlass.optim.average import Average
from windlass.parallel.dist import Ranks
from windlass.parallel.parallelize import autocast, unwrap, varying_shapes
from windlass.recipe import Recipe
from windlass.recipe.settings import HELLASWAG_SUITE, LOSS_SUITE, SQUAD_SUITE, EvalSettings

MAX_TOKENS = 256  # to generate if a task does not say


class Interrupted(Exception):
    """`poll` asked to stop; the harness itself cannot stop."""


def run_harness(
    tasks: str,
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    stop: frozenset[int],
    settings: EvalSettings,
    template: Template | None = None,
    task_manager: Any = None,
    **how: Any,
) -> dict[str, Any] | None:
    """The scores `TASK/METRIC` of tasks, joined by `+`; `template` is for `lm_eval_chat`."""
    hub.prepare()
    require("lm_eval", f"the suite lm-eval:{tasks}")
    from lm_eval import simple_evaluate

    if (folder := settings.lm_eval_tasks) and not Path(folder).expanduser().is_dir():
        raise UserError(f"eval.lm_eval_tasks: {folder} is not a directory with task files")
    if folder:
        from lm_eval.tasks import TaskManager

        task_manager = TaskManager(include_path=str(Path(folder).expanduser()))
    limit = settings.lm_eval_limit
    chat = template if settings.lm_eval_chat else None
    try:
        with hub.explained(f"the suite lm-eval:{tasks}"):
            report = simple_evaluate(
                model=adapter(model, tokenizer, ranks, stop, chat, **how),
                tasks=[name for name in tasks.split("+") if name],
                num_fewshot=None if settings.lm_eval_few_shot < 0 else settings.lm_eval_few_shot,
                limit=(int(limit) if limit >= 1 else limit) or None,
                apply_chat_template=settings.lm_eval_chat,
                task_manager=task_manager,
                log_samples=False,
            )
    except Interrupted:
        return None
    except KeyError as error:  # the harness's error for an unknown task
        raise UserError(f"the suite lm-eval:{tasks}: the harness lacks the task {error}") from None
    numbers = {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in (report["results"] if report else {}).items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "stderr" not in metric and metric != "sample_len"
    }
    # Under a launcher the harness returns results to each node's first process only.
    return dict(ranks.broadcast_object("lm-eval results", numbers))


def adapter(
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    stop: frozenset[int],
    template: Template | None = None,
    **how: Any,
) -> Any:
    """The model for the harness, with the tokens of its `HFLM`; raises `Interrupted`."""
    from lm_eval.api.model import TemplateLM

    class Adapter(TemplateLM):  # type: ignore[misc]
        tokenizer_name = tokenizer.fingerprint  # of the harness's cache
        eot_token_id = tokenizer.prompt("")[-1]  # before a text without a context

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> Any:
            if add_special_tokens is False:
                return tokenizer.encode(string).tolist()
            return text_tokens(string, tokenizer)[0] if template else tokenizer.prompt(string)

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
                Continuation(a, b or self.tok_encode(pair[1], False)) for pair, a, b in requests
            ]
            scores = log_likelihoods(model, rows, ranks, **how) if rows else []
            if scores is None:
                raise Interrupted
            return [(score.sum, score.greedy) for score in scores]

        def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
            from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

            sums, context = list[float](), unwrap(model).context
            for request in requests:
                ids = self.tok_encode(request.args[0])
                windows = get_rolling_token_windows(ids, self.prefix_token_id, context, 1)
                rows = [(request.args, *make_disjoint_window(window)) for window in windows]
                sums.append(sum(value for value, _greedy in self._loglikelihood_tokens(rows)))
            return sums

        def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
            arguments = [request.args for request in requests]
            return generate_until(model, tokenizer, ranks, stop, arguments, template, **how)

    return Adapter()


def generate_until(
    model: Any,
    tokenizer: Tokenizer,
    ranks: Ranks,
    stop: frozenset[int],
    requests: Sequence[tuple[str, Any]],
    template: Template | None = None,
    **how: Any,
) -> list[str]:
    """A text for each request (context and settings), on every rank."""
    samplings = list[Sampling]()
    for _, settings in requests:
        # the likeliest tokens unless `do_sample` is set
        options = settings if settings.get("do_sample") else {"temperature": 0.0}
        count, top_k = settings.get("max_gen_toks", MAX_TOKENS), int(options.get("top_k", 0))
        temperature, top_p = (float(options.get(key, 1.0)) for key in ("temperature", "top_p"))
        samplings.append(Sampling(int(count), temperature, top_k, top_p, stop=stop))
    texts = [context for context, _ in requests]
    if template is None:
        ids = [tokenizer.prompt(text) for text in texts]
    else:
        ids = [text_tokens(text, tokenizer)[0] for text in texts]
    answers: dict[int, str] = {}
    for sampling in dict.fromkeys(samplings):
        room = max(1, window(unwrap(model)) - sampling.max_tokens)
        prompts = {n: ids[n][-room:] for n, other in enumerate(samplings) if other == sampling}
        numbers, prompt_of = list(prompts), prompts.__getitem__
        part = generate_divided(model, tokenizer, ranks, sampling, numbers, prompt_of, **how)
        if part is None:
            raise Interrupted
        answers |= part
    for number, (_, settings) in enumerate(requests):  # a text ends before its first stop text
        text, until = answers[number], settings.get("until") or []
        stops = [until] if isinstance(until, str) else until
        places = [text.find(stop) for stop in stops if stop and stop in text]
        answers[number] = text[: min(places, default=len(text))]
    return [answers[number] for number in range(len(requests))]


MAX_ANSWER_CHARACTERS = 160  # one of a thousand answers in SQuAD is longer
PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation and English articles, single spaces."""
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text.lower().translate(PUNCTUATION)).split())


def exact_match(prediction: str, reference: str) -> float:
    return float(normalise(prediction) == normalise(reference))


def f1(prediction: str, reference: str) -> float:
    """Harmonic mean of precision and recall over bags of normalised words; 0 if none is shared."""
    predicted, wanted = normalise(prediction).split(), normalise(reference).split()
    shared = sum((Counter(predicted) & Counter(wanted)).values())
    if not shared:
        return 0.0
    precision, recall = shared / len(predicted), shared / len(wanted)
    return 2 * precision * recall / (precision + recall)


def score(
    predictions: Mapping[str, str], references: Mapping[str, Sequence[str]]
) -> dict[str, float]:
    """`exact_match` and `f1` in percent over all questions (by id), and `items`."""
    if not references:
        raise UserError("scores need at least one question")
    scores = {"exact_match": 0.0, "f1": 0.0}
    for key in filter(predictions.__contains__, references):
        for name, metric in (("exact_match", exact_match), ("f1", f1)):
            scores[name] += max(metric(predictions[key], answer) for answer in references[key])
    percent = {name: 100.0 * total / len(references) for name, total in scores.items()}
    return {**percent, "items": len(references)}


def evaluate_squad(
    model: Any,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    ranks: Ranks,
    stop: frozenset[int],
    *,
    max_tokens: int = 0,
    **how: Any,
) -> tuple[dict[str, float], dict[str, str]] | None:
    """Exact Match and F1 in percent, and `items`; and predictions by question id."""
    model = unwrap(model)
    if not max_tokens:
        texts = [question.question + " " + question.context for question in questions[:64]]
        tokens = sum(len(tokenizer.encode(text)) for text in texts)
        longest_answer = math.ceil(tokens / max(1, sum(map(len, texts))) * MAX_ANSWER_CHARACTERS)
        max_tokens = max(1, min(longest_answer, model.context // 2))
    longest = min(model.context, window(model) - max_tokens)
    sampling = Sampling(max_tokens=max_tokens, temperature=0, stop=stop)

    def prompt_of(number: int) -> list[int]:
        return question_prompt(questions[number], tokenizer, longest)

    numbers = range(len(questions))
    answers = generate_divided(model, tokenizer, ranks, sampling, numbers, prompt_of, **how)
    if answers is None:
        return None
    predictions = {question.id: answers[i].strip() for i, question in enumerate(questions)}
    return score(
        predictions, {question.id: question.answers for question in questions}
    ), predictions


HARNESS = "lm-eval:"
Scores = dict[str, Any]  # of a suite, as in an `eval` line of the ledger


@dataclass
class Suites:
    """Measures a recipe's suites on a model; all ranks call it, and items are read once."""

    recipe: Recipe  # `eval` and `data` give the items, `train.precision` the arithmetic
    tokenizer: Tokenizer
    ranks: Ranks
    val: Samples | None = None  # the validation set of the suite `loss`
    batch: int = 1  # its sequences in one forward pass of one rank
    own: Mapping[str, Callable[[Any], Scores]] = field(default_factory=dict)  # the user's suites
    train: Samples | None = None  # the training set, for `eval.train_batches`
    template: Template | None = None  # its ends of turns end a generated text

    def measure(
        self,
        suite: str,
        model: Any,
        poll: Callable[[], bool] | None = None,
        whole: bool = False,
        progress: likelihood.OnProgress | None = None,
        average: Average | None = None,
    ) -> tuple[Scores, dict[str, str] | None] | None:
        """Scores of a suite with their time, and SQuAD's predictions; None if `poll` asks to stop.

        `whole`: also measure the loss of all validation data, not only of `eval.batches`.
        `average`: also measure the validation loss of these weights of the model.
        """
        # Passes of other shapes must not recompile the training.
        fixed = suite == LOSS_SUITE and not self.recipe.data.ragged_
        arithmetic = partial(autocast, self.recipe, self.ranks.device)
        how: dict[str, Any] = {"autocast": arithmetic, "poll": poll}
        how |= {} if suite.startswith(HARNESS) else {"progress": progress}
        scores: Scores | None
        predictions, items = None, list[Any]()
        if suite == SQUAD_SUITE:
            items = self._questions
        elif suite == HELLASWAG_SUITE:
            items, endings = self._endings
        started = time.perf_counter()  # without reading the items
        devices = [self.ranks.device] if self.ranks.device.type == "cuda" else []
        seeded = torch.random.fork_rng(devices=devices)
        with seeded, nullcontext() if fixed else varying_shapes():
            # A module may draw random numbers in evaluation mode, too.
            torch.manual_seed(self.recipe.run.seed)
            if suite in self.own:
                scores = self.own[suite](model)
            elif suite.startswith(HARNESS):
                tasks = suite.removeprefix(HARNESS)
                how |= {"settings": self.recipe.eval, "template": self.template}
                scores = run_harness(tasks, model, self.tokenizer, self.ranks, self._stop, **how)
            elif suite == LOSS_SUITE:
                scores = self._loss(model, whole, average, **how)
            elif suite == SQUAD_SUITE:
                place = self.tokenizer, items, self.ranks, self._stop
                scored = evaluate_squad(model, *place, **how)
                scores, predictions = scored or (None, None)
            else:
                scores = evaluate_hellaswag(model, items, endings, self.ranks, **how)
        if scores is None:
            return None
        runtime_s = time.perf_counter() - started
        scores = scores | {"runtime_s": runtime_s}
        if items:
            scores |= {"samples_per_s": len(items) / runtime_s, "items_hash": items_hash(items)}
        elif suite == LOSS_SUITE:
            samples: Any = scores.get("full_samples", scores["samples"])
            samples = samples * (1 + (average is not None)) + scores.get("train_samples", 0)
            scores["samples_per_s"] = samples / runtime_s
        return scores, predictions

    def _loss(self, model: Any, whole: bool, average: Average | None, **how: Any) -> Scores | None:
        assert self.val is not None
        size, settings = self.recipe.train.global_batch, self.recipe.eval
        limit = settings.batches * size
        measure = partial(evaluate_loss, model, ranks=self.ranks, batch=self.batch, **how)
        scores: Scores | None = measure(
            samples=self.val, limit=limit, token_bytes=self._token_bytes, whole=whole
        )
        if scores is not None and average is not None:
            with average.in_model():
                other = measure(samples=self.val, limit=limit, whole=whole)
            new = {"loss": "average_loss", "full_loss": "full_average_loss"}
            scores = other and scores | {new[key]: other[key] for key in new if key in other}
        if scores is None or self.train is None or not settings.train_batches:
            return scores
        part = Subset(self.train, settings.train_batches * size, self.recipe.run.seed)
        own = measure(samples=part)
        return own and scores | {f"train_{key}": own[key] for key in ("loss", "tokens", "samples")}

    @property
    def names(self) -> list[str]:
        return [*(self.recipe.eval.suites if self.val is not None else []), *self.own]

    @cached_property
    def _token_bytes(self) -> Any:  # another tokenizer may lack it
        return getattr(self.tokenizer, "byte_lengths", lambda: None)()

    @cached_property
    def _stop(self) -> frozenset[int]:
        return stop_tokens(self.tokenizer, self.template)

    @cached_property
    def _questions(self) -> list[Question]:
        return eval_questions(self.recipe)

    @cached_property
    def _endings(self) -> tuple[list[likelihood.Item], list[likelihood.Continuation]]:
        settings = self.recipe.eval
        items = likelihood.read_items(settings.hellaswag_file, settings.hellaswag_items)
        return items, likelihood.continuations(items, self.tokenizer)


def items_hash(items: Sequence[Any]) -> str:
    """Eight hexadecimal digits, equal for the same items."""
    return hashlib.sha256(repr(items).encode()).hexdigest()[:8]


def write_predictions(
    folder: Path, step: int | None, predictions: Mapping[str, str], weights: str = "raw"
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"squad-predictions-{step_name(step, weights)}.json"
    text = json.dumps(dict(predictions), ensure_ascii=False, indent=0) + "\n"
    write_atomic(path, text.encode("utf-8", "replace"))
    return path


def step_name(step: int | None, weights: str = "raw") -> str:
    """The name of the record of a step's scores, without `.json`."""
    name = "model" if step is None else f"step-{step:08d}"
    return name if weights == "raw" else f"{name}-{weights}"
