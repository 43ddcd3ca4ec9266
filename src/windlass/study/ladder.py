"""Ladders: a study of model sizes times tokens, the law fitted to it, and its answers.

Its cells differ in `model.width`, `model.layers` and `train.tokens_per_parameter`.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windlass.data.prepare import prepare
from windlass.errors import UserError, argument
from windlass.estimate.inputs import read_inputs
from windlass.estimate.plan import Plan, assemble, plan, predicted_speed
from windlass.fileio import read_json, write_atomic
from windlass.model.size import count
from windlass.recipe import Changes, ModelSettings, Recipe
from windlass.run import Run
from windlass.study.comparable import TOKENIZER, common_measure, validation_settings
from windlass.study.grid import Assignment, Cell
from windlass.study.law import (
    FORMS,
    FormErrors,
    Law,
    Observation,
    Range,
    check,
    compare_forms,
    effective_tokens,
    fit_law,
    held_out,
)
from windlass.study.numbers import BITS, divergence, number, read_numbers
from windlass.study.results import CellResult, cell_result
from windlass.study.runner import sweep
from windlass.study.study import KINDS, Study, load_study
from windlass.telemetry.measures import LOSS

UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9}
# Learning rate and batch against the number of parameters (arXiv 2412.04403, section 3). With muP
# the learning rate stays.
LR_EXPONENT, BATCH_EXPONENT = -1 / 3, 2 / 3
TOKENS = (5.0, 10.0, 20.0, 40.0)  # for each parameter
AMOUNTS = ("data.max_tokens", "data.val_fraction", "data.val_shards", "data.eval_size")
JOINED = "joined.json"  # in a ladder: its further runs, by their paths from there
# Sizes that may be the best for hours of a device, around the best at the recipe's own speed; small
# models do not use a device as well as large ones.
AROUND = (1 / 8, 64, 20)
TOKENS_KEY = "train.tokens_per_parameter"
ASPECT = 2.0  # the largest change of width / layers, for a size nearer to the wanted one


class Best(NamedTuple):
    """The size and tokens with the lowest loss for a budget."""

    flops: float  # 6 N D, with N as the law counts it
    size: float
    tokens: float
    loss: Range
    command: str  # that trains the nearest shape, or why there is none


@dataclass(frozen=True)
class Ladder:
    study: Study
    observations: list[Observation]
    left_out: list[str]  # cells that the law does not use, each with its reason
    measure: str  # LOSS, or BITS if the tokenizers differ

    @property
    def unit(self) -> str:
        return "nats per token" if self.measure == LOSS else "bits per byte"

    @cached_property
    def forms(self) -> list[FormErrors]:
        """The forms by their error on further runs or on the largest size, fitted without these."""
        return compare_forms(self.observations)

    @cached_property
    def law(self) -> Law:
        best, observations = self.forms[0], [replace(one, in_fit=True) for one in self.observations]
        return fit_law(observations, best.form, embeddings=best.embeddings)

    @property
    def further(self) -> list[Observation]:
        return [one for one in self.observations if not one.in_fit]

    @cached_property
    def earlier(self) -> Law:
        """The law without the further runs, as `plan --law` had it before they trained."""
        return replace(self, observations=[one for one in self.observations if one.in_fit]).law

    def predict(self, recipe: Recipe, planned: Plan) -> Range:
        """The validation loss of a recipe by its plan; UserError if their losses do not compare."""
        wanted, given = self._compared(self.study.recipe), self._compared(recipe)
        for key in wanted:
            if given.get(key) != wanted[key] and key not in self.study.keys:
                law = f"the law of {self.study.path} is of {key} = {wanted[key]!r}"
                problem = f"{law}, and the recipe has {given.get(key)!r}"
                raise UserError(f"{problem}: their losses in {self.unit} do not compare")
        size = self._size(planned)
        if not size or not planned.tokens:
            why = "; ".join(dict.fromkeys(planned.unknown.values()))
            why = why or "the size does not count blocks alone"
            raise UserError(f"the law needs size and tokens of the plan, which are unknown: {why}")
        unique = planned.tokens / planned.epochs if planned.epochs else 0
        return self.law.predict(size, effective_tokens(planned.tokens, unique))

    def best(self, flops: float) -> Best:
        """The answer to a budget of FLOPs."""
        size, tokens = self.law.optimum(flops)
        vocab = read_inputs(self.study.recipe).size.vocab or 0
        try:
            command = self.study.winner_command(self._assignment(size, tokens, vocab))
        except UserError as error:
            command = f"no shape of this recipe: {error}"
        return Best(flops, size, tokens, self.law.predict(size, tokens), command)

    def best_in(self, hours: float, device: str) -> Best:
        """The answer to a budget of hours of a device: the best of the shapes around a first guess,
        each at the speed of its own plan."""
        recipe, answers = self.study.recipe, list[tuple[float, float, float, Assignment]]()
        guess, tokens = self.law.optimum(hours * flops_per_hour(recipe, device))
        inputs = read_inputs(recipe, device=device)
        for factor in np.geomspace(*AROUND):
            with suppress(UserError):  # no such shape
                row = self._assignment(factor * guess, tokens, inputs.size.vocab or 0)
                own = replace(inputs, recipe=recipe.replace(row))
                planned = assemble(own, predicted_speed(own)[0])
                size, total = self._size(planned), planned.size.parameters
                if size and total and planned.tokens and planned.device_hours:
                    tokens_paid = hours * planned.tokens / planned.device_hours
                    row[TOKENS_KEY] = float(f"{tokens_paid / total:.4g}")
                    answers.append((self.law.loss(size, tokens_paid), size, tokens_paid, row))
        if not answers:
            raise UserError(f"{argument('device', device)}: no size for these hours has a plan")
        _, best, tokens, row = min(answers, key=lambda answer: answer[0])
        loss, command = self.law.predict(best, tokens), self.study.winner_command(row)
        return Best(6 * best * tokens, best, tokens, loss, command)

    def _size(self, planned: Plan) -> int | None:
        """N of a plan as the law counts it."""
        return planned.size.parameters if self.law.embeddings else planned.size.non_embedding

    def _assignment(self, size: float, tokens: float, vocab: int) -> Assignment:
        """The settings of the shape nearest to a size of the law, by the rules of the ladder, with
        as many tokens as cost the same."""
        recipe = self.study.recipe
        [row] = assignments(recipe, [f"{size:.0f}"], [1.0], vocab, self.law.embeddings)
        shape = count(recipe.replace(row).model, vocab)
        tokens *= size / (shape.total if self.law.embeddings else shape.non_embedding)
        return row | {TOKENS_KEY: float(f"{tokens / shape.total:.4g}")}

    def _compared(self, recipe: Recipe) -> dict[str, Any]:
        """The settings behind a loss, with the real paths of files, but for amounts of data."""
        settings = validation_settings(recipe)
        settings = {key: value for key, value in settings.items() if key not in AMOUNTS}
        for name in ("source", "eval_source"):
            place = Path(str(getattr(recipe.data, name))).expanduser()
            if isinstance(settings.get(f"data.{name}"), str) and place.exists():
                settings[f"data.{name}"] = str(place.resolve())
        if self.measure == LOSS:
            flat = recipe.flat()
            settings |= {key: flat.get(key) for key in TOKENIZER}
        return settings


def ladder(
    recipe: Recipe | Run | Study | str | Path,
    sizes: Sequence[str] = (),
    tokens: Sequence[float] = (),
    overrides: Changes = (),
    *,
    path: str | Path | None = None,
    **options: Any,
) -> Study:
    """Train every open cell of a ladder, and return the study; `open_ladder` fits its law.

    Args:
        recipe: The settings that all cells share; or a ladder, to continue it.
        sizes: Numbers of parameters (`10M`), or shapes as `4x128` (layers x width).
        tokens: Training tokens for each parameter; default 5, 10, 20 and 40.
        overrides: Changes to the recipe.
        path: The study's directory; None: `studies/<preset>-ladder-<hash>`.
        options: `world`, `workers`, `retry_failed`, `progress`: as for `sweep`.

    Raises UserError if the grid is invalid or allows no law, and Stopped after a signal, with
    everything saved.
    """
    study = create_ladder(recipe, sizes, tokens, overrides, path, options.get("world", 0))
    return sweep(study, **options)


def create_ladder(
    recipe: Recipe | Run | Study | str | Path,
    sizes: Sequence[str] = (),
    tokens: Sequence[float] = (),
    overrides: Changes = (),
    path: str | Path | None = None,
    world: int = 0,
) -> Study:
    base, _, place = load_study(recipe, "sweep", overrides)
    if not sizes and place and not tokens and path is None:
        study = Study.create(base, (), place, world=world)
        _check_kind(study)
        return study
    if not sizes:
        raise UserError(f"{argument('sizes', ['1M', '3M', '10M'])}: name the sizes of the ladder")
    if base.model.kind != "gpt":
        problem = "a ladder changes layers and width, and only model.kind = gpt can change them"
        raise UserError(f"model.kind = {base.model.kind}: {problem}")
    if not base.eval.every:
        raise UserError("eval.every = 0 measures no validation loss, which the law needs")
    # `eval.batches` counts in global batches, which differ, and the losses must cover equal data.
    base = base.replace({"train.steps": "compute-optimal", "eval.batches": 0})
    usual = Path("studies", f"{base.preset}-ladder-{base.config_hash[:8]}")
    if not (vocab := read_inputs(base).size.vocab):
        prepare(base)  # the tokenizer is learned from the data
        vocab = read_inputs(base).size.vocab or 0
    grid, path = assignments(base, sizes, tokens or TOKENS, vocab), Path(path or place or usual)
    planned = Study.create(base, grid, path, kind="ladder", write=False)
    observations = []  # as the law will see the finished cells, without their losses
    for cell in planned.cells:
        sizes_of_cell = count(cell.recipe.model, vocab)
        amount = int(sizes_of_cell.total * cell.recipe.train.tokens_per_parameter)
        counted = sizes_of_cell.total, sizes_of_cell.non_embedding, amount
        observations.append(Observation(cell.label, *counted, 1.0))
    outside = held_out(observations)
    for form in FORMS:
        check([one for one in observations if one not in outside], form)
    return Study.create(base, grid, path, kind="ladder", world=world)


def _check_kind(study: Study) -> None:
    if study.kind != "ladder":
        remedy = f"give a ladder, or {argument('sizes', ['1M', '3M', '10M'])} for a new one"
        raise UserError(f"{study.path} is {KINDS[study.kind]}: {remedy}")


def assignments(
    recipe: Recipe,
    sizes: Sequence[str],
    tokens: Sequence[float],
    vocab: int,
    embeddings: bool = True,
) -> list[Assignment]:
    """The grid of a ladder: shape, learning rate and batch of each size, times the tokens."""
    parameters = count(recipe.model, vocab).total
    rows = []
    for size in sizes:
        shape = shape_of(recipe, size, vocab, embeddings)
        ratio = count(recipe.replace(shape).model, vocab).total / parameters
        if not recipe.model.mup_base_width:
            shape["optim.lr"] = float(f"{recipe.optim.lr * ratio**LR_EXPONENT:.3g}")
        batch = recipe.train.global_batch * ratio**BATCH_EXPONENT
        shape["train.global_batch"] = 1 << max(0, round(batch).bit_length() - 1)
        rows.append(shape)
    pairs = itertools.product(rows, tokens)
    return [shape | {TOKENS_KEY: float(each)} for shape, each in pairs]


def shape_of(recipe: Recipe, size: str, vocab: int, embeddings: bool = True) -> Assignment:
    """Layers and width of a size, with heads and the feed-forward layer as the recipe has them.
    `embeddings`: whether the size counts them.

    Heads keep their width. For each number of layers, the width is the multiple of a head's width
    with the nearest size; of these shapes within ASPECT of the recipe's width / layers the nearest.
    """
    model, text = recipe.model, size.strip().lower()
    head, aspect = model.width // model.heads, model.width / model.layers
    if match := re.fullmatch(r"(\d+)x(\d+)", text):
        layers, width = map(int, match.groups())
        multiple = head * (model.heads // model.kv_heads_)
        if not layers or not width or width % multiple:
            problem = f"the width must be a multiple of {multiple}"
            raise UserError(f"{argument('sizes', size)}: {problem}, as heads are {head} wide")
        return _shape(model, layers, width // head)
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text)
    if not match or not float(match[1]):
        forms = "a number of parameters (300k, 10M, 1.5B) or LAYERSxWIDTH (4x128)"
        raise UserError(f"{argument('sizes', size)}: write {forms}")
    wanted = float(match[1]) * UNITS[match[2]]

    def parameters(shape: Assignment) -> int:
        changes = {key.removeprefix("model."): value for key, value in shape.items()}
        sizes = count(model.model_copy(update=changes), vocab)
        return sizes.total if embeddings else sizes.non_embedding

    def distance(shape: Assignment) -> float:
        total = parameters(shape)
        return max(total / wanted, wanted / total)

    shapes, layers, smallest = list[Assignment](), 0, 0
    while smallest <= wanted:  # `smallest`: parameters of the narrowest shape with these layers
        layers += 1
        fewest = max(1, round(aspect * layers / ASPECT / head))
        most = max(1, round(ASPECT * aspect * layers / head))
        shapes += [_shape(model, layers, heads) for heads in range(fewest, most + 1)]
        smallest = parameters(_shape(model, layers, fewest))
    best = min(shapes, key=distance)
    if distance(best) > 1.5:
        problem = f"the nearest size with heads of {head} and {vocab:,} tokens of vocabulary"
        least_parameters = min(map(parameters, shapes))
        raise UserError(f"{argument('sizes', size)}: {problem} has {least_parameters:,} parameters")
    return best


def _shape(model: ModelSettings, layers: int, heads: int) -> Assignment:
    """The settings of a shape with heads as wide as the model's, and its ratios of other widths."""
    group = model.heads // model.kv_heads_
    heads = -(-heads // group) * group
    width = heads * (model.width // model.heads)
    shape: Assignment = {"model.layers": layers, "model.width": width, "model.heads": heads}
    if model.kv_heads:
        shape["model.kv_heads"] = heads // group
    if model.ff_width:
        shape["model.ff_width"] = max(1, round(model.ff_width / model.width * width))
    return shape


def open_ladder(source: Study | str | Path, runs: Sequence[Run] = ()) -> Ladder:
    """A ladder with its finished runs; `runs`: further ones, which the law predicts."""
    study = source if isinstance(source, Study) else Study.open(source)
    _check_kind(study)

    def result_of(run: Run) -> CellResult:
        cell, alive = Cell.of(run.recipe, {}, str(run.path)), run.alive
        return cell_result(cell, run, read_numbers(run, study.measure), alive)

    further = {run.path.resolve(): run for run in runs}
    listed = {study.run_of(cell).path.resolve() for cell in study.cells} | further.keys()
    paths = read_json(study.path / JOINED).get("runs", [])
    joined = [Run(Path(os.path.normpath(study.path / path))) for path in paths]
    joined = [run for run in joined if run.path.resolve() not in listed]
    pairs = [(r, True) for r in study.results() if r.run.path.resolve() not in further]
    pairs += [(result_of(run), True) for run in joined if run.exists]
    pairs += [(result_of(run), False) for run in further.values()]
    chosen, left_out = list[tuple[CellResult, bool]](), list[str]()
    for result, in_fit in pairs:
        why = divergence([number(line.get("loss")) for line in result.run.lines("train")])
        if not why and result.numbers.score is None:
            why = "it lacks an evaluation"
        if result.state != "finished":
            why = result.reason or result.state
        if why and not in_fit:
            needs = "the law needs a finished run with a validation loss"
            raise UserError(f"{result.run.path}: {why}; {needs}")
        if why:
            left_out.append(f"{name_of(result)}: {why}")
        else:
            chosen.append((result, in_fit))
    left_out += [f"{run.path}: it is gone" for run in joined if not run.exists]
    if not chosen:
        raise UserError("\n".join([f"{study.path}: no finished cell, so no law:", *left_out]))
    measure, remark = common_measure([result.validation for result, _ in chosen])
    if not measure:
        raise UserError(f"{study.path}: {remark}")
    observations = []
    for result, in_fit in chosen:
        numbers = result.numbers
        loss = numbers.eval_loss
        if measure == BITS:
            loss = [line["bits_per_byte"] for line in numbers.evals if "bits_per_byte" in line][-1]
        observation = Observation(
            name_of(result),
            parameters=int(numbers.start["parameters"]),
            non_embedding=count(result.cell.recipe.model, 0).non_embedding,
            tokens=numbers.tokens,
            loss=float(loss or 0.0),
            unique_tokens=int(numbers.start["data"]["train"].get("tokens") or 0),
            in_fit=in_fit,
        )
        observations.append(observation)
    return Ladder(study, observations, left_out, measure)


def name_of(result: CellResult) -> str:
    if not result.cell.assignment:
        return str(result.run.path)
    model, train = result.cell.recipe.model, result.cell.recipe.train
    return f"{model.layers}x{model.width}, D = {train.tokens_per_parameter:g} N"


def join(study: Study, runs: Sequence[Run]) -> None:
    """Add runs to the later fits of a ladder."""
    new = [os.path.relpath(run.path.resolve(), study.path.resolve()) for run in runs]
    paths = dict.fromkeys([*read_json(study.path / JOINED).get("runs", []), *new])
    write_atomic(study.path / JOINED, json.dumps({"runs": [*paths]}, indent=1))


def flops_per_hour(recipe: Recipe, device: str) -> float:
    """FLOPs that training a recipe gets from an hour of a device, by its plan; UserError if that
    lacks the speed."""
    planned = plan(recipe, device=device)
    if not planned.flops or not planned.device_hours:
        why = "; ".join(dict.fromkeys(planned.unknown.values()))
        place = argument("device", device) if device else "this device"
        raise UserError(f"{place}: no plan of the speed: {why}")
    return planned.flops / planned.device_hours
