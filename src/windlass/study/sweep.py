"""Working through a study's cells: side by side, each a `windlass train` process. No torch.

The directory is the only state: a sweep that was killed anywhere and is given again leaves finished cells alone, resumes
interrupted ones from their last checkpoint, and leaves failed and diverged ones as they are, with their reason.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.checkpoint.retention import lower_is_better
from windlass.data.prepare import data_dir, prepare
from windlass.errors import (
    BAD_INPUT,
    DONE,
    LOST,
    STOPPED,
    HostLost,
    Stopped,
    UserError,
    argument,
    require,
)
from windlass.processes import WINDLASS, catch_signals, thread_share, visible_gpus
from windlass.recipe import Recipe, typed
from windlass.run import OCCUPIED
from windlass.study.grid import Cell
from windlass.study.presets import load_study, preset_dir
from windlass.study.result import CellResult
from windlass.study.study import Axes, Study
from windlass.training.stop import StopSignals

DONE_STATES = ("finished", "pruned", "diverged")
# What a sweep works on. A `running` cell of another process is left to it and looked at again: if that process is killed,
# the cell is resumed here.
OPEN_STATES = ("waiting", "interrupted", "running")
RETRIES = (
    2  # of a cell that a signal ended (out of memory, a kill) or that another process was training
)
STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
)  # the last one: the terminal or ssh connection is gone
STOP_SECONDS = 90.0  # for cells to save and end when the sweep is stopped


def sweep(
    recipe: Recipe | str | Path,
    axes: Axes = (),
    *,
    path: str | Path | None = None,
    world: int | None = None,
    workers: int = 1,
    stop_diverged: bool = False,
    halving: bool = False,
    retry_failed: bool = False,
    only: int | None = None,
    launch: bool = False,
    show: Callable[[Study], None] = lambda study: None,
    notify: Callable[[str], None] = lambda text: None,
) -> Study:
    """Train every cell of a grid that is not done yet, and return the study.

    `recipe` is what all cells share (or a preset of studies, which has axes and world of its own), `axes` the grid, as typed
    (`["optim.lr=1e-2,1e-3"]`) or as a mapping of keys to values, `path` the study's directory (None:
    `studies/<preset>-<hash>`). A study that is there grows by the cells that it
    does not have, and all that are open are trained. A cell has `world` ranks (default 1) where it does not set
    `parallel.world`; `workers` cells run side by side, each with an equal share of the cores and devices of its own.
    `stop_diverged` stops a cell whose loss diverged (`study.diverged`), `halving` is asynchronous successive halving by
    `checkpoint.best`, `retry_failed` trains failed and diverged cells again, `only` is the number of the one cell to work
    on. With `launch` a cell has all ranks of the allocation instead (`windlass launch`). `show` is called with the study
    twice a second, `notify` with messages for the user.

    Raises UserError where the directory holds another preset's study, a cell's recipe is invalid or no cell has usable data;
    Stopped after a signal.
    """
    if halving:
        require("optuna", argument("halving"))
    recipe, preset = load_study(recipe, "sweep")
    axes, world = axes or preset.get("axes", ()), world or preset.get("world", 1)
    path = path or preset_dir(recipe, preset)
    recipe.check_packages()
    study = Study.create(recipe, axes, Path(path) if path else None)
    if study.scaling:
        raise UserError(
            f"{study.path} is a scaling study: `windlass scale {study.path}` continues it"
        )
    for note in study.notes:
        notify(note)
    if only is not None and not 0 <= only < len(study.cells):
        raise UserError(f"{argument('only', only)}: the cells are 0 to {len(study.cells) - 1}")
    cells = study.cells if only is None else [study.cells[only]]
    states = (*OPEN_STATES, "failed", "diverged") if retry_failed else OPEN_STATES
    prepare_data([cell for cell in cells if study.result(cell).state in states])
    Sweep(
        study, cells, world, workers, stop_diverged, halving, retry_failed, launch, show, notify
    ).run()
    return study


def prepare_data(cells: Sequence[Cell]) -> None:
    """Prepare the data of these cells before the first one trains: else each of them would do it, or fail by itself.

    Raises UserError if no cell has data that can be used. If some have, the others fail alone.
    """
    places, problems = set[Path](), list[UserError]()
    with StopSignals():
        for cell in cells:
            try:
                if (place := data_dir(cell.recipe)) not in places:
                    prepare(cell.recipe)
                    places.add(place)
            except UserError as error:
                problems.append(error)
    if problems and not places:
        raise problems[0]


def train_command(study: Study, cell: Cell) -> list[str]:
    recipe, directory = study.path / "recipe.toml", study.run_of(cell).path
    return [*WINDLASS, "train", str(recipe), *cell.overrides, f"run.dir={typed(str(directory))}"]


@dataclass
class Sweep:
    """A sweep at work; the arguments are those of `sweep`."""

    study: Study
    cells: list[Cell]
    world: int = 1
    workers: int = 1
    stop_diverged: bool = False
    halving: bool = False
    retry_failed: bool = False
    launch: bool = False
    show: Callable[[Study], None] = lambda study: None
    notify: Callable[[str], None] = lambda text: None
    command: Callable[[Study, Cell], list[str]] = train_command
    poll_seconds: float = 0.5
    running: list[CellProcess] = field(default_factory=list)
    interruptions: dict[str, int] = field(default_factory=dict)
    stopping: bool = False
    lost: str = ""  # why a cell lost a host

    def __post_init__(self) -> None:
        on_cpu = all(cell.recipe.parallel.device == "cpu" for cell in self.cells)
        self.devices = [] if on_cpu else visible_gpus()
        self.largest_world = max(cell.world or self.world for cell in self.cells)
        asked = self.workers = min(self.workers, len(self.cells))
        if self.devices:
            self.workers = max(1, min(asked, len(self.devices) // self.largest_world))
        if self.workers < asked:
            devices = f"{len(self.devices)} devices, {self.largest_world} for each cell"
            self.notify(f"{devices}: {self.workers} cells side by side, not {asked}")
        self.open_states = (*OPEN_STATES, "failed") if self.retry_failed else OPEN_STATES
        self.pruner = Halving(self.study) if self.halving else None

    def run(self) -> None:
        """Work until no cell is open; raises Stopped after a stop signal, when the running cells have saved."""
        with catch_signals(STOP_SIGNALS, self._on_signal):
            try:
                self._work()
            finally:
                for process in self.running:
                    process.kill()
        self.show(self.study)
        if self.stopping:
            raise Stopped("stopped with everything saved; the same command continues")
        if self.lost:
            raise HostLost(self.lost)

    def _on_signal(self, number: int) -> None:
        if self.stopping and number == signal.SIGINT:  # a second Ctrl-C does not wait for saves
            for process in self.running:
                process.kill()
        self.stopping = True

    def _work(self) -> None:
        for cell in self.cells if self.retry_failed else ():
            if self.study.status(cell) in ("failed", "diverged"):
                self.study.set_status(cell, "")
        queue = [cell for cell in self.cells if self.study.result(cell).state in self.open_states]
        while queue or self.running:
            self._start_cells(queue)
            if self.stopping:
                for process in self.running:
                    process.terminate()
                deadline = time.monotonic() + STOP_SECONDS
                while time.monotonic() < deadline and any(p.poll() is None for p in self.running):
                    time.sleep(0.1)
                return
            for process in list(self.running):
                if (code := process.poll()) is None:
                    self._watch(process)
                    continue
                self.running.remove(process)
                if self._ended(process, code):
                    queue.append(process.cell)
            self.show(self.study)
            time.sleep(self.poll_seconds)

    def _start_cells(self, queue: list[Cell]) -> None:
        """Start the next cells while workers are free; those that another process trains stay in the queue."""
        for cell in list(queue):
            if self.stopping or len(self.running) >= self.workers:
                return
            result = self.study.result(cell)
            if result.state == "running":
                continue
            queue.remove(cell)
            if result.state not in self.open_states:
                continue
            if reason := self.pruner.prune(result) if self.pruner else "":
                self.study.set_status(
                    cell, "pruned", reason
                )  # by a sweep that was killed before it wrote this down
                continue
            world = cell.world or self.world
            used = {name for process in self.running for name in process.devices}
            free = [name for name in self.devices if name not in used][:world]
            ranks = self.workers * self.largest_world
            # a cell alone chooses by measurement, the ranks of a launch by the cores of their hosts
            threads = thread_share(ranks) if ranks > 1 and not self.launch else 0
            command, directory = (
                [*self.command(self.study, cell), "--world", str(world)],
                self.study.run_of(cell).path,
            )
            if self.launch:
                command = [*WINDLASS, "launch", "--", *command[:-2]]
            self.running.append(
                CellProcess(cell, command, directory, threads, free if len(free) == world else [])
            )

    def _watch(self, process: CellProcess) -> None:
        """Stop a running cell that diverged or that halving prunes; not one that has done all steps and only saves."""
        cell, result = process.cell, self.study.result(process.cell)
        at_end = result.steps is not None and result.last_step >= result.steps
        if at_end or self.study.status(cell) not in ("", "interrupted"):
            return
        pruned = self.pruner.prune(result) if self.pruner else ""
        diverged = result.divergence if self.stop_diverged else ""
        if diverged or pruned:
            self.study.set_status(cell, "diverged" if diverged else "pruned", diverged or pruned)
            process.terminate()

    def _ended(self, process: CellProcess, code: int) -> bool:
        """Write down why a cell ended, where its ledger has no reason; returns whether it is to be started again."""
        cell, result = process.cell, self.study.result(process.cell)
        if self.pruner:  # it may have ended between two looks, and later cells are compared with it
            self.pruner.prune(result)
        if self.study.status(cell) not in ("", "interrupted"):
            return False
        reason = process.failure(code)
        if code == LOST:  # not here again: its job is started again, on other hosts
            self.lost = reason
            self.study.set_status(cell, "interrupted", reason)
        elif code == STOPPED or code < 0 or OCCUPIED in reason:
            times = self.interruptions[cell.key] = self.interruptions.get(cell.key, 0) + 1
            reason = reason or "stopped by a signal"
            self.study.set_status(
                cell, "interrupted", f"{reason} ({times} times)" if times > 1 else reason
            )
            return times <= RETRIES
        elif code != DONE:
            self.study.set_status(
                cell, "diverged" if result.divergence and code != BAD_INPUT else "failed", reason
            )
        elif result.divergence and result.state != "finished":
            self.study.set_status(cell, "diverged", result.divergence)
        return False


class CellProcess(subprocess.Popen[bytes]):
    """A running cell: `windlass train` in a session of its own; what it prints goes to `runs/<cell>.out`."""

    def __init__(
        self, cell: Cell, command: list[str], directory: Path, threads: int, devices: list[str]
    ):
        self.cell, self.devices = cell, devices
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log_path = directory.parent / f"{directory.name}.out"
        env = {
            **({"OMP_NUM_THREADS": str(threads)} if threads else {}),
            **os.environ,
            "WINDLASS_QUIET_END": "1",
        }
        env |= {"WINDLASS_PARENT": str(os.getpid())} | (
            {"CUDA_VISIBLE_DEVICES": ",".join(devices)} if devices else {}
        )
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
        if self.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self.wait()

    def failure(self, code: int) -> str:
        """One line on why a cell that exited with `code` did not finish; empty where it finished or stopped."""
        if code in (DONE, STOPPED):
            return ""
        lines = [
            "",
            *filter(None, map(str.strip, self.log_path.read_text(errors="replace").splitlines())),
        ]
        message = next(
            (line for line in reversed(lines) if line.startswith("windlass:")), lines[-1]
        )
        kind = (
            "bad input"
            if code == BAD_INPUT
            else f"killed by signal {-code}"
            if code < 0
            else f"exit code {code}"
        )
        return f"{kind}: {message}" if message else kind


class Halving:
    """Asynchronous successive halving over a study's ledgers (arXiv 1810.05934), by Optuna's pruner.

    At each rung (the 1st, 2nd, 4th, ... evaluation) a cell continues only if it is in the better half of those that came
    there before it. Evaluations of earlier sweeps are reported in the order in which they happened, to decide alike.
    """

    def __init__(self, study: Study):
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)
        direction = "minimize" if lower_is_better(study.measure) else "maximize"
        trials = optuna.create_study(direction=direction, pruner=pruner)
        self._trials = {cell.key: trials.ask() for cell in study.cells}
        self._reported = dict.fromkeys(self._trials, 0)
        self._reasons: dict[str, str] = {}
        past = [(result, each) for result in study.results() for each in result.evaluations]
        for result, (_, step, value) in sorted(past, key=lambda x: x[1][0]):
            self._report(result, step, value)

    def prune(self, result: CellResult) -> str:
        """Report a cell's new evaluations; why it is pruned, or empty while it continues."""
        for _, step, value in result.evaluations[self._reported[result.cell.key] :]:
            self._report(result, step, value)
        return self._reasons.get(result.cell.key, "")

    def _report(self, result: CellResult, step: int, value: float) -> None:
        key = result.cell.key
        rung = self._reported[key] = self._reported[key] + 1
        self._trials[key].report(value, rung)
        if self._trials[key].should_prune() and key not in self._reasons:
            why = f"not in the better half after evaluation {rung}"
            self._reasons[key] = f"{why} ({result.measure} {value:.4f} at step {step})"
