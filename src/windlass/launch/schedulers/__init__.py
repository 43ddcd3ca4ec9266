"""The schedulers that Windlass submits to. A new one is one file here and one entry in `SCHEDULERS`."""

from __future__ import annotations

from collections.abc import Mapping

from windlass.launch.schedulers import lsf, pbs, slurm
from windlass.launch.schedulers.protocol import Scheduler

SCHEDULERS: dict[str, Scheduler] = {"slurm": slurm, "pbs": pbs, "lsf": lsf}


def find_job(environ: Mapping[str, str]) -> tuple[str, str]:
    """The name of the scheduler whose job has these variables, and the job's id; `none` outside a job."""
    jobs = ((name, environ.get(one.JOB_ID, "")) for name, one in SCHEDULERS.items())
    return next(((name, job) for name, job in jobs if job), ("none", ""))


def host_name(environ: Mapping[str, str]) -> str:
    """The name that a scheduler gives this host, if it tells the ranks that it starts; else empty."""
    names = (environ.get(one.RANK.get("host", ""), "") for one in SCHEDULERS.values())
    return next(filter(None, names), "")
