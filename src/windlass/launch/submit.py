"""Batch scripts of runs and studies: rendered by a pure function, submitted, queried, cancelled.

A script requeues its job at the time limit, unless two starts in a row have saved no checkpoint.
No torch.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from windlass.errors import RunFailed, UserError
from windlass.estimate.advice import host_memory_gb
from windlass.fileio import read_json, write_atomic
from windlass.launch.job import INDEX, TIME, Job, Site, read_site, seconds_of, site_file
from windlass.launch.rank_status import stop_lead
from windlass.launch.schedulers import SCHEDULERS
from windlass.launch.schedulers.base import Scheduler, run_program
from windlass.processes import WINDLASS
from windlass.recipe import Recipe
from windlass.run import Run

SNAPSHOT = "submit.toml"  # in the run's directory: the recipe that the job trains
EARLY_SECONDS = 60  # by which SLURM may send a signal ahead of its time
LAUNCH = (*WINDLASS, "launch", "--", *WINDLASS)  # a verb on all ranks of the job
SUBMITTED = "job.json"  # in the directory of a run or study: scheduler and id of its last job
FOLLOWING = "job-*.json"  # beside it: the job that continues one task of an array, by its number
# what a scheduler says about a job that is over
OVER = re.compile("invalid job|unknown job|has finished|is not found", re.IGNORECASE)

START = """\
# An attempt that never came to its end, or ended with 69, lost a host.
open={open}
export WINDLASS_LOST_HOSTS="$open.hosts" WINDLASS_SAVED="$open.saved" WINDLASS_LIMIT={limit}
lost=$([ -e "$open" ] && echo $(($(cat "$open") + 1)) || echo 0)
if [ "$lost" -gt {most} ]; then
  echo "windlass: hosts were lost $lost times, and --max-restarts is {most}: not started again"
  rm -f "$open"; exit 1
fi
echo "$lost" >"$open"
"""
WAIT = """\
child=$!
again() {{
  {again}
  [ "$new" ] || return
  printf '{{"scheduler": "%s", "job": "%s", "array": [%s]}}' {scheduler} "${{new%%;*}}" "$task" \\
    >{submitted}
}}
limit= ended= timer=
trap 'limit=1; kill -TERM $child' USR1  # the time limit is near
trap 'ended=1; kill -TERM $child' TERM USR2  # a person, or a scheduler that preempts and requeues
{timer}
wait $child; code=$?
while [ $code -gt 128 ] && kill -0 $child 2>/dev/null; do wait $child; code=$?; done
[ $code -gt 128 ] && {{ wait $child; code=$?; }}  # a signal cut the wait short, not the command
[ $timer ] && kill $timer 2>/dev/null
gone=$(cat "$open.hosts" 2>/dev/null)
idle=0  # starts in a row without a new checkpoint
[ "$WINDLASS_SAVED" -nt "$open" ] || idle=$(($(cat "$open.idle" 2>/dev/null || echo 0) + 1))
rm -f "$open" "$open.hosts" "$open.idle"
if [ ! $ended ] && [ $code = 75 ] && [ $limit ] && [ $idle = 2 ]; then
  echo "windlass: two starts in a row reached the time limit without a new checkpoint"
  echo "windlass: the job ends; give it a longer --time, or lower checkpoint.every"
  code=1
elif [ ! $ended ] && [ $code = 75 ] && [ $limit ]; then
  echo $idle >"$open.idle"
  again
elif [ ! $ended ] && [ $code = 69 ] && [ "$lost" -lt {most} ]; then
  echo "windlass: ${{gone:-a rank}} was lost; the job is started again"
  echo "$lost" >"$open"  # the next start counts this one
  again
