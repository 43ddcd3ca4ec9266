"""What is measured while training: the validation loss and other suites, generated texts, and which step was best."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from windlass.checkpoint.retention import LOSS, best, scores_by_step
from windlass.data.chat import stop_tokens
from windlass.evaluation.generate import Sampling, generate, prompt_ids, text_after
from windlass.evaluation.suites import Suites, write_predictions
from windlass.parallel.parallelize import autocast, unwrap
from windlass.training.start import decide_on_rank_0

if TYPE_CHECKING:
    from windlass.data.dataset import Data
    from windlass.parallel.dist import Ranks
    from windlass.recipe import Horizon, Recipe
    from windlass.run import Line
    from windlass.training.record import Recorder

Poll = Callable[[], bool]
"""Asked between forward passes whether to stop; True on any rank stops all."""
Scores = dict[int, float]
"""Finite values of a measure by step."""


@dataclass
class Measurements:
    """The evaluations and samples of a run. Each method is called by every rank at the same step."""

    recipe: Recipe
    model: nn.Module
    data: Data
    ranks: Ranks
    horizon: Horizon
    suites: Suites
    recorder: Recorder
    losses: Scores = field(default_factory=dict)
    """Validation losses, from the ledger and since."""
    scores: Scores = field(default_factory=dict)
    """Likewise values of `checkpoint.best`."""

    @property
    def evaluates(self) -> bool:
        """Whether the run evaluates at all."""
        return self.data.val is not None and self.recipe.eval.every not in (0, 0.0)

    def evaluation_due(self, step: int) -> bool:
        """Whether the suites are measured after `step`: as `eval.every` says, and at the end."""
        return self.evaluates and (step == self.horizon.steps or self.horizon.due(self.recipe.eval.every, step))

    def sample_due(self, step: int) -> bool:
        """Whether a text is generated after `step`; a user's own model or tokenizer may not be able to."""
        able = hasattr(unwrap(self.model), "new_cache") and hasattr(self.data.tokenizer, "encode")
        return able and self.horizon.due(self.recipe.eval.sample_every, step)

    def evaluate(self, step: int, poll: Poll) -> bool:
        """Every suite of `eval.suites`, into the ledger; False where a stop cut one short, and then nothing is written."""
        lines, recorder, ranks = [], self.recorder, self.ranks
        with recorder.timer.outside(), recorder.goodput.phase("eval"):
            ranks.mark(step, "evaluation")
            for suite in self.recipe.eval.suites:
                outcome = self.suites.measure(suite, self.model, poll)
                if outcome is None:
                    return False
                numbers, predictions = outcome
                lines.append({"suite": suite, **numbers})
                if predictions and ranks.main:
                    try:
                        write_predictions(recorder.run.path / "eval", step, predictions)
                    except OSError as error:  # the scores are in the ledger
                        recorder.console.warning(
                            f"{suite}: the predictions were not written: {error.strerror or error}"
                        )
        self.add(recorder.evaluation(lines))
        return True

    def read_ledger(self, step: int) -> set[str]:
        """Take what an earlier start measured up to `step`; which kinds of lines (`eval`, `sample`) there are of `step` itself."""

        def read() -> list[Line]:
            return [x for x in self.recorder.run.ledger() if x["kind"] in ("eval", "sample") and x["step"] <= step]

        lines = decide_on_rank_0(self.ranks, "measured", read)
        self.add(lines)
        return {line["kind"] for line in lines if line["step"] == step}

    def add(self, lines: Iterable[Line]) -> None:
        """Take the losses and scores of ledger lines."""
        lines = list(lines)
        self.losses |= scores_by_step(lines, LOSS)
        self.scores |= scores_by_step(lines, self.recipe.checkpoint.best)

    def forget_after(self, step: int) -> None:
        """After a rewind: what was measured past the step is void."""
        self.losses = {at: value for at, value in self.losses.items() if at <= step}
        self.scores = {at: value for at, value in self.scores.items() if at <= step}

    def sample(self, step: int, poll: Poll) -> bool:
        """Texts from the recipe's prompt, equal on every rank and world size, into the ledger; False as in `evaluate`."""
        settings, tokenizer, recorder = self.recipe.eval, self.data.tokenizer, self.recorder
        prompt = prompt_ids(self.model, tokenizer, settings.prompt)
        sampling = Sampling(
            max_tokens=settings.sample_tokens, temperature=settings.temperature, top_k=settings.top_k,
            seed=self.recipe.run.seed, stop=stop_tokens(tokenizer, self.data.template),
        )  # fmt: skip
        with recorder.timer.outside(), recorder.goodput.phase("sample"):
            self.ranks.mark(step, "sample")
            texts = generate(
                self.model, [prompt] * settings.sample_count, sampling, self.ranks, vocab=tokenizer.vocab,
                autocast=partial(autocast, self.recipe, self.ranks.device), poll=poll,
            )  # fmt: skip
        if texts is None:
            return False
        seen = prompt if settings.prompt else []
        recorder.samples(settings.prompt, [settings.prompt + text_after(tokenizer, seen, text) for text in texts])
        return True

    def is_best(self, step: int) -> bool:
        """Whether `checkpoint.best` was never better than at `step`, where it was measured."""
        return best(self.scores, self.recipe.checkpoint.best) == step
