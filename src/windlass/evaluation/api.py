"""The commands `eval` and `sample`. Rank 0 records the scores in one JSON file per step: `results`
(suite → scores) and `measured` (suite → everything else that the scores depend on).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from windlass.data.chat import prompt_tokens
from windlass.data.open import Data, open_data, own_data
from windlass.errors import UserError, argument
from windlass.evaluation.generate import Sampling, generate_events, in_order
from windlass.evaluation.passes import Passes
from windlass.evaluation.source import Source, find_source, open_model
from windlass.evaluation.suites import Suites, SuiteScores, step_name, write_predictions
from windlass.fileio import make_dir, read_json, write_atomic
from windlass.ledger import plain
from windlass.model.sharding import unwrap
from windlass.parallel.env import detect_env
from windlass.parallel.parallelize import autocast, resolve_precision
from windlass.parallel.ranks import Ranks, alone, init_ranks
from windlass.recipe import Changes, Recipe, dotted
from windlass.recipe.settings import LOSS_SUITE, SUITE
from windlass.recipe.units import samples_per_pass
from windlass.run import Run


@dataclass(frozen=True)
class Evaluation:
    """The scores of `evaluate`; on rank 0 also their file."""

    model: str
    step: int | None
    results: dict[str, SuiteScores]
    measured: dict[str, dict[str, Any]] = field(repr=False)  # by suite: see `measure`
    predictions: dict[str, str] | None = None  # SQuAD's: question id → answer
    weights: str = "raw"
    path: Path | None = None


def evaluate(
    run: str | Path | Run | Source,
    suites: Sequence[str] = (),
    overrides: Changes = (),
    out: str | Path | None = None,
    on_result: Callable[[str, SuiteScores], None] = lambda suite, numbers: None,
    on_progress: Callable[[str, int, int], object] = lambda suite, done, total: None,
    *,
    model: nn.Module | None = None,
    data: Data | Dataset[Any] | tuple[Dataset[Any], Dataset[Any]] | None = None,
    weights: str = "raw",
) -> Evaluation:
    """Measure a saved model on the ranks of this process's launch, and record the scores.

    `run`, `model` and `weights` are as in `load_model`.

    Args:
        suites: `loss`, `hellaswag`, `squad`, `lm-eval:TASKS`; default: the run's `eval.suites`.
        overrides: Settings to change, as `data.eval_source=FILE` or a mapping. On a GPU the run's
            precision and TF32 apply, so that the scores equal its training's. On a CPU the
            precision is fp32 (fp64 for a run in fp64). The loss covers all validation data unless
            `eval.batches` is overridden.
        out: Directory of results and predictions; default: RUN/eval, or none for a model without a
            run.
        on_result: Called on rank 0 with each suite's scores when it ends.
        on_progress: Called between the passes of a suite with the samples done and their total.
        data: Your own samples, as in `train`; the loss is measured on their validation set, or on
            a single `Dataset`.

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
    """The settings for measuring; the model is sharded if its training divided it."""
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
    }
    if LOSS_SUITE not in suites:
        settings["eval.train_batches"] = 0
    return settings if "eval.batches" in changes else settings | {"eval.batches": 0}


def precision_of(recipe: Recipe, changes: Collection[str], gpu: bool) -> str:
    """The precision for a saved model: the run's on a GPU, fp32 on a CPU, unless overridden."""
    trained = recipe.train.precision
    return trained if gpu or trained == "fp64" or "train.precision" in changes else "fp32"


def measure(
    source: Source,
    ranks: Ranks,
    on_result: Callable[[str, SuiteScores], None],
    on_progress: Callable[[str, int, int], object],
    given: Data | None = None,
) -> Evaluation:
    """Every suite of the source's recipe in turn; all ranks call it together.

    `measured` has the settings that scores depend on, and the fingerprint of the loss's data.
    """
    recipe, suites = source.recipe, source.recipe.eval.suites
    model = open_model(source, ranks)
    data, tokenizer, template = given, source.tokenizer, source.template
    if data is None and LOSS_SUITE in suites:
        if tokenizer is None:
            problem = f"{source.name} was trained on your data"
            raise UserError(f"{problem}: measure it from Python, as evaluate(run, data=...)")
        data = open_data(recipe, ranks, tokenizer=tokenizer, template=template, only_val=True)
    if data is not None and data.val is None:
        raise UserError(
            "the validation set is missing: give data.eval_source=FILE, or data.val_fraction=0.1"
        )
    batch = samples_per_pass(recipe.model.context, ranks.device.type)
    val = data.val if data else None
    measurer = Suites(recipe, tokenizer, ranks, val, batch, template=template)
    keys = ("eval.", "data.", "model.context", "train.global_batch", "run.seed")
    settings = {key: value for key, value in recipe.flat().items() if key.startswith(keys)}
    settings["train.precision"] = resolve_precision(recipe.train.precision, ranks.device)
    results, measured = dict[str, SuiteScores](), dict[str, dict[str, Any]]()
    for suite in suites:
        results[suite] = measurer.measure(suite, model, progress=partial(on_progress, suite))
        if ranks.main:
            measured[suite] = {"settings": settings}
            if suite == LOSS_SUITE and data is not None:
                measured[suite]["data"] = data.fingerprint
            on_result(suite, results[suite])
    predictions = measurer.predictions or None
    return Evaluation(source.name, source.step, results, measured, predictions, source.weights)


