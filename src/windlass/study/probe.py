"""Steps without communication, measured beside a scaling study's cells.

`probes/<hash>/<i>` are run directories; each trains one rank's part of a cell's batch, alone. They
run side by side, so that they contend for cores and memory as the cell's ranks on a host do. The
exposed communication of torch's profiler was 0.5 to 0.83 of the time lost on two gloo ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from windlass.errors import BAD_INPUT, DONE, STOPPED, Stopped
from windlass.fileio import read_json, write_atomic
from windlass.processes import WINDLASS, catch_signals, visible_gpus
from windlass.recipe import Recipe, typed
from windlass.recipe.strategies import NO_LAYOUT
from windlass.run import Run
from windlass.study.grid import Cell
from windlass.study.study import Study

# SIGHUP: the terminal or ssh connection is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CellProcess(subprocess.Popen[bytes]):
    """A `windlass train` process in a session of its own; its output goes to `runs/<cell>.out`."""

    def __init__(
        self,
        cell: Cell,
        command: list[str],
        directory: Path,
        threads: int,
        devices: Sequence[str],
    ):
        self.cell, self.devices = cell, devices
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = directory.parent / f"{directory.name}.out"
        env = {"OMP_NUM_THREADS": str(threads)} if threads else {}
        env |= os.environ | {"WINDLASS_QUIET_END": "1", "WINDLASS_PARENT": str(os.getpid())}
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        with self.log_path.open("ab") as log:
            output: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            super().__init__(command, env=env, start_new_session=True, **output)

    def kill(self) -> None:
        """Kill the process and its ranks. A signal handler may call it, so it does not wait."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def failure(self, code: int) -> str:
        if code in (DONE, STOPPED):
            return ""
        kind = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        kind = "bad input" if code == BAD_INPUT else kind
        text = self.log_path.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
        own = [line for line in lines if line.startswith("windlass:")]
        message = (own or lines)[-1]
        return f"{kind}: {message}" if message else kind


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
    """The directory of a cell's probe, which repeats and strategies share."""
    settings = cell.recipe.replace(ALONE).flat().items()
    timed = [(key, value) for key, value in settings if not key.startswith(UNTIMED)]
    digest = hashlib.sha256(f"{timed}{cell.world}x{cell.nodes}".encode()).hexdigest()[:8]
    return study.path / PROBES / f"{cell.world}-ranks-{digest}"


def probe_recipe(cell: Cell) -> Recipe:
    """A data rank's part of a cell's step, without communication, evaluation and checkpoints."""
    recipe, world = cell.recipe, cell.world or 1
    on_cpu = recipe.parallel.device == "cpu" or not visible_gpus()
    none = ["optim.schedule.warmup", "optim.schedule.steps", "eval.every"]
    none += ["eval.sample_every", "checkpoint.every", "checkpoint.keep_every"]
    changes: dict[str, Any] = dict.fromkeys(none, 0) | ALONE
    changes["train.global_batch"] = recipe.train.global_batch // recipe.sizes(world).data_world
    kind = "cpu" if on_cpu else "cuda"
    changes["train.micro_batch"] = recipe.batch(world, kind).micro_batch
    changes |= {"train.steps": ENDLESS, "optim.lr": TINY_LR, "optim.muon_lr": TINY_LR}
    changes["optim.schedule.kind"] = "constant"
    changes["telemetry.every"] = min(recipe.telemetry.every, MOST_EVERY)
    return recipe.replace(changes | {"telemetry.trackers": []})


def run_probe(
    study: Study, cell: Cell, notify: Callable[[str], None], retry_failed: bool = False
) -> None:
    """Run a cell's probe unless an equal one has ended; `probe.json` stores a failure."""
    directory, ranks = probe_dir(study, cell), (cell.world or 1) // cell.nodes
    before = read_json(directory / "probe.json").get("state")
    done = before == "finished" or (before and not retry_failed)
    parallel = cell.recipe.parallel
    if (cell.world or 1) < 2 or parallel.offload or parallel.model_ranks > 1 or done:
        return  # `setups._probe` has the reasons
    shutil.rmtree(directory, ignore_errors=True)  # of a killed probe: all ranks train together
    directory.mkdir(parents=True)
    recipe, gpus = probe_recipe(cell), visible_gpus()
    write_atomic(directory / "recipe.toml", recipe.toml())
    steps = WARMUP + max(STEPS, WINDOWS * recipe.telemetry.every)
    side_by_side = f"{ranks} process{'es' * (ranks > 1)}"
    notify(f"{cell.label}: {steps} steps without communication, {side_by_side}")
    runs, processes = [Run(directory / str(rank)) for rank in range(ranks)], list[CellProcess]()
    stopped = list[int]()
    with catch_signals(STOP_SIGNALS, stopped.append):
        try:
            own_gpus = len(gpus) >= ranks and recipe.parallel.device != "cpu"
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
