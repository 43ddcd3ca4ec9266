"""PBS (OpenPBS, PBS Pro), by its manual; no real PBS was run.

PBS does not warn a job before its time limit, rejects an array of one task, and lets only operators
put a job back, so a new job follows. Nothing can depend on one task of an array, so the job that
continues a task begins by the clock.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from windlass.launch.schedulers.base import Scheduler, quoted, run_program

if TYPE_CHECKING:
    from windlass.launch.job import Job, Site

REQUEUE = """\
new=
  qrerun "$PBS_JOBID" 2>/dev/null && return
  case $PBS_JOBID in
    *\\[*) when=(-a "$(date -d '+1 minute' +%Y%m%d%H%M.%S)");;
    *) when=(-W depend="afterany:$PBS_JOBID");;
  esac
  new=$(sed '/^#PBS -J/d' {script} | qsub "${{when[@]}}"{task})"""


class PBS(Scheduler):
    TITLE = "PBS"
    SUBMIT = "qsub"
    MARK = "#PBS"
    REPEATED = "-l"
    LISTS = False
    JOB_SHELL = "${PBS_JOBID%%.*}"
    JOB_ID = "PBS_JOBID"
    MACHINE = "PBS_SERVER"
    NODEFILE = "PBS_NODEFILE"
    LOGGED = (JOB_ID, "PBS_QUEUE", MACHINE)
    JOB_VARIABLES = r"PBS(_\w+)?|NCPUS(_\w+)?"
    TASK_VARIABLES = "PBS_(TASKNUM|NODENUM|VNODENUM)"
    STATES: Mapping[str, str] = {  # in our words; empty: over
        "Q": "pending",
        "H": "held",
        "W": "waiting",
        "R": "running",
        "B": "begun",
        "S": "suspended",
        "U": "suspended",
        "E": "exiting",
        "X": "",
    }

    def options(self, job: Job, site: Site) -> Mapping[str, object]:
        """The script writes its own log; what PBS says before and after it goes to `<job>.OU`."""
        chunk = {
            "ncpus": site.cores(job.gpus_per_node) * job.ranks_per_node,
            "ngpus": job.gpus_per_node,
            "mem": job.memory_gb and f"{job.memory_gb}gb",
            "mpiprocs": job.ranks_per_node,
        }
        select = [str(job.nodes), *(f"{name}={value}" for name, value in chunk.items() if value)]
        tasks = f"{job.array[0]}-{job.array[-1]}" if len(job.array) > 1 else ""
        return {
            "-N {}": job.short_name()[:15],  # PBS takes no longer one
            "-l select={}": ":".join([*select, *filter(None, [site.constraint])]),
            "-l place=scatter": job.nodes > 1,  # else two chunks may share a host
            "-J {}": tasks,
            "-l walltime={}": job.time or site.time,
            "-q {}": site.partition,
            "-A {}": site.account,
            "-r y": True,
            "-j oe": True,
            "-o {}": quoted(f"{job.logs}/"),
        }

    def task(self, array: Sequence[int]) -> str:
        return f"${{WINDLASS_TASK:-${{PBS_ARRAY_INDEX:-{array[0]}}}}}" if array else ""

    def requeue(self, job: Job) -> str:
        task = ' -v WINDLASS_TASK="$task"' if job.array else ""
        return REQUEUE.format(script=shlex.quote(str(job.script)), task=task)

    def query(self, job: str) -> list[str]:
        return ["qstat", job]

    def state(self, output: str) -> str:
        words = output.split()
        return self.STATES.get(words[-2], words[-2]) if words else ""

    def tasks(self, job: str, state: str) -> Mapping[str, str]:
        if state != "begun":
            return {job: state}
        lines = run_program(["qstat", "-t", job]).stdout.splitlines()
        numbers = ((re.match(r"\d+\[(\d+)\]", line), line) for line in lines)
        return {job.replace("[]", f"[{n[1]}]"): self.state(line) for n, line in numbers if n}

    def cancel(self, job: str, state: str) -> list[list[str]]:
        tasks = self.tasks(job, state).items()
        running = [task for task, word in tasks if word in ("running", "suspended")]
        no_delete = ("", "exiting", "running", "suspended")
        waiting = [task for task, word in tasks if word not in no_delete]
        deletes = [["qdel", *waiting]] if waiting else []
        return deletes + ([["qsig", "-s", "SIGUSR2", *running]] if running else [])
