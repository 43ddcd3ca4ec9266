"""What a scaling study measures beside its cells: steps without communication, and the rates of the machine. No torch.

`probes/<cell>/<i>` are run directories of `windlass train` processes, each with one rank's share of the cell's batch and no
communication. On this machine as many run side by side as the cell has ranks here, so that they contend for cores and memory
as those do: each is suspended after its first step until all have come there, and all are killed when they have done enough
steps. `probe.json` beside them says how it ended, from which time on (`together`) all were running, and the equal probe
(`of`) that a setup shares. `machine.json` of the study has what `windlass check` measured, by
`<hosts>x<ranks>` (all ranks).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock

from windlass.errors import Stopped
from windlass.fileio import read_json, write_atomic
from windlass.processes import WINDLASS, catch_signals, usable_cores, visible_gpus
from windlass.recipe import Recipe, typed
from windlass.run import Run
from windlass.study.grid import Cell
from windlass.study.study import Study
from windlass.study.sweep import STOP_SIGNALS, CellProcess

STEPS, WINDOWS = (
    10,
    4,
)  # of a probe after its warm-up, at least; windows are those between two `train` lines
MOST_EVERY = 5  # steps of a window, at most
ENDLESS, TINY_LR = (
    10**6,
    1e-9,
)  # it is killed before its end, and its loss must stay finite without a schedule
SECONDS = 600.0  # a probe that takes longer has failed
POLL_SECONDS = 0.05
CHECK_BYTES = "4M"  # largest message on a CPU


def probe_recipe(cell: Cell) -> Recipe:
    """One rank's share of a cell's step, without communication, evaluation and checkpoints."""
    recipe, world = cell.recipe, cell.world or 1
    batch = recipe.batch(
        world, "cpu" if not visible_gpus() or recipe.parallel.device == "cpu" else "cuda"
    )
    return recipe.replace(
        {
            "train.global_batch": recipe.train.global_batch // world,
            "train.micro_batch": batch.micro_batch,
            "train.steps": ENDLESS,
            "train.early_stop": 0,
            "optim.lr": TINY_LR,
            "optim.muon_lr": TINY_LR,
            "optim.schedule.kind": "constant",
            "optim.schedule.warmup": 0,
            "optim.schedule.steps": 0,
            "parallel.strategy": "single",
            "parallel.offload": False,
            "parallel.shard_size": 0,
            "eval.every": 0,
            "eval.sample_every": 0,
            "checkpoint.every": 0,
            "checkpoint.keep_every": 0,
            "telemetry.every": min(recipe.telemetry.every, MOST_EVERY),
            "telemetry.trackers": [],
        }
    )


def run_probe(
    study: Study, cell: Cell, notify: Callable[[str], None], retry_failed: bool = False
) -> None:
    """Run a cell's probe where it was not run to its end; a failure is written down, for the table."""
    assert study.scaling is not None
    directory, ranks = study.probe_dir(cell), (cell.world or 1) // cell.nodes
    before = read_json(directory / "probe.json")
    done = before.get("state") == "finished" or (before and not retry_failed)
    if (cell.world or 1) < 2 or cell.recipe.parallel.offload or done:
        return  # one rank does not communicate, and what is offloaded takes time that no communication does
    shutil.rmtree(
        directory, ignore_errors=True
    )  # of a probe that was killed: its ranks must start together
    directory.mkdir(parents=True)
    recipe, gpus = probe_recipe(cell), visible_gpus()
    write_atomic(directory / "recipe.toml", recipe.toml())
    steps = study.scaling.warmup + max(STEPS, WINDOWS * recipe.telemetry.every)
    about = {"state": "finished", "reason": "", "steps": steps, "ranks": ranks}
    if alike := _equal_probe(directory, about):
        write_atomic(directory / "probe.json", json.dumps(about | alike))
        return
    notify(
        f"{cell.label}: {steps} steps without communication, {ranks} process{'es' * (ranks > 1)}"
    )
    processes, runs, stopped = (
        list[CellProcess](),
        [Run(directory / str(rank)) for rank in range(ranks)],
        list[int](),
    )
    with catch_signals(STOP_SIGNALS, stopped.append):
        try:
            for rank, run in enumerate(runs):
                command = [
                    *WINDLASS,
                    "train",
                    str(directory / "recipe.toml"),
                    f"run.dir={typed(str(run.path))}",
                ]
                device = (
                    gpus[rank : rank + 1]
                    if len(gpus) >= ranks and recipe.parallel.device != "cpu"
                    else []
                )
                processes.append(CellProcess(cell, command, run.path, recipe.train.threads, device))
            together, reason = _wait(processes, runs, steps, stopped)
        finally:
            for process in processes:
                process.kill()
    if stopped:
        raise Stopped("stopped with everything saved; the same command continues")
    about |= {"state": "failed" if reason else "finished", "reason": reason, "together": together}
    write_atomic(directory / "probe.json", json.dumps(about))
    if reason:
        notify(
            f"{cell.label}: the probe failed, so the time of communication stays unknown: {reason}"
        )


