"""The jobs of a run or study in a scheduler's queue: their states, an end, their logs. No torch."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from windlass.errors import RunFailed, UserError
from windlass.fileio import read_json
from windlass.launch.batch import FOLLOWING, SUBMITTED
from windlass.launch.job import SCRIPT
from windlass.launch.schedulers import SCHEDULERS
from windlass.launch.schedulers.base import Scheduler
from windlass.run import Run

WATCH_SECONDS = 5.0
OVER = re.compile("invalid job|unknown job|has finished|is not found", re.IGNORECASE)
"""The words of a scheduler about a job that is over."""


class Queued(NamedTuple):
    """A job that was submitted."""

    directory: Path  # of its script and logs
    scheduler: Scheduler
    job: str
    state: str  # in words; empty: the job is over
    array: list[int]  # the numbers of its tasks


def queued(directory: Path) -> tuple[str, str]:
    """The id of a directory's job, and its state in words (empty: over); both empty without a job.

    Among several jobs the first one that is not over counts.
    """
    jobs = [(one.job, one.state) for one in _jobs(directory)]
    return next((job for job in jobs if job[1]), jobs[0] if jobs else ("", ""))


def is_followed(directory: Path) -> bool:
    """Whether there is a job to watch: one that waits or runs, or that has finished its run."""
    job, state = queued(directory)
    return bool(state) or (bool(job) and Run(directory).state == "finished")


def queued_tasks(directory: Path) -> dict[int, Queued]:
    """The tasks of a study's jobs that wait or run: the job of each by the number of its cell."""
    tasks = dict[int, Queued]()
    for one in _jobs(directory):
        if one.state:
            states = one.scheduler.tasks(one.job, one.state, _ask)
            by_number = {task_number(task): state for task, state in states.items()}
            # without states of single tasks, none has begun or the scheduler does not answer
            is_whole = by_number.keys() <= {None}
            held = one.array if is_whole else [n for n in one.array if by_number.get(n)]
            tasks |= dict.fromkeys(held, one)
    return tasks


def task_number(task: str) -> int | None:
    """The number of an array's task by its id (`7_3`, `7[3]`); None if it is a whole job."""
    number = re.search(r"(?:_|\[)(\d+)", task)
    return int(number[1]) if number else None


def _jobs(directory: Path) -> list[Queued]:
    """The jobs of a run or study, the last one first; each array of a study has a directory."""
    arrays = sorted(directory.glob("jobs/*"), key=lambda one: (len(one.name), one.name))
    jobs = []
    for folder in (directory, *reversed(arrays)):
        for path in (folder / SUBMITTED, *sorted(folder.glob(FOLLOWING))):
            if (record := read_json(path)).get("job"):
                scheduler, job = SCHEDULERS[record["scheduler"]], str(record["job"])
                state = _state(scheduler, job)
                jobs.append(Queued(folder, scheduler, job, state, record.get("array", [])))
    return jobs


def _state(scheduler: Scheduler, job: str) -> str:
    """The state of a job in words; empty if it is over."""
    query = scheduler.query(job)
    done = run_program(query)
    if done.returncode and not OVER.search(done.stderr):  # a scheduler that is busy
        return f"unknown ({(done.stderr or query[0]).strip()})"
    return "" if done.returncode else scheduler.state(done.stdout)


def run_program(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of the scheduler; UserError if this machine does not have it."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    except FileNotFoundError:
        raise UserError(f"this machine has no {command[0]}: use a login node") from None


def _ask(command: list[str]) -> str:
    return run_program(command).stdout


def cancel(directory: Path) -> str:
    """End the jobs of a run or study; a running job saves first. Returns the jobs' ids.

    Raises UserError if all jobs are over, RunFailed if the scheduler does not answer.
    """
    jobs = _jobs(directory)
    if not jobs:
        problem = f"{directory} has no {SUBMITTED}"
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
        for command in one.scheduler.cancel(one.job, one.state, _ask):
            done = run_program(command)
            if done.returncode:
                raise RunFailed(f"{shlex.join(command)}: {done.stderr.strip()}")
    return ", ".join(one.job for one in alive)


def watch(directory: Path, show: Callable[[str], None]) -> None:
    """Show state and logs of a directory's job until it is over."""
    shown, last, since = dict[Path, int](), "", dict[Path, float]()
    while True:
        jobs = _jobs(directory)
        alive = [one for one in jobs if one.state]
        for one in alive or jobs[: not since]:
            since[one.directory] = (one.directory / SCRIPT).stat().st_mtime
        if alive and (line := f"[{alive[0].job}: {alive[0].state}]") != last:
            show(last := line)
        # .OU: from PBS itself
        logs = [log for one in since for end in ("out", "OU") for log in one.glob(f"*.{end}")]
        for log in sorted(log for log in logs if log.stat().st_mtime >= since[log.parent]):
            with log.open(errors="replace") as file:
                file.seek(shown.get(log, 0))
                if text := file.read():
                    show(text.rstrip("\n"))
                shown[log] = file.tell()
        if not alive:
            break
        time.sleep(WATCH_SECONDS)
