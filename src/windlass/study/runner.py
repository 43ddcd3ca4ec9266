"""Works through a study's cells: side by side, each a `windlass train` process.

The directory is the only state. A sweep that was killed anywhere and is given again leaves finished
cells alone and resumes interrupted ones. Failed cells keep their state and reason.
"""

from __future__ import annotations

import itertools
import shlex
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from windlass import errors
from windlass.data.directory import data_dirs
from windlass.data.prepare import prepare
from windlass.errors import UserError, plural
from windlass.fileio import locked
from windlass.launch import submit
from windlass.launch.batch import SUBMITTED, queued_tasks
from windlass.launch.job import INDEX, Job, Site
from windlass.processes import WINDLASS, catch_signals, thread_share, visible_gpus
from windlass.recipe import Changes, Recipe, typed
from windlass.run import OCCUPIED, Run
from windlass.study.grid import Cell, short_names
from windlass.study.probe import STOP_SIGNALS, CellProcess, run_probe
from windlass.study.results import OPEN_STATES, CellResult
from windlass.study.study import Axes, Study, load_study
from windlass.telemetry import terminal
from windlass.telemetry.ledger import LOSS
from windlass.telemetry.measures import duration, short, title_of
from windlass.training.stop import StopSignals

if TYPE_CHECKING:
    from rich.console import Group


class Progress:
    """Shows cells on a stream, by default standard output; used as a context manager."""

    def __init__(self, stream: IO[str] | None = None):
        from rich.live import Live

        self.console = terminal.rich_console(stream or sys.stdout)
        self._live = Live(console=self.console, auto_refresh=False)
        self._states: dict[str, str] = {}  # by cell the state of its last line

    def __enter__(self) -> Progress:
        if self.console.is_interactive:
            self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.console.is_interactive:
            self._live.__exit__(*error)

    def notify(self, text: str) -> None:
        if text:
            self.console.out(terminal.message(text, self.console.file))

    def show(self, study: Study, results: Sequence[CellResult] = ()) -> None:
        """Draw the table again, or print a line for each cell whose state changed."""
        results = results or study.results()
        if self.console.is_interactive:
            self.console.width = terminal.size(self.console.file).columns
            self._live.update(cells_table(study, results, self.console.width), refresh=True)
            return
        for number, result in enumerate(results, 1):
            if result.state != self._states.get(result.cell.key, "waiting"):
                self._states[result.cell.key] = result.state
                more = f" ({result.reason})" if result.reason else ""
                place = f"[{number}/{len(results)}]"
                self.console.out(f"{place} {result.cell.label}: {result.state}{more}")

    def show_end(self, study: Study) -> None:
        if not self.console.is_interactive:
            self.console.print(cells_table(study, study.results(), self.console.width))


