"""The suites (loss, hellaswag, squad, lm-eval:TASKS), the command `eval`, and its record.

During training a `Suites` object measures the suites of `eval.suites` on the current model.
`evaluate` opens a saved model, and rank 0 writes one JSON file per step: `results` (suite → scores)
and `measured` (suite → everything else that the scores depend on). A new measurement of a suite
replaces its scores.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from windlass.data.chat import Template, stop_tokens
from windlass.data.examples import Question
from windlass.data.open import Data, open_data, own_data
from windlass.data.samples import Samples, Subset
from windlass.data.suite import eval_questions, suite_sources
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError, argument
from windlass.evaluation import likelihood
from windlass.evaluation.likelihood import evaluate_hellaswag, evaluate_loss
from windlass.evaluation.lm_eval import run_harness
from windlass.evaluation.source import Source, find_source, open_model
from windlass.evaluation.squad import evaluate_squad
from windlass.fileio import make_dir, read_json, write_atomic
from windlass.optim.average import Average
from windlass.parallel.dist import Ranks, init_ranks
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import autocast, resolve_precision, varying_shapes
from windlass.recipe import Changes, Recipe, dotted
from windlass.recipe.settings import HELLASWAG_SUITE, LOSS_SUITE, SQUAD_SUITE, SUITE
from windlass.recipe.units import samples_per_pass
from windlass.run import Run
from windlass.telemetry.ledger import plain

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
        limit = self.recipe.eval.batches * self.recipe.train.global_batch
        measure = partial(evaluate_loss, model, ranks=self.ranks, batch=self.batch, **how)
        scores: Scores | None = measure(
            samples=self.val, limit=limit, token_bytes=self._token_bytes, whole=whole
        )
        if scores is not None and average is not None:
            with average.in_model():
                other = measure(samples=self.val, limit=limit, whole=whole)
            scores = other and scores | averaged_losses(other)
        if scores is None or self._train_sample is None:
            return scores
        own = measure(samples=self._train_sample)
        names = ("loss", "tokens", "samples")
        return own and scores | {f"train_{name}": own[name] for name in names}

    @property
    def names(self) -> list[str]:
        """The suites that are measured during training."""
        return [*(self.recipe.eval.suites if self.val is not None else []), *self.own]

    @cached_property
    def _train_sample(self) -> Samples | None:
        """The part of the training set whose loss is measured."""
        count = self.recipe.eval.train_batches * self.recipe.train.global_batch
        if not count or self.train is None:
            return None
        return Subset(self.train, count, self.recipe.run.seed)

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


def averaged_losses(scores: Scores) -> Scores:
    """The losses among the scores of the averaged weights, under names of their own."""
    names = {"loss": "average_loss", "full_loss": "full_average_loss"}
    return {new: scores[name] for name, new in names.items() if name in scores}


def items_hash(items: Sequence[Any]) -> str:
    """Eight hexadecimal digits, equal for the same items; other scores are not comparable."""
    return hashlib.sha256(repr(items).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Evaluation:
    """The scores of `evaluate`; on rank 0 also the files they were written to."""

    model: str
    step: int | None
    results: dict[str, Scores]
    measured: dict[str, dict[str, Any]] = field(repr=False)  # by suite: see `measured_on`
    predictions: dict[str, str] | None = None  # SQuAD's: question id → answer
    weights: str = "raw"
    path: Path | None = None
    predictions_path: Path | None = None


def evaluate(
    run: str | Path | Run | Source,
    suites: Sequence[str] = (),
    overrides: Changes = (),
    out: str | Path | None = None,
    on_result: Callable[[str, Scores], None] = lambda suite, numbers: None,
    on_progress: Callable[[str, int, int], object] = lambda suite, done, total: None,
    *,
    model: nn.Module | None = None,
    data: Data | Dataset[Any] | tuple[Dataset[Any], Dataset[Any]] | None = None,
    weights: str = "raw",
) -> Evaluation:
    """Measure a saved model on the ranks of this process's launch, and record the scores.

    Args:
        run: A run (its newest checkpoint), RUN@STEP, RUN@best, a checkpoint, a directory of
            `transformers`, `hf:NAME`.
        suites: `loss`, `hellaswag`, `squad`, `lm-eval:TASKS`; default: the run's `eval.suites`.
        overrides: Settings to change, as `data.eval_source=FILE` or a mapping. On a GPU the run's
            precision and TF32 apply, so that the scores equal its training's. On a CPU the
            precision is fp32 (fp64 for a run in fp64). The loss covers all validation data unless
            `eval.batches` is overridden.
        out: Directory of results and predictions; default: RUN/eval, or none for a model without a
            run.
        on_result: Called on rank 0 with each suite's scores when it ends.
        on_progress: Called between the passes of a suite with the samples done and their total.
        model: An instance of your class, for a run that trains it; the weights are loaded into
            it.
        data: Your own samples, as in `train`; the loss is measured on their validation set, or on
            a single `Dataset`.
        weights: `raw`, or `average` for the averaged weights (`train.average`).

    Raises:
        UserError: The model or a suite does not exist, suites are missing, or the data does not fit
            the model.
    """
    source = run if isinstance(run, Source) else find_source(run, overrides, model, weights)
    changes = dotted(overrides)
    suites = list(suites) or (source.recipe.eval.suites if source.run else [])
    valid = "there are loss, hellaswag, squad and lm-eval:TASKS"
    if not suites:
        raise UserError(f"name what to measure, as {argument('suites', ['loss'])}; {valid}")
    if unknown := [suite for suite in suites if not re.fullmatch(SUITE, suite)]:
        raise UserError(f"{argument('suites', unknown)}: {valid}")
    has_data = source.run or data is not None or {"data.source", "data.mix"} & set(changes)
    if LOSS_SUITE in suites and not has_data:
        raise UserError(
            "the loss of a model without a run needs data: "
            "add data.source=FILE and data.val_fraction=0.1"
        )
    env = detect_env(os.environ)
    recipe = source.recipe.replace(**_settings(source, changes, suites, env.world))
    recipe.check_packages()
    if folder := Path(out) if out else source.run.path / "eval" if source.run else None:
        make_dir(folder, f"give another place as {argument('out', 'DIR')}")
    with init_ranks(env, recipe) as ranks:
        samples = own_data(data, recipe, measured=True)
        result = measure(replace(source, recipe=recipe), ranks, on_result, on_progress, samples)
        return write(result, folder) if ranks.main and folder else result


def _settings(
    source: Source, changes: Collection[str], suites: list[str], world: int
) -> dict[str, Any]:
    """The settings for measuring a saved model; it is sharded if its training divided it."""
    recipe = source.recipe
    divided = source.run is not None and source.run.recipe.parallel.model_ranks > 1
    sharded = world > 1 and (divided or recipe.strategy(1).shards_parameters)
    gpu = recipe.parallel.device != "cpu" and torch.cuda.is_available()
    precision = precision_of(recipe, changes, gpu)
    settings = {
        "parallel.strategy": "full_shard" if sharded else "auto",
        "parallel.shard_size": 0,
        "parallel.offload": False,
        "parallel.activation_checkpointing": "none",
        "eval.suites": suites,
        "checkpoint.best": "loss",  # the run's own measure may be of another suite
        "telemetry.trackers": [],
        "train.precision": precision,
        "train.stream": recipe.train.stream if precision in ("auto", "bf16") else "fp32",
    }
    if LOSS_SUITE not in suites:
        settings["eval.train_batches"] = 0
    return settings if "eval.batches" in changes else settings | {"eval.batches": 0}


def precision_of(recipe: Recipe, changes: Collection[str], gpu: bool) -> str:
    """The precision for a saved model: the run's on a GPU, fp32 on a CPU, unless overridden."""
    own = recipe.train.precision
    return own if gpu or own == "fp64" or "train.precision" in changes else "fp32"


