"""Where a plan's speed comes from: given past runs, steps made here, the recipe's own run, or a device's peak."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from windlass.errors import RunFailed, UserError
from windlass.estimate.devices import same_device, this_device
from windlass.estimate.subject import Subject
from windlass.estimate.time import MEASURED, Speed, assumed_speed, measured_speed, project
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.telemetry.timing import peak_flops

SMALL_WIDTH = 768
"""Narrower models spend their time on launching kernels rather than in them: no usual MFU holds for them."""
STEPS = 8
"""Steps of a measurement."""
WARMUP = 2
"""Steps of a measurement that do not count: caches, compilation, first allocations."""
MICRO_BATCHES = 4
"""Micro-batches of a rank in a measured step, at most; a step of the recipe may have more."""


def find_speed(
    subject: Subject,
    run: Run | None,
    past: Sequence[Sequence[Run]],
    measure: bool,
    mfu: float,
    *,
    own: bool,
    notify: Callable[[str], None],
) -> Speed | None:
    """The speed of a plan: from given runs and steps made here, else from the run itself, else assumed from the peak.

    `own`: the recipe's own run directory counts too.
    """
    speeds = [speed for runs in past for speed in speeds_of(subject, runs)]
    if measure:
        speeds.append(measure_here(subject, notify))
    if not speeds and own:
        place = run or Run(subject.recipe.run_dir)
        speed = measured_speed(place) if place.path.is_dir() else None
        speeds = [speed] if speed and same_device(speed.device, subject.device.name) else []
    return project(speeds, subject.world) if speeds else assumed(subject, mfu)


def speeds_of(subject: Subject, runs: Sequence[Run]) -> list[Speed]:
    """The speeds of past runs of the same model on the plan's kind of device.

    Raises:
        UserError: no run has logged steps, none was made on such a device, or one trains another model.
    """
    where = f"--from {', '.join(str(run.path) for run in runs)}"
    measured = [(run, speed) for run in runs if (speed := measured_speed(run))]
    if not measured:
        raise UserError(f"{where}: there is no run with logged steps in it")
    same = [(run, speed) for run, speed in measured if same_device(speed.device, subject.device.name)]
    if not same:
        there = sorted({speed.device for _, speed in measured})
        raise UserError(
            f"{where}: its speed was measured on {' and '.join(there)}, and the plan is for {subject.device.name}. "
            "Leave --device out, or leave --from out and have the speed assumed from the peak"
        )
    if other := next((run for run, _ in same if run.recipe.model != subject.recipe.model), None):
        raise UserError(f"--from {other.path}: it trains another model; name a run of the same one, or use --measure")
    return [speed for _, speed in same]


def assumed(subject: Subject, mfu: float) -> Speed | None:
    """The speed that a share of the device's peak gives; None where the peak or the model's FLOPs are not known."""
    flops, peak = subject.flops_per_token, peak_flops(subject.device.name, subject.precision, tf32=False)
    if flops is None or peak is None:
        return None
    real = min(1.0, subject.tokens_per_sample / subject.recipe.model.context)
    speed = assumed_speed(flops, peak, subject.world, subject.device.name, mfu, real)
    if subject.recipe.model.kind == "gpt" and (width := subject.recipe.model.width) < SMALL_WIDTH:
        bound = f"{speed.detail}; matrices of width {width} hardly fill such a device, so take it for a bound"
        return replace(speed, detail=bound)
    return speed


def measure_here(subject: Subject, notify: Callable[[str], None]) -> Speed:
    """The speed from a few real steps on this machine, in processes of their own; missing data is prepared first.

    What a step spends on each micro-batch is multiplied by the recipe's accumulation; what it spends once (the update,
    waiting for data) counts once.

    Raises:
        UserError: this machine has not the device that the plan is for.
        RunFailed: the steps failed; the message has the end of their output.
    """
    here = this_device(cpu=subject.device.kind == "cpu").name
    if not same_device(here, subject.device.name):
        raise UserError(
            f"--measure makes its steps here, on {here}, and the plan is for {subject.device.name}: leave --device "
            "out, or take the speed of a run that was made there, with --from RUN"
        )
    recipe = subject.recipe.with_overrides(**{"parallel.device": subject.device.kind})
    notify(f"measuring: {STEPS} steps, {subject.world} x {here}; missing data is prepared first")
    with tempfile.TemporaryDirectory(prefix="windlass-measure-") as directory:
        short = measuring_recipe(recipe, subject.world, subject.device.kind, Path(directory) / "run")
        file = Path(directory) / "recipe.toml"
        file.write_text(short.toml(), encoding="utf-8")
        command = [sys.executable, "-m", "windlass", "train", str(file), "--world", str(subject.world)]
        environ = os.environ | {"WINDLASS_QUIET_END": "1"}
        done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            output = "\n".join(done.stdout.splitlines()[-15:])
            raise RunFailed(f"the steps to measure failed (exit code {done.returncode}):\n{output}")
        return speed_of_measurement(
            Run.open(Path(directory) / "run"), recipe, short, subject.world, subject.device.kind
        )


def measuring_recipe(recipe: Recipe, world: int, device: str, directory: Path) -> Recipe:
    """The recipe cut down to a few steps of a few micro-batches: no evaluation, no saves, no trackers."""
    batch = recipe.batch(world, device)
    micro_batches = min(batch.accumulation, MICRO_BATCHES)
    return recipe.with_overrides(
        **{
            "run.dir": str(directory), "run.name": "", "train.steps": STEPS, "train.micro_batch": batch.micro_batch,
            "train.global_batch": batch.micro_batch * world * micro_batches, "train.startup_checks": False,
            "eval.every": 0, "eval.sample_every": 0, "checkpoint.every": 0, "telemetry.every": 1,
            "telemetry.trackers": [], "optim.schedule.warmup": 0, "optim.schedule.decay": 0,
        }
    )  # fmt: skip


def speed_of_measurement(run: Run, recipe: Recipe, short: Recipe, world: int, device: str) -> Speed:
    """What the ledger of the cut-down run says of the whole recipe."""
    lines = run.lines("train")[WARMUP:]
    micro_batches = short.train.global_batch // (short.train.micro_batch * world)
    ratio = recipe.batch(world, device).accumulation / micro_batches
    once = median(x.get("optimizer_ms", 0.0) + x.get("data_ms", 0.0) for x in lines)
    step_ms = median(x["step_ms"] for x in lines)
    tokens = median(x["tokens_per_s"] * x["step_ms"] / 1e3 for x in lines) * ratio
    seconds = ((step_ms - once) * ratio + once) / 1e3
    name = next((str(x["device"]) for x in run.events if x.get("device")), device)
    size = f"{micro_batches} micro-batch{'es' * (micro_batches > 1)} of {short.train.micro_batch}"
    return Speed(tokens / seconds, world, MEASURED, f"{len(lines)} steps of {size} made here: {world} x {name}")
