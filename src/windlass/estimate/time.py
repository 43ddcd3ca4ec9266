"""How long a run takes: from speeds measured in past runs' ledgers, or from a device's peak and an assumed MFU.

A speed always says what it rests on (`basis`, `detail`); where nothing is known there is none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING

from windlass.estimate.milestones import (
    CHECKPOINT,
    END,
    EVALUATION,
    SAMPLE,
    Milestone,
    ahead,
    milestones,
    seconds_until,
)
from windlass.recipe import Horizon
from windlass.run import effective, read_lines
from windlass.telemetry.timing import wall_time

if TYPE_CHECKING:
    from windlass.run import Line, Run

ASSUMED_MFU = 0.4
"""Share of the peak that is assumed where nothing was measured. Published GPU and TPU trainings report 0.3 to 0.55
(0.46 for PaLM, arXiv 2204.02311); a small model or a slow network gives less."""

MEASURED, PROJECTED, ASSUMED, BOUND = "measured", "projected", "assumed", "at best"

PREDICTED_AT = 0.05
"""Share of a run's steps after which its time to finish is predicted, to be compared with the actual one."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second over all ranks, and where the number comes from."""

    tokens_per_s: float
    """Real tokens, padding not counted."""
    world: int
    basis: str
    """`measured`; `projected` with measured efficiency; `assumed` from a peak; `at best`: scaled to more ranks as if
    nothing were lost."""
    detail: str
    """The same in words: which run, which peak, which efficiency."""
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds of one evaluation, checkpoint, sample, as far as they were measured."""
    device: str = ""
    """What it was measured on, as the ledger names it; empty where that was not written down."""


def assumed_speed(
    flops_per_token: float, peak: float, world: int, device: str, mfu: float = ASSUMED_MFU, real: float = 1.0
) -> Speed:
    """What `world` devices do at a share `mfu` of their peak.

    Args:
        flops_per_token: of a place in the batch, padding or not: both are computed.
        peak: FLOP/s of one device.
        world: number of devices.
        device: its name.
        mfu: the share of the peak.
        real: share of the places that hold real tokens; below 1 where samples are padded.
    """
    detail = f"{device}: peak {peak / 1e12:.4g} TFLOP/s x an assumed MFU of {100 * mfu:g} %, nothing measured"
    if real < 1:
        detail += f"; {100 * real:.0f} % of the places are tokens, the rest padding"
    return Speed(peak * mfu * world * real / flops_per_token, world, ASSUMED, detail, device=device)


def measured_speed(run: Run) -> Speed | None:
    """The speed of a run from its ledger; None where it has not logged enough yet."""
    return speed_of_ledger(run.ledger(), run.name)


def speed_of_ledger(ledger: Sequence[Line], name: str) -> Speed | None:
    """The speed that the effective lines of a ledger show.

    Steps are taken from the last start alone, without the first lines (compilation, caches) where there are more than
    four; the mean leaves out the fastest and slowest tenth.
    """
    lines = [x for x in ledger if x["kind"] == "train" and x.get("step_ms") and x.get("tokens_per_s")]
    if not lines:
        return None
    lines = [x for x in lines if x.get("attempt", 0) == lines[-1].get("attempt", 0)]
    lines = lines[2:] if len(lines) > 4 else lines[1:] or lines
    starts = [x for x in ledger if x["kind"] == "event" and isinstance(x.get("world"), int)]
    world, device = (starts[-1]["world"], str(starts[-1].get("device") or "")) if starts else (1, "")
    tokens_per_step = median(x["tokens_per_s"] * x["step_ms"] / 1e3 for x in lines)
    times, cut = sorted(x["step_ms"] for x in lines), len(lines) // 10
    speed = tokens_per_step / (mean(times[cut : len(times) - cut]) / 1e3)
    detail = f"run {name}: {world} x {device or 'unknown device'}, steps {lines[0]['step']:,} to {lines[-1]['step']:,}"
    return Speed(speed, world, MEASURED, detail, _costs(ledger, speed), device)


def _costs(ledger: Sequence[Line], tokens_per_s: float) -> dict[str, float]:
    """Seconds of one evaluation, save and sample, from the lines' own times and their `seconds` by phase."""
    evaluations: dict[int, list[Line]] = {}
    for x in ledger:
        if x["kind"] == "eval" and isinstance(x.get("runtime_s"), int | float):
            evaluations.setdefault(x["step"], []).append(x)
    costs: dict[str, float] = {}
    if evaluations:
        first, *later = (evaluations[step] for step in sorted(evaluations))
        # The first evaluation of a run also pays for compilation, caches and first allocations.
        if later:
            costs[EVALUATION] = median(sum(x["runtime_s"] for x in lines) for lines in later)
        else:
            costs[EVALUATION] = sum(_without_warmup(x, tokens_per_s) for x in first)
    stamps = [x["seconds"] for x in ledger if isinstance(x.get("seconds"), dict)]
    counted = {
        CHECKPOINT: ("save", sum(x["kind"] == "event" and x.get("event") == "checkpoint" for x in ledger)),
        SAMPLE: ("sample", len({x["step"] for x in ledger if x["kind"] == "sample"})),
    }
    for what, (phase, number) in counted.items():
        spent = max((stamp.get(phase, 0.0) for stamp in stamps), default=0.0)
        if number and spent:
            costs[what] = spent / number
    return costs