def cells_table(study: Study, results: Sequence[CellResult], width: int) -> Group:
    best = "best" if study.measure == LOSS else f"best {title_of(study.measure)}"
    settings = short_names(study.keys).values()
    head = ["cell", *settings, "state", "step", "left", "loss", "val loss", best]
    head += ["tok/s", "device-h"]
    rows = []
    for number, r in enumerate(results, 1):
        values = r.cell.assignment.values()
        row = [str(number), *(f"{v:g}" if isinstance(v, float) else str(v) for v in values)]
        row += [r.state, f"{r.step}/{r.steps or '?'}" if r.step or r.steps else ""]
        row.append("" if r.left_s is None else duration(r.left_s))
        row += ["" if v is None else f"{v:.4f}" for v in (r.loss, r.eval_loss, r.score)]
        row.append("" if r.tokens_per_s is None else short(r.tokens_per_s))
        rows.append([*row, "" if r.device_hours is None else f"{r.device_hours:.3g}"])
    notes = errors.by_text((f"cell {n}", r.reason) for n, r in enumerate(results, 1) if r.reason)
    return terminal.table(head, rows, width, ("state",), title=str(study.path), notes=notes)


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
        how = f"`windlass submit {shlex.quote(str(study.path))}` submits its cells"
        raise UserError(f"{study.path} is a scaling study over hosts: {how}")
    cells = study.cells if only is None else [study.cell(only)]
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
        on_cpu = all(cell.recipe.parallel.device == "cpu" for cell in self.cells)
        self.devices = [] if on_cpu else visible_gpus()
        world = max(map(self.study.ranks_of, self.cells))
        # The cells of a scaling study run one at a time, so that their times compare.
        asked = self.workers = 1 if self.study.scaling else min(self.workers, len(self.cells))
        if self.devices:
            self.workers = max(1, min(asked, len(self.devices) // world))
        if self.workers < asked:
            devices = f"{plural(len(self.devices), 'device')}, {world} for each cell"
            self.progress.notify(f"{devices}: {self.workers} cells side by side, not {asked}")
        # A cell that another process trains is left to it, and resumed here if that process dies.
        again = ("failed",) if self.retry_failed else ()
        self.open_states = {*OPEN_STATES, "running", *again}

    def start(self) -> None:
        # Prepare the data of the open cells once. A cell without usable data fails alone.
        cells = [c for c in self.cells if self.study.result(c).state in self.open_states]
        prepared, problems = set[tuple[object, ...]](), list[UserError]()
        resuming = any(self.study.run_of(cell).exists for cell in cells)
        with StopSignals():
            for recipe in (cell.recipe for cell in cells):
                try:
                    needed = *data_dirs(recipe), recipe.data.model_dump_json()
                    if needed not in prepared:
                        prepare(recipe, resuming=resuming)
                        prepared.add(needed)
                except UserError as error:
                    problems.append(error)
        if problems and not prepared:
            raise problems[0]
        if not (self.study.scaling and self.probes):
            self.run(self.cells)
            return
        for cell in self.cells:
            self.run([cell])
            if cell.repeat == 1 and self.study.result(cell).state == "finished":
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
                self._work(cells)
            finally:
                for process in self.running:
                    process.kill()
                    process.wait()
        self.progress.show(self.study)
        if self.stopping:
            raise errors.Stopped("stopped with everything saved; the same command continues")
        if self.lost:
            raise errors.HostLost(self.lost)

    def _work(self, cells: list[Cell]) -> None:
        for cell in cells if self.retry_failed else ():
            self.study.set_failure(cell, None)
        queue = [cell for cell in cells if self.study.result(cell).state in self.open_states]
        # 0: a cell alone measures the best number, a launch shares cores.
        ranks = self.workers * max(map(self.study.ranks_of, cells))
        threads = thread_share(ranks) if ranks > 1 and not self.launch else 0
        while queue or self.running:
            every = self.study.results()  # reads the study's files once for each poll
            results = {result.cell.key: result for result in every}
            self._start_cells(queue, threads, results)
            if self.stopping:
                for process in self.running:
                    process.terminate()
                deadline = time.monotonic() + STOP_SECONDS
                while time.monotonic() < deadline and any(p.poll() is None for p in self.running):
                    time.sleep(0.1)
                return
            before = len(self.running)
            for process in list(self.running):
                if (code := process.poll()) is None:
                    continue
                self.running.remove(process)
                reason = process.failure(code)
                if code == errors.LOST:  # its job starts it again, on other hosts
                    self.lost = reason
                elif reason and code > 0 and OCCUPIED not in reason:
                    self.study.set_failure(process.cell, reason)
                elif reason and code < 0:
                    self.progress.notify(
                        f"{process.cell.directory}: {reason}; sweep again to go on"
                    )
            self.progress.show(self.study, every)
            if len(self.running) == before:
                until = time.monotonic() + POLL_SECONDS
                while time.monotonic() < until and all(p.poll() is None for p in self.running):
                    time.sleep(0.02)

    def _start_cells(
        self, queue: list[Cell], threads: int, results: Mapping[str, CellResult]
    ) -> None:
        for cell in list(queue):
            if self.stopping or len(self.running) >= self.workers:
                return
            result = results[cell.key]
            if result.state == "running":
                continue
            queue.remove(cell)
            if result.state not in self.open_states:
                continue
            world = self.study.ranks_of(cell)
            used = {name for process in self.running for name in process.devices}
            free = [name for name in self.devices if name not in used][:world]
            command = train_command(self.study, cell)
            if self.launch:  # a cell with fewer ranks uses a part of its job's
                part = ["--per-host", str(cell.world // cell.nodes)] if cell.world else []
                command = [*WINDLASS, "launch", *part, "--", *command]
            else:
                command = [*command, "--world", str(world)]
            devices = free if len(free) == world else []
            directory = self.study.run_of(cell).path
            self.running.append(CellProcess(cell, command, directory, threads, devices))


def submit_study(
    study: Study,
    *,
    scheduler: str = "",
    site: Site | None = None,
    asked: submit.Resources | None = None,
    dry_run: bool = False,
    retry_failed: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> list[submit.Submitted]:
    """Submit the open cells of a study as array jobs; the list is empty if no cell is open.

    - A sweep is one job. Each cell has `asked.nodes` hosts and a rank for each of their GPUs. If
      the study or the grid sets the ranks, each cell has one host and these ranks.
    - A scaling study over hosts is a job for each number of hosts.

    A cell that an earlier job still holds is left to it; `dry_run` does not ask the scheduler. Each
    job has a directory `jobs/<n>` of its own.
    """
    site, asked = site or submit.read_site(), asked or submit.Resources()
    scheduler = submit.find_scheduler(scheduler, site, dry_run)
    jobs, path = list[submit.Submitted](), study.path.resolve()
    places = (path / "jobs" / str(number) for number in itertools.count(1))
    free = (place for place in places if not (place / SUBMITTED).exists())
    with nullcontext() if dry_run else locked(path / ".study.lock"):
        held = {} if dry_run else queued_tasks(path)
        by_job = itertools.groupby(held, lambda number: (held[number].job, held[number].state))
        for (name, state), cells in by_job:
            end = f"`windlass submit --cancel {path}` ends it"
            notify(f"cell {', '.join(map(str, cells))} is in job {name} ({state}); {end}")
        every = [result.state for result in study.results()]
        states = {number: state for number, state in enumerate(every) if number not in held}
        failed = [str(number) for number, state in states.items() if state == "failed"]
        if failed and not retry_failed:
            notify(f"cell {', '.join(failed)} failed; --retry-failed submits failed cells, too")
        if running := [str(number) for number, state in states.items() if state == "running"]:
            notify(f"cell {', '.join(running)} is running already")
        wanted = (*OPEN_STATES, "failed") if retry_failed else OPEN_STATES
        numbers = [number for number, state in states.items() if state in wanted]
        for nodes in sorted({study.cells[number].nodes for number in numbers}):
            own = [number for number in numbers if study.cells[number].nodes == nodes]
            job = _array_job(study, own, next(free), site, asked, retry_failed)
            jobs.append(submit.submit(job, site, scheduler, dry_run))
    return jobs


def _array_job(
    study: Study,
    numbers: list[int],
    where: Path,
    site: Site,
    asked: submit.Resources,
    retry_failed: bool,
) -> Job:
    path, cells = study.path.resolve(), [study.cells[number] for number in numbers]
    name = f"windlass-{path.name}"
    worlds = {cell.world or study.world for cell in cells} - {0}
    if (worlds or study.over_hosts) and (asked.nodes > 1 or asked.per_host):
        option = f"--nodes {asked.nodes}" if asked.nodes > 1 else f"--per-host {asked.per_host}"
        raise UserError(f"{option}: {path} sets hosts and ranks of its cells; leave it out")
    if study.over_hosts:
        nodes = cells[0].nodes
        name = f"{name}-{nodes}"
        ranks = max(cell.world or nodes for cell in cells) // nodes
        asked = replace(asked, nodes=nodes, per_host=ranks)
    elif worlds:
        asked = replace(asked, nodes=1, per_host=max(worlds))
    parts = ("model", "train", "parallel")  # which need resources
    recipes = list({repr([getattr(c.recipe, p) for p in parts]): c.recipe for c in cells}.values())
    launches = study.over_hosts or not worlds
    # Without `launch` the cells' ranks are processes of the sweep.
    program = shlex.split(site.program) if site.program and not launches else WINDLASS
    command = [*program, "sweep", str(path), "--only", INDEX]
    command += ["--launch"] if launches else []
    command += ["--retry-failed"] if retry_failed else []
    job = submit.make_job(name, command, recipes, where, site, asked)
    for cell in cells:
        cell.recipe.batch(cell.world or study.world or job.nodes * job.ranks_per_node)
    one_rank = job.nodes * job.ranks_per_node == 1 and study.over_hosts  # without a bandwidth
    before = () if one_rank else asked.check(str(path / "recipe.toml"))
    return replace(job, array=numbers, before=before)
