"""How long a run takes and what it costs in device-hours: from a measured speed, or an assumed one, and said which."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING

from windlass.estimate.milestones import CHECKPOINT, EVALUATION, SAMPLE, Milestone, clock

if TYPE_CHECKING:
    from windlass.run import Line, Run

ASSUMED_MFU = 0.4
"""Share of the peak that is assumed where nothing was measured. Published GPU and TPU trainings report 0.3 to 0.55 (0.46
for PaLM, arXiv 2204.02311); a small model or a slow network gives less."""

MEASURED, PROJECTED, ASSUMED, BOUND = "measured", "projected", "assumed", "at best"
SCALED = "scaled"
"""Measured on another model or other samples, and scaled by the FLOPs of a token."""


@dataclass(frozen=True)
class Speed:
    """Tokens a second over all ranks, and where the number comes from."""

    tokens_per_s: float
    """Real tokens, padding not counted."""
    world: int
    basis: str
    """`measured`; `scaled` from another model; `projected` with measured efficiency; `assumed` from a peak; `at best`:
    scaled to more ranks as if nothing were lost."""
    detail: str
    """The same in words: which run, which peak, which efficiency."""
    costs: dict[str, float] = field(default_factory=dict)
    """Seconds of one evaluation, checkpoint, sample, as far as they were measured."""
    device: str = ""
    """What it was measured on, as the ledger names it; empty where nobody wrote it down."""


def assumed_speed(
    flops_per_token: float, peak: float, world: int, device: str, mfu: float = ASSUMED_MFU, real: float = 1.0
) -> Speed:
    """What `world` devices do at a share `mfu` of their peak FLOP/s; a guess, and called one.

    Args:
        flops_per_token: of a place in the batch, padding or not: both are computed.
        peak: FLOP/s of one device.
        world: number of devices.
        device: its name, for the words.
        mfu: the share of the peak.
        real: share of the places that hold real tokens; below 1 where samples are padded.
    """
    detail = f"{device}: peak {peak / 1e12:.4g} TFLOP/s x an assumed MFU of {100 * mfu:g} %, nothing measured"
    if real < 1:
        detail += f"; {100 * real:.0f} % of the places are tokens, the rest padding"
    return Speed(peak * mfu * world * real / flops_per_token, world, ASSUMED, detail, device=device)


def measured_speed(run: Run) -> Speed | None:
    """The speed of a run from its ledger; None where it has not logged enough yet."""
    return speed_of_lines(run.ledger(), run.name)


def speed_of_lines(ledger: list[Line], name: str) -> Speed | None:
    """The speed that the lines of a ledger show.

    Steps are taken from the last start alone, without the first lines (compiling, caches) where there are more than
    four, and the mean leaves out the fastest and slowest tenth.
    """
    lines = [x for x in ledger if x["kind"] == "train" and x.get("step_ms") and x.get("tokens_per_s")]
    if not lines:
        return None
    lines = [x for x in lines if x.get("attempt", 0) == lines[-1].get("attempt", 0)]
    lines = lines[2:] if len(lines) > 4 else lines[1:] or lines
    starts = [x for x in ledger if x["kind"] == "event" and isinstance(x.get("world"), int)]
    start = starts[-1] if starts else {}
    world, device = start.get("world", 1), start.get("device") or "unknown device"
    tokens_per_step = median(x["tokens_per_s"] * x["step_ms"] / 1e3 for x in lines)
    speed = tokens_per_step / (_trimmed_mean([x["step_ms"] for x in lines]) / 1e3)
    detail = f"run {name}: {world} x {device}, steps {lines[0]['step']:,} to {lines[-1]['step']:,}"
    return Speed(speed, world, MEASURED, detail, _costs(ledger), str(start.get("device") or ""))


def _trimmed_mean(values: Sequence[float]) -> float:
    cut = len(values) // 10
    return mean(sorted(values)[cut : len(values) - cut])


def _costs(ledger: list[Line]) -> dict[str, float]:
    """Seconds of one evaluation, save and sample, from the lines' own times and their `seconds` by phase."""
    runtimes: dict[int, float] = {}
    for x in ledger:
        if x["kind"] == "eval" and isinstance(x.get("runtime_s"), int | float):
            runtimes[x["step"]] = runtimes.get(x["step"], 0.0) + x["runtime_s"]
    costs = {EVALUATION: mean(runtimes.values())} if runtimes else {}
    stamped = [x["seconds"] for x in ledger if isinstance(x.get("seconds"), dict)]
    counted = {
        CHECKPOINT: ("save", sum(x["kind"] == "event" and x.get("event") == "checkpoint" for x in ledger)),
        SAMPLE: ("sample", len({x["step"] for x in ledger if x["kind"] == "sample"})),
    }
    for what, (phase, number) in counted.items():
        spent = max((s.get(phase, 0.0) for s in stamped), default=0.0)
        if number and spent:
            costs[what] = spent / number
    return costs


