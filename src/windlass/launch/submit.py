"""Submits a run to a scheduler, cancels it, and follows it. No torch."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from windlass.errors import RunFailed, UserError
from windlass.estimate.layouts import host_memory_gb
from windlass.fileio import read_json, write_atomic
from windlass.launch.batch import EXIT_CODE, FOLLOWING, SUBMITTED, render
from windlass.launch.job import SCRIPT, TIME, Job, Site, seconds_of
from windlass.launch.schedulers import SCHEDULERS
from windlass.launch.schedulers.base import GRACE_SECONDS, Scheduler
from windlass.processes import WINDLASS
from windlass.recipe import Recipe
from windlass.recipe.paths import from_here
from windlass.run import Run
from windlass.variables import SECRET_NAME

SNAPSHOT = "submit.toml"  # in the run's directory: the recipe that the job trains
WATCH_SECONDS = 5.0
EARLY_SECONDS = 60  # by which SLURM may send a signal ahead of its time
# what a scheduler says about a job that is over
OVER = re.compile("invalid job|unknown job|has finished|is not found", re.IGNORECASE)
LAUNCH = (*WINDLASS, "launch", "--", *WINDLASS)  # a verb on all ranks of the job


@dataclass(frozen=True)
class Resources:
    """What a job asks for."""

    nodes: int = 1
    per_host: int = 0  # ranks of a host; 0: one for each GPU, one on a host without GPUs
    gpus_per_node: int = -1  # -1: the site's
    time: str = ""  # HH:MM:SS; empty: the site's
    max_restarts: int = 3
    min_busbw: float = 0.0  # GB/s that `windlass check` has to measure first; 0: no check
    max_size: str = ""  # the largest message of that check, as `windlass check --max-size` reads it

    def check(self, recipe: str) -> Sequence[str]:
        """The command that requires the bandwidth; empty without one."""
        size = ("--max-size", self.max_size) if self.max_size else ()
        required = ("--min-busbw", f"{self.min_busbw:g}", *size)
        return (*LAUNCH, "check", recipe, *required) if self.min_busbw else ()


class Submitted(NamedTuple):
    """A job, or an array of jobs."""

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
            name, key = ".".join(map(str, e["loc"])), Site.model_fields.get(str(e["loc"][0]))
            wrong = f"= {e['input']!r}: {e['msg']}. {key.description}" if key else "is not a key"
            lines.append(f"  {name} {wrong}")
        lines.append(f"  The keys are {', '.join(sorted(Site.model_fields))}")
        raise UserError("\n".join(lines)) from None
    if site.scheduler and site.scheduler not in SCHEDULERS:
        names = ", ".join(SCHEDULERS)
        raise UserError(f"{file}: scheduler = {site.scheduler!r}: write one of {names}")
    if secret := [name for name in site.environment if SECRET_NAME.search(name)]:
        raise UserError(
            f"{file}: environment has {', '.join(secret)}, but others may read a batch script: "
            "leave it out; SLURM passes the variables of the shell that submits (PBS: `directives "
            '= ["-V"]`), and W&B reads ~/.netrc'
        )
    return site


def find_scheduler(asked: str, site: Site, dry_run: bool = False) -> str:
    """The name of the scheduler: `asked`, the site's, or the installed one; else UserError."""
    installed = [name for name, one in SCHEDULERS.items() if shutil.which(one.SUBMIT)]
    name = asked or site.scheduler or next(iter(installed), "")
    if name and name not in SCHEDULERS:
        raise UserError(f"--scheduler {name}: write {', '.join(SCHEDULERS)}")
    if not name or (name not in installed and not dry_run):
        wanted = [SCHEDULERS[name]] if name else SCHEDULERS.values()
        programs = " or ".join(f"{one.SUBMIT} ({one.TITLE})" for one in wanted)
        remedy = "submit from a login node; --scheduler NAME --dry-run prints the script"
        raise UserError(f"this machine has no {programs}: {remedy}")
    one = SCHEDULERS[name]
    if site.launcher and site.launcher not in one.LAUNCHERS:
        launchers = " or ".join(one.LAUNCHERS)
        remedy = f"write launcher = {launchers} in the site file"
        raise UserError(f"{one.TITLE} has no {site.launcher}: {remedy}")
    return name