def write(result: Evaluation, folder: Path) -> Evaluation:
    """Add scores to their step's record in `folder`, and write SQuAD's predictions."""
    path = folder / f"{step_name(result.step, result.weights)}.json"
    keys = ("model", "step", "weights", "results", "measured")
    record: dict[str, Any] = {key: getattr(result, key) for key in keys}
    before = read_json(path)
    if before.get("model") == result.model:  # suites that are not measured again stay
        record |= {key: {**before.get(key, {}), **record[key]} for key in ("results", "measured")}
    write_atomic(path, json.dumps(plain(record), indent=1, allow_nan=False) + "\n")
    if result.predictions:
        write_predictions(folder, result.step, result.predictions, result.weights)
    return replace(result, path=path)


class TextSampler:
    """A saved model on one device, for many samples; `settings` as in `sample`."""

    def __init__(self, source: Source, device: str = "", **settings: Any):
        self.source = source
        default = {"max_tokens": 256, "temperature": 0.8, "seed": source.recipe.run.seed}
        sampling = Sampling(**default | settings)  # rejects bad ones before it opens the model
        ranks, tokenizer = alone(device or None), source.tokenizer
        model, low = open_model(source, ranks), partial(autocast, source.recipe, ranks.device)
        model = unwrap(model)
        self.passes = Passes(model, ranks, tokenizer, source.template, low)
        if tokenizer is None or not hasattr(model, "new_cache"):
            lack = "data without a tokenizer" if tokenizer is None else "a model without new_cache"
            needs = "text needs a tokenizer and new_cache(batch, length)"
            raise UserError(f"{source.name} is the run of {lack}: {needs}")
        self.sampling = replace(sampling, stop=self.passes.stop)
        self.messages: list[dict[str, str]] = []  # the conversation so far, of `reply`

    def pieces(self, prompts: list[list[int]], after: Sequence[int]) -> Iterator[tuple[int, str]]:
        """The continuations of prompts, as (number of the text, next piece), text after text."""
        events = generate_events(self.passes, prompts, self.sampling)
        return in_order(events, self.source.tokenizer, len(prompts), after)

    def reply(self, message: str) -> Iterator[str]:
        """The pieces of the model's answer to the next message, by its chat template."""
        self.messages.append({"role": "user", "content": message})
        ids = prompt_tokens(self.messages, self.source.template, self.source.tokenizer)
        answer = ""
        for _, piece in self.pieces([ids], after=ids):
            answer += piece
            yield piece
        self.messages.append({"role": "assistant", "content": answer.strip()})


def sample(
    run: str | Path | Run | Source,
    prompt: str = "",
    n: int = 1,
    device: str = "",
    *,
    model: nn.Module | None = None,
    weights: str = "raw",
    overrides: Changes = (),
    **settings: Any,
) -> Iterator[tuple[int, str]]:
    """`n` texts after a prompt, as (number of the text, next piece); a function of the seed.

    `run`, `model`, `weights` and `overrides` are as in `load_model`.

    Args:
        prompt: Not part of the pieces; empty: a text from its beginning.
        n: Number of texts; they are generated together, with a KV cache.
        device: `cpu` or `cuda`; default: cuda if available.
        settings: Fields of `Sampling`: `max_tokens` (default 256), `temperature` (0.8), `top_k`,
            `top_p`, `seed` (the run's).

    Raises:
        UserError: The model does not exist, or a setting is out of its range.
    """
    source = run if isinstance(run, Source) else find_source(run, overrides, model, weights)
    sampler = TextSampler(source, device, **settings)
    ids = source.tokenizer.prompt(prompt)
    return sampler.pieces([ids] * n, after=ids if prompt else ())


def generate(
    run: str | Path | Run | Source, prompt: str = "", n: int | None = None, **options: Any
) -> str | list[str]:
    """The text that continues a prompt, or with `n` a list of texts; arguments as in `sample`."""
    texts = [""] * (n or 1)
    for number, piece in sample(run, prompt, n or 1, **options):
        texts[number] += piece
    return texts[0] if n is None else texts