def measure(
    source: Source,
    ranks: Ranks,
    on_result: Callable[[str, Scores], None],
    on_progress: Callable[[str, int, int], object],
    given: Data | None = None,
) -> Evaluation:
    """Every suite of the source's recipe in turn; all ranks call it together."""
    recipe, suites = source.recipe, source.recipe.eval.suites
    model = open_model(source, ranks)
    if LOSS_SUITE in suites and source.tokenizer is None and given is None:
        problem = f"{source.name} was trained on your data"
        raise UserError(f"{problem}: measure it from Python, as evaluate(run, data=...)")
    own: dict[str, Any] = {"tokenizer": source.tokenizer, "template": source.template}
    data = given
    if data is None and LOSS_SUITE in suites:
        data = open_data(recipe, ranks, **own, only_val=True)
    if data is not None and data.val is None:
        raise UserError(
            "the validation set is missing: give data.eval_source=FILE, or data.val_fraction=0.1"
        )
    batch = samples_per_pass(recipe.model.context, ranks.device.type)
    val, template = data.val if data else None, source.template
    measurer = Suites(recipe, source.tokenizer, ranks, val, batch, template=template)
    results, measured, predictions = {}, {}, None
    fingerprint = data.fingerprint if data else ""
    for suite in suites:
        scored = measurer.measure(suite, model, progress=partial(on_progress, suite))
        assert scored is not None, "only a poll stops a suite"
        results[suite], predictions = scored[0], scored[1] or predictions
        if ranks.main:
            measured[suite] = measured_on(suite, recipe, ranks.device, fingerprint)
            on_result(suite, scored[0])
    return Evaluation(source.name, source.step, results, measured, predictions, source.weights)