def _equal_probe(directory: Path, about: Mapping[str, Any]) -> dict[str, Any]:
    """The name (`of`) and the time of a finished probe with the recipe in `directory`; empty if there is none.

    The setups of a study of strategies differ in what a probe leaves out, so that they share one.
    """
    recipe = (directory / "recipe.toml").read_bytes()
    for path in sorted(directory.parent.glob("*/probe.json")):
        ended = read_json(path)
        is_own = "of" not in ended and all(
            ended.get(name) == value for name, value in about.items()
        )
        if is_own and (path.parent / "recipe.toml").read_bytes() == recipe:
            return {"of": path.parent.name, "together": ended["together"]}
    return {}


def _wait(
    processes: Sequence[CellProcess], runs: Sequence[Run], steps: int, stopped: list[int]
) -> tuple[float, str]:
    """Wait until all have done so many steps side by side, one has failed, or a signal came.

    Returns the time from which on all were running, and why one failed.
    """
    until, together = time.monotonic() + SECONDS, 0.0
    suspended = dict[int, int]()  # by rank the step at which it was suspended

    def step(rank: int) -> int:
        return max((line["step"] for line in runs[rank].lines("train")), default=0)

    while not stopped:
        for process in processes:
            if (code := process.poll()) is not None:
                return together, process.failure(code) or "it ended before its last step"
        for rank in set(range(len(runs))) - suspended.keys():
            if step(rank):
                os.killpg(processes[rank].pid, signal.SIGSTOP)
                suspended[rank] = step(rank)
                if len(suspended) == len(runs):
                    for process in processes:
                        os.killpg(process.pid, signal.SIGCONT)
                    together = time.time()
        if len(suspended) == len(runs) and all(
            step(rank) >= suspended[rank] + steps for rank in suspended
        ):
            break
        if time.monotonic() > until:
            return together, f"not {steps} steps within {SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)
    return together, ""


def measure_machine(study: Study, world: int, notify: Callable[[str], None]) -> None:
    """Measure matrix products and collectives with so many ranks on this machine, where that was not done yet."""
    if f"1x{world}" in read_json(study.path / "machine.json"):
        return
    notify(
        f"measuring matrix products{' and collectives' * (world > 1)} of {world} rank{'s' * (world > 1)}"
    )
    on_cpu = study.recipe.parallel.device == "cpu" or not visible_gpus()
    command = [*WINDLASS, "check", str(study.path / "recipe.toml"), "--world", str(world), "--json"]
    command += ["--max-size", CHECK_BYTES] if on_cpu else []
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    try:
        measured = json.loads(done.stdout)
    except ValueError:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        notify(f"the machine could not be measured: {last}")
        return
    store_rates(study.path, measured["ranks"], measured["rates"])


def store_rates(
    study: Path, ranks: Sequence[Mapping[str, Any]], rates: Sequence[Mapping[str, Any]]
) -> None:
    """Write what a check measured into a study's `machine.json`: of matrix products the slowest rank's rate."""
    nodes, hosts = (
        len({rank["node"] for rank in ranks}),
        sorted({str(rank["host"]) for rank in ranks}),
    )
    names = ("collective", "size", "seconds", "algbw", "busbw")
    entry = {
        "device": ranks[0].get("name", "cpu"),
        "hosts": hosts,
        "cores": usable_cores(),
        "matrix_tflops": {
            name: min(rank["tflops"][name] for rank in ranks) for name in ranks[0]["tflops"]
        },
        "collectives": [
            {name: rate[name] for name in names} for rate in rates if rate["group"] == "all ranks"
        ],
    }
    with FileLock(study / ".machine.lock"):
        before = read_json(study / "machine.json")
        write_atomic(
            study / "machine.json", json.dumps(before | {f"{nodes}x{len(ranks)}": entry}, indent=1)
        )