fi
"""

# The script counts the time: the lead of a signal of the scheduler stays as it was at submission.
TIMER = """\
(while [ $SECONDS -lt $(({limit} - $(cat "$WINDLASS_SAVED" 2>/dev/null || echo {lead}))) ]; do
  sleep 5
done; kill -USR1 $$) & timer=$!
"""
# PBS signals all processes of a job, and mpiexec does not handle it.
IGNORE = "trap '' USR2  # a signal to all processes of the job must not end those without a handler"
CHECK = """\
rates={rates}
{command} >>"$rates" 2>&1; code=$?
tail -n 2 "$rates"  # the bandwidth, and whether it is enough
if [ $code != 0 ]; then
  echo "windlass: the check ended with exit code $code: $rates"
  rm -f "$open"; exit $code
fi
"""


def render(job: Job, site: Site, scheduler: str) -> str:
    """The batch script of a job, for a scheduler of `SCHEDULERS`."""
    chosen = SCHEDULERS[scheduler]
    replaced = {chosen.option(line) for line in site.directives}
    values = chosen.options(job, site).items()
    header = [template.format(value) for template, value in values if value]
    header = [line for line in header if chosen.option(line) not in replaced]
    options = [f"{chosen.MARK} {line}" for line in (*header, *site.directives)]
    folder = shlex.quote(str(job.logs))
    command = shlex.join(job.command).replace(shlex.quote(INDEX), '"$task"')
    lines = ["#!/bin/bash", *options, ""]
    if not chosen.WRITES_LOG:
        log = shlex.quote(str(job.logs / job.short_name()))
        lines.append(f'exec >>{log}_"{chosen.JOB_SHELL}.out" 2>&1')
    lines.append(f"task={chosen.task(job.array)}")
    skipped = set(range(job.array[0], job.array[-1])) - set(job.array) if job.array else set()
    if skipped and not chosen.LISTS:
        numbers = "|".join(map(str, sorted(skipped)))
        lines.append(f'case "$task" in {numbers}) exit 0;; esac  # cells that are done')
    lines.append(f"cd {shlex.quote(str(job.directory))} || exit 1")
    if site.modules:
        lines.append('[ "$(type -t module)" ] || . /etc/profile')
        lines.append(f"module load {shlex.join(site.modules)} || exit 1")
    exported = {"WINDLASS_JOB_DIR": str(job.logs), "WINDLASS_PER_HOST": str(job.ranks_per_node)}
    if site.launcher_options:
        exported["WINDLASS_LAUNCHER_OPTIONS"] = site.launcher_options
    exported |= {"WINDLASS_PROGRAM": site.program} if site.program else {}
    exported |= site.environment
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(exported.items())]
    lines += [*site.setup, ""]
    mark = f'{folder}/".open-${{task:-run}}"'
    limit = seconds_of(job.time or site.time)
    lines += START.format(open=mark, most=job.max_restarts, limit=limit).splitlines()
    if job.before:
        rates = f'{folder}/"check_{chosen.JOB_SHELL}.out"'
        lines += CHECK.format(rates=rates, command=shlex.join(job.before)).splitlines()
    lines += [IGNORE, f"{command} &"]
    lines += WAIT.format(
        timer=TIMER.format(limit=limit, lead=job.lead) if limit else "",
        again=chosen.requeue(job),
        most=job.max_restarts,
        scheduler=scheduler,
        submitted=f'{folder}/"job-$task.json"' if job.array else f"{folder}/{SUBMITTED}",
    ).splitlines()
    return "\n".join([*lines, "exit $code", ""])


class Queued(NamedTuple):
    """A job that was submitted."""

    directory: Path  # of its script and logs
    scheduler: Scheduler
    job: str
    state: str  # in words; empty: the job is over
    array: list[int]  # the numbers of its tasks


def queued(directory: Path) -> tuple[str, str]:
    """The id and state in words of a directory's job: the first that is not over, or the last."""
    jobs = [(one.job, one.state) for one in _jobs(directory)]
    return next((job for job in jobs if job[1]), jobs[0] if jobs else ("", ""))


