"""The suites (loss, hellaswag, squad, lm-eval:TASKS) and the verb `eval`: what a model scores, measured once and recorded.

During training a `Suites` object measures the suites of `eval.suites` on the model of the moment. `evaluate` opens a saved
model, and rank 0 writes one JSON file per step: `results` (suite → numbers) and `measured` (suite → what the numbers depend on
besides the model). Measured again, a suite's numbers are replaced.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from windlass.data import squad as squad_data
from windlass.data.prepare import Data, open_data
from windlass.data.samples import Samples, Subset
from windlass.data.tokenizer import Tokenizer
from windlass.errors import UserError, argument
from windlass.evaluation import likelihood
from windlass.evaluation.lm_eval import run_harness
from windlass.evaluation.source import Source, find_source, open_model
from windlass.evaluation.squad import evaluate_squad
from windlass.fileio import make_dir, read_json, write_atomic
from windlass.parallel.dist import Ranks, init_ranks
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import autocast, resolve_precision, varying_shapes
from windlass.recipe import Changes, Recipe, dotted
from windlass.recipe.settings import HELLASWAG_SUITE, LOSS_SUITE, SQUAD_SUITE
from windlass.recipe.units import TOKENS_PER_MICRO_BATCH
from windlass.run import Run
from windlass.telemetry.ledger import plain

HARNESS = "lm-eval:"
Numbers = dict[str, Any]
"""The scores of a suite, as they stand in an `eval` line of the ledger."""


@dataclass
class Suites:
    """Measures the suites of a recipe on a model; items are read and tokenized once. All ranks call it together."""

    recipe: Recipe  # `eval` and `data` say what is measured on, `train.precision` the arithmetic
    tokenizer: Tokenizer
    ranks: Ranks
    val: Samples | None = None  # the validation set of the suite `loss`
    batch: int = 1  # sequences of it in one forward pass of one rank
    own: Mapping[str, Callable[[Any], Numbers]] = field(
        default_factory=dict
    )  # suites of the user's own, by name
    train: Samples | None = None  # the training set, for `eval.train_batches`

    def measure(
        self,
        suite: str,
        model: Any,
        poll: Callable[[], bool] | None = None,
        whole: bool = False,
        progress: likelihood.Progress | None = None,
    ) -> tuple[Numbers, dict[str, str] | None] | None:
        """The numbers of a suite, and SQuAD's predictions; None if `poll`, asked between passes, cut it short.

        `whole`: also measure the loss of all validation data, beside the loss of `eval.batches`.
        """
        # Only the loss of text has passes of one shape; any other must not change how the training is compiled.
        fixed = suite == LOSS_SUITE and self.recipe.data.format == "text"
        with nullcontext() if fixed else varying_shapes():
            return self._measure(suite, model, poll, whole, progress)

    def _measure(
        self,
        suite: str,
        model: Any,
        poll: Callable[[], bool] | None,
        whole: bool,
        progress: likelihood.Progress | None,
    ) -> tuple[Numbers, dict[str, str] | None] | None:
        recipe, ranks, tokenizer = self.recipe, self.ranks, self.tokenizer
        if suite in self.own:
            return self.own[suite](model), None
        how: dict[str, Any] = {"autocast": partial(autocast, recipe, ranks.device), "poll": poll}
        numbers: Numbers | None
        if suite == SQUAD_SUITE:
            scored = evaluate_squad(
                model, tokenizer, self._questions, ranks, **how, progress=progress
            )
            return (
                None
                if scored is None
                else (scored[0] | {"items_hash": items_hash(self._questions)}, scored[1])
            )
        if suite == LOSS_SUITE:
            assert self.val is not None
            how |= {
                "limit": recipe.eval.batches * recipe.train.global_batch,
                "token_bytes": self._token_bytes,
            }
            how |= {"whole": whole, "progress": progress}
            numbers = likelihood.evaluate_loss(model, self.val, ranks, self.batch, **how)
            if numbers is not None and self._sample is not None:
                how |= {"limit": 0, "token_bytes": None}
                own = likelihood.evaluate_loss(model, self._sample, ranks, self.batch, **how)
                numbers = own and with_train_loss(numbers, own)
        elif suite == HELLASWAG_SUITE:
            chosen = likelihood.evaluate_hellaswag(
                model, *self._endings, ranks, **how, progress=progress
            )
            numbers = chosen and {**chosen, "items_hash": items_hash(self._endings[0])}
        else:  # the recipe has checked the name
            numbers = run_harness(suite.removeprefix(HARNESS), model, tokenizer, ranks, **how)
        return None if numbers is None else (numbers, None)

    @property
    def names(self) -> list[str]:
        """The suites that are measured while training."""
        return [*(self.recipe.eval.suites if self.val is not None else []), *self.own]

    @cached_property
    def _sample(self) -> Samples | None:
        """The part of the training set whose loss is measured."""
        count = self.recipe.eval.train_batches * self.recipe.train.global_batch
        return (
            Subset(self.train, count, self.recipe.run.seed)
            if count and self.train is not None
            else None
        )

    @cached_property
    def _token_bytes(self) -> Any:  # a user's own tokenizer may not have it
        return getattr(self.tokenizer, "byte_lengths", lambda: None)()

    @cached_property
    def _questions(self) -> list[squad_data.Question]:
        return squad_data.eval_questions(self.recipe)

    @cached_property
    def _endings(self) -> tuple[list[likelihood.Item], list[likelihood.Continuation]]:
        items = likelihood.read_items(
            self.recipe.eval.hellaswag_file, self.recipe.eval.hellaswag_items
        )
        return items, likelihood.continuations(items, self.tokenizer)


def with_train_loss(numbers: Numbers, own: Numbers) -> Numbers:
    """The numbers of a validation set with those of a part of the training set; time and speed are those of both."""
    runtime_s, samples = (
        numbers["runtime_s"] + own["runtime_s"],
        numbers.get("full_samples", numbers["samples"]),
    )
    both = {"runtime_s": runtime_s, "samples_per_s": (samples + own["samples"]) / runtime_s}
    return numbers | both | {f"train_{name}": own[name] for name in ("loss", "tokens", "samples")}


def items_hash(items: Sequence[Any]) -> str:
    """Eight hexadecimal digits, equal for the same items: numbers of others do not compare."""
    return hashlib.sha256(repr(items).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` measured; on rank 0 also where it was written."""

    model: str
    step: int | None
    results: dict[str, Numbers]
    measured: dict[str, dict[str, Any]] = field(
        repr=False
    )  # by suite what its numbers depend on: see `measured_on`
    predictions: dict[str, str] | None = None  # SQuAD's: question id → answer
    path: Path | None = None
    predictions_path: Path | None = None


