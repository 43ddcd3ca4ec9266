"""What a run did, from its ledger: scores by step, speed, wall time, device-hours. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from windlass.ledger import STARTS, Line
from windlass.telemetry.measures import LOSS, PHASES, lower_is_better

SAME_ITEMS = ("samples", "items", "items_hash")  # identify the items that an `eval` line measured


class Scores(dict[int, float]):
    """Values of a measure by step; `lower`: whether less is better."""

    def __init__(self, values: Mapping[int, float] = MappingProxyType({}), lower: bool = True):
        super().__init__(values)
        self.lower = lower

    def ranked(self) -> list[int]:
        """The steps with a finite value, the best first; among equals the earliest first."""
        sign = 1 if self.lower else -1
        finite = [step for step, value in self.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * self[step], step))

    @property
    def best_step(self) -> int | None:
        ranked = self.ranked()
        return ranked[0] if ranked else None

    @property
    def best(self) -> float | None:
        return None if self.best_step is None else self[self.best_step]


def scores_by_step(lines: Iterable[Mapping[str, Any]], measure: str) -> Scores:
    """The finite values of a measure, `loss` or `SUITE.NAME`, in the `eval` lines of its suite.

    Step 0 does not count, because it has no checkpoint. Nor do values on other items than the last
    line's: a resume may change the items.
    """
    suite, _, name = measure.partition(".")
    suite_lines = [x for x in lines if x["kind"] == "eval" and x.get("suite", LOSS) == suite]
    scores = Scores(lower=lower_is_better(measure, suite_lines))
    for line in suite_lines:
        value = float(line.get(name or suite, math.nan))
        same = all(line.get(key) == suite_lines[-1].get(key) for key in SAME_ITEMS)
        if line["step"] and same and math.isfinite(value):
            scores[int(line["step"])] = value
    return scores


class Throughput(NamedTuple):
    """Work divided by the time of its steps, without evaluations, saves and starts."""

    steps_per_s: float
    samples_per_s: float
    tokens_per_s: float  # padding not counted
    mfu: float | None  # None without a peak of the device


def throughput(ledger: Iterable[Line]) -> Throughput | None:
    """The speed over a run, from its effective ledger; None if it timed nothing.

    A `train` line holds means over the steps since the line or start before it, so it counts by the
    time of these steps. The first line of each start (caches, compilation) counts only if there are
    no others.
    """
    windows: list[tuple[Line, float]] = []  # a line, and the seconds of its steps
    firsts: list[tuple[Line, float]] = []  # the same for the first line of each start
    step, is_first = 0, True
    for line in ledger:
        if line["kind"] == "event" and line.get("event") in STARTS:
            step, is_first = line["step"], True
        elif line["kind"] == "train":
            if line.get("step_ms") and "tokens_per_s" in line:
                seconds = line["step_ms"] / 1e3 * max(line["step"] - step, 1)
                (firsts if is_first else windows).append((line, seconds))
            step, is_first = line["step"], False
    windows = windows or firsts
    total = sum(seconds for _, seconds in windows)
    if not total:
        return None

    def mean(field: str) -> float:
        return float(sum(line.get(field, 0.0) * seconds for line, seconds in windows) / total)

    steps = sum(1e3 / line["step_ms"] * seconds for line, seconds in windows) / total
    reached = mean("mfu") if all("mfu" in line for line, _ in windows) else None
    return Throughput(steps, mean("samples_per_s"), mean("tokens_per_s"), reached)


def evaluation_speed(ledger: Iterable[Line]) -> float | None:
    """Samples a second of all evaluations of the loss."""
    losses = [x for x in ledger if x["kind"] == "eval" and x.get("suite", LOSS) == LOSS]
    timed = [(x["samples_per_s"], x["runtime_s"]) for x in losses if x.get("samples_per_s")]
    seconds = sum(runtime_s for _, runtime_s in timed)
    return sum(rate * runtime_s for rate, runtime_s in timed) / seconds if seconds else None


def averages(ledger: Sequence[Line]) -> dict[str, float]:
    """The speeds of a run as fields of its `summary` line."""
    speed = throughput(ledger)
    speeds = speed._asdict() if speed else {}
    means = {f"{name}_mean": value for name, value in speeds.items() if value is not None}
    if firsts := [line for line in ledger if line.get("event") == "first_step"]:
        means["startup_s"] = firsts[-1]["startup_s"]  # of the last start
    if evaluated := evaluation_speed(ledger):
        means["eval_samples_per_s"] = evaluated
    return means


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops: float | None, devices: int
) -> float | None:
    """Model FLOPs utilisation, a fraction (arXiv 2204.02311); None without a peak.

    `flops_per_token`: forward and backward by the 6N convention plus attention, no recomputation.
    """
    return tokens_per_s * flops_per_token / (peak_flops * devices) if peak_flops else None


def wall_time(lines: Iterable[Line]) -> dict[str, float]:
    """Seconds by phase over all starts, with `lost` and their sum `total`, from the raw ledger.

    The `seconds` of a line count its process so far. If an attempt resumes from step *s*, the
    time that earlier attempts spent after step *s* is `lost`. The time between an attempt's last
    line and its death is in no line.
    """
    attempts = _timed_lines(lines)
    totals = dict.fromkeys(PHASES, 0.0)
    for number, attempt_lines in attempts.items():
        resumed_at = min(
            (later[0]["step"] for other, later in attempts.items() if other > number),
            default=float("inf"),
        )
        useful: dict[str, float] = {}
        for line in attempt_lines:
            # The event of a checkpoint written in the background may come after lines of later
            # steps: only the lines before the first one beyond that step count.
            if line["step"] > resumed_at:
                break
            useful = line["seconds"]
        for phase, seconds in attempt_lines[-1]["seconds"].items():
            totals[phase] = totals.get(phase, 0.0) + useful.get(phase, 0.0)
            totals["lost"] += seconds - useful.get(phase, 0.0)
    rounded = {phase: round(seconds, 3) for phase, seconds in totals.items()}
    return rounded | {"total": round(sum(rounded.values()), 3)}


def device_hours(lines: Iterable[Line]) -> float:
    """Hours of wall time times ranks, over all starts of a run, from the raw ledger."""
    lines = list(lines)
    worlds = {int(x.get("attempt", 0)): x["world"] for x in lines if "world" in x}
    hours, ranks = 0.0, 1
    for number, attempt_lines in sorted(_timed_lines(lines).items()):
        ranks = worlds.get(number, ranks)
        hours += sum(attempt_lines[-1]["seconds"].values()) * ranks / 3600
    return hours


def _timed_lines(lines: Iterable[Line]) -> dict[int, list[Line]]:
    """The lines with the seconds of their process, by attempt."""
    attempts: dict[int, list[Line]] = {}
    for line in lines:
        if isinstance(line.get("seconds"), dict):
            attempts.setdefault(int(line.get("attempt", 0)), []).append(line)
    return attempts
