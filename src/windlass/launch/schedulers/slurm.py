"""SLURM. It warns a job before its time limit, requeues it under its id, and excludes hosts."""

from __future__ import annotations

import contextlib
import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.errors import UserError
from windlass.launch.schedulers.base import (
    SECOND_SHELL,
    Allocation,
    Scheduler,
    quoted,
    run_program,
)

if TYPE_CHECKING:
    from windlass.launch.job import Job, Site

INTERACTIVE_STEP = 0xFFFF_FFF0  # from here on, steps that no srun of the user's started

# Later starts leave out the lost hosts if enough others remain. No signal of a requeue ends this.
REQUEUE = """\
trap '' TERM; new=
  out=$(squeue -h -j {id} -o %x)
  more=$out${{out:+,}}$gone
  [ "$gone" ] && sbatch --test-only --exclude="$more"{task} {script} 2>/dev/null && out=$more
  if scontrol requeue {id}; then
    [ "$out" ] && scontrol update JobId={id} ExcNodeList="$out"
  else
    new=$(sbatch --parsable --dependency=afterany:{id}${{out:+ --exclude="$out"}}{task} {script})
  fi"""


class SLURM(Scheduler):
    TITLE = "SLURM"
    SUBMIT = "sbatch"
    MARK = "#SBATCH"
    LAUNCHER = "srun"
    WRITES_LOG = True
    JOB_SHELL = "$SLURM_JOB_ID"
    JOB_ID = "SLURM_JOB_ID"
    MACHINE = "SLURM_CLUSTER_NAME"
    LOGGED = (JOB_ID, "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION", MACHINE)
    JOB_VARIABLES = r"SLURMD?(_\w+)?"
    TASK_VARIABLES = (
        r"SLURM_(PROCID|LOCALID|NODEID|STEP\w*|TASK_PID|GTIDS|SRUN_COMM\w*|UMASK|CPU_BIND\w*)"
    )
    RANK: Mapping[str, str] = {
        "rank": "SLURM_PROCID",
        "world": "SLURM_STEP_NUM_TASKS SLURM_NTASKS",
        "local_rank": "SLURM_LOCALID",
        "node": "SLURM_NODEID",
        "nodes": "SLURM_STEP_NUM_NODES SLURM_NNODES SLURM_JOB_NUM_NODES",
        "attempt": "SLURM_RESTART_COUNT",
        "job": JOB_ID,
        "step": "SLURM_STEP_ID",
        "host": "SLURMD_NODENAME",
    }

    def options(self, job: Job, site: Site) -> Mapping[str, object]:
        tasks = ",".join(map(str, job.array))
        output = "%x_%A_%a.out" if tasks else "%x_%j.out"
        return {
            "--job-name={}": job.short_name(),
            "--nodes={}": job.nodes,
            "--ntasks-per-node={}": job.ranks_per_node,
            "--cpus-per-task={}": site.cores(job.gpus_per_node),
            "--array={}": tasks,
            "--gpus-per-node={}": job.gpus_per_node,
            "--mem={}G": job.memory_gb,
            "--time={}": job.time or site.time,
            "--partition={}": site.partition,
            "--account={}": site.account,
            "--constraint={}": site.constraint,
            "--output={}": quoted(f"{str(job.logs).replace('%', '%%')}/{output}"),
            "--open-mode=append": True,
            "--requeue": True,
            "--signal=B:USR1@{}": job.lead,
        }

    def option(self, line: str) -> str:
        name = super().option(line)
        return "--mem" if name.startswith("--mem-per-") else name  # SLURM takes one of the three

    def task(self, array: Sequence[int]) -> str:
        return "$SLURM_ARRAY_TASK_ID"

    def requeue(self, job: Job) -> str:
        task = ' --array="$SLURM_ARRAY_TASK_ID"' if job.array else ""
        return REQUEUE.format(id=self.JOB_SHELL, task=task, script=shlex.quote(str(job.script)))

    def submit(self, script: Path) -> list[str]:
        return [self.SUBMIT, "--parsable", str(script)]

    def submitted(self, output: str) -> str:
        # `;cluster` follows if there are several clusters
        return super().submitted(output).partition(";")[0]

    def query(self, job: str) -> list[str]:
        return ["squeue", "--noheader", "-o", "%T %r", "-j", job]

    def state(self, output: str) -> str:
        """An array is running if one task is; else the first task counts, and why it waits."""
        tasks = [line.split() for line in output.splitlines() if line.strip()]
        if not tasks:
            return ""
        words = next((task for task in tasks if task[0] == "RUNNING"), tasks[0])
        why = f" ({words[1]})" if words[0] == "PENDING" and words[1] != "None" else ""
        return words[0].lower() + why

    def tasks(self, job: str, state: str) -> Mapping[str, str]:
        lines = run_program(
            ["squeue", "--noheader", "--array", "-o", "%i %T", "-j", job]
        ).stdout.splitlines()
        return {words[0]: words[1].lower() for line in lines if len(words := line.split()) == 2}

    def cancel(self, job: str, state: str) -> list[list[str]]:
        states = set(run_program(["squeue", "--noheader", "-o", "%T", "-j", job]).stdout.split())
        running = states - {"PENDING", "COMPLETING"}
        signal = ["scancel", "--batch", "--signal=USR2", job]
        return [["scancel", "--state=PENDING", job], *([signal] if running else [])]

    def allocation(self, environ: Mapping[str, str]) -> Allocation:
        job = environ.get(self.JOB_ID, "")
        names = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST", "")
        if not names:
            problem = f"{self.JOB_ID}={job} is set, SLURM_JOB_NODELIST is not"
            raise UserError(f"{problem}: {SECOND_SHELL}")
        tasks = environ.get("SLURM_TASKS_PER_NODE", "") if "SLURM_NTASKS" in environ else ""
        return Allocation("slurm", job, expand_hosts(names), expand_counts(tasks))

    def step(self, environ: Mapping[str, str]) -> Allocation | None:
        """The step, if srun started this process as one of several tasks."""
        # A batch job's shell has a rank and tasks too, but no step. An interactive shell is a step
        # of one task, whose number is near 2**32.
        number = environ.get("SLURM_STEP_ID", "")
        tasks = _first(environ, *self.RANK["world"].split()) or "1"
        is_step = number.isdigit() and int(number) < INTERACTIVE_STEP
        if "SLURM_PROCID" not in environ or not is_step or tasks == "1":
            return None
        counts = expand_counts(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
        names = _first(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
        hosts: tuple[str, ...] = ()
        with contextlib.suppress(UserError):  # only a process without MASTER_ADDR needs them
            hosts = expand_hosts(names)
        return Allocation("slurm", environ.get(self.JOB_ID, ""), hosts, counts)

    def restarts(self, environ: Mapping[str, str]) -> int:
        return int(environ.get("SLURM_RESTART_COUNT") or 0)

    def launcher(self, allocation: Allocation, environ: Mapping[str, str]) -> list[str]:
        # Ranks end one after another, rank 0 last, so srun ends none of them. Ranks notice a lost
        # one, and `launch` ends the step after a failure.
        per_host = allocation.per_host
        equal = len(set(per_host)) == 1
        spread = f"--ntasks-per-node={per_host[0]}" if equal else "--distribution=block"
        words = ["srun", f"--nodes={len(allocation.hosts)}", f"--ntasks={allocation.ranks}", spread]
        if given := environ.get("SLURM_CPUS_PER_TASK"):  # srun 22.05 and later ignores the job's
            words.append(f"--cpus-per-task={given}")
        return [*words, "--kill-on-bad-exit=0", "--wait=0"]


def _first(environ: Mapping[str, str], *names: str) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def expand_hosts(text: str) -> tuple[str, ...]:
    """The names in a short list: `a[08-10,12],b` is a08, a09, a10, a12, b."""
    hosts = list[str]()
    for item in re.findall(r"(?:[^,\s\[]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", item)  # text and ranges in turn
        choices = [_numbers(part, text) if i % 2 else [part] for i, part in enumerate(parts)]
        hosts += ["".join(choice) for choice in itertools.product(*choices)]
    return tuple(hosts)


def _numbers(ranges: str, text: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not (first.isdigit() and (last or first).isdigit()):
            raise UserError(f"{text!r} is not a list of hosts as SLURM writes it")
        span = range(int(first), int(last or first) + 1)
        numbers += [f"{number:0{len(first)}}" for number in span]
    return numbers


def expand_counts(text: str) -> tuple[int, ...]:
    """The numbers of tasks per node: `4(x2),1` is 4, 4, 1."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return tuple(int(count) for count, times in pairs for _ in range(int(times or 1)))