def measured_on(
    suite: str, recipe: Recipe, device: torch.device, fingerprint: str = ""
) -> dict[str, Any]:
    """Everything except the model that the scores of a suite depend on.

    `settings`; and, by suite, `files` (path → SHA-256), `data` (the fingerprint of the prepared
    data) or `lm_eval` (the harness's version).
    """
    keys = ("eval.", "data.", "model.context", "train.global_batch", "run.seed")
    settings = {key: value for key, value in recipe.flat().items() if key.startswith(keys)}
    settings["train.precision"] = resolve_precision(recipe.train.precision, device)
    if suite == LOSS_SUITE:
        return {"settings": settings, "data": fingerprint}
    if suite.startswith(HARNESS):
        return {"settings": settings, "lm_eval": metadata.version("lm_eval")}
    files = [recipe.eval.hellaswag_file]
    if suite == SQUAD_SUITE:
        sources = suite_sources(recipe) or recipe.data.sources
        files = [source.partition(":")[2] for source in sources]
    # Items without a file come from the Hub.
    hashes = {file: hashlib.sha256(Path(file).read_bytes()).hexdigest() for file in files if file}
    return {"settings": settings, "files": hashes}


def write(result: Evaluation, folder: Path) -> Evaluation:
    """Add scores to their step's record in `folder`, and write SQuAD's predictions."""
    path = folder / f"{step_name(result.step, result.weights)}.json"
    keys = ("model", "step", "weights", "results", "measured")
    record: dict[str, Any] = {key: getattr(result, key) for key in keys}
    before = read_json(path)
    if before.get("model") == result.model:  # suites that are not measured again stay
        record |= {key: {**before.get(key, {}), **record[key]} for key in ("results", "measured")}
    write_atomic(path, json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
    predictions_path = None
    if result.predictions:
        own = folder, result.step, result.predictions, result.weights
        predictions_path = write_predictions(*own)
    return replace(result, path=path, predictions_path=predictions_path)


def write_predictions(
    folder: Path, step: int | None, predictions: Mapping[str, str], weights: str = "raw"
) -> Path:
    """Write SQuAD's predictions, question id → answer, to a file in `folder`; OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"squad-predictions-{step_name(step, weights)}.json"
    text = json.dumps(dict(predictions), ensure_ascii=False, indent=0) + "\n"
    write_atomic(path, text.encode("utf-8", "replace"))
    return path


def step_name(step: int | None, weights: str = "raw") -> str:
    """The name of the record of a step's scores, without `.json`."""
    name = "model" if step is None else f"step-{step:08d}"
    return name if weights == "raw" else f"{name}-{weights}"
