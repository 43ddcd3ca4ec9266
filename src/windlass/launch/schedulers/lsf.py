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

from windlass.launch.schedulers.protocol import Ask, Nodes, mpiexec_only, quoted, read_nodefile

if TYPE_CHECKING:
    from windlass.launch.job import Job, Site

TITLE, SUBMIT = "LSF", "bsub"
LAUNCHERS: tuple[str, ...] = ("mpiexec", "torchrun")
MARK, WARNS, WRITES_LOG, LISTS = "#BSUB", False, False, True
JOB_SHELL = "${LSB_JOBID}_${LSB_JOBINDEX:-0}"
JOB_ID, MACHINE, NODEFILE = "LSB_JOBID", "LSF_CLUSTER_NAME", "LSB_DJOB_HOSTFILE"
LOGGED: tuple[str, ...] = (JOB_ID, "LSB_JOBINDEX", "LSB_QUEUE", MACHINE)
JOB_VARIABLES = r"(LSB|LSF|LS)_\w+"
TASK_VARIABLES = "LS_JOBPID"
RANK, step, own_launcher = mpiexec_only()
REQUEUE_CODE = 120
STATES = {
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


def header(job: Job, site: Site) -> list[str]:
    """The script writes its own log; LSF's report of the job goes to `<job>.OU`."""
    at_once = f"%{site.cells_at_once}" if site.cells_at_once else ""
    tasks = f"[{','.join(str(number + 1) for number in job.array)}]{at_once}" if job.array else ""
    time, cores = (job.time or site.time).rpartition(":")[0], site.cores(job.gpus_per_node)
    optional = {
        "-gpu": f"num={job.gpus_per_node}" if job.gpus_per_node else "",
        # of a host; of a task if the site has RESOURCE_RESERVE_PER_TASK
        "-R": f"rusage[mem={job.memory_gb}GB]" if job.memory_gb else "",
        "-W": time,  # hours and minutes
        "-q": site.partition,
        "-P": site.account,
        "-u": site.mail,
    }
    name = re.sub(r"[^\w.+-]", "_", job.name)
    return [
        f'-J "{name}{tasks}"',
        f"-n {job.nodes * job.ranks_per_node}",
        f'-R "span[ptile={job.ranks_per_node}]"',
        f'-R "affinity[core({cores})]"',
        *([f'-R "select[{site.constraint}]"'] if site.constraint else []),
        *(f'{name} "{value}"' for name, value in optional.items() if value),
        *(["-N"] if site.mail else []),
        "-r",
        f'-Q "{REQUEUE_CODE}"',
        f"-o {quoted(f'{job.logs}/%J_%I.OU')}",
    ]


def option(directive: str) -> str:
    words = re.split(r"[\s\"'\[]+", directive)
    return " ".join(words[: 2 if words[0] == "-R" else 1])


def task(array: Sequence[int]) -> str:
    return "$((LSB_JOBINDEX - 1))" if array else ""


def requeue(job: Job) -> str:
    return f"exit {REQUEUE_CODE}"


def submit(script: Path) -> list[str]:
    return ["sh", "-c", f"{SUBMIT} <{shlex.quote(str(script))}"]


def submitted(output: str) -> str:
    match = re.search(r"Job <(\d+)>", output)
    return match[1] if match else output.strip()


def query(job: str) -> list[str]:
    return ["bjobs", "-noheader", "-o", "stat", job]


def state(output: str) -> str:
    """An array is running if one task is; else the first task that is not over counts."""
    states = [STATES.get(word, word.lower()) for word in output.split()]
    return "running" if "running" in states else next(filter(None, states), "")


def cancel(job: str, state: str, ask: Ask) -> list[list[str]]:
    waiting, running = list[str](), list[str]()
    for line in ask(["bjobs", "-noheader", "-o", "jobindex stat", job]).splitlines():
        index, word = line.split()
        name = f"{job}[{index}]" if index not in ("0", "-") else job
        if STATES.get(word) in ("running", "suspended"):
            running.append(name)
        elif STATES.get(word):
            waiting.append(name)
    kills = [["bkill", *waiting]] if waiting else []
    return [*kills, *([["bkill", "-s", "USR2", *running]] if running else [])]


def nodes(environ: Mapping[str, str]) -> Nodes:
    return read_nodefile(environ, JOB_ID, NODEFILE)


def restarts(environ: Mapping[str, str]) -> int:
    return int(environ.get("LSB_RESTART") == "Y")
