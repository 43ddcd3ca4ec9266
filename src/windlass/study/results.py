"""The numbers of runs, the measure that compares them, and the states and winners of cells.

`telemetry.measures.RUN` has the name, heading and format of each number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from windlass.errors import UserError, plural
from windlass.estimate.calendar import resolve_steps
from windlass.fileio import read_json
from windlass.ledger import STARTS, Line, effective, last_start, read_lines, timestamp
from windlass.model.size import describe_network, trainable
from windlass.recipe import NON_SEMANTIC, Recipe
from windlass.recipe.strategies import Sizes
from windlass.run import Run
from windlass.study.grid import AXES_ONLY, SEED, Assignment, Cell, label_of
from windlass.telemetry.measures import DEVICE, EPOCH_LOSS, LOSS, RUN, of_eval, show
from windlass.telemetry.summary import (
    device_hours,
    evaluation_speed,
    scores_by_step,
    throughput,
    wall_time,
)

BITS = "loss.bits_per_byte"  # as in `checkpoint.best`: the suite, and the field of its `eval` line
RECENT = 10  # logged steps from which the time left is computed
# Settings that choose the tokenizer.
TOKENIZER = ("data.tokenizer", "data.tokenizer_vocab", "model.name", "model.revision")
# Settings that choose the validation data, and further ones if it is held out from `data.source`.
VALIDATION = (
    *("data.eval_source", "data.eval_split", "data.eval_size", "data.text_key"),
    *("data.format", "data.packing", "data.document_mask"),
)
HELD_OUT = ("data.source", "data.split", "data.max_tokens", "data.val_fraction", "data.val_shards")
NO_BEST = "Windlass names no best cell"
OPEN_STATES = ("waiting", "interrupted")
# A lower loss does not decide between values of these settings: they change how much is computed,
# or how it is computed.
NO_CHOICE = (
    *NON_SEMANTIC,
    *AXES_ONLY,
    SEED,
    *(f"model.{name}" for name in ("layers", "heads", "kv_heads", "width", "ff_width", "context")),
    *("train.steps", "train.tokens_per_parameter", "train.global_batch"),
    *("train.precision", "train.tf32"),
    *("data.max_tokens", "data.train_size"),
)

Value = float | int | str


class RunNumbers:
    """The numbers of a run by its ledger; None for a number that the ledger lacks (so far)."""

    def __init__(self, raw: Sequence[Line], lines: Sequence[Line], measure: str = LOSS):
        """`raw`: all lines; `lines`: the effective ones; `measure`: of `checkpoint.best`."""
        train = [line for line in lines if line["kind"] == "train"]
        self.measure = measure
        self.start, self.recent = last_start(lines), train[-RECENT:]
        self.summary = [{}, *(line for line in lines if line["kind"] == "summary")][-1]
        self.events = [line for line in lines if line["kind"] == "event"]
        self.history = [line for line in raw if line["kind"] == "event"]  # as they were written
        self.evals = [line for line in lines if line["kind"] == "eval"]
        self.suites: dict[str, list[Line]] = {}  # the `eval` lines by suite
        for line in self.evals:
            self.suites.setdefault(line.get("suite", LOSS), []).append(line)

        saved = [event for event in self.events if event["event"] in ("checkpoint", "finished")]
        self.step = max((line["step"] for line in (*train, *self.evals, *saved)), default=0)
        self.steps: int | None = self.start.get("steps")
        losses = [line["loss"] for line in self.suites.get(LOSS, ()) if "loss" in line]
        self.loss: float | None = train[-1].get("loss") if train else None
        self.eval_loss: float | None = losses[-1] if losses else None
        self.best_loss = scores_by_step(self.evals, LOSS).best
        scores = scores_by_step([line for line in self.evals if line["step"] > 0], measure)
        self.score = scores.best  # the best value of `measure` after step 0
        self.lower = scores.lower  # whether less of it is better
        self.tokens = int(train[-1].get("tokens", 0)) if train else 0
        self.speed = throughput(lines)
        self.tokens_per_s = self.speed.tokens_per_s if self.speed else None
        self.wall = wall_time(raw)  # seconds by phase over all starts, and their `total`
        self.device_hours = device_hours(raw) or None
        attempts = {x.get("attempt", 0) for x in self.events if x["event"] in STARTS}
        self.starts = max(1, len(attempts))

    def seconds_left(self, steps: int | None) -> float | None:
        """Seconds to the step `steps`, by the wall clock of recent steps, with their saves."""
        lines = [x for x in self.recent if x.get("attempt") == self.recent[-1].get("attempt")]
        if not steps or len(lines) < 2:
            return None
        pace = (timestamp(lines[-1]) - timestamp(lines[0])) / (lines[-1]["step"] - lines[0]["step"])
        return max(steps - lines[-1]["step"], 0) * pace

    def values(self, devices: Mapping[str, float] | None = None) -> dict[str, Value]:
        """The measures of RUN but for the state, the losses of epochs, and the scores of suites.

        `devices`: means over the samples of all ranks, for a run without a summary.
        """
        devices, speed, start = devices or {}, self.speed, self.start
        losses = scores_by_step(self.evals, LOSS)
        scores = None if self.measure == LOSS else scores_by_step(self.evals, self.measure)
        total, trained = start.get("parameters"), start.get("trained")
        per_epoch = (start.get("samples_per_epoch") or 0) / max(1, start.get("global_batch", 1))
        part = kwh = None
        if total and trained not in (None, total):
            part = trainable(trained, total)
        if "power_w" in devices and self.device_hours:
            kwh = devices["power_w"] * self.device_hours / 1e3
        memory = first_finite(self.summary.get("peak_mem_mb"), devices.get("peak_alloc_mb"))
        computed: dict[str, Value | None] = {
            "steps": self.step,
            "trainable": part,
            "network": describe_network(start["network"]) if start.get("network") else None,
            "layout": Sizes(**start.get("mesh", {})).layout or None,
            "best_eval_loss": losses.best,
            "best_eval_step": losses.best_step,
            "best_bits_per_byte": scores_by_step(self.evals, BITS).best,
            "best_measure": self.measure if scores else None,
            "best_score": scores.best if scores else None,
            "best_score_step": scores.best_step if scores else None,
            "train_samples_per_s": (speed.samples_per_s or None) if speed else None,
            "train_tokens_per_s": speed.tokens_per_s if speed else None,
            "train_steps_per_s": speed.steps_per_s if speed else None,
            "eval_samples_per_s": evaluation_speed(self.evals),
            "steps_per_epoch": per_epoch or None,
            "peak_mem_mb": memory,
            "mfu": speed.mfu if speed else None,
            "goodput": self.wall["train"] / self.wall["total"] if self.wall["total"] else None,
            "runtime_s": self.wall["total"] or None,
            "device_hours": self.device_hours,
            "energy_kwh": kwh,
            "starts": self.starts,
        }
        computed |= self._logged(devices)
        values = {name: computed[name] for name in RUN if computed.get(name) is not None}
        values |= self._epoch_losses(per_epoch)
        for suite, lines in self.suites.items():
            for name in score_fields(lines) if suite != LOSS else ():
                values[f"{suite}_{name}"] = number(lines[-1].get(name))
        return values  # type: ignore[return-value]

    def _logged(self, devices: Mapping[str, float]) -> dict[str, Value | None]:
        """The measures with a `source`, by the first source that has a value; NaN only for a loss,
        which must not be hidden."""
        means = {name: self.summary.get(f"avg_{name}") for name in DEVICE}
        utilisation = (self.summary.get(f"avg_{kind}_util_pct") for kind in ("gpu", "cpu"))
        means["util_pct"] = first_finite(*utilisation)
        known = {name: mean for name, mean in means.items() if first_finite(mean) is not None}
        last: dict[str, Mapping[str, Any]] = {event["event"]: event for event in self.events}
        last["train"] = self.recent[-1] if self.recent else {}
        last["eval"] = [{}, *self.suites.get(LOSS, ())][-1]
        last |= {"summary": self.summary, "start": self.start, "device": {**devices, **known}}
        values = dict[str, Value | None]()
        for measure in RUN.values():
            for source in reversed(measure.source.split()):
                line, _, field = source.partition(".")
                value = last.get(line, {}).get(field)
                shown = isinstance(value, str) or first_finite(value) is not None
                if measure.kind == "loss" or shown:
                    values[measure.name] = value
        return values

    def _epoch_losses(self, steps_per_epoch: float) -> dict[str, float]:
        """The validation loss at the end of each whole epoch: of the first step at or past it, or
        of the run's last step if that is less than a step before it."""
        evals = self.suites.get(LOSS, ())
        points = [(number(x.get("epoch")), number(x.get("loss"))) for x in evals]
        losses = dict[str, float]()
        if not steps_per_epoch or not points:
            return losses
        for epoch, loss in points:
            if epoch >= 1 and epoch % 1 < 1 / steps_per_epoch:
                losses.setdefault(f"{EPOCH_LOSS}{int(epoch)}", loss)
        epoch, loss = points[-1]
        if -epoch % 1 < 1 / steps_per_epoch:
            losses.setdefault(f"{EPOCH_LOSS}{math.ceil(epoch)}", loss)
        return losses


