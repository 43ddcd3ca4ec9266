"""Probes of a scaling study: the steps of a cell without communication.

`probes/<N>-ranks-<hash>/<rank>` of a study are run directories. In each, a rank's part of a cell's
batch is trained without communication. They run side by side, so that they contend for cores and
memory as the cell's ranks on a host do. torch's profiler counted 0.5 to 0.83 of the time that two
gloo ranks lost.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from windlass import errors
from windlass.fileio import read_json, write_atomic
from windlass.ledger import timestamp
from windlass.processes import WINDLASS, catch_signals, visible_gpus
from windlass.recipe import Recipe, typed
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run
from windlass.study.grid import Cell
from windlass.study.numbers import WARMUP, step_medians, windows
from windlass.study.process import STOP_SIGNALS, STOPPED, CellProcess
from windlass.study.study import Study

# A probe has at least PROBE_STEPS after its warm-up, and PROBE_WINDOWS between its `train` lines.
PROBE_STEPS, PROBE_WINDOWS = 10, 4
MOST_EVERY = 5  # steps of such a window, at most
PROBE_SECONDS, PROBE_POLL_SECONDS = 600.0, 0.05  # the limit of a probe, and between two looks
ENDLESS = 10**6  # steps, because the probe is killed before its end
TINY_LR = 1e-9  # keeps the loss finite without a schedule
# The settings of a rank that trains without communication.
ALONE: dict[str, Any] = {"parallel.strategy": "single", "parallel.offload": False} | NO_LAYOUT
ALONE["parallel.shard_size"] = 0
# Settings that do not change the time of a step.
UNTIMED = ("preset", "run.", "data.dir", "eval.", "checkpoint.", "telemetry.")


def probe_dir(study: Study, cell: Cell) -> Path:
    """The directory of a cell's probe, which strategies share."""
    settings = cell.recipe.replace(ALONE).flat().items()
    timed = [(key, value) for key, value in settings if not key.startswith(UNTIMED)]
    digest = hashlib.sha256(f"{timed}{cell.world}x{cell.nodes}".encode()).hexdigest()[:8]
    return study.path / "probes" / f"{cell.world}-ranks-{digest}"


def why_no_probe(cell: Cell) -> str:
    """Why a cell cannot have a probe; empty if it can."""
    parallel = cell.recipe.parallel
    if (cell.world or 1) < 2:
        return "one rank does not communicate"
    if parallel.offload:
        return "offloading takes time that a probe without communication does not have"
    return "no rank can do its part of the step alone" if parallel.model_ranks > 1 else ""


def probe_recipe(cell: Cell) -> Recipe:
    """A data rank's part of a cell's step, without communication, evaluation and checkpoints."""
    recipe, world = cell.recipe, cell.world or 1
    on_cpu = recipe.parallel.device == "cpu" or not visible_gpus()
    off = ("eval.every", "eval.sample_every", "checkpoint.every", "checkpoint.keep_every")
    return recipe.replace(
        ALONE
        | dict.fromkeys(off, 0)
        | {
            "train.global_batch": recipe.train.global_batch // recipe.sizes(world).data_world,
            "train.micro_batch": recipe.batch(world, "cpu" if on_cpu else "cuda").micro_batch,
            "train.steps": ENDLESS,
            "optim.lr": TINY_LR,
            "optim.muon_lr": TINY_LR,
            "optim.schedule.kind": "constant",
            "optim.schedule.warmup": 0,
            "optim.schedule.steps": 0,
            "telemetry.every": min(recipe.telemetry.every, MOST_EVERY),
            "telemetry.trackers": [],
        }
    )


def run_probe(
    study: Study, cell: Cell, notify: Callable[[str], None], retry_failed: bool = False
) -> None:
    """Run a cell's probe unless an equal one has ended; `probe.json` stores how it ended."""
    directory, ranks = probe_dir(study, cell), (cell.world or 1) // cell.nodes
    before = read_json(directory / "probe.json").get("state")
    if why_no_probe(cell) or before == "finished" or (before and not retry_failed):
        return
    shutil.rmtree(directory, ignore_errors=True)  # a killed probe: ranks train side by side
    directory.mkdir(parents=True)
    recipe, gpus = probe_recipe(cell), visible_gpus()
    write_atomic(directory / "recipe.toml", recipe.toml())
    steps = WARMUP + max(PROBE_STEPS, PROBE_WINDOWS * recipe.telemetry.every)
    side_by_side = f"{ranks} process{'es' * (ranks > 1)}"
    notify(f"{cell.label}: {steps} steps without communication, {side_by_side}")
    runs, children = [Run(directory / str(rank)) for rank in range(ranks)], list[CellProcess]()
    own_gpus = len(gpus) >= ranks and recipe.parallel.device != "cpu"
    stopped = list[int]()
    with catch_signals(STOP_SIGNALS, stopped.append):
        try:
            for rank, run in enumerate(runs):
                words = ["train", str(directory / "recipe.toml"), f"run.dir={typed(str(run.path))}"]
                devices = gpus[rank : rank + 1] if own_gpus else []
                threads = recipe.train.threads
                children.append(CellProcess(cell, [*WINDLASS, *words], run.path, threads, devices))
            reason = _wait(children, runs, steps, stopped)
        finally:
            for process in children:
                process.kill()
                process.wait()
    if stopped:
        raise errors.Stopped(STOPPED)
    ended = {"state": "failed" if reason else "finished", "reason": reason}
    write_atomic(directory / "probe.json", json.dumps(ended))
    if reason:
        notify(f"{cell.label}: the time of communication is unknown, the probe failed: {reason}")


def _wait(
    children: Sequence[CellProcess], runs: Sequence[Run], steps: int, stopped: list[int]
) -> str:
    """Wait until all ranks have trained `steps` steps side by side; returns why they did not."""
    until, first = time.monotonic() + PROBE_SECONDS, list[int]()
    while not stopped:
        for process in children:
            if (code := process.poll()) is not None:
                return process.failure(code) or "it ended before its last step"
        trained = [max((line["step"] for line in run.lines("train")), default=0) for run in runs]
        if not first and all(trained):
            first = trained
        if first and all(now >= then + steps for now, then in zip(trained, first, strict=True)):
            break
        if time.monotonic() > until:
            return f"not {steps} steps within {PROBE_SECONDS:.0f} s"
        time.sleep(PROBE_POLL_SECONDS)
    return ""


def probe_medians(study: Study, cell: Cell) -> tuple[Mapping[str, float], str]:
    """The medians of a cell's step without communication, or why there are none."""
    directory = probe_dir(study, cell)
    ended = read_json(directory / "probe.json")
    if why := why_no_probe(cell):
        return {}, why
    if not ended or ended["reason"]:
        return {}, f"the probe failed: {ended['reason']}" if ended else "no probe was run"
    ledgers = [Run(path.parent).ledger() for path in sorted(directory.glob("*/metrics.jsonl"))]
    # From the moment when every rank had trained its first steps, all of them ran.
    firsts = [next(line for line in lines if line["kind"] == "train") for lines in ledgers]
    since = max(map(timestamp, firsts))
    ranks = [step_medians(windows(lines, since)) for lines in ledgers]
    names = dict.fromkeys(name for rank in ranks for name in rank)
    return {n: statistics.median(rank[n] for rank in ranks if n in rank) for n in names}, ""
