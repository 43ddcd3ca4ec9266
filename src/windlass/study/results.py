"""The numbers of runs and of a study's cells, from their ledgers, and the best cells.

Runs with different tokenizers are compared by bits per byte of text, not by nats per token.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from windlass.errors import UserError
from windlass.estimate.calendar import resolve_steps
from windlass.fileio import read_json
from windlass.recipe import NON_SEMANTIC, Recipe
from windlass.run import Line, Run, effective, last_start, read_lines, timestamp
from windlass.study.grid import AXES_ONLY, SEED, Assignment, Cell, label_of
from windlass.telemetry.measures import LOSS
from windlass.telemetry.summary import scores_by_step, throughput

BITS = "loss.bits_per_byte"  # as in `checkpoint.best`: the suite, and the field of its `eval` line
# Settings that choose the tokenizer.
TOKENIZER = ("data.tokenizer", "data.tokenizer_vocab", "model.name", "model.revision")
# Settings that choose the validation data, and further ones if it is held out from `data.source`.
VALIDATION = (
    *("data.eval_source", "data.eval_split", "data.eval_size", "data.text_key"),
    *("data.format", "data.packing", "data.document_mask"),
)
HELD_OUT = ("data.source", "data.split", "data.max_tokens", "data.val_fraction", "data.val_shards")
NO_BEST = "Windlass names no best cell"
RECENT = 10  # logged steps from which the time left is computed
OPEN_STATES = ("waiting", "interrupted")
# All states; several repeats together have the one that comes first here.
STATES = ("failed", "interrupted", "running", "waiting", "finished")
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


def validation_data(run: Run, recipe: Recipe, lines: Sequence[Line]) -> ValidationData | None:
    """The tokenizer and data of the last evaluation of the loss, from a run's effective ledger."""
    losses = [x for x in lines if x["kind"] == "eval" and x.get("suite", LOSS) == LOSS]
    if not losses:
        return None
    last, flat = losses[-1], recipe.flat()
    saved = read_json(run.path / "tokenizer" / "windlass.json").get("fingerprint")
    tokens, bits, size = int(last.get("tokens", 0)), last.get("bits_per_byte"), None
    if bits and math.isfinite(bits):
        size = last["loss"] * tokens / (math.log(2) * bits)
    tokenizer = str(saved or [flat.get(key) for key in TOKENIZER])
    text = last_start(lines).get("data", {}).get("val", {}).get("text", "")
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


def diverged(first: float, last: float) -> bool:
    """Whether the last training loss is not finite, or more than 1 nat above the first."""
    return not math.isfinite(last) or last > first + 1.0


@dataclass(frozen=True)
class CellResult:
    """The state and numbers of a cell; None for a number that the ledger lacks (so far)."""

    cell: Cell
    run: Run  # begun or not
    measure: str  # that ranks cells: `loss`, or as `squad.f1`
    state: str = "waiting"  # of STATES
    reason: str = ""
    step: int = 0  # of the last `train` or `eval` line
    steps: int | None = None
    loss: float | None = None
    eval_loss: float | None = None
    best_loss: float | None = None
    score: float | None = None  # the best value of `measure` after step 0
    lower: bool = False  # whether less of it is better, by its declaration or by the run's suite
    validation: ValidationData | None = None
    tokens: int = 0
    tokens_per_s: float | None = None  # tokens over time in steps
    device_hours: float | None = None
    left_s: float | None = None  # seconds to the last step, while it runs

    def row(self) -> dict[str, Any]:
        """The cell's settings and results as plain values, for a table or JSON."""
        left_out = {"cell", "run", "measure", "lower", "validation"}
        values = {name: value for name, value in vars(self).items() if name not in left_out}
        return {**self.cell.assignment, **values, "run": str(self.run.path)}


def read_result(
    cell: Cell, run: Run, measure: str, failure: str | None, cache: dict[Path, tuple[Any, ...]]
) -> CellResult:
    """A cell's result.

    `failure`: why a sweep saw it fail; `cache`: what each run's ledger gave.
    """
    version: tuple[int, ...] = ()
    with suppress(OSError):
        stat = run.metrics_path.stat()
        version = stat.st_size, stat.st_mtime_ns
    if run.path not in cache or cache[run.path][0] != version:
        raw = list(read_lines(run.metrics_path))
        lines, events = effective(raw), [line for line in raw if line["kind"] == "event"]
        train = [line for line in lines if line["kind"] == "train"][-RECENT:]
        values = summarize(lines, measure)
        values["validation"] = validation_data(run, cell.recipe, lines)
        cache[run.path] = version, events, train, values
    _, events, train, values = cache[run.path]
    state, reason = run.state_by(events), ""
    last = max((x.get("attempt", 0) for x in events), default=0)
    failures = [x for x in events if x["event"] == "failed" and x.get("attempt", 0) == last]
    if failure is not None and state not in ("finished", "running"):
        state, reason = "failed", failure
    elif state == "failed" and failures:
        reason = str(failures[-1].get("reason", ""))
    elif state in ("stopped", "preempted", "failed"):  # a killed run lacks a failure
        state = "interrupted"
    elif state == "new":
        state = "waiting"
    if values["steps"] is None:
        with suppress(UserError):  # it may depend on data that is not prepared yet
            values["steps"] = resolve_steps(cell.recipe)
    left = time_left(train, values["steps"]) if state == "running" else None
    return CellResult(cell, run, measure, state, reason, left_s=left, **values)