def read_numbers(run: Run, measure: str = LOSS) -> RunNumbers:
    raw = list(read_lines(run.metrics_path))
    return RunNumbers(raw, effective(raw), measure)


def divergence(losses: Sequence[float]) -> str:
    """How a training loss diverged, to NaN or by more than 1 nat; empty if it did not."""
    if not losses:
        return ""
    first, last = losses[0], losses[-1]
    if math.isfinite(last) and not last > first + 1.0:
        return ""
    return f"the training loss went from {show(first, 'loss')} to {show(last, 'loss')}"


def score_fields(lines: Sequence[Line]) -> list[str]:
    """The fields of `eval` lines that are finite scores, in the order of their first values."""
    fields = dict.fromkeys(k for line in lines for k, x in line.items() if math.isfinite(number(x)))
    return [name for name in fields if of_eval(name).role == "score"]


def number(value: Any) -> float:
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return math.nan


def first_finite(*values: Any) -> float | None:
    return next((x for x in values if isinstance(x, (int, float)) and math.isfinite(x)), None)


class ValidationData(NamedTuple):
    tokenizer: str
    data: dict[str, Any]  # the settings that choose it
    tokens: int
    bytes: float | None  # of text in these tokens; None if the tokenizer cannot tell
    text: str = ""  # a hash of the validation text, equal for every tokenizer; empty: unknown


