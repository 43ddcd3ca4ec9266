"""Trains the cells of a study, each in a `windlass train` process, and probes of scaling studies.

The directory is the only state. A sweep that was killed anywhere and is given again leaves finished
cells alone and resumes interrupted ones. Failed cells keep their state and reason.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from windlass import errors, processes
from windlass.data.prepare import prepare
from windlass.data.recipe_sources import data_dirs
from windlass.errors import UserError
from windlass.fileio import read_json, write_atomic
from windlass.processes import WINDLASS, catch_signals, thread_share, visible_gpus
from windlass.recipe import Changes, Recipe, typed
from windlass.run import OCCUPIED, Run
from windlass.study.grid import Cell
from windlass.study.progress import Progress
from windlass.study.results import OPEN_STATES
from windlass.study.setups import ALONE, WARMUP, probe_dir, why_no_probe
from windlass.study.study import Axes, Study, load_study
from windlass.training.stop import StopSignals

POLL_SECONDS = 0.5  # between two looks at the ledgers
STOP_SECONDS = 90.0  # for cells to save and end when the sweep is stopped
# SIGHUP: the terminal or ssh connection is gone.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
STOPPED = "stopped with everything saved; the same command continues"
# A probe has at least PROBE_STEPS after its warm-up, and PROBE_WINDOWS between its `train` lines.
PROBE_STEPS, PROBE_WINDOWS = 10, 4
MOST_EVERY = 5  # steps of such a window, at most
PROBE_SECONDS, PROBE_POLL_SECONDS = 600.0, 0.05  # the limit of a probe, and between two looks
ENDLESS = 10**6  # steps, because the probe is killed before its end
TINY_LR = 1e-9  # keeps the loss finite without a schedule


class CellProcess(subprocess.Popen[bytes]):
    """A `windlass train` process in a session of its own; its output goes to `DIRECTORY.out`."""

    def __init__(
        self,
        cell: Cell,
        command: Sequence[str],
        directory: Path,
        threads: int = 0,  # of a rank; 0: its own choice
        devices: Sequence[str] = (),  # that it may use; empty: all
    ):
        self.cell, self.devices = cell, devices
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = directory.parent / f"{directory.name}.out"
        env = os.environ | {processes.QUIET_END: "1", processes.PARENT: str(os.getpid())}
        if threads:
            env.setdefault("OMP_NUM_THREADS", str(threads))
        if devices:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        with self.log_path.open("ab") as log:
            super().__init__(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        """Kill the process and its ranks. A signal handler may call it, so it does not wait."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def failure(self, code: int) -> str:
        """Why it ended with this exit code; empty if it finished or was asked to stop."""
        if code in (errors.DONE, errors.STOPPED):
            return ""
        kind = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        if code == errors.BAD_INPUT:
            kind = "bad input"
        text = self.log_path.read_text(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        messages = [line for line in lines if line.startswith("windlass:")]
        return ": ".join([kind, *(messages or lines)[-1:]])


def sweep(
    recipe: Recipe | Run | Study | str | Path,
    axes: Axes = (),
    overrides: Changes = (),
    *,
    path: str | Path | None = None,
    world: int = 0,
    workers: int = 1,
    retry_failed: bool = False,
    only: int | None = None,
    launch: bool = False,
    progress: Progress | None = None,
) -> Study:
    """Train every open cell of a grid, and return the study.

    Args:
        recipe: The settings that all cells share; or a preset of studies, with axes and world of
            its own; or a study, to continue it.
        axes: The grid, as typed (`["optim.lr=1e-2,1e-3"]`), or a mapping of keys to values. An
            existing study gains the cells that it lacks.
        overrides: Changes to the recipe.
        path: The study's directory; None: `studies/<preset>-<hash>`.
        world: Ranks of each cell that does not set `parallel.world`; 0: as the study has it, or 1.
        workers: Cells side by side, each with an equal part of the cores and its own devices.
        retry_failed: Train failed cells again.
        only: The number of the one cell to train.
        launch: A cell has all ranks of the allocation (`windlass launch`).
        progress: Shows the cells; None: on standard output.

    Raises:
        UserError: The directory has another study, a recipe is invalid, or no cell has usable data.
        Stopped: A signal stopped the sweep, and everything is saved.
    """
    study = create_sweep(recipe, axes, overrides, path, world)
    if study.over_hosts and only is None:
        remedy = f"`windlass submit {shlex.quote(str(study.path))}` submits its cells"
        raise UserError(f"{study.path} is a scaling study over hosts: {remedy}")
    cells = study.cells if only is None else [study.cells[only]]
    with progress or Progress() as shown:
        Sweep(study, cells, workers, retry_failed, launch, progress=shown).start()
    return study


def create_sweep(
    recipe: Recipe | Run | Study | str | Path,
    axes: Axes = (),
    overrides: Changes = (),
    path: str | Path | None = None,
    world: int = 0,
) -> Study:
    """Create the study of a sweep, or add cells to it. Arguments as `sweep`."""
    base, options, place = load_study(recipe, "sweep", overrides)
    base.check_packages()
    axes, target = axes or options.get("axes", ()), Path(path) if path else place
    if target is None or not Study.is_study(target):  # which has its own ranks
        world = world or options.get("world", 0)
    return Study.create(base, axes, target, world=world)


def train_command(study: Study, cell: Cell) -> list[str]:
    recipe, directory = study.path / "recipe.toml", study.run_of(cell).path
    places = {"run.dir": str(directory), "run.base": study.recipe.run.base}
    words = [f"{key}={typed(place)}" for key, place in places.items()]
    return [*WINDLASS, "train", str(recipe), *cell.overrides, *words]


@dataclass
class Sweep:
    study: Study
    cells: list[Cell]
    workers: int = 1
    retry_failed: bool = False
    launch: bool = False
    probes: bool = True  # of a scaling study: measure steps without communication
    progress: Progress = field(default_factory=Progress)
    running: list[CellProcess] = field(default_factory=list)
    stopping: bool = False
    lost: str = ""  # why a cell lost a host

    def __post_init__(self) -> None:
        self.launch = self.launch or self.study.over_hosts
        # The cells of a scaling study run one at a time, so that their times compare.
        self.workers = 1 if self.study.scaling else min(self.workers, len(self.cells))
        world = max(map(self.study.ranks_of, self.cells))
        on_cpu = all(cell.recipe.parallel.device == "cpu" for cell in self.cells)
        self.devices = [] if on_cpu else visible_gpus()
        if self.devices:
            self.workers = max(1, min(self.workers, len(self.devices) // world))
        # A cell that another process trains is left to it, and resumed here if that process dies.
        self.open_states = {*OPEN_STATES, "running"}
        if self.retry_failed:
            self.open_states.add("failed")

    def start(self) -> None:
        """Prepare the data of the open cells, and train them; probe each cell of a scaling study.

        A cell without usable data fails, and the others train.
        """
        cells = [c for c in self.cells if self.study.result(c).state in self.open_states]
        resuming = any(self.study.run_of(cell).exists for cell in cells)
        prepared, problems = set[tuple[object, ...]](), list[UserError]()
        with StopSignals():
            for recipe in (cell.recipe for cell in cells):
                try:
                    needed = (*data_dirs(recipe), recipe.data.model_dump_json())
                    if needed not in prepared:
                        prepare(recipe, resuming=resuming)
                        prepared.add(needed)
                except UserError as error:
                    problems.append(error)
        if problems and not prepared:
            raise problems[0]
        if not self.study.scaling or not self.probes:
            self.run(self.cells)
            return
        for cell in self.cells:
            self.run([cell])
            if self.study.result(cell).state == "finished":
                run_probe(self.study, cell, self.progress.notify, self.retry_failed)

    def run(self, cells: list[Cell]) -> None:
        """Train these cells until none is open; raises Stopped after a signal and their saves."""

        def stop(number: int) -> None:
            if self.stopping and number == signal.SIGINT:  # a second Ctrl-C waits for no save
                for process in self.running:
                    process.kill()
            self.stopping = True

        with catch_signals(STOP_SIGNALS, stop):
            try:
                self._train(cells)
            finally:
                for process in self.running:
                    process.kill()
                    process.wait()
        self.progress.show(self.study)
        if self.stopping:
            raise errors.Stopped(STOPPED)
        if self.lost:
            raise errors.HostLost(self.lost)

    def _train(self, cells: list[Cell]) -> None:
        if self.retry_failed:
            for cell in cells:
                self.study.set_failure(cell, None)
        queue = [cell for cell in cells if self.study.result(cell).state in self.open_states]
        # 0: a single rank measures its best number of threads, and a launch divides the cores.
        ranks = self.workers * max(map(self.study.ranks_of, cells))
        threads = thread_share(ranks) if ranks > 1 and not self.launch else 0
        while (queue or self.running) and not self.stopping:
            results = self.study.results()  # reads the study's files once for each poll
            states = {result.cell.key: result.state for result in results}
            for cell in list(queue):
                if self.stopping or len(self.running) >= self.workers:
                    break
                if states[cell.key] == "running":  # in another process
                    continue
                queue.remove(cell)
                if states[cell.key] in self.open_states:
                    self.running.append(self._process(cell, threads))
            until, ended = time.monotonic() + POLL_SECONDS, list[CellProcess]()
            self.progress.show(self.study, results)
            while not ended and not self.stopping and time.monotonic() < until:
                time.sleep(0.02)
                ended = [process for process in self.running if process.poll() is not None]
            for process in ended:
                self.running.remove(process)
                code = process.poll() or 0
                reason = process.failure(code)
                if code == errors.LOST:  # the job starts again, on other hosts
                    self.lost, queue = reason, []
                elif code > 0 and reason and OCCUPIED not in reason:
                    self.study.set_failure(process.cell, reason)
                elif code < 0:
                    place = process.cell.directory
                    self.progress.notify(f"{place}: {reason}; sweep again to go on")
        for process in self.running:
            process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and any(p.poll() is None for p in self.running):
            time.sleep(0.1)

    def _process(self, cell: Cell, threads: int) -> CellProcess:
        world = self.study.ranks_of(cell)
        command = train_command(self.study, cell)
        if not self.launch:
            command = [*command, "--world", str(world)]
        elif cell.world:  # a cell with fewer ranks uses a part of its job's
            per_host = str(cell.world // cell.nodes)
            command = [*WINDLASS, "launch", "--per-host", per_host, "--", *command]
        else:
            command = [*WINDLASS, "launch", "--", *command]
        used = {name for process in self.running for name in process.devices}
        free = [name for name in self.devices if name not in used][:world]
        devices = free if len(free) == world else []
        return CellProcess(cell, command, self.study.run_of(cell).path, threads, devices)


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
