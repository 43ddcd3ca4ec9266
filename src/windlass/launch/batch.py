"""Batch scripts for SLURM and PBS, as pure functions of a job and of what a site wants. No torch, no disk.

A script starts its command on the hosts of the job, asks for a signal ahead of its time limit, and puts the job back into
the queue when the command has exited with 75 (stopped, everything saved) for that reason. It does so once per limit, never
after a failure, and never when a person or the scheduler ended the job (`scancel`, `qdel`, preemption: a scheduler that
preempts requeues by itself). Where the job starts again and its last attempt never came to an end, hosts were lost. Those
that `windlass launch` names are left out from then on (SLURM; PBS has no way to ask for any host but one).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

SCHEDULERS = {"slurm": "sbatch", "pbs": "qsub"}
TIME = r"\d+:[0-5]\d:[0-5]\d"
SUBMITTED = "job.json"  # in the directory of a run or study: scheduler and id of its last job
FOLLOWING = "job-*.json"  # beside it: the same of a job that goes on with one task of an array, by the task's number
EXIT_CODE = ".exit"  # of a run's last job, in its directory
GRACE_SECONDS = 120  # between the signal and the time limit
GPU_RANK_CORES = 4  # Python, autograd, NCCL's proxy and the thread that saves; small GPU nodes have no more for a GPU
PER_HOST = (
    "WINDLASS_PER_HOST"  # set by a script: the ranks of a host, which `windlass launch` starts
)


class Site(BaseModel):
    """What a site wants of every job: the file `~/.config/windlass/site.toml`, or `--site FILE`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    scheduler: str = Field("", pattern="^(slurm|pbs)?$")
    """`slurm` or `pbs`; empty: the one that is installed."""
    partition: str = ""
    """The partition (SLURM) or queue (PBS)."""
    account: str = ""
    """What the time is charged to."""
    time: str = Field("", pattern=f"^({TIME})?$")
    """Time limit where `--time` gives none, as HH:MM:SS."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of a node: the default of `--gpus-per-node`, and the most that it may be; 0: not given."""
    cpus_per_rank: int = Field(0, ge=0)
    """Cores for each rank; 0: 4 for a rank with a GPU, else 1."""
    memory_per_rank: int = Field(-1, ge=-1)
    """GB of the host's memory for each rank; -1: computed from the recipe; 0: the job does not ask for memory."""
    constraint: str = ""
    """Features of the nodes: SLURM's `--constraint`, or resources that PBS adds to each chunk (`system=polaris`)."""
    mail: str = ""
    """Where the scheduler mails when a job ends or fails."""
    directives: list[Annotated[str, Field(pattern="^-")]] = []
    """More options of the scheduler, as after `#SBATCH` or `#PBS`; one of ours with the same name gives way."""
    modules: list[str] = []
    """Modules to load."""
    setup: list[str] = []
    """Lines of shell to run first, as `source ~/venv/bin/activate`."""
    environment: dict[str, str] = {}
    """Variables to export. No secrets: the script is a file."""
    launcher: str = Field("", pattern="^(srun|mpiexec|torchrun)?$")
    """What starts the ranks: `srun`, `mpiexec` or `torchrun` (one on each host); empty: `srun` under SLURM, `mpiexec` under PBS."""
    cells_at_once: int = Field(0, ge=0)
    """Most cells of a study that run at the same time (the limit of an array); 0: as many as the scheduler starts."""
    scratch: str = ""
    """Directory in which the jobs of runs work and below which relative run directories are; empty: where `submit` is
    called, which is also where the jobs of studies work."""

    def cores(self, gpus: int) -> int:
        """The cores of a rank on hosts with so many GPUs."""
        return self.cpus_per_rank or (GPU_RANK_CORES if gpus else 1)


@dataclass(frozen=True)
class Job:
    """What is to be submitted; paths are absolute."""

    name: str
    command: Sequence[str]  # run once, in the job's shell; `windlass launch -- …` starts all ranks
    directory: Path  # where it is run
    logs: Path  # the directory of `<name>_<id>.out`
    script: Path  # where the script will be
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    memory_gb: int = 0  # of a host; 0: the scheduler's default
    time: str = ""  # HH:MM:SS; empty: the site's
    array: Sequence[int] = ()  # task numbers, which the command gets as INDEX
    before: Sequence[
        str
    ] = ()  # a check that has to succeed first, with a log of its own; its exit code ends the job
    after: Sequence[Sequence[str]] = ()  # commands at the end, whose failures change nothing
    max_restarts: int = 3  # after lost hosts


INDEX = "{index}"  # in a job's command: the number of the array's task