def place_of(assignment: Assignment) -> str:
    """The settings of a cell that a score does not decide; each such choice has its own best."""
    given = {k: v for k, v in assignment.items() if k.startswith(NO_CHOICE) and k != SEED}
    return repr(given)


def time_left(train: Sequence[Line], steps: int | None) -> float | None:
    """Seconds to the last step, by the wall clock of recent `train` lines, with their saves."""
    own = [line for line in train if line.get("attempt") == train[-1].get("attempt")][-RECENT:]
    if not steps or len(own) < 2:
        return None
    pace = (timestamp(own[-1]) - timestamp(own[0])) / (own[-1]["step"] - own[0]["step"])
    return max(steps - own[-1]["step"], 0) * pace


def summarize(lines: Sequence[Line], measure: str) -> dict[str, Any]:
    """The fields of a CellResult that come from the effective lines of a run's ledger."""
    train, evals = ([x for x in lines if x["kind"] == kind] for kind in ("train", "eval"))
    losses = [x["loss"] for x in evals if x.get("suite", LOSS) == LOSS and "loss" in x]
    scores = scores_by_step([x for x in evals if x["step"] > 0], measure)
    speed = throughput(lines)
    last = train[-1] if train else {}
    summaries = [x for x in lines if x["kind"] == "summary"]
    return {
        "step": max((x["step"] for x in (*train, *evals)), default=0),
        "steps": last_start(lines).get("steps"),
        "loss": last.get("loss"),
        "eval_loss": losses[-1] if losses else None,
        "best_loss": scores_by_step(lines, LOSS).best,
        "score": scores.best,
        "lower": scores.lower,
        "tokens": int(last.get("tokens", 0)),
        "tokens_per_s": speed.tokens_per_s if speed else None,
        "device_hours": summaries[-1].get("device_hours") if summaries else None,
    }


@dataclass(frozen=True)
class SeedGroup:
    """The cells that differ only in the seed; the numbers are of the finished ones."""

    assignment: Assignment  # without the seed
    results: list[CellResult]

    @property
    def scores(self) -> list[float]:
        return [r.score for r in self.results if r.state == "finished" and r.score is not None]

    @property
    def median(self) -> float | None:
        return statistics.median(self.scores) if self.scores else None

    @property
    def best(self) -> CellResult | None:
        scored = [r for r in self.results if r.state == "finished" and r.score is not None]
        if not scored:
            return None
        sign = 1 if scored[0].lower else -1
        return min(scored, key=lambda r: sign * (r.score or 0.0))

    @property
    def label(self) -> str:
        return label_of(self.assignment) or "the recipe"

    @property
    def seeds(self) -> str:
        """`2 seeds`, `1 of 2 seeds` while one is unfinished, empty if the seed is not an axis."""
        if SEED not in self.results[0].cell.assignment:
            return ""
        total, finished = len(self.results), len(self.scores)
        return f"{'' if finished == total else f'{finished} of '}{total} seed{'s' * (total > 1)}"


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
        return self.groups[0].best if self.groups else None


def find_winners(
    results: Sequence[CellResult], measure: str, values: Mapping[str, Sequence[Any]]
) -> Winners:
    """The groups with the best median score; groups whose seeds have all finished come first.

    Nothing wins if the losses do not compare, or if a lower loss decides between none of the
    varied settings (`values`, by setting); the remark then has the reason.
    """
    remark = ""
    if measure in (LOSS, BITS):
        finished = [r.validation for r in results if r.state == "finished"]
        common, remark = common_measure(finished)
        if not common or (measure, common) == (LOSS, BITS):
            return Winners([], remark)
    varied = [key for key in values if len(values[key]) > 1 and key != SEED]
    choices = [key for key in varied if not key.startswith(NO_CHOICE)]
    if not choices:
        scale = f"{', '.join(varied)}, which set the amount or kind of computation"
        only = scale if varied else "only the seed"
        return Winners([], f"{NO_BEST}: the study varies {only}.")
    rivals: dict[str, list[SeedGroup]] = {}
    for group in seed_groups(results):
        rivals.setdefault(place_of(group.assignment), []).append(group)
    sign = 1 if any(r.lower for r in results) else -1
    winners = list[tuple[tuple[bool, float], SeedGroup]]()
    for groups in rivals.values():
        scored = [group for group in groups if group.scores] if len(groups) > 1 else []
        if scored:
            most = max(len(group.results) for group in groups)
            ranked = [((len(g.scores) < most, sign * (g.median or 0.0)), g) for g in scored]
            winners.append(min(ranked, key=lambda pair: pair[0]))
    if not winners:
        if any(group.scores for groups in rivals.values() for group in groups):
            amounts = ", ".join(key for key in varied if key not in choices)
            why = f"no other choice of {', '.join(choices)} has the {amounts} of a finished cell"
        else:
            why = "no cell has finished with a score"
        return Winners([], f"{NO_BEST}: {why}.")
    return Winners([group for _, group in sorted(winners, key=lambda pair: pair[0])], remark)