def of_world(speeds: Sequence[Speed]) -> Speed:
    """Of several speeds on one world the median; those of the same model go before those scaled from another."""
    own = [s for s in speeds if s.basis == MEASURED] or list(speeds)
    if len(own) == 1:
        return own[0]
    middle = median(s.tokens_per_s for s in own)
    nearest = min(own, key=lambda s: abs(s.tokens_per_s - middle))
    low, high = min(s.tokens_per_s for s in own), max(s.tokens_per_s for s in own)
    kinds = {kind: [s.costs[kind] for s in own if kind in s.costs] for s in own for kind in s.costs}
    detail = f"the median of {len(own)} runs ({low:,.0f} to {high:,.0f} tokens/s); the nearest is {nearest.detail}"
    costs = {kind: median(values) for kind, values in kinds.items()}
    return replace(nearest, tokens_per_s=middle, detail=detail, costs=costs)


def project(measured: Sequence[Speed], world: int) -> Speed:
    """The speed on another number of ranks, from speeds measured on some; of several on one world the median counts.

    Between two measured worlds, and beyond the largest, the speed is taken to grow as world^s with the s that the two
    nearest measurements show: their efficiency, not the ideal one. From one measurement alone no efficiency follows: the
    result is then what the world would reach if nothing were lost, and its basis says `at best`.
    """
    known = {w: of_world([s for s in measured if s.world == w]) for w in {s.world for s in measured}}
    assert known, "nothing measured"
    if world in known:
        return known[world]
    worlds = sorted(known)
    if len(worlds) == 1:
        one = known[worlds[0]]
        if one.basis == ASSUMED:
            return replace(one, tokens_per_s=one.tokens_per_s * world / one.world, world=world)
        detail = f"{one.detail}; scaled by {world}/{one.world} as if nothing were lost: no efficiency was measured"
        return Speed(one.tokens_per_s * world / one.world, world, BOUND, detail, one.costs, one.device)
    pairs = list(pairwise(worlds))
    low, high = next((p for p in pairs if world < p[1]), pairs[-1])
    a, b = known[low], known[high]
    exponent = math.log(b.tokens_per_s / a.tokens_per_s) / math.log(high / low)
    near = b if world > high else a
    speed = near.tokens_per_s * (world / near.world) ** exponent
    efficiency = speed / (known[worlds[0]].tokens_per_s * world / worlds[0])
    measured_or_scaled = "scaled from another model" if SCALED in (a.basis, b.basis) else "measured"
    detail = (
        f"{measured_or_scaled} at {', '.join(map(str, worlds))} ranks, continued as world^{exponent:.2f}: "
        f"efficiency {100 * efficiency:.0f} % of {worlds[0]} rank{'s' * (worlds[0] > 1)}"
    )
    return Speed(speed, world, PROJECTED, detail, near.costs, near.device)


@dataclass(frozen=True)
class Duration:
    """What is left of a run, in time."""

    seconds: float
    """From now to the end."""
    train_seconds: float
    """Of the steps alone."""
    device_hours: float
    """Wall time times ranks."""
    basis: str
    not_counted: tuple[str, ...]
    """Kinds of milestones that will take time nobody measured."""


def time_left(found: list[Milestone], now: int, steps: int, tokens_per_step: float, speed: Speed) -> Duration:
    """Time from step `now` to the end of a run of `steps`, evaluations and saves counted where their cost is known.

    Args:
        found: all milestones of the run.
        now: steps done.
        steps: steps of the whole run.
        tokens_per_step: real tokens in a step, over all ranks.
        speed: on the world it is for.
    """
    per_step = tokens_per_step / speed.tokens_per_s
    seconds = clock(found, now, per_step, speed.costs)(steps)
    ahead = {m.what for m in found if m.step > now}
    missing = tuple(w for w in (EVALUATION, CHECKPOINT, SAMPLE) if w in ahead and w not in speed.costs)
    left = max(0, steps - now)
    return Duration(seconds, left * per_step, seconds * speed.world / 3600, speed.basis, missing)
