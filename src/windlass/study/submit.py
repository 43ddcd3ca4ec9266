"""The open cells of a study as an array job of SLURM or PBS, whose tasks call `windlass sweep STUDY --only N`. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from windlass.launch.batch import INDEX, Site
from windlass.launch.submit import Resources, find_scheduler, make_job, read_site, submit
from windlass.processes import WINDLASS
from windlass.study.study import Study

OPEN_STATES = ("waiting", "interrupted")


def submit_study(
    path: Path, *, scheduler: str = "", site: Site | None = None, asked: Resources | None = None, dry_run: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> tuple[str, str]:  # fmt: skip
    """Submit the open cells of the study at `path`; returns the script and the job's id, both empty where no cell is open.

    Each cell has `asked.nodes` hosts of its own and a rank for each of their GPUs. Where the grid sets `parallel.world`, a cell
    has one host, and as many ranks there as it says.

    Raises UserError for what the site has not, a cell cannot do, or the scheduler refuses.
    """
    study, site, asked = Study.open(path), site or read_site(), asked or Resources()
    scheduler = find_scheduler(scheduler, site, dry_run)
    states = [result.state for result in study.results()]
    numbers = [number for number, state in enumerate(states) if state in OPEN_STATES]
    if running := [str(number) for number, state in enumerate(states) if state == "running"]:
        notify(f"running already, so not submitted: cell {', '.join(running)}")
    if not numbers:
        return "", ""
    cells, path = [study.cells[number] for number in numbers], path.resolve()
    worlds = {cell.world for cell in cells if cell.world}
    if worlds:
        asked = replace(asked, nodes=1, per_host=max(worlds))
    on_cpu = all(cell.recipe.parallel.device == "cpu" for cell in cells)
    command = [*WINDLASS, "sweep", str(path), "--only", INDEX, *([] if worlds else ["--launch"])]
    job = replace(make_job(f"windlass-{path.name}", command, path, site, asked, on_cpu), array=numbers)
    for cell in cells:
        cell.recipe.batch(cell.world or job.nodes * job.ranks_per_node)
    return submit(job, site, scheduler, dry_run)
