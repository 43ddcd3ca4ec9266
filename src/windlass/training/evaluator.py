"""The evaluations and the generated texts of a training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from windlass.data.chat import stop_tokens
from windlass.data.open import Data
from windlass.data.suite import eval_questions
from windlass.errors import UserError
from windlass.estimate.calendar import measures_all
from windlass.evaluation.generate import Sampling, generate, prompt_ids, text_after
from windlass.evaluation.likelihood import read_items
from windlass.evaluation.suites import Scores, Suites, write_predictions
from windlass.optim.average import Average
from windlass.parallel.parallelize import autocast, unwrap
from windlass.recipe import Recipe
from windlass.recipe.settings import HELLASWAG_SUITE, SQUAD_SUITE
from windlass.training.record import Recorder


def check_evaluations(recipe: Recipe, data: Data, model: nn.Module) -> None:
    """Raise UserError, at the start, for what evaluations and samples cannot read."""
    settings = recipe.eval
    if settings.every and data.val is not None:
        if SQUAD_SUITE in settings.suites:
            eval_questions(recipe)
        if HELLASWAG_SUITE in settings.suites:
            read_items(settings.hellaswag_file, settings.hellaswag_items)
    if settings.sample_every and settings.prompt and can_sample(model, data):
        try:
            data.tokenizer.prompt(settings.prompt)
        except UserError as error:
            raise UserError(
                f"eval.prompt = {settings.prompt!r}: {error}; write another, or eval.sample_every=0"
            ) from None


def can_sample(model: nn.Module, data: Data) -> bool:
    """Whether a model and its tokenizer, perhaps the user's, can generate texts."""
    return hasattr(unwrap(model), "new_cache") and hasattr(data.tokenizer, "encode")


class Evaluator:
    """Measures the suites, and generates texts. All ranks call it at the same step."""

    def __init__(
        self,
        recorder: Recorder,
        *,
        model: nn.Module,
        data: Data,
        micro_batch: int,
        own_suites: Mapping[str, Callable[[Any], Scores]],
        average: Average,
        stop_requested: Callable[[], bool],
    ):
        """`stop_requested` is asked between the passes of a measurement; `average` is measured
        beside the model."""
        self.recorder, self.model, self.data = recorder, model, data
        self.recipe, self.ranks = recorder.plan.recipe, recorder.ranks
        self.state, self.horizon = recorder.state, recorder.horizon
        self.stop_requested, self.average = stop_requested, average
        sets = data.val, micro_batch, own_suites, data.train, data.template
        self.suites = Suites(self.recipe, data.tokenizer, self.ranks, *sets)

    def use_micro_batch(self, size: int) -> None:
        """Evaluate with this number of sequences per pass."""
        self.suites = replace(self.suites, batch=size)

    @property
    def due(self) -> bool:
        """Whether an evaluation is due at this step: at both ends and by `eval.every`."""
        step, every = self.state.step, self.recipe.eval.every
        if not self.suites.names or every in (0, 0.0):
            return False
        return step in (0, self.horizon.steps) or self.horizon.due(every, step)

    def measure(self) -> dict[str, Scores] | None:
        """Measure and record the suites; None if a stop interrupted it.

        At the last step all validation data is measured, if the recipe says so.
        """
        step, recorder, measured = self.state.step, self.recorder, dict[str, Scores]()
        with recorder.outside("eval"):
            self.ranks.mark(step, "evaluation")
            whole = step == self.horizon.steps and measures_all(
                self.recipe, self.horizon, len(self.data.val or ())
            )
            for suite in self.suites.names:
                show = partial(recorder.console.progress, f"evaluating {suite}")
                average = self.average if self.average.begun(step) else None
                result = self.suites.measure(
                    suite, self.model, self.stop_requested, whole, show, average
                )
                if result is None:
                    return None
                measured[suite], predictions = result
                if predictions and self.ranks.main:
                    try:
                        write_predictions(recorder.run.path / "eval", step, predictions)
                    except OSError as error:  # the scores are in the ledger
                        text = f"{suite}: the predictions were not written: {error}"
                        recorder.console.warning(text)
        for suite, scores in measured.items():
            recorder.evaluated({"suite": suite, **scores})
        return measured

    @property
    def sample_due(self) -> bool:
        """Whether to generate texts at this step."""
        due = self.horizon.due(self.recipe.eval.sample_every, self.state.step)
        return due and can_sample(self.model, self.data)

    def sample(self) -> bool:
        """Generate texts from the recipe's prompt, equal on every rank and world size.

        Returns False, and writes nothing, if a stop interrupted it.
        """
        settings, tokenizer = self.recipe.eval, self.data.tokenizer
        recorder, step = self.recorder, self.state.step
        prompt = prompt_ids(self.model, tokenizer, settings.prompt)
        sampling = Sampling(
            max_tokens=settings.sample_tokens,
            temperature=0.8,
            seed=self.recipe.run.seed,
            stop=stop_tokens(tokenizer, self.data.template),
        )
        with recorder.outside("sample"):
            self.ranks.mark(step, "sample")
            how = {"vocab": tokenizer.vocab, "poll": self.stop_requested}
            arithmetic = partial(autocast, self.recipe, self.ranks.device)
            prompts = [prompt] * settings.sample_count
            texts = generate(self.model, prompts, sampling, self.ranks, autocast=arithmetic, **how)
        for index, ids in enumerate(texts or []):
            text = settings.prompt + text_after(tokenizer, prompt if settings.prompt else [], ids)
            recorder.ledger.write("sample", step, index=index, prompt=settings.prompt, text=text)
            recorder.console.sample(text, step)
        return texts is not None
