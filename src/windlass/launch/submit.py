"""Submits a run to a scheduler. No torch."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from windlass.errors import UserError
from windlass.estimate.inputs import host_memory_gb
from windlass.fileio import write_atomic
from windlass.launch.batch import SUBMITTED, queued, render, run_program
from windlass.launch.job import TIME, Job, Site, seconds_of, stop_lead
from windlass.launch.schedulers import SCHEDULERS
from windlass.processes import WINDLASS
from windlass.recipe import Recipe
from windlass.run import Run
from windlass.variables import SECRET_NAME

SNAPSHOT = "submit.toml"  # in the run's directory: the recipe that the job trains
EARLY_SECONDS = 60  # by which SLURM may send a signal ahead of its time
LAUNCH = (*WINDLASS, "launch", "--", *WINDLASS)  # a verb on all ranks of the job


@dataclass(frozen=True)
class Resources:
    nodes: int = 1
    per_host: int = 0  # ranks of a host; 0: one for each GPU, one on a host without GPUs
    gpus_per_node: int = -1  # -1: the site's
    time: str = ""  # HH:MM:SS; empty: the site's
    max_restarts: int = 3
    min_busbw: float = 0.0  # GB/s that `windlass check` has to measure first; 0: no check

    def check(self, recipe: str) -> Sequence[str]:
        """The command that requires the bandwidth; empty without one."""
        required = ("--min-busbw", f"{self.min_busbw:g}")
        return (*LAUNCH, "check", recipe, *required) if self.min_busbw else ()


class Submitted(NamedTuple):
    directory: Path
    script: str
    job: str  # its id; empty without submission


def site_file() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config, "windlass", "site.toml")


def read_site(path: Path | None = None) -> Site:
    """The site file, or the defaults if the user has none. UserError if it is not valid."""
    file = path or site_file()
    if path is None and not file.is_file():
        return Site()
    try:
        site = Site(**tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the site file {file} cannot be read: {error}") from None
    except ValidationError as error:
        lines = [f"{file}:"]
        for e in error.errors():
            name = ".".join(map(str, e["loc"]))
            key = Site.model_fields.get(str(e["loc"][0]))
            wrong = f"= {e['input']!r}: {e['msg']}. {key.description}" if key else "is not a key"
            lines.append(f"  {name} {wrong}")
        lines.append(f"  The keys are {', '.join(sorted(Site.model_fields))}")
        raise UserError("\n".join(lines)) from None
    if secret := [name for name in site.environment if SECRET_NAME.search(name)]:
        raise UserError(
            f"{file}: environment has {', '.join(secret)}, but others may read a batch script: "
            'export it in the shell that submits (PBS: with `directives = ["-V"]`)'
        )
    return site


def find_scheduler(asked: str, site: Site, dry_run: bool = False) -> str:
    """The name of the scheduler: `asked`, the site's, or the installed one."""
    installed = [name for name, one in SCHEDULERS.items() if shutil.which(one.SUBMIT)]
    name = asked or site.scheduler or (installed[0] if installed else "")
    if name and name not in SCHEDULERS:
        raise UserError(f"scheduler {name}: write {' or '.join(SCHEDULERS)}")
    if not name or (name not in installed and not dry_run):
        wanted = [SCHEDULERS[name]] if name else SCHEDULERS.values()
        programs = " or ".join(f"{one.SUBMIT} ({one.TITLE})" for one in wanted)
        remedy = "submit from a login node; --scheduler NAME --dry-run prints the script"
        raise UserError(f"this machine lacks {programs}: {remedy}")
    return name