def queued_tasks(directory: Path) -> dict[int, Queued]:
    """The tasks of a study's jobs that wait or run: the job of each by the number of its cell."""
    tasks = dict[int, Queued]()
    for one in _jobs(directory):
        if one.state:
            states = one.scheduler.tasks(one.job, one.state)
            by_number = dict[int, str]()
            for task, state in states.items():
                if number := re.search(r"(?:_|\[)(\d+)", task):  # `7_3` or `7[3]`, not a whole job
                    by_number[int(number[1])] = state
            # without states of single tasks, none has begun or the scheduler does not answer
            held = [n for n in one.array if by_number.get(n)] if by_number else one.array
            tasks |= dict.fromkeys(held, one)
    return tasks


def _jobs(directory: Path) -> list[Queued]:
    """The jobs of a run or study, the last one first; each array of a study has a directory."""
    arrays = sorted(directory.glob("jobs/*"), key=lambda one: (len(one.name), one.name))
    jobs = []
    for folder in (directory, *reversed(arrays)):
        for path in (folder / SUBMITTED, *sorted(folder.glob(FOLLOWING))):
            if (record := read_json(path)).get("job"):
                scheduler = SCHEDULERS[record["scheduler"]]
                job = str(record["job"])
                query = scheduler.query(job)
                done = run_program(query)
                state = "" if done.returncode else scheduler.state(done.stdout)
                if done.returncode and not OVER.search(done.stderr):  # a scheduler that is busy
                    state = f"unknown ({(done.stderr or query[0]).strip()})"
                jobs.append(Queued(folder, scheduler, job, state, record.get("array", [])))
    return jobs


def cancel(directory: Path) -> str:
    """End the jobs of a run or study; a running job saves first. Returns the jobs' ids."""
    jobs = _jobs(directory)
    if not jobs:
        problem = f"{directory} lacks {SUBMITTED}"
        raise UserError(f"{problem}: it was not submitted with `windlass submit`")
    alive = [one for one in jobs if one.state]
    if not alive:
        raise UserError(f"job {jobs[0].job} of {directory} is over: there is nothing to cancel")
    if silent := next((one.state for one in alive if one.state.startswith("unknown")), ""):
        raise RunFailed(f"the scheduler does not say whether the job runs: {silent}; try again")
    # Schedulers kill a job some seconds after they have asked it to end, too soon for a save. So a
    # waiting job is deleted. The script of a running job gets a signal, lets the ranks save, and
    # does not requeue the job.
    for one in alive:
        for command in one.scheduler.cancel(one.job, one.state):
            done = run_program(command)
            if done.returncode:
                raise RunFailed(f"{shlex.join(command)}: {done.stderr.strip()}")
    return ", ".join(one.job for one in alive)


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
    run = Run(recipe.run_dir.resolve())
    recipe = recipe.replace({"run.dir": str(run.path)})
    snapshot = str(run.path / SNAPSHOT)
    written = [e for e in run.events if e["event"] == "checkpoint"]
    # Without `checkpoint.background` the step waits for the write, so `blocked_s` includes it.
    background = recipe.checkpoint.background
    saves = [e["blocked_s"] + (e["write_s"] if background else 0.0) for e in written]
    slowest = max(saves[-3:], default=0.0)
    job = make_job(run.name, (*LAUNCH, "train", snapshot), [recipe], run.path, site, asked, slowest)
    recipe.batch(job.nodes * job.ranks_per_node)  # UserError if it does not divide the global batch
    job = replace(job, before=asked.check(snapshot))
    if not dry_run:
        job_id, state = queued(job.logs)
        if state:
            remedy = f"wait for it, or end it by `windlass submit --cancel {job.logs}`"
            raise UserError(f"job {job_id} of {job.logs} is {state}: {remedy}")
    return submit(job, site, scheduler, dry_run, recipe)


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
        keys = f"keys of {site_file()} or --site FILE (partition, account, memory_per_rank, …)"
        raise UserError(
            f"{one.SUBMIT} fails for {job.script}: {why}. "
            f"Change --nodes, --gpus-per-node, --time, or {keys}"
        )
    job_id = one.submitted(done.stdout)
    record = {"scheduler": scheduler, "job": job_id, "array": list(job.array)}
    write_atomic(job.logs / SUBMITTED, json.dumps(record) + "\n")
    return Submitted(job.logs, script, job_id)