def render(job: Job, site: Site, scheduler: str) -> str:
    """The batch script of a job for `slurm` or `pbs`."""
    header = slurm_header(job, site) if scheduler == "slurm" else pbs_header(job, site)
    mark = "#SBATCH" if scheduler == "slurm" else "#PBS"

    def option(text: str) -> str:  # what it sets: `--time`, `-q`, or `-l select`
        name = " ".join(re.split(r"[=\s]+", text)[: 2 if text.startswith("-l") else 1])
        return "--mem" if name.startswith("--mem-per-") else name  # SLURM takes one of the three

    replaced = {option(text) for text in site.directives}
    lines = [text for text in header if option(text) not in replaced] + site.directives
    return "\n".join(
        ["#!/bin/bash", *(f"{mark} {text}" for text in lines), "", *body(job, site, scheduler), ""]
    )


def slurm_header(job: Job, site: Site) -> list[str]:
    """The options of `sbatch`, one a line."""
    output = "%x_%A_%a.out" if job.array else "%x_%j.out"
    at_once = f"%{site.cells_at_once}" if site.cells_at_once else ""
    optional = {
        "--array": f"{','.join(map(str, job.array))}{at_once}" if job.array else "",
        "--gpus-per-node": job.gpus_per_node,
        "--mem": f"{job.memory_gb}G" if job.memory_gb else "",
        "--time": job.time or site.time,
        "--partition": site.partition,
        "--account": site.account,
        "--constraint": site.constraint,
        "--mail-user": site.mail,
        "--mail-type": "END,FAIL" if site.mail else "",
    }
    return [
        f"--job-name={_quoted(job.name)}",
        f"--nodes={job.nodes}",
        f"--ntasks-per-node={job.ranks_per_node}",
        f"--cpus-per-task={site.cores(job.gpus_per_node)}",
        *(f"{name}={value}" for name, value in optional.items() if value),
        f"--output={_quoted(f'{job.logs}/{output}')}",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:USR1@{GRACE_SECONDS}",
    ]


def _quoted(value: str) -> str:
    """A value as sbatch and qsub read it."""
    return f'"{value}"' if re.search(r"\s", value) else value


def pbs_header(job: Job, site: Site) -> list[str]:
    """The options of `qsub`, one a line. PBS has no array of one task, and names of at most 15 characters without spaces.

    The script writes its log itself, from its first line on. What PBS says before and after it goes to `<job>.OU` beside.
    """
    at_once = f"%{site.cells_at_once}" if site.cells_at_once else ""
    gpus = f":ngpus={job.gpus_per_node}" if job.gpus_per_node else ""
    cores = site.cores(job.gpus_per_node) * job.ranks_per_node
    memory = f":mem={job.memory_gb}gb" if job.memory_gb else ""
    select = f"-l select={job.nodes}:ncpus={cores}{gpus}{memory}:mpiprocs={job.ranks_per_node}"
    optional = {
        "-J": f"{job.array[0]}-{job.array[-1]}{at_once}" if len(job.array) > 1 else "",
        "-l walltime=": job.time or site.time,
        "-q": site.partition,
        "-A": site.account,
        "-M": site.mail,
        "-m": "ae" if site.mail else "",
    }
    given = [
        f"{name}{'' if name.endswith('=') else ' '}{value}"
        for name, value in optional.items()
        if value
    ]
    select += f":{site.constraint}" if site.constraint else ""
    scatter = (
        ["-l place=scatter"] if job.nodes > 1 else []
    )  # else PBS may put two chunks on one host
    name = re.sub(r"[^\w.+-]", "_", job.name)[:15]
    return [
        f"-N {name}",
        select,
        *scatter,
        *given,
        "-r y",
        "-j oe",
        f"-o {_quoted(f'{job.logs}/')}",
    ]


START = """\
# An attempt that never came to its end, or ended with 69, lost a host.
open={open}
export WINDLASS_LOST_HOSTS="$open.hosts"
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
  [ ! "$new" ] || printf '{{"scheduler": "%s", "job": "%s"}}' {scheduler} "${{new%%;*}}" >{submitted}
}}
limit= ended= timer=
trap 'limit=1; kill -TERM $child' USR1  # the time limit is near
trap 'ended=1; kill -TERM $child' TERM USR2  # ended by a person, or by a scheduler that starts it again by itself
{timer}
wait $child; code=$?
while [ $code -gt 128 ] && kill -0 $child 2>/dev/null; do wait $child; code=$?; done
[ $code -gt 128 ] && {{ wait $child; code=$?; }}  # a signal cut the wait short, not the command
[ $timer ] && kill $timer 2>/dev/null
gone=$(cat "$open.hosts" 2>/dev/null)
rm -f "$open" "$open.hosts"
if [ ! $ended ] && [ $code = 75 ] && [ $limit ]; then
  again
elif [ ! $ended ] && [ $code = 69 ] && [ "$lost" -lt {most} ]; then
  echo "windlass: ${{gone:-a rank}} was lost; the job is started again"
  echo "$lost" >"$open"  # the next start counts this one
  again
fi
"""

