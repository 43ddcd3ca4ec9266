"""The schedulers that Windlass knows. A new one is a file here and an entry in `SCHEDULERS`."""

from __future__ import annotations

from collections.abc import Mapping

from windlass.launch.schedulers.base import Scheduler
from windlass.launch.schedulers.pbs import PBS
from windlass.launch.schedulers.slurm import SLURM

SCHEDULERS: dict[str, Scheduler] = {"slurm": SLURM(), "pbs": PBS()}


def find_job(environ: Mapping[str, str]) -> tuple[str, str]:
    """The scheduler whose job has these variables, and the job's id; (`none`, "") outside a job."""
    jobs = ((name, environ.get(one.JOB_ID, "")) for name, one in SCHEDULERS.items())
    return next(((name, job) for name, job in jobs if job), ("none", ""))


def host_name(environ: Mapping[str, str]) -> str:
    """The scheduler's name for this host; empty if it does not tell its ranks."""
    names = (environ.get(one.RANK.get("host", ""), "") for one in SCHEDULERS.values())
    return next(filter(None, names), "")