def evaluate(
    run: str | Path | Run | Source,
    suites: Sequence[str] = (),
    overrides: Changes = (),
    out: str | Path | None = None,
    on_result: Callable[[str, Numbers], None] = lambda suite, numbers: None,
    on_progress: Callable[[str, int, int], object] = lambda suite, done, total: None,
    *,
    model: nn.Module | None = None,
    data: Data | None = None,
) -> Evaluation:
    """Measure a saved model, spread over the ranks of the launch that this process is part of, and record the scores.

    Args:
        run: A run (its newest checkpoint), RUN@STEP, RUN@best, a checkpoint, a directory of `transformers`, `hf:NAME`.
        suites: `loss`, `hellaswag`, `squad`, `lm-eval:TASKS`; default: the run's `eval.suites`.
        overrides: Settings to change, as `data.eval_source=FILE` or a mapping. On a GPU the precision and TF32 are the run's,
            so that the scores are the ones of its training; on a CPU the precision is fp32 (fp64 for a run in fp64). For
            fp32 on a GPU, override `train.precision`: bf16 rounds a logit between 16 and 32 to the next eighth. The loss is that of all validation data, unless one of them is `eval.batches`.
        out: Where results and predictions go; default: RUN/eval, or nowhere for a model without a run.
        on_result: Called on rank 0 with each suite's numbers as it ends.
        on_progress: Called between the passes of a suite: how many samples are done, of how many.
        model: Of a run that trains a model of your own: one of its class, into which the weights are loaded.
        data: Samples of your own, of whose validation set the loss is.

    Raises UserError where there is no such model or suite, no suite is named, or the data do not fit the model.
    """
    source = run if isinstance(run, Source) else find_source(run, overrides, model)
    changes = dotted(overrides)
    suites = list(suites) or (source.recipe.eval.suites if source.run else [])
    if not suites:
        raise UserError(
            f"name what to measure, as {argument('suites', ['loss'])}; there are loss, hellaswag, squad and lm-eval:TASKS"
        )
    if (
        source.run is None
        and LOSS_SUITE in suites
        and data is None
        and "data.source" not in changes
    ):
        raise UserError(
            "the loss of a model without a run needs data: add data.source=FILE and data.val_fraction=0.1"
        )
    env = detect_env(os.environ)
    # Sharded where the training was, else whole on each rank. What the run's best was chosen by need not be measured here.
    sharded = env.world > 1 and source.recipe.strategy(1).shards_parameters
    settings = {
        "parallel.strategy": "full_shard" if sharded else "auto",
        "parallel.shard_size": 0,
        "parallel.offload": False,
        "parallel.activation_checkpointing": "none",
        "eval.suites": suites,
        "checkpoint.best": "loss",
        "telemetry.trackers": [],
    }
    gpu = source.recipe.parallel.device != "cpu" and torch.cuda.is_available()
    settings["train.precision"] = precision_of(source.recipe, changes, gpu)
    if "eval.batches" not in changes:
        settings["eval.batches"] = 0
    recipe = source.recipe.replace(**settings)
    recipe.check_packages()
    if folder := Path(out) if out else source.run.path / "eval" if source.run else None:
        make_dir(folder, f"give another place as {argument('out', 'DIR')}")
    with init_ranks(env, recipe) as ranks:
        result = measure(replace(source, recipe=recipe), ranks, on_result, on_progress, data)
        return write(result, folder) if ranks.main and folder else result


