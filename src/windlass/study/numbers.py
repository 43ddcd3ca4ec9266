"""The numbers of a run by its ledger: progress, losses, speed, and the times of its steps.

`telemetry.measures.RUN` has the name, heading and format of each number.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from windlass.launch.rank_status import STEP_PHASES
from windlass.ledger import STARTS, Line, effective, last_start, read_lines, timestamp
from windlass.model.size import describe_network, trainable
from windlass.recipe.strategies import Sizes
from windlass.run import Run
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
WARMUP = 5  # steps of each start that no time of a step counts

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
        self.losses, self.scores = (scores_by_step(self.evals, x) for x in (LOSS, measure))
        self.best_loss, self.score = self.losses.best, self.scores.best
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
        losses, scores = self.losses, None if self.measure == LOSS else self.scores
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


def windows(lines: Iterable[Line], since: float = 0.0) -> list[Line]:
    """The `train` lines whose steps begin after WARMUP steps of their start, and after `since`
    (seconds since 1970). A line holds means over the steps since the previous line.
    """
    step, start, begun, chosen = 0, 0, 0.0, []
    for line in lines:
        if line["kind"] == "event" and line.get("event") in STARTS:
            step = start = line["step"]
        elif line["kind"] == "train":
            if line.get("step_ms") and step - start >= WARMUP and begun >= since:
                chosen.append(line)
            step, begun = line["step"], timestamp(line) if since else 0.0
    return chosen


def step_medians(lines: Sequence[Line]) -> dict[str, float]:
    """Medians of a step's time, phases and tokens over `train` lines; empty without lines."""
    names = (f"{name}_ms" for name in ("step", *STEP_PHASES))
    columns = {name: [x[name] for x in lines if name in x] for name in names}
    for name in ("tokens", "padded_tokens"):
        rates = [(x.get(f"{name}_per_s", x["tokens_per_s"]), x["step_ms"]) for x in lines]
        columns[f"{name}_per_step"] = [rate * ms / 1e3 for rate, ms in rates]
    return {name: statistics.median(column) for name, column in columns.items() if column}