# A later start leaves out the hosts that were lost, where enough others are left; and no signal of a requeue ends this.
SLURM_AGAIN = """\
trap '' TERM; new=
  out=$(squeue -h -j {id} -o %x)
  more=$out${{out:+,}}$gone
  [ "$gone" ] && sbatch --test-only --exclude="$more"{task} {script} 2>/dev/null && out=$more
  if scontrol requeue {id}; then
    [ "$out" ] && scontrol update JobId={id} ExcNodeList="$out"
  else
    new=$(sbatch --parsable --dependency=afterany:{id}${{out:+ --exclude="$out"}}{task} {script})
  fi"""


# PBS lets only its operators put a job back, so a new job follows. Nothing can depend on one task of an array (qsub refuses
# it), so the new job of a task begins by the clock. It is not an array.
PBS_AGAIN = """\
new=
  qrerun "$PBS_JOBID" 2>/dev/null && return
  case $PBS_JOBID in
    *\\[*) when=(-a "$(date -d '+1 minute' +%Y%m%d%H%M.%S)");;
    *) when=(-W depend="afterany:$PBS_JOBID");;
  esac
  new=$(sed '/^#PBS -J/d' {script} | qsub "${{when[@]}}"{task})"""

CHECK = """\
rates={rates}
{command} >>"$rates" 2>&1; code=$?
tail -n 2 "$rates"  # the bandwidth, and whether it is enough
[ $code = 0 ] || {{ echo "windlass: the check ended with exit code $code: $rates"; rm -f "$open"; exit $code; }}
"""


def body(job: Job, site: Site, scheduler: str) -> list[str]:
    """The shell that runs the command, passes on signals, and puts the job back into the queue."""
    slurm, script = scheduler == "slurm", shlex.quote(str(job.script))
    job_id = "$SLURM_JOB_ID" if slurm else "${PBS_JOBID%%.*}"
    pbs_index = f"${{WINDLASS_TASK:-${{PBS_ARRAY_INDEX:-{job.array[0]}}}}}" if job.array else ""
    index = "$SLURM_ARRAY_TASK_ID" if slurm else pbs_index
    command, *after = (
        shlex.join(one).replace(shlex.quote(INDEX), '"$task"') for one in (job.command, *job.after)
    )
    left_out = (
        set(range(job.array[0], job.array[-1])) - set(job.array)
        if job.array and not slurm
        else set()
    )
    limit = seconds(job.time or site.time)
    folder = shlex.quote(str(job.logs))
    log = f'{shlex.quote(str(job.logs / job.name))}_"{job_id}.out"'
    if slurm:
        task = ' --array="$SLURM_ARRAY_TASK_ID"' if job.array else ""
        again = SLURM_AGAIN.format(id=job_id, task=task, script=script)
    else:
        again = PBS_AGAIN.format(
            script=script, task=' -v WINDLASS_TASK="$task"' if job.array else ""
        )
    check = (
        CHECK.format(rates=f'{folder}/"check_{job_id}.out"', command=shlex.join(job.before))
        if job.before
        else ""
    )
    submitted = f'{folder}/"job-$task.json"' if job.array else f"{folder}/{SUBMITTED}"
    launcher = {"WINDLASS_LAUNCHER": site.launcher} if site.launcher else {}
    ours = {"WINDLASS_JOB_DIR": str(job.logs), PER_HOST: str(job.ranks_per_node)}
    exported = {**ours, **launcher, **site.environment}
    done = "|".join(map(str, sorted(left_out)))
    return [
        *([] if slurm else [f"exec >>{log} 2>&1"]),
        f"task={index}",
        *(
            []
            if job.array
            else [
                "trap "
                + shlex.quote(f"echo $? >{shlex.quote(str(job.logs / EXIT_CODE))}")
                + " EXIT"
            ]
        ),
        *([f'case "$task" in {done}) exit 0;; esac  # cells that are done'] if left_out else []),
        f"cd {shlex.quote(str(job.directory))} || exit 1",
        *(
            [
                '[ "$(type -t module)" ] || . /etc/profile',
                f"module load {shlex.join(site.modules)} || exit 1",
            ]
            if site.modules
            else []
        ),
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(exported.items())),
        *site.setup,
        "",
        *START.format(open=f'{folder}/".open-${{task:-run}}"', most=job.max_restarts).splitlines(),
        *check.splitlines(),
        "trap '' USR2  # PBS signals all processes of a job: one without a handler, as mpiexec, must not end by it",
        f"{command} &",
        *WAIT.format(
            timer=f"(sleep $(({max(1, limit - GRACE_SECONDS)} - SECONDS)); kill -USR1 $$) 2>/dev/null & timer=$!"
            if limit and not slurm
            else "",
            again=again,
            most=job.max_restarts,
            scheduler=scheduler,
            submitted=submitted,
        ).splitlines(),
        *(
            f"[ $code = 75 ] || [ $code = 69 ] || {one}" for one in after
        ),  # at its end, not a restart
        "exit $code",
    ]


def seconds(time: str) -> int:
    """HH:MM:SS in seconds; 0 for none."""
    hours, minutes, rest = map(int, (time or "0:0:0").split(":"))
    return 3600 * hours + 60 * minutes + rest
