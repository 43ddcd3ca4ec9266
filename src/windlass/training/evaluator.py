"""The evaluations and the generated texts of a training."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from windlass.errors import UserError
from windlass.estimate.calendar import measures_all
from windlass.evaluation.generate import Sampling, generate, text_after
from windlass.evaluation.passes import Interrupted, Passes
from windlass.evaluation.suites import Suites, SuiteScores, write_predictions
from windlass.model.sharding import unwrap
from windlass.optim.average import Average
from windlass.parallel.parallelize import autocast
from windlass.recipe import Recipe
from windlass.training.record import Recorder
from windlass.training.stop import StopSignals


def can_sample(model: nn.Module, tokenizer: Any) -> bool:
    """Whether a model and its tokenizer, perhaps the user's, can generate texts."""
    return hasattr(unwrap(model), "new_cache") and hasattr(tokenizer, "encode")


def check_prompt(recipe: Recipe, model: nn.Module, tokenizer: Any) -> None:
    """Raise UserError if the tokenizer, perhaps the user's, cannot read `eval.prompt`."""
    settings = recipe.eval
    if settings.sample_every and settings.prompt and can_sample(model, tokenizer):
        try:
            tokenizer.prompt(settings.prompt)
        except UserError as error:
            problem = f"eval.prompt = {settings.prompt!r}: {error}"
            raise UserError(f"{problem}; write another, or eval.sample_every=0") from None


@dataclass
class Evaluator:
    """Measures the suites, and generates texts. All ranks call it at the same step."""

    recorder: Recorder
    suites: Suites
    model: nn.Module
    average: Average  # is measured along with the model
    stop: StopSignals  # a signal interrupts a measurement

    def __post_init__(self) -> None:
        self.recipe, self.ranks = self.recorder.recipe, self.recorder.ranks
        self.state, self.horizon = self.recorder.state, self.recorder.horizon

    def stop_requested(self) -> bool:
        """Whether this rank was asked to stop; called between the passes of a measurement."""
        self.recorder.beat()
        status = self.ranks.status
        self.ranks.mark(status.step, status.phase)  # this rank lives
        return self.stop.requested

    @property
    def due(self) -> bool:
        """Whether an evaluation is due at this step: at both ends and by `eval.every`."""
        step, every = self.state.step, self.recipe.eval.every
        if not self.suites.names or every in (0, 0.0):
            return False
        return step in (0, self.horizon.steps) or self.horizon.due(every, step)

    def measure(self) -> dict[str, SuiteScores] | None:
        """Measure and record the suites; None if a stop interrupted it."""
        step, recorder, measured = self.state.step, self.recorder, dict[str, SuiteScores]()
        with recorder.outside("eval"):
            self.ranks.mark(step, "evaluation")
            samples = len(self.suites.val or ())
            is_last = step == self.horizon.steps
            whole = is_last and measures_all(self.recipe, self.horizon, samples)
            for suite in self.suites.names:
                show = partial(recorder.console.progress, f"evaluating {suite}")
                average = self.average if self.average.tensors and step else None
                try:
                    measured[suite] = self.suites.measure(
                        suite, self.model, self.stop_requested, whole, show, average
                    )
                except Interrupted:
                    return None
            if self.suites.predictions and self.ranks.main:
                write_predictions(recorder.run.path / "eval", step, self.suites.predictions)
        for suite, scores in measured.items():
            recorder.evaluated({"suite": suite, **scores})
        return measured

    @property
    def sample_due(self) -> bool:
        due = self.horizon.due(self.recipe.eval.sample_every, self.state.step)
        return due and can_sample(self.model, self.suites.tokenizer)

    def sample(self) -> bool:
        """Generate texts from the recipe's prompt, equal on every rank and world size; False, with
        nothing written, if a stop interrupted it."""
        settings, tokenizer = self.recipe.eval, self.suites.tokenizer
        recorder, step = self.recorder, self.state.step
        prompt = tokenizer.prompt(settings.prompt)
        low = partial(autocast, self.recipe, self.ranks.device)
        template, stop = self.suites.template, self.stop_requested
        passes = Passes(unwrap(self.model), self.ranks, tokenizer, template, low, stop)
        seed = self.recipe.run.seed
        sampling = Sampling(settings.sample_tokens, 0.8, seed=seed, stop=passes.stop)
        with recorder.outside("sample"):
            self.ranks.mark(step, "sample")
            try:
                texts = generate(passes, [prompt] * settings.sample_count, sampling)
            except Interrupted:
                return False
        before = prompt if settings.prompt else []
        for index, ids in enumerate(texts):
            text = settings.prompt + text_after(tokenizer, before, ids)
            recorder.ledger.write("sample", step, index=index, prompt=settings.prompt, text=text)
            recorder.console.sample(text, step)
        return True