def validation_settings(recipe: Recipe) -> dict[str, Any]:
    flat = recipe.flat()
    if recipe.data.mix:  # its weights do not change the validation data
        weights = {"name", "weight"}
        flat["data.source"] = [part.model_dump(exclude=weights) for part in recipe.data.mix]
    own_split = recipe.data.eval_split and recipe.data.sources[0].startswith("hf:")
    held_out = () if recipe.data.eval_source or own_split else HELD_OUT
    return {key: flat.get(key) for key in (*VALIDATION, *held_out)}


def validation_data(run: Run, recipe: Recipe, numbers: RunNumbers) -> ValidationData | None:
    """The tokenizer and data of a run's last evaluation of the loss."""
    losses = numbers.suites.get(LOSS)
    if not losses:
        return None
    last, flat = losses[-1], recipe.flat()
    saved = read_json(run.path / "tokenizer" / "windlass.json").get("fingerprint")
    tokens, bits, size = int(last.get("tokens", 0)), last.get("bits_per_byte"), None
    if bits and math.isfinite(bits):
        size = last["loss"] * tokens / (math.log(2) * bits)
    tokenizer = str(saved or [flat.get(key) for key in TOKENIZER])
    text = numbers.start.get("data", {}).get("val", {}).get("text", "")
    return ValidationData(tokenizer, validation_settings(recipe), tokens, size, text)