def make_job(
    name: str,
    command: Sequence[str],
    recipes: Sequence[Recipe],
    logs: Path,
    site: Site,
    asked: Resources,
) -> Job:
    """A job with the resources to train any of these recipes; UserError if the site lacks them."""
    on_cpu = all(recipe.parallel.device == "cpu" for recipe in recipes)
    gpus = 0 if on_cpu else asked.gpus_per_node if asked.gpus_per_node >= 0 else site.gpus_per_node
    if not gpus and not on_cpu:
        raise UserError(
            f"how many GPUs has a node? Write --gpus-per-node N (or gpus_per_node in {site_file()})"
            ", or train on the CPU with parallel.device=cpu"
        )
    if site.gpus_per_node and gpus > site.gpus_per_node:
        most = f"a node of this site has {site.gpus_per_node} (gpus_per_node)"
        raise UserError(f"--gpus-per-node {gpus}: {most}")
    if asked.time and not re.fullmatch(TIME, asked.time):
        raise UserError(f"--time {asked.time}: write hours, minutes and seconds, as 04:00:00")
    limit = asked.time or site.time
    if limit and seconds_of(limit) <= GRACE_SECONDS + EARLY_SECONDS:
        early = (
            f"a job saves {GRACE_SECONDS} s before its limit, and up to {EARLY_SECONDS} s earlier"
        )
        raise UserError(f"--time {limit}: {early} on SLURM; write 00:10:00 or more")
    if asked.max_size and not asked.min_busbw:
        raise UserError(f"--max-size {asked.max_size}: give it together with --min-busbw GB/S")
    ranks = asked.per_host or max(1, gpus)
    memory = site.memory_per_rank * ranks
    if memory < 0:
        world = asked.nodes * ranks
        memory = max(host_memory_gb(recipe, world, ranks, on_cpu) for recipe in recipes)
    job = Job(name, command, Path.cwd(), logs, asked.nodes, ranks, gpus, memory)
    return replace(job, time=asked.time, max_restarts=asked.max_restarts)


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

    Raises UserError for what the site lacks, the recipe cannot do, or the scheduler rejects.
    """
    site = site or read_site()
    scheduler = find_scheduler(scheduler, site, dry_run)
    place = Path(site.scratch or Path.cwd())
    run = Run(recipe.run_dir.resolve())
    if not run.exists:
        run = Run((place / recipe.run_dir).resolve())
    recipe = recipe.replace({"run.dir": str(run.path)})
    if recipe.home is None:
        # Inputs are here. What the job prepares belongs on the site's scratch disk.
        places = ("data.dir", "run.base")
        inputs = {key: value for key, value in recipe.flat().items() if key not in places}
        recipe = recipe.replace(from_here(inputs, str(place)) | {"run.base": str(place)})
    grace = type(recipe.checkpoint).model_fields["grace_seconds"].default  # for torchrun
    if recipe.checkpoint.grace_seconds == grace:
        recipe = recipe.replace({"checkpoint.grace_seconds": GRACE_SECONDS - 10})
    snapshot = str(run.path / SNAPSHOT)
    job = make_job(run.name, (*LAUNCH, "train", snapshot), [recipe], run.path, site, asked)
    recipe.batch(job.nodes * job.ranks_per_node)  # UserError if it does not divide the global batch
    after = track_commands([recipe], site, str(run.path))
    job = replace(job, directory=place, before=asked.check(snapshot), after=after)
    job_id, state = ("", "") if dry_run else queued(run.path)
    if state:
        follow = f"`windlass submit --watch {run.path}` follows it, --cancel instead ends it"
        raise UserError(f"job {job_id} of {run.path} is {state}: {follow}")
    return submit(job, site, scheduler, dry_run, recipe)


def track_commands(
    recipes: Sequence[Recipe], site: Site, run: str, *options: str
) -> list[Sequence[str]]:
    """The commands that complete the trackers after a job: W&B offline, and MLflow servers."""
    environ = os.environ | site.environment
    behind = {
        "wandb": environ.get("WANDB_MODE") == "offline",
        "mlflow": environ.get("MLFLOW_TRACKING_URI", "").startswith("http"),
    }
    used = dict.fromkeys(name for recipe in recipes for name in recipe.telemetry.trackers)
    track = ("env", "WANDB_MODE=online", "timeout", "600", *WINDLASS, "track", run)
    return [(*track, *options, "--to", name) for name in used if behind.get(name)]


def submit(
    job: Job, site: Site, scheduler: str, dry_run: bool = False, recipe: Recipe | None = None
) -> Submitted:
    """Write a job's script and the recipe, and submit the script."""
    script = render(job, site, scheduler)
    if dry_run:
        return Submitted(job.logs, script, "")
    try:
        job.logs.mkdir(parents=True, exist_ok=True)
        for mark in (*job.logs.glob(".open-*"), job.logs / EXIT_CODE):  # of an earlier job
            mark.unlink(missing_ok=True)
        for path, _, last, state in _jobs(job.logs):
            if not state:
                path.unlink()
            elif path.name == SUBMITTED:
                path.rename(path.with_name(FOLLOWING.replace("*", last)))
        if recipe:
            write_atomic(job.logs / SNAPSHOT, recipe.toml())
        job.script.write_text(script, encoding="utf-8")
    except OSError as error:
        why = f"{job.script} cannot be written: {error.strerror}"
        raise UserError(f"{why}; set another run.dir") from None
    one = SCHEDULERS[scheduler]
    done = _run(one.submit(job.script), job.directory)
    if done.returncode:
        why = (done.stderr or done.stdout).strip()
        raise UserError(
            f"{one.SUBMIT} fails for {job.script}: {why}. If the cluster rejects what the job asks "
            "for, change --nodes, --gpus-per-node or --time, or partition, account, constraint, "
            f"cpus_per_rank and memory_per_rank (0: none) in {site_file()} or --site FILE"
        )
    job_id = one.submitted(done.stdout)
    write_atomic(job.logs / SUBMITTED, json.dumps({"scheduler": scheduler, "job": job_id}) + "\n")
    return Submitted(job.logs, script, job_id)