def precision_of(recipe: Recipe, changes: Collection[str], gpu: bool) -> str:
    """The precision in which a saved model is measured: on a GPU the run's, on a CPU fp32, unless `changes` name it."""
    own = recipe.train.precision
    return own if gpu or own == "fp64" or "train.precision" in changes else "fp32"


def measure(
    source: Source,
    ranks: Ranks,
    on_result: Callable[[str, Numbers], None],
    on_progress: Callable[[str, int, int], object],
    given: Data | None = None,
) -> Evaluation:
    """Every suite of the source's recipe in turn; all ranks call it together."""
    recipe, suites = source.recipe, source.recipe.eval.suites
    model = open_model(source, ranks)
    data = given or (open_data(recipe, ranks) if LOSS_SUITE in suites else None)
    if (
        data is not None
        and given is None
        and data.tokenizer.fingerprint != source.tokenizer.fingerprint
    ):
        raise UserError(
            f"the data of this recipe have another tokenizer than {source.name}: set data.tokenizer"
        )
    if data is not None and data.val is None:
        raise UserError(
            "there is no validation set: give data.eval_source=FILE, or data.val_fraction=0.1"
        )
    batch = max(1, TOKENS_PER_MICRO_BATCH[ranks.device.type] // recipe.model.context)
    measurer = Suites(recipe, source.tokenizer, ranks, data.val if data else None, batch)
    results, measured, predictions = {}, {}, None
    for suite in suites:
        outcome = measurer.measure(suite, model, progress=partial(on_progress, suite))
        assert outcome is not None, "only a poll cuts a suite short"
        results[suite], predictions = outcome[0], outcome[1] or predictions
        if ranks.main:
            measured[suite] = measured_on(
                suite, recipe, ranks.device, data.fingerprint if data else ""
            )
            on_result(suite, outcome[0])
    return Evaluation(source.name, source.step, results, measured, predictions)


def measured_on(
    suite: str, recipe: Recipe, device: torch.device, fingerprint: str = ""
) -> dict[str, Any]:
    """What the numbers of a suite depend on besides the model: `settings` (the precision is the one used), and, as the suite has
    them, `files` (path → SHA-256), `data` (the prepared data's fingerprint), `lm_eval` (the harness's version).
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
        files = [
            source.partition(":")[2]
            for source in squad_data.suite_sources(recipe) or recipe.data.sources
        ]
    # Those that are not named come from the Hub.
    return {
        "settings": settings,
        "files": {f: hashlib.sha256(Path(f).read_bytes()).hexdigest() for f in files if f},
    }


def write(result: Evaluation, folder: Path) -> Evaluation:
    """Add results to the record of their step in `folder`, and SQuAD's predictions as the official script reads them."""
    path = folder / f"{_step_name(result.step)}.json"
    record: dict[str, Any] = {
        key: getattr(result, key) for key in ("model", "step", "results", "measured")
    }
    before = read_json(path)
    if before.get("model") == result.model:  # what is not measured again stays
        record |= {key: {**before.get(key, {}), **record[key]} for key in ("results", "measured")}
    write_atomic(path, json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
    predictions = (
        write_predictions(folder, result.step, result.predictions) if result.predictions else None
    )
    return replace(result, path=path, predictions_path=predictions)


def write_predictions(folder: Path, step: int | None, predictions: Mapping[str, str]) -> Path:
    """SQuAD's predictions at a step, question id → answer, as a file in `folder`. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"squad-predictions-{_step_name(step)}.json"
    write_atomic(
        path,
        json.dumps(dict(predictions), ensure_ascii=False, indent=0).encode("utf-8", "replace")
        + b"\n",
    )
    return path


def _step_name(step: int | None) -> str:
    return "model" if step is None else f"step-{step:08d}"