def _without_warmup(line: Line, tokens_per_s: float) -> float:
    """What the first evaluation would take again: the loss at most as long as training's forward passes."""
    if line.get("suite", "loss") != "loss" or not line.get("tokens"):
        return float(line["runtime_s"])
    forward = line["tokens"] / tokens_per_s / 3  # a third of a step's FLOPs
    return float(min(line["runtime_s"], forward))


def project(speeds: Sequence[Speed], world: int) -> Speed:
    """The speed on a number of ranks, from at least one speed; of several on one world the median counts.

    Between two measured worlds and beyond the largest, the speed is taken to grow as world^s with the s that the two
    nearest measurements show. From one world alone no efficiency follows: the result is what the world would reach if
    nothing were lost, and its basis says `at best`.
    """
    by_world = {w: _median_speed([s for s in speeds if s.world == w]) for w in {s.world for s in speeds}}
    if world in by_world:
        return by_world[world]
    worlds = sorted(by_world)
    if len(worlds) == 1:
        one = by_world[worlds[0]]
        scaled = replace(one, tokens_per_s=one.tokens_per_s * world / one.world, world=world)
        if one.basis == ASSUMED:
            return scaled
        detail = f"{one.detail}; scaled by {world}/{one.world} as if nothing were lost: no efficiency was measured"
        return replace(scaled, basis=BOUND, detail=detail)
    pairs = list(pairwise(worlds))
    low, high = next((pair for pair in pairs if world < pair[1]), pairs[-1])
    a, b = by_world[low], by_world[high]
    exponent = math.log(b.tokens_per_s / a.tokens_per_s) / math.log(high / low)
    near = b if world > high else a
    tokens_per_s = near.tokens_per_s * (world / near.world) ** exponent
    efficiency = tokens_per_s / (by_world[worlds[0]].tokens_per_s * world / worlds[0])
    detail = (
        f"measured at {', '.join(map(str, worlds))} ranks, continued as world^{exponent:.2f}: "
        f"efficiency {100 * efficiency:.0f} % of {worlds[0]} rank(s)"
    )
    return Speed(tokens_per_s, world, PROJECTED, detail, near.costs, near.device)


def _median_speed(speeds: Sequence[Speed]) -> Speed:
    """Of several speeds on one world the median."""
    if len(speeds) == 1:
        return speeds[0]
    middle = median(s.tokens_per_s for s in speeds)
    nearest = min(speeds, key=lambda s: abs(s.tokens_per_s - middle))
    low, high = min(s.tokens_per_s for s in speeds), max(s.tokens_per_s for s in speeds)
    costs = {kind: median(s.costs[kind] for s in speeds if kind in s.costs) for s in speeds for kind in s.costs}
    detail = f"the median of {len(speeds)} runs ({low:,.0f} to {high:,.0f} tokens/s); the nearest is {nearest.detail}"
    return replace(nearest, tokens_per_s=middle, detail=detail, costs=costs)


@dataclass(frozen=True)
class TimeLeft:
    """What is left of a run, in time."""

    seconds: float
    """From now to the end."""
    train_seconds: float
    """Of the steps alone."""
    device_hours: float
    """Wall time times ranks."""
    not_counted: tuple[str, ...]
    """Kinds of milestones that take time, but whose time was not measured."""


