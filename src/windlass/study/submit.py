"""The open cells of a study as array jobs of SLURM or PBS, whose tasks call `windlass sweep STUDY --only N`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from windlass.errors import UserError
from windlass.launch.batch import INDEX, Site
from windlass.launch.submit import (
    Resources,
    find_scheduler,
    make_job,
    queued,
    read_site,
    submit,
    track_commands,
)
from windlass.processes import WINDLASS
from windlass.recipe import Recipe
from windlass.study.grid import NODES, Cell
from windlass.study.study import Study

OPEN_STATES, FAILED_STATES = ("waiting", "interrupted"), ("failed", "diverged")


def submit_study(
    path: Path,
    *,
    scheduler: str = "",
    site: Site | None = None,
    asked: Resources | None = None,
    dry_run: bool = False,
    retry_failed: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[str, str]:
    """Submit the open cells of the study at `path`; returns the script and the job's id, both empty where no cell is open.

    Each cell has `asked.nodes` hosts of its own and a rank for each of their GPUs. Where the grid sets `parallel.world`, a cell
    has one host, and as many ranks there as it says.

    Raises UserError for what the site has not, a cell cannot do, or the scheduler refuses.
    """
    study, site, asked = Study.open(path), site or read_site(), asked or Resources()
    if study.scaling:
        raise UserError(
            f"{path} is a scaling study: give again what made it, which submits the cells that are open"
        )
    scheduler = find_scheduler(scheduler, site, dry_run)
    numbers = _cells_to_submit(study, retry_failed, notify)
    if not numbers:
        return "", ""
    cells, path = [study.cells[number] for number in numbers], path.resolve()
    worlds = {cell.world for cell in cells if cell.world}
    if worlds:
        asked = replace(asked, nodes=1, per_host=max(worlds))
    recipes = distinct(cells)
    command = [*WINDLASS, "sweep", str(path), "--only", INDEX, *([] if worlds else ["--launch"])]
    command += ["--retry-failed"] if retry_failed else []
    check = [
        *WINDLASS,
        "launch",
        "--",
        *WINDLASS,
        "check",
        str(path / "recipe.toml"),
        *asked.check(),
    ]
    job = make_job(f"windlass-{path.name}", command, recipes, path, site, asked)
    after = track_commands(recipes, site, str(path), "--only", INDEX)
    job = replace(job, array=numbers, before=check if asked.min_busbw else (), after=after)
    for cell in cells:
        cell.recipe.batch(cell.world or job.nodes * job.ranks_per_node)
    return submit(job, site, scheduler, dry_run)


def submit_scaling(
    study: Study,
    *,
    scheduler: str,
    site: Site,
    asked: Resources,
    dry_run: bool = False,
    retry_failed: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> list[tuple[Path, str, str]]:
    """Submit the open cells of a scaling study over hosts, one array job for each number of hosts.

    Each cell first checks its hosts' bandwidth (`asked.min_busbw`) and writes what it measured into the study. Returns the
    directory, the script and the id of each job; a number of hosts whose last job is not over is left out.
    """
    scheduler, path, jobs = find_scheduler(scheduler, site, dry_run), study.path.resolve(), []
    waiting = _cells_to_submit(study, retry_failed, notify)
    for nodes in study.values[NODES]:
        numbers = [number for number in waiting if study.cells[number].nodes == nodes]
        where = path / "jobs" / f"{nodes}-nodes"
        job_id, state = queued(where)
        if state:
            notify(
                f"{nodes}-node job {job_id} is {state}; `windlass submit --cancel {where}` ends it"
            )
        if state or not numbers:
            continue
        ranks = max(study.cells[number].world or nodes for number in numbers) // nodes
        recipes = distinct([study.cells[number] for number in numbers])
        command = [
            *WINDLASS,
            "scale",
            str(path),
            "--only",
            INDEX,
            *(["--retry-failed"] if retry_failed else []),
        ]
        own = replace(asked, nodes=nodes, per_host=ranks)
        job = make_job(f"windlass-{path.name}-{nodes}", command, recipes, where, site, own)
        least = own.check() if nodes * ranks > 1 else []  # one rank has no bandwidth
        check = [*WINDLASS, "check", str(path / "recipe.toml"), *least, "--rates", str(path)]
        after = track_commands(recipes, site, str(path), "--only", INDEX)
        job = replace(job, array=numbers, before=[*WINDLASS, "launch", "--", *check], after=after)
        jobs.append((where, *submit(job, site, scheduler, dry_run)))
    return jobs


def distinct(cells: Sequence[Cell]) -> list[Recipe]:
    """The recipes of cells, one for each model, batch, layout and list of trackers: what a job's needs depend on."""
    parts = ("model", "train", "parallel", "telemetry")
    return list(
        {
            repr([getattr(cell.recipe, part) for part in parts]): cell.recipe for cell in cells
        }.values()
    )


def _cells_to_submit(study: Study, retry_failed: bool, notify: Callable[[str], None]) -> list[int]:
    """The numbers of the open cells, and of the failed ones where these are asked for."""
    states = [result.state for result in study.results()]
    failed = [str(number) for number, state in enumerate(states) if state in FAILED_STATES]
    if failed and not retry_failed:
        notify(f"failed, so not submitted: cell {', '.join(failed)}; with --retry-failed they are")
    if running := [str(number) for number, state in enumerate(states) if state == "running"]:
        notify(f"running already, so not submitted: cell {', '.join(running)}")
    wanted = (*OPEN_STATES, *FAILED_STATES) if retry_failed else OPEN_STATES
    return [number for number, state in enumerate(states) if state in wanted]