def common_measure(measured: Sequence[ValidationData | None]) -> tuple[str, str]:
    """The measure that compares runs, LOSS or BITS (empty: none), and a remark unless LOSS."""
    runs = [one for one in measured if one is not None]
    keys = [k for k in HELD_OUT + VALIDATION if len({repr(one.data.get(k)) for one in runs}) > 1]
    tokens, texts = sorted({one.tokens for one in runs}), sorted({one.text for one in runs} - {""})
    several = len({one.tokenizer for one in runs}) > 1
    sizes = sorted(one.bytes for one in runs if one.bytes is not None)
    why = "The tokenizers differ, so losses per token do not compare"
    problem = ""
    if keys:
        problem = f"The runs were evaluated on different data ({', '.join(keys)})"
    elif len(texts) > 1:
        problem = f"The runs were evaluated on different texts (hashes {', '.join(texts)})"
    elif several and not all(one.text and one.bytes for one in runs):
        problem = f"{why}. Some runs lack bits per byte or the hash of their validation text"
    elif several and sizes[-1] > 1.01 * sizes[0]:
        amounts = f"{sizes[0] / 1e3:,.1f} to {sizes[-1] / 1e3:,.1f} kB"
        problem = f"{why}. Bits per byte cover {amounts} of the validation text"
        problem += " (set eval.batches = 0)"
    elif len(tokens) > 1 and not several:
        amounts = f"{tokens[0]:,} to {tokens[-1]:,} tokens"
        cause = "eval.batches x train.global_batch x model.context"
        problem = f"The runs were evaluated on {amounts} of the validation data ({cause})"
    if problem:
        return "", f"{problem}, so Windlass names no best run."
    formula = "loss / ln 2 x tokens / bytes of the validation data"
    return (BITS, f"{why}; bits per byte do ({formula}).") if several else (LOSS, "")


@dataclass(frozen=True)
class CellResult:
    """A cell's state and numbers."""

    cell: Cell
    run: Run  # begun or not
    numbers: RunNumbers
    state: str  # `failed`, `interrupted`, `running`, `waiting` or `finished`
    reason: str = ""  # why it failed
    steps: int | None = None  # None: they depend on data that is not prepared yet
    left_s: float | None = None  # seconds to the last step, while it runs

    @cached_property
    def validation(self) -> ValidationData | None:
        return validation_data(self.run, self.cell.recipe, self.numbers)

    def row(self) -> dict[str, Any]:
        """The cell's settings and results as plain values, for a table or JSON."""
        names = ("step", "loss", "eval_loss", "best_loss", "score", "tokens", "tokens_per_s")
        numbers = {name: getattr(self.numbers, name) for name in (*names, "device_hours")}
        state = {"state": self.state, "reason": self.reason, "steps": self.steps}
        more = {"left_s": self.left_s, "run": str(self.run.path)}
        return {**self.cell.assignment, **state, **numbers, **more}


def cell_result(
    cell: Cell, run: Run, numbers: RunNumbers, failure: str | None = None
) -> CellResult:
    """The result of a cell; `failure`: why a sweep saw it fail."""
    state, reason, events = run.state_by(numbers.history), "", numbers.history
    attempt = max((event.get("attempt", 0) for event in events), default=0)
    ends = [e for e in events if e["event"] == "failed" and e.get("attempt", 0) == attempt]
    if state in ("finished", "running"):
        pass
    elif failure is not None:
        state, reason = "failed", failure
    elif state == "new":
        state = "waiting"
    elif ends:
        state, reason = "failed", str(ends[-1].get("reason", ""))
    else:
        state = "interrupted"  # stopped, preempted, or killed
    steps = numbers.steps
    if steps is None:
        with suppress(UserError):
            steps = resolve_steps(cell.recipe)
    left = numbers.seconds_left(steps) if state == "running" else None
    return CellResult(cell, run, numbers, state, reason, steps, left)


