"""The open cells of a study as array jobs of a scheduler."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

from windlass.errors import UserError
from windlass.fileio import locked
from windlass.launch import submit
from windlass.launch.job import INDEX, Job, Site, read_site
from windlass.processes import WINDLASS
from windlass.study.results import OPEN_STATES
from windlass.study.study import Study


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
    site, asked = site or read_site(), asked or submit.Resources()
    scheduler = submit.find_scheduler(scheduler, site, dry_run)
    jobs, path = list[submit.Submitted](), study.path.resolve()
    places = (path / "jobs" / str(number) for number in itertools.count(1))
    free = (place for place in places if not (place / submit.SUBMITTED).exists())
    with nullcontext() if dry_run else locked(path / ".study.lock"):
        held = {} if dry_run else submit.queued_tasks(path)
        by_job = itertools.groupby(held, lambda number: (held[number].job, held[number].state))
        for (name, state), cells in by_job:
            end = f"`windlass submit --cancel {path}` ends it"
            notify(f"cell {_listed(cells)} is in job {name} ({state}); {end}")
        result_states = [result.state for result in study.results()]
        states = {number: state for number, state in enumerate(result_states) if number not in held}
        failed = [number for number, state in states.items() if state == "failed"]
        if failed and not retry_failed:
            notify(f"cell {_listed(failed)} failed; --retry-failed submits failed cells, too")
        if running := [number for number, state in states.items() if state == "running"]:
            notify(f"cell {_listed(running)} is running already")
        wanted = (*OPEN_STATES, "failed") if retry_failed else OPEN_STATES
        numbers = [number for number, state in states.items() if state in wanted]
        for nodes in sorted({study.cells[number].nodes for number in numbers}):
            of_size = [number for number in numbers if study.cells[number].nodes == nodes]
            job = _array_job(study, of_size, next(free), site, asked, retry_failed)
            jobs.append(submit.submit(job, site, scheduler, dry_run))
    return jobs


def _listed(numbers: Iterable[int]) -> str:
    return ", ".join(str(number + 1) for number in numbers)  # as `study.progress` counts the cells


def _array_job(
    study: Study,
    numbers: list[int],
    logs: Path,
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
    job = submit.make_job(name, command, recipes, logs, site, asked)
    for cell in cells:
        cell.recipe.batch(cell.world or study.world or job.nodes * job.ranks_per_node)
    one_rank = job.nodes * job.ranks_per_node == 1 and study.over_hosts  # without a bandwidth
    before = () if one_rank else asked.check(str(path / "recipe.toml"))
    return replace(job, array=numbers, before=before)