def time_left(events: Sequence[Milestone], now: int, tokens_per_step: float, speed: Speed) -> TimeLeft:
    """Time from step `now` to a run's end, evaluations, saves and samples counted where their cost is known.

    Args:
        events: all milestones of the run.
        now: steps done.
        tokens_per_step: real tokens in a step, over all ranks.
        speed: on the world it is for.
    """
    per_step, end = tokens_per_step / speed.tokens_per_s, next(m.step for m in events if m.what == END)
    seconds = seconds_until(events, end, now, per_step, speed.costs)
    coming = {m.what for m in ahead(events, now) if m.step > 0}
    missing = tuple(w for w in (EVALUATION, CHECKPOINT, SAMPLE) if w in coming and w not in speed.costs)
    return TimeLeft(seconds, max(0, end - now) * per_step, seconds * speed.world / 3600, missing)


@dataclass(frozen=True)
class PredictedAndActual:
    """Two lines of a report: the time a run took beside its prediction, and its peak memory beside the device's."""

    predicted_seconds: float | None = None
    """From the run's start to its end, as predicted from its ledger after 5 % of the steps."""
    actual_seconds: float | None = None
    """Without the steps that were made twice and without starts after the first."""
    predicted_at_step: int | None = None
    reason: str = ""
    """Why there is no prediction."""
    peak_bytes: float | None = None
    """Of the fullest rank: the allocator's peak on CUDA, resident memory on a CPU."""
    device_bytes: float | None = None
    """The device's memory; None where it is not known."""


def predicted_and_actual(run: Run) -> PredictedAndActual:
    """The time to finish as predicted after 5 % of the steps beside the actual one, and the peak memory."""
    memory = _peak_memory(run)
    raw = list(read_lines(run.metrics_path))
    ledger = effective(raw)
    started = next((x for x in ledger if x["kind"] == "event" and "world" in x and "steps" in x), None)
    if started is None or ledger[-1]["step"] < int(started["steps"]) or not any("seconds" in x for x in raw):
        return replace(memory, reason="the run has not finished")
    steps = int(started["steps"])
    worlds = dict.fromkeys(x["world"] for x in raw if x["kind"] == "event" and isinstance(x.get("world"), int))
    if len(worlds) > 1:
        return replace(memory, reason=f"the number of ranks changed: {', then '.join(map(str, worlds))}")
    early = (x for x in ledger if x["kind"] == "train" and max(PREDICTED_AT * steps, 2) <= x["step"] < steps)
    now = next(early, None)
    speed = speed_of_ledger([x for x in ledger if now and x["step"] <= now["step"]], run.name)
    if now is None or speed is None:
        return replace(memory, reason=f"nothing was logged between {100 * PREDICTED_AT:g} % of the steps and the end")
    horizon = Horizon(steps, int(started.get("samples_per_epoch", 0)), run.recipe.train.global_batch)
    left = time_left(milestones(run.recipe, horizon), now["step"], now["tokens"] / now["step"], speed)
    predicted = _without_pauses(raw[: raw.index(now) + 1]) + left.seconds
    return replace(
        memory, predicted_seconds=predicted, actual_seconds=_without_pauses(raw), predicted_at_step=int(now["step"])
    )


def _without_pauses(raw: Sequence[Line]) -> float:
    """Seconds of a raw ledger as if there had been one start: without lost steps and later starts' start-up."""
    whole = wall_time(raw)
    first = next((int(x.get("attempt", 0)) for x in raw if isinstance(x.get("seconds"), dict)), 0)
    one = wall_time([x for x in raw if int(x.get("attempt", 0)) == first])
    again = sum(max(0.0, whole.get(phase, 0.0) - one.get(phase, 0.0)) for phase in ("startup", "compile"))
    return whole["total"] - whole["lost"] - again


def _peak_memory(run: Run) -> PredictedAndActual:
    """The peak of the fullest rank from the run's summary, beside the memory of its device or machine."""
    peak, environment = run.summary.get("peak_mem_mb"), run.environment
    sizes = [rank["memory_mb"] for rank in environment.get("ranks", []) if rank.get("memory_mb")]
    total = min(sizes) if sizes else environment.get("machine", {}).get("memory_mb")
    return PredictedAndActual(
        peak_bytes=None if peak is None else peak * 1e6, device_bytes=None if total is None else total * 1e6
    )
