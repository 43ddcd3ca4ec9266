"""Steps without communication, measured beside a scaling study's cells.

`probes/<hash>/<i>` are run directories; each trains one rank's part of a cell's batch, alone. They
run side by side, so that they contend for cores and memory as the cell's ranks on a host do. The
exposed communication of torch's profiler was 0.5 to 0.83 of the time lost on two gloo ranks.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.errors import Stopped
from windlass.fileio import read_json, write_atomic
from windlass.processes import WINDLASS, catch_signals, visible_gpus
from windlass.recipe import Recipe, typed
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run
from windlass.study.cell_process import STOP_SIGNALS, CellProcess
from windlass.study.grid import Cell
from windlass.study.study import Study

WARMUP = 5  # steps of each start that no time of a step counts
PROBES = "probes"  # the directory in a study
STEPS, WINDOWS = 10, 4  # of a probe after its warm-up, at least; windows between `train` lines
MOST_EVERY = 5  # steps of a window, at most
ENDLESS = 10**6  # steps: the probe is killed before its end
TINY_LR = 1e-9  # keeps the loss finite without a schedule
SECONDS = 600.0  # limit for a probe
POLL_SECONDS = 0.05

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
    return study.path / PROBES / f"{cell.world}-ranks-{digest}"


def why_no_probe(cell: Cell) -> str:
    """Why a cell cannot have a probe; empty if it can."""
    parallel = cell.recipe.parallel
    if (cell.world or 1) < 2:
        return "one rank does not communicate"
    if parallel.offload:
        return "offloading takes time that a probe without communication does not have"
    if parallel.model_ranks > 1:
        return "no rank can do its part of the step alone"
    return ""


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
    """Run a cell's probe unless an equal one has ended; `probe.json` stores a failure."""
    directory, ranks = probe_dir(study, cell), (cell.world or 1) // cell.nodes
    before = read_json(directory / "probe.json").get("state")
    if why_no_probe(cell) or before == "finished" or (before and not retry_failed):
        return
    shutil.rmtree(directory, ignore_errors=True)  # of a killed probe: all ranks train together
    directory.mkdir(parents=True)
    recipe, gpus = probe_recipe(cell), visible_gpus()
    write_atomic(directory / "recipe.toml", recipe.toml())
    steps = WARMUP + max(STEPS, WINDOWS * recipe.telemetry.every)
    side_by_side = f"{ranks} process{'es' * (ranks > 1)}"
    notify(f"{cell.label}: {steps} steps without communication, {side_by_side}")
    runs, processes = [Run(directory / str(rank)) for rank in range(ranks)], list[CellProcess]()
    own_gpus = len(gpus) >= ranks and recipe.parallel.device != "cpu"
    stopped = list[int]()
    with catch_signals(STOP_SIGNALS, stopped.append):
        try:
            for rank, run in enumerate(runs):
                words = ["train", str(directory / "recipe.toml"), f"run.dir={typed(str(run.path))}"]
                devices = gpus[rank : rank + 1] if own_gpus else []
                threads = recipe.train.threads
                processes.append(CellProcess(cell, [*WINDLASS, *words], run.path, threads, devices))
            reason = _wait(processes, runs, steps, stopped)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if stopped:
        raise Stopped("stopped with everything saved; the same command continues")
    ended = {"state": "failed" if reason else "finished", "reason": reason}
    write_atomic(directory / "probe.json", json.dumps(ended))
    if reason:
        notify(f"{cell.label}: the time of communication is unknown, the probe failed: {reason}")


def read_probe(study: Study, cell: Cell) -> tuple[list[Run], str]:
    """The runs of a cell's finished probe, a run for each rank; or why there are none."""
    directory = probe_dir(study, cell)
    ended = read_json(directory / "probe.json")
    if why := why_no_probe(cell):
        return [], why
    if not ended:
        return [], "no probe was run"
    if ended["reason"]:
        return [], f"the probe failed: {ended['reason']}"
    return [Run(path.parent) for path in sorted(directory.glob("*/metrics.jsonl"))], ""


def _wait(
    processes: Sequence[CellProcess], runs: Sequence[Run], steps: int, stopped: list[int]
) -> str:
    """Wait until all ranks have trained `steps` steps side by side; returns why they did not."""
    until, first = time.monotonic() + SECONDS, list[int]()
    while not stopped:
        for process in processes:
            if (code := process.poll()) is not None:
                return process.failure(code) or "it ended before its last step"
        trained = [max((line["step"] for line in run.lines("train")), default=0) for run in runs]
        if not first and all(trained):
            first = trained
        if first and all(now >= then + steps for now, then in zip(trained, first, strict=True)):
            break
        if time.monotonic() > until:
            return f"not {steps} steps within {SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)
    return ""
