"""The suites of a recipe, measured on a model, and the files of their results."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from windlass.data.batch import Samples, Subset
from windlass.data.chat import Template
from windlass.data.items import Question
from windlass.data.tokenizer import Tokenizer
from windlass.evaluation.harness import run_harness
from windlass.evaluation.hellaswag import Item, continuations, evaluate_hellaswag, read_items
from windlass.evaluation.likelihood import Continuation, evaluate_loss
from windlass.evaluation.passes import Passes
from windlass.evaluation.squad import eval_questions, evaluate_squad
from windlass.fileio import write_atomic
from windlass.model.sharding import unwrap
from windlass.optim.average import Average
from windlass.parallel.parallelize import autocast, varying_shapes
from windlass.parallel.ranks import Ranks
from windlass.recipe import Recipe
from windlass.recipe.settings import HELLASWAG_SUITE, LOSS_SUITE, SQUAD_SUITE

HARNESS = "lm-eval:"
SuiteScores = dict[str, Any]  # of a suite, as in an `eval` line of the ledger


@dataclass
class Suites:
    """Measures a recipe's suites on a model; all ranks call it, and items are read once."""

    recipe: Recipe  # `eval` and `data` give the items, `train.precision` the arithmetic
    tokenizer: Tokenizer
    ranks: Ranks
    val: Samples | None = None  # the validation set of the suite `loss`
    batch: int = 1  # its sequences in one forward pass of one rank
    # the user's suites
    own: Mapping[str, Callable[[Any], SuiteScores]] = field(default_factory=dict)
    train: Samples | None = None  # the training set, for `eval.train_batches`
    template: Template | None = None  # its ends of turns end a generated text
    predictions: dict[str, str] = field(default_factory=dict)  # SQuAD's: question id → answer

    @property
    def names(self) -> list[str]:
        """The recipe's suites and the user's; the loss only if there is a validation set."""
        suites = [s for s in self.recipe.eval.suites if s != LOSS_SUITE or self.val is not None]
        return [*suites, *self.own]

    def measure(
        self,
        suite: str,
        model: Any,
        poll: Callable[[], bool] | None = None,
        whole: bool = False,
        progress: Callable[[int, int], object] | None = None,
        average: Average | None = None,
    ) -> SuiteScores:
        """Scores of a suite with their time. Raises Interrupted if `poll` asks to stop.

        `whole`: also measure the loss of all validation data, not only of `eval.batches`.
        `average`: also measure the validation loss of these weights of the model.
        """
        ranks, tokenizer = self.ranks, self.tokenizer
        low = partial(autocast, self.recipe, ranks.device)
        passes = Passes(unwrap(model), ranks, tokenizer, self.template, low, poll, progress)
        items: Sequence[Any] = ()
        if suite == SQUAD_SUITE:
            items = self._questions
        elif suite == HELLASWAG_SUITE:
            items, endings = self._endings
        scores: SuiteScores
        started = time.perf_counter()  # without reading the items
        # Passes of other shapes must not recompile the training.
        fixed = suite == LOSS_SUITE and not self.recipe.data.ragged_
        devices = [ranks.device] if ranks.device.type == "cuda" else []
        seeded = torch.random.fork_rng(devices=devices)
        with seeded, nullcontext() if fixed else varying_shapes():
            # A module may draw random numbers in evaluation mode, too.
            torch.manual_seed(self.recipe.run.seed)
            if suite in self.own:
                scores = self.own[suite](model)
            elif suite == LOSS_SUITE:
                scores = self._loss(passes, whole, average)
            elif suite == HELLASWAG_SUITE:
                scores = evaluate_hellaswag(passes, items, endings)
            elif suite == SQUAD_SUITE:
                scores, self.predictions = evaluate_squad(passes, items)
            else:
                passes.progress = None  # the harness has several parts
                scores = run_harness(passes, suite.removeprefix(HARNESS), self.recipe.eval)
        runtime_s = time.perf_counter() - started
        scores = scores | {"runtime_s": runtime_s}
        if items:
            digest = hashlib.sha256(repr(items).encode()).hexdigest()[:8]  # equal for equal items
            scores |= {"samples_per_s": len(items) / runtime_s, "items_hash": digest}
        elif suite == LOSS_SUITE:
            samples: Any = scores.get("full_samples", scores["samples"])
            measured = 2 * samples if average is not None else samples
            scores["samples_per_s"] = (measured + scores.get("train_samples", 0)) / runtime_s
        return scores

    def _loss(self, passes: Passes, whole: bool, average: Average | None) -> SuiteScores:
        assert self.val is not None
        size = self.recipe.train.global_batch
        limit = self.recipe.eval.batches * size
        measure = partial(evaluate_loss, passes, batch=self.batch)
        token_bytes = getattr(self.tokenizer, "byte_lengths", None)  # another tokenizer may lack it
        scores: SuiteScores = measure(self.val, limit=limit, whole=whole, token_bytes=token_bytes)
        if average is not None:
            with average.in_model():
                averaged = measure(self.val, limit=limit, whole=whole)
            scores["average_loss"] = averaged["loss"]
            if "full_loss" in averaged:
                scores["full_average_loss"] = averaged["full_loss"]
        if self.train is not None and self.recipe.eval.train_batches:
            count = self.recipe.eval.train_batches * size
            trained = measure(Subset(self.train, count, self.recipe.run.seed))
            scores |= {f"train_{key}": trained[key] for key in ("loss", "tokens", "samples")}
        return scores

    @cached_property
    def _questions(self) -> list[Question]:
        return eval_questions(self.recipe)

    @cached_property
    def _endings(self) -> tuple[list[Item], list[Continuation]]:
        settings = self.recipe.eval
        items = read_items(settings.hellaswag_file, settings.hellaswag_items)
        return items, continuations(items, self.tokenizer)


def step_name(step: int | None, weights: str = "raw") -> str:
    """The name of the record of a step's scores, without `.json`."""
    name = "model" if step is None else f"step-{step:08d}"
    return name if weights == "raw" else f"{name}-{weights}"


def write_predictions(
    folder: Path, step: int | None, predictions: Mapping[str, str], weights: str = "raw"
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"squad-predictions-{step_name(step, weights)}.json"
    text = json.dumps(dict(predictions), ensure_ascii=False, indent=0) + "\n"
    write_atomic(path, text.encode("utf-8", "replace"))
