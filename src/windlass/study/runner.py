"""Trains the cells of a study: which cells run now, on which devices, and what becomes of them.

The directory is the only state. A sweep that was killed anywhere and is given again leaves finished
cells alone and resumes interrupted ones. Failed cells keep their state and reason.
"""

from __future__ import annotations

import shlex
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

from windlass import errors
from windlass.data.prepare import prepare
from windlass.data.recipe_sources import data_dirs
from windlass.errors import UserError
from windlass.processes import WINDLASS, catch_signals, thread_share, visible_gpus
from windlass.recipe import Changes, Recipe
from windlass.run import OCCUPIED, Run
from windlass.study.grid import Cell
from windlass.study.probes import run_probe
from windlass.study.process import STOP_SIGNALS, STOPPED, CellProcess, train_command
from windlass.study.progress import Progress
from windlass.study.results import OPEN_STATES
from windlass.study.study import Axes, Study, load_study
from windlass.training.stop import StopSignals

POLL_SECONDS = 0.5  # between two looks at the ledgers
STOP_SECONDS = 90.0  # for cells to save and end when the sweep is stopped


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
