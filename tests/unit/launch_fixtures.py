"""Jobs, their batch scripts, and a shell that runs them."""

import os
import re
import subprocess
from pathlib import Path

from helpers import wait_for
from windlass.launch.batch import render
from windlass.launch.job import Job, Site

SAVES = "trap 'sleep 0.3; touch saved; exit 75' TERM; touch up; while :; do sleep 0.05; done"


def job_of(folder: Path, *command: str, **more) -> Job:
    return Job("run", list(command), folder, folder / "logs", **more)


def header(script: str) -> list[str]:
    """The option lines of a script, without the scheduler's mark."""
    return re.findall(r"^#(?:SBATCH|PBS) (.*)$", script, re.MULTILINE)


def run_job(job: Job, scheduler: str, **environ: str) -> subprocess.Popen:
    """Start a job's script as bash; waits for the file `up` if its command makes one."""
    job.logs.mkdir(exist_ok=True)
    job.script.write_text(render(job, Site(), scheduler))
    process = subprocess.Popen(
        ["bash", str(job.script)], env=os.environ | environ, start_new_session=True
    )
    if "touch up" in job.command[-1]:
        wait_for((job.directory / "up").exists, 20)
    return process
