"""PBS (OpenPBS, PBS Pro), by its manual; no real PBS was run.

PBS does not warn a job before its time limit, has no array of one task, and lets only operators put
a job back, so a new job follows. Nothing can depend on one task of an array, so the job that
continues a task begins by the clock.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.launch.schedulers.protocol import Ask, Nodes, mpiexec_only, quoted, read_nodefile

if TYPE_CHECKING:
    from windlass.launch.job import Job, Site

TITLE, SUBMIT = "PBS", "qsub"
LAUNCHERS: tuple[str, ...] = ("mpiexec", "torchrun")
MARK, WARNS, WRITES_LOG, LISTS = "#PBS", False, False, False
JOB_SHELL = "${PBS_JOBID%%.*}"
JOB_ID, MACHINE, NODEFILE = "PBS_JOBID", "PBS_SERVER", "PBS_NODEFILE"
LOGGED: tuple[str, ...] = (JOB_ID, "PBS_QUEUE", MACHINE)
JOB_VARIABLES = r"PBS(_\w+)?|NCPUS(_\w+)?"
TASK_VARIABLES = "PBS_(TASKNUM|NODENUM|VNODENUM)"
RANK, step, own_launcher = mpiexec_only()
STATES = {
    "Q": "pending",
    "H": "held",
    "W": "waiting",
    "R": "running",
    "B": "begun",
    "S": "suspended",
    "U": "suspended",
    "E": "exiting",
}
REQUEUE = """\
new=
  qrerun "$PBS_JOBID" 2>/dev/null && return
  case $PBS_JOBID in
    *\\[*) when=(-a "$(date -d '+1 minute' +%Y%m%d%H%M.%S)");;
    *) when=(-W depend="afterany:$PBS_JOBID");;
  esac
  new=$(sed '/^#PBS -J/d' {script} | qsub "${{when[@]}}"{task})"""


def header(job: Job, site: Site) -> list[str]:
    """The script writes its own log; what PBS says before and after it goes to `<job>.OU`."""
    at_once = f"%{site.cells_at_once}" if site.cells_at_once else ""
    gpus = f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    cores = site.cores(job.gpus_per_node) * job.ranks_per_node
    memory = f":mem={job.memory_gb}gb" if job.memory_gb else ""
    select = f"-l select={job.nodes}:ncpus={cores}{gpus}{memory}:mpiprocs={job.ranks_per_node}"
    optional = {
        "-J ": f"{job.array[0]}-{job.array[-1]}{at_once}" if len(job.array) > 1 else "",
        "-l walltime=": job.time or site.time,
        "-q ": site.partition,
        "-A ": site.account,
        "-M ": site.mail,
        "-m ": "ae" if site.mail else "",
    }
    name = re.sub(r"[^\w.+-]", "_", job.name)[:15]  # of at most 15 characters without spaces
    return [
        f"-N {name}",
        select + (f":{site.constraint}" if site.constraint else ""),
        *(["-l place=scatter"] if job.nodes > 1 else []),  # else two chunks may share a host
        *(f"{name}{value}" for name, value in optional.items() if value),
        "-r y",
        "-j oe",
        f"-o {quoted(f'{job.logs}/')}",
    ]


def option(directive: str) -> str:
    return " ".join(re.split(r"[=\s]+", directive)[: 2 if directive.startswith("-l") else 1])


def task(array: Sequence[int]) -> str:
    return f"${{WINDLASS_TASK:-${{PBS_ARRAY_INDEX:-{array[0]}}}}}" if array else ""


def requeue(job: Job) -> str:
    task = ' -v WINDLASS_TASK="$task"' if job.array else ""
    return REQUEUE.format(script=shlex.quote(str(job.script)), task=task)


def submit(script: Path) -> list[str]:
    return [SUBMIT, str(script)]


def submitted(output: str) -> str:
    return output.rsplit(maxsplit=1)[-1]


def query(job: str) -> list[str]:
    return ["qstat", job]


def state(output: str) -> str:
    words = output.split()
    return STATES.get(words[-2], words[-2]) if words else ""


def cancel(job: str, state: str, ask: Ask) -> list[list[str]]:
    signal = ["qsig", "-s", "SIGUSR2"]
    if state != "begun":
        return [[*signal, job] if state in ("running", "suspended") else ["qdel", job]]
    tasks = dict[str, str]()  # id and state of each task
    for line in ask(["qstat", "-t", job]).splitlines():
        if match := re.match(r"\d+\[(\d+)\]", line):
            tasks[job.replace("[]", f"[{match[1]}]")] = line.split()[-2]
    waiting = [task for task, letter in tasks.items() if letter in "QHWT"]
    running = [task for task, letter in tasks.items() if letter in "RSU"]
    deletes = [["qdel", *waiting]] if waiting else []
    return [*deletes, *([[*signal, *running]] if running else [])]


def nodes(environ: Mapping[str, str]) -> Nodes:
    return read_nodefile(environ, JOB_ID, NODEFILE)


def restarts(environ: Mapping[str, str]) -> int:
    return 0  # PBS does not tell the job
