"""Where a plan's speed comes from: past runs on the same kind of device, the recipe's own run, or a device's peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import UserError
from windlass.estimate.devices import Device, find_device
from windlass.estimate.optimum import known_vocab, vocab_of
from windlass.estimate.predict import sizes_in
from windlass.estimate.time import SCALED, Speed, assumed_speed, measured_speed
from windlass.model.size import flops_per_token
from windlass.run import Run
from windlass.telemetry.timing import peak_flops

if TYPE_CHECKING:
    from windlass.estimate.plan import Setting

SMALL_WIDTH = 768
"""Narrower models spend their time on launching kernels rather than in them: no usual MFU holds for them."""


def same_device(one: str, other: str) -> bool:
    """Whether two names are of one kind of device; a name that nobody wrote down may be any."""
    if not one or not other:
        return True
    return _full_name(one) == _full_name(other)


def _full_name(name: str) -> str:
    try:
        return find_device(name).name.lower()
    except UserError:  # the beginning of several: it is none of them
        return name.lower()


def device_of(speeds: Sequence[Speed], where: str) -> str:
    """The one kind of device that speeds were measured on, empty where no run says it; UserError where there are several."""
    names = sorted({s.device for s in speeds if s.device})
    different = [name for name in names if not same_device(name, names[0])]
    if different:
        raise UserError(
            f"{where}: its runs were made on {names[0]} and on {different[0]}; say which one the plan is for with --device"
        )
    return names[0] if names else ""


def on_device(past: Sequence[tuple[Run, Speed]], device: Device, where: str) -> list[tuple[Run, Speed]]:
    """Those that were measured on a device of the plan's kind; UserError where none was: a speed is of its own device."""
    found = [(run, speed) for run, speed in past if same_device(speed.device, device.name)]
    if not found:
        there = sorted({speed.device for _, speed in past})
        raise UserError(
            f"{where}: its speed was measured on {' and '.join(there)}, and the plan is for {device.name}. Leave --device "
            "out, name a run that was made on such a device, or leave the speed out and have it assumed from the peak"
        )
    left = len(past) - len(found)
    if left:
        note = f"{left} run{'s' * (left > 1)} on other devices left out"
        found = [(run, replace(speed, detail=f"{speed.detail}; {note}")) for run, speed in found]
    return found


def past_speeds(runs: Sequence[Run]) -> list[tuple[Run, Speed]]:
    """The runs that have logged enough, each with its speed."""
    return [(run, speed) for run in runs if (speed := measured_speed(run))]


def own_speed(setting: Setting, path: Path) -> list[Speed]:
    """The speed of a run of the recipe itself, where there is one on such a device."""
    speed = measured_speed(Run(path)) if path.is_dir() else None
    return [speed] if speed and same_device(speed.device, setting.device.name) else []


def scaled(setting: Setting, run: Run, speed: Speed) -> Speed:
    """A speed of another model or of samples that are filled otherwise, scaled by the FLOPs of a real token; said so."""
    mine, theirs = setting.recipe.model, run.recipe.model
    there = _filled(run)
    filled = setting.tokens_per_sample / mine.context if setting.facts.tokens_per_sample else there
    if mine == theirs and abs(filled - there) < 0.01 * there:
        return speed
    if mine.kind == theirs.kind == "hf" and mine.name == theirs.name:
        return speed
    of_mine, of_theirs = _flops(setting), _flops_of_run(run)
    if of_mine is None or of_theirs is None:
        raise UserError(
            f"--from {run.path}: it trains another model, and how many FLOPs a token takes is not known of both, so that its "
            "speed cannot be scaled; name a run of the same model"
        )
    ratio = of_theirs / there / (of_mine / filled)
    what = "another model" if mine != theirs else "samples filled otherwise"
    detail = f"{speed.detail}; {what}, scaled by the FLOPs of a token ({ratio:.3g} x)"
    return replace(speed, tokens_per_s=speed.tokens_per_s * ratio, detail=detail, basis=SCALED)


def _flops(setting: Setting) -> float | None:
    """FLOPs of a token of the recipe; None where the vocabulary or the model's configuration is not known."""
    if setting.hf is None and not (setting.facts.vocab or known_vocab(setting.recipe)):
        return None
    return setting.flops_per_token


def _flops_of_run(run: Run) -> float | None:
    """FLOPs of a token of a past run, whose vocabulary is in its recipe or follows from its parameters."""
    recipe = run.recipe
    if recipe.model.kind != "gpt":
        sizes = sizes_in(run)
        return sizes.flops_per_token() if sizes else None
    started = next((x for x in run.events if isinstance(x.get("parameters"), int)), {})
    vocab = vocab_of(recipe, started.get("parameters"))
    return flops_per_token(recipe.model, vocab) if vocab else None


def _filled(run: Run) -> float:
    """Share of the places of a run's samples that hold real tokens."""
    last = next((x for x in reversed(run.lines("train")) if x.get("samples") and x.get("tokens")), None)
    return last["tokens"] / last["samples"] / run.recipe.model.context if last else 1.0


def assumed(setting: Setting, mfu: float) -> list[Speed]:
    """The speed that a share of the device's peak gives; none where the peak or the model's FLOPs are not known."""
    flops = _flops(setting)
    peak = peak_flops(setting.device.name, setting.precision, tf32=False)
    if flops is None or peak is None:
        return []
    like = setting.hf.like if setting.hf else setting.recipe.model
    real = min(1.0, setting.tokens_per_sample / setting.recipe.model.context)
    speed = assumed_speed(flops, peak, setting.world, setting.device.name, mfu, real)
    if like.width < SMALL_WIDTH:
        narrow = f"{speed.detail}; matrices of width {like.width} hardly fill such a device, so take it for a bound"
        return [replace(speed, detail=narrow)]
    return [speed]