@dataclass(frozen=True)
class SeedGroup:
    """The cells that differ only in the seed; the numbers are of the finished ones."""

    assignment: Assignment  # without the seed
    results: list[CellResult]

    @property
    def scored(self) -> list[tuple[float, CellResult]]:
        finished = (result for result in self.results if result.state == "finished")
        return [(r.numbers.score, r) for r in finished if r.numbers.score is not None]

    @property
    def scores(self) -> list[float]:
        return [score for score, _ in self.scored]

    @property
    def median(self) -> float | None:
        return statistics.median(self.scores) if self.scores else None

    @property
    def label(self) -> str:
        return label_of(self.assignment) or "the recipe"

    @property
    def seeds(self) -> str:
        """`2 seeds`, `1 of 2 seeds` while one is unfinished, empty if the seed is not an axis."""
        if SEED not in self.results[0].cell.assignment:
            return ""
        total, finished = plural(len(self.results), "seed"), len(self.scores)
        return total if finished == len(self.results) else f"{finished} of {total}"


def seed_groups(results: Sequence[CellResult]) -> list[SeedGroup]:
    groups: dict[str, SeedGroup] = {}
    for result in results:
        rest = {key: value for key, value in result.cell.assignment.items() if key != SEED}
        groups.setdefault(repr(rest), SeedGroup(rest, [])).results.append(result)
    return list(groups.values())


class Winners(NamedTuple):
    groups: list[SeedGroup]  # the best first; one for each choice of varied NO_CHOICE settings
    remark: str

    @property
    def cell(self) -> CellResult | None:
        """The best cell of the first group."""
        if not self.groups:
            return None
        scored = self.groups[0].scored
        choose = min if scored[0][1].numbers.lower else max
        return choose(scored, key=lambda pair: pair[0])[1]


def find_winners(
    results: Sequence[CellResult], measure: str, values: Mapping[str, Sequence[Any]]
) -> Winners:
    """The groups with the best median score; groups whose seeds have all finished come first.

    Nothing wins if the losses do not compare, or if a lower loss decides between none of the
    varied settings (`values`, by setting); the remark then has the reason.
    """
    remark = ""
    if measure in (LOSS, BITS):
        finished = [result.validation for result in results if result.state == "finished"]
        common, remark = common_measure(finished)
        if not common or (measure, common) == (LOSS, BITS):
            return Winners([], remark)
    varied = [key for key in values if len(values[key]) > 1 and key != SEED]
    choices = [key for key in varied if not key.startswith(NO_CHOICE)]
    amounts = [key for key in varied if key not in choices]
    if not varied:
        return Winners([], f"{NO_BEST}: the study varies only the seed.")
    if not choices:
        only = f"{', '.join(varied)}, which set the amount or kind of computation"
        return Winners([], f"{NO_BEST}: the study varies {only}.")

    sign = 1 if any(result.numbers.lower for result in results) else -1
    # A score decides between the groups that share the amount and kind of computation.
    rivals: dict[str, list[SeedGroup]] = {}
    for group in seed_groups(results):
        rivals.setdefault(repr([group.assignment[key] for key in amounts]), []).append(group)
    best, any_score = [], False
    for groups in rivals.values():
        seeds = max(len(group.results) for group in groups)
        ranked = []
        for group in groups:
            if group.median is not None:
                ranked.append(((len(group.scores) < seeds, sign * group.median), group))
        any_score = any_score or bool(ranked)
        if ranked and len(groups) > 1:
            best.append(min(ranked, key=lambda one: one[0]))
    if not best:
        why = "no cell has finished with a score"
        if any_score:
            shared = ", ".join(amounts)
            why = f"no other choice of {', '.join(choices)} has the {shared} of a finished cell"
        return Winners([], f"{NO_BEST}: {why}.")
    return Winners([group for _, group in sorted(best, key=lambda one: one[0])], remark)