def make_job(
    name: str,
    command: Sequence[str],
    recipes: Sequence[Recipe],
    logs: Path,
    site: Site,
    asked: Resources,
    save_seconds: float = 0.0,
) -> Job:
    """A job that trains any of these recipes, with a signal early enough for a save."""
    on_cpu = all(recipe.parallel.device == "cpu" for recipe in recipes)
    gpus = asked.gpus_per_node if asked.gpus_per_node >= 0 else site.gpus_per_node
    if on_cpu:
        gpus = 0
    if not gpus and not on_cpu:
        choice = f"write --gpus-per-node N (or gpus_per_node in {site_file()})"
        raise UserError(f"how many GPUs has a node? {choice}, or parallel.device=cpu")
    if asked.time and not re.fullmatch(TIME, asked.time):
        raise UserError(f"--time {asked.time}: write hours, minutes and seconds, as 04:00:00")
    limit = asked.time or site.time
    lead = stop_lead(save_seconds)
    if limit and seconds_of(limit) <= lead + EARLY_SECONDS:
        hours, minutes = divmod(max(10, 2 * lead // 60), 60)
        early = f"a job saves {lead} s before its limit, and up to {EARLY_SECONDS} s earlier"
        raise UserError(f"--time {limit}: {early}; write {hours:02d}:{minutes:02d}:00 or more")
    ranks = asked.per_host or max(1, gpus)
    memory = site.memory_per_rank * ranks
    if memory < 0:
        world = asked.nodes * ranks
        memory = max(host_memory_gb(recipe, world, ranks, on_cpu) for recipe in recipes)
    job = Job(name, command, Path.cwd(), logs, asked.nodes, ranks, gpus, memory)
    return replace(job, time=asked.time, max_restarts=asked.max_restarts, lead=lead)


def submit_run(
    recipe: Recipe,
    *,
    scheduler: str = "",
    site: Site | None = None,
    asked: Resources = Resources(),
    dry_run: bool = False,
) -> Submitted:
    """Submit the training of a recipe.

    The run directory gets the script, the log `<run>_<id>.out`, and a copy of the recipe, which all
    starts of the job train. `dry_run` writes nothing, and the id is empty.
    """
    site = site or read_site()
    scheduler = find_scheduler(scheduler, site, dry_run)
    job, recipe = run_job(recipe, site, asked)
    if not dry_run:
        job_id, state = queued(job.logs)
        if state:
            remedy = f"wait for it, or end it by `windlass submit --cancel {job.logs}`"
            raise UserError(f"job {job_id} of {job.logs} is {state}: {remedy}")
    return submit(job, site, scheduler, dry_run, recipe)


def run_job(recipe: Recipe, site: Site, asked: Resources) -> tuple[Job, Recipe]:
    """The job that trains a recipe, and the recipe that all its starts train."""
    run = Run(recipe.run_dir.resolve())
    recipe = recipe.replace({"run.dir": str(run.path)})
    snapshot = str(run.path / SNAPSHOT)
    written = [e for e in run.events if e["event"] == "checkpoint"]
    # Without `checkpoint.background` the step also waits for the write.
    alone = not recipe.checkpoint.background
    saves = [e["blocked_s"] + (0.0 if alone else e["write_s"]) for e in written]
    command = (*LAUNCH, "train", snapshot)
    slowest = max(saves[-3:], default=0.0)
    job = make_job(run.name, command, [recipe], run.path, site, asked, slowest)
    recipe.batch(job.nodes * job.ranks_per_node)  # UserError if it does not divide the global batch
    return replace(job, before=asked.check(snapshot)), recipe


def submit(
    job: Job, site: Site, scheduler: str, dry_run: bool = False, recipe: Recipe | None = None
) -> Submitted:
    """Write a job's script and the recipe, and submit the script."""
    script = render(job, site, scheduler)
    if dry_run:
        return Submitted(job.logs, script, "")
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
        for mark in job.logs.glob(".open-*"):  # of an earlier job
            mark.unlink(missing_ok=True)
        if recipe:
            write_atomic(job.logs / SNAPSHOT, recipe.toml())
        job.script.write_text(script, encoding="utf-8")
    except OSError as error:
        why = f"{job.script} cannot be written: {error.strerror}"
        raise UserError(f"{why}; set another run.dir") from None
    one = SCHEDULERS[scheduler]
    done = run_program(one.submit(job.script), job.directory)
    if done.returncode:
        why = (done.stderr or done.stdout).strip()
        places = (
            f"the keys of {site_file()} or --site FILE (partition, account, memory_per_rank, …)"
        )
        raise UserError(
            f"{one.SUBMIT} fails for {job.script}: {why}. "
            f"Change --nodes, --gpus-per-node, --time, or {places}"
        )
    job_id = one.submitted(done.stdout)
    record = {"scheduler": scheduler, "job": job_id, "array": list(job.array)}
    write_atomic(job.logs / SUBMITTED, json.dumps(record) + "\n")
    return Submitted(job.logs, script, job_id)
