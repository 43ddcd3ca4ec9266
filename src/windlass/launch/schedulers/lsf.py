"""LSF, by the manual of IBM Spectrum LSF 10.1 (bsub, bjobs, bkill); not run on any machine.

A job goes back into the queue, under the same id, when its script ends with `REQUEUE_CODE` (`-Q`).
Tasks of an array count from 1, and a cell of a study from 0. LSF reads a script from stdin.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.launch.schedulers.base import Ask, Scheduler, quoted

if TYPE_CHECKING:
    from windlass.launch.job import Job, Site

REQUEUE_CODE = 120


class LSF(Scheduler):
    TITLE, SUBMIT, MARK, REPEATED = "LSF", "bsub", "#BSUB", "-R"
    JOB_SHELL = "${LSB_JOBID}_${LSB_JOBINDEX:-0}"
    JOB_ID, MACHINE, NODEFILE = "LSB_JOBID", "LSF_CLUSTER_NAME", "LSB_DJOB_HOSTFILE"
    LOGGED = (JOB_ID, "LSB_JOBINDEX", "LSB_QUEUE", MACHINE)
    JOB_VARIABLES = r"(LSB|LSF|LS)_\w+"
    TASK_VARIABLES = "LS_JOBPID"
    STATES: Mapping[str, str] = {
        "PEND": "pending",
        "WAIT": "waiting",
        "RUN": "running",
        "PSUSP": "held",
        "USUSP": "suspended",
        "SSUSP": "suspended",
        "UNKWN": "unreachable",
        "DONE": "",
        "EXIT": "",
    }
    DELETE, SIGNAL = ("bkill",), ("bkill", "-s", "USR2")

    def options(self, job: Job, site: Site) -> Mapping[str, object]:
        """The script writes its own log; LSF's report of the job goes to `<job>.OU`."""
        tasks = ",".join(str(number + 1) for number in job.array)
        return {
            '-J "{}"': job.short_name() + (f"[{tasks}]{site.at_once()}" if tasks else ""),
            "-n {}": job.nodes * job.ranks_per_node,
            '-R "span[ptile={}]"': job.ranks_per_node,
            '-R "affinity[core({})]"': site.cores(job.gpus_per_node),
            '-R "select[{}]"': site.constraint,
            '-gpu "num={}"': job.gpus_per_node,
            # of a host; of a task if the site has RESOURCE_RESERVE_PER_TASK
            '-R "rusage[mem={}GB]"': job.memory_gb,
            '-W "{}"': (job.time or site.time).rpartition(":")[0],  # hours and minutes
            '-q "{}"': site.partition,
            '-P "{}"': site.account,
            '-u "{}"': site.mail,
            "-N": site.mail,
            "-r": True,
            '-Q "{}"': REQUEUE_CODE,
            "-o {}": quoted(f"{job.logs}/%J_%I.OU"),
        }

    def task(self, array: Sequence[int]) -> str:
        return "$((LSB_JOBINDEX - 1))" if array else ""

    def requeue(self, job: Job) -> str:
        return f"exit {REQUEUE_CODE}"

    def submit(self, script: Path) -> list[str]:
        return ["sh", "-c", f"{self.SUBMIT} <{shlex.quote(str(script))}"]

    def submitted(self, output: str) -> str:
        match = re.search(r"Job <(\d+)>", output)
        return match[1] if match else output.strip()

    def query(self, job: str) -> list[str]:
        return ["bjobs", "-noheader", "-o", "stat", job]

    def state(self, output: str) -> str:
        """An array is running if one task is; else the first task that is not over counts."""
        states = [self.STATES.get(word, word.lower()) for word in output.split()]
        return "running" if "running" in states else next(filter(None, states), "")

    def tasks(self, job: str, state: str, ask: Ask) -> Mapping[str, str]:
        lines = ask(["bjobs", "-noheader", "-o", "jobindex stat", job]).splitlines()
        pairs = (line.split() for line in lines)
        return {
            job if index in ("0", "-") else f"{job}[{index}]": self.STATES.get(word, "")
            for index, word in pairs
        }

    def task_number(self, task: str) -> int | None:
        number = super().task_number(task)
        return None if number is None else number - 1

    def restarts(self, environ: Mapping[str, str]) -> int:
        return int(environ.get("LSB_RESTART") == "Y")