def queued(directory: Path) -> tuple[str, str]:
    """The id of a directory's job, and its state in words (empty: over); both empty without a job.

    An array has several jobs if tasks continue in their own jobs; the first one not over counts.
    """
    jobs = [(job, state) for _, _, job, state in _jobs(directory)]
    return next((job for job in jobs if job[1]), jobs[0] if jobs else ("", ""))


def _jobs(directory: Path) -> list[tuple[Path, Scheduler, str, str]]:
    """The jobs of a directory, the last one first: file that names it, scheduler, id and state."""
    paths = (directory / SUBMITTED, *sorted(directory.glob(FOLLOWING)))
    jobs = []
    for path in paths:
        if (submitted := read_json(path)).get("job"):
            scheduler, job = SCHEDULERS[submitted["scheduler"]], str(submitted["job"])
            jobs.append((path, scheduler, job, _state(scheduler, job)))
    return jobs


def _state(scheduler: Scheduler, job: str) -> str:
    """The state of a job in words; empty if it is over."""
    if shutil.which(scheduler.SUBMIT) is None:
        return ""
    query = scheduler.query(job)
    done = _run(query)
    if done.returncode and not OVER.search(done.stderr):  # a scheduler that is busy
        return f"unknown ({(done.stderr or query[0]).strip()})"
    return "" if done.returncode else scheduler.state(done.stdout)


def _run(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def cancel(directory: Path) -> str:
    """End the jobs of a run or study; a running job saves first. Returns the jobs' ids.

    Raises UserError if all jobs are over, RunFailed if the scheduler does not answer.
    """
    jobs = _jobs(directory)
    if not jobs:
        problem = f"{directory} has no {SUBMITTED}"
        raise UserError(f"{problem}: it was not submitted with `windlass submit`")
    alive = [(scheduler, job, state) for _, scheduler, job, state in jobs if state]
    if not alive:
        raise UserError(f"job {jobs[0][2]} of {directory} is over: there is nothing to cancel")
    if silent := next((state for *_, state in alive if state.startswith("unknown")), ""):
        raise RunFailed(f"the scheduler does not say whether the job runs: {silent}; try again")
    # Schedulers kill a job some seconds after they have asked it to end, too soon for a save. So a
    # waiting job is deleted. The script of a running job gets a signal, lets the ranks save, and
    # does not requeue the job.
    for scheduler, job, state in alive:
        for command in scheduler.cancel(job, state, lambda words: _run(words).stdout):
            done = _run(command)
            if done.returncode:
                raise RunFailed(f"{shlex.join(command)}: {done.stderr.strip()}")
    return ", ".join(job for _, job, _ in alive)


def watch(directory: Path, show: Callable[[str], None]) -> None:
    """Show state and logs of a directory's job until it is over."""
    shown, last, since = dict[Path, int](), "", (directory / SCRIPT).stat().st_mtime
    while True:
        job, state = queued(directory)
        if state and state != last:
            show(f"[{job}: {state}]")
        logs = [*directory.glob("*.out"), *directory.glob("*.OU")]  # .OU: from PBS or LSF itself
        for log in sorted(log for log in logs if log.stat().st_mtime >= since):
            with log.open(errors="replace") as file:
                file.seek(shown.get(log, 0))
                if text := file.read():
                    show(text.rstrip("\n"))
                shown[log] = file.tell()
        if not state:
            break
        last = state
        time.sleep(WATCH_SECONDS)
