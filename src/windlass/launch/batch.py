"""Batch scripts, as pure functions of a job and a site. No torch, no disk.

A script starts its command on the hosts of the job and asks for a signal ahead of its time limit.
It puts the job back into the queue when the command has exited with 75 (stopped, can be resumed)
because of that signal, once per limit. It never does so after a failure, after two starts in a row
that saved no checkpoint, or when a person or the scheduler ended the job, because a scheduler that
preempts requeues by itself. If the job starts again and its last attempt never came to an end,
hosts were lost. If the scheduler can leave hosts out, later starts do so with the hosts that
`windlass launch` names.

The training writes into `$WINDLASS_SAVED`, after each save, how many seconds before the limit it
has to be stopped (`job.report_saved`).
"""

from __future__ import annotations

import shlex

from windlass.errors import UserError
from windlass.launch.job import INDEX, Job, Site, seconds_of
from windlass.launch.schedulers import SCHEDULERS

SUBMITTED = "job.json"  # in the directory of a run or study: scheduler and id of its last job
FOLLOWING = "job-*.json"  # beside it: the job that continues one task of an array, by its number
EXIT_CODE = ".exit"  # of a run's last job, in its directory

START = """\
# An attempt that never came to its end, or ended with 69, lost a host.
open={open}
export WINDLASS_LOST_HOSTS="$open.hosts" WINDLASS_SAVED="$open.saved" WINDLASS_LIMIT={limit}
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
  [ "$new" ] || return
  printf '{{"scheduler": "%s", "job": "%s", "array": [%s]}}' {scheduler} "${{new%%;*}}" "$task" \\
    >{submitted}
}}
limit= ended= timer=
trap 'limit=1; kill -TERM $child' USR1  # the time limit is near
trap 'ended=1; kill -TERM $child' TERM USR2  # a person, or a scheduler that preempts and requeues
{timer}
wait $child; code=$?
while [ $code -gt 128 ] && kill -0 $child 2>/dev/null; do wait $child; code=$?; done
[ $code -gt 128 ] && {{ wait $child; code=$?; }}  # a signal cut the wait short, not the command
[ $timer ] && kill $timer 2>/dev/null
gone=$(cat "$open.hosts" 2>/dev/null)
idle=0  # starts in a row without a new checkpoint
[ "$WINDLASS_SAVED" -nt "$open" ] || idle=$(($(cat "$open.idle" 2>/dev/null || echo 0) + 1))
rm -f "$open" "$open.hosts" "$open.idle"
if [ ! $ended ] && [ $code = 75 ] && [ $limit ] && [ $idle = 2 ]; then
  echo "windlass: two starts in a row reached the time limit without a new checkpoint"
  echo "windlass: the job ends; give it a longer --time, or lower checkpoint.every"
  code=1
elif [ ! $ended ] && [ $code = 75 ] && [ $limit ]; then
  echo $idle >"$open.idle"
  again
elif [ ! $ended ] && [ $code = 69 ] && [ "$lost" -lt {most} ]; then
  echo "windlass: ${{gone:-a rank}} was lost; the job is started again"
  echo "$lost" >"$open"  # the next start counts this one
  again
fi
"""

# The script counts the time: the lead of a signal of the scheduler stays as it was at submission.
TIMER = """\
(while [ $SECONDS -lt $(({limit} - $(cat "$WINDLASS_SAVED" 2>/dev/null || echo {lead}))) ]; do
  sleep 5
done; kill -USR1 $$) & timer=$!
"""
# PBS signals all processes of a job, and mpiexec does not handle it.
IGNORE = "trap '' USR2  # a signal to all processes of the job must not end those without a handler"
CHECK = """\
rates={rates}
{command} >>"$rates" 2>&1; code=$?
tail -n 2 "$rates"  # the bandwidth, and whether it is enough
if [ $code != 0 ]; then
  echo "windlass: the check ended with exit code $code: $rates"
  rm -f "$open"; exit $code
fi
"""


def render(job: Job, site: Site, scheduler: str) -> str:
    """The batch script of a job, for a scheduler of `SCHEDULERS`.

    Raises UserError if the path of its logs cannot be written as an option.
    """
    chosen = SCHEDULERS[scheduler]
    if odd := sorted(set(str(job.logs)) & set(chosen.UNWRITABLE)):
        problem = f"{str(job.logs)!r} has {' and '.join(map(repr, odd))}"
        raise UserError(f"{problem}, which an option of {chosen.TITLE} cannot have: rename it")
    replaced = {chosen.option(line) for line in site.directives}
    values = chosen.options(job, site).items()
    lines = [template.format(value) for template, value in values if value]
    header = [line for line in lines if chosen.option(line) not in replaced]
    options = [f"{chosen.MARK} {line}" for line in (*header, *site.directives)]
    return "\n".join(["#!/bin/bash", *options, "", *body(job, site, scheduler), ""])


def body(job: Job, site: Site, scheduler: str) -> list[str]:
    """The shell that runs the command, passes on signals, and puts the job back into the queue."""
    chosen = SCHEDULERS[scheduler]
    folder = shlex.quote(str(job.logs))
    command = shlex.join(job.command).replace(shlex.quote(INDEX), '"$task"')
    lines = []
    if not chosen.WRITES_LOG:
        log = shlex.quote(str(job.logs / job.short_name()))
        lines.append(f'exec >>{log}_"{chosen.JOB_SHELL}.out" 2>&1')
    lines.append(f"task={chosen.task(job.array)}")
    if not job.array:
        code_file = shlex.quote(str(job.logs / EXIT_CODE))
        lines.append(f"trap {shlex.quote(f'echo $? >{code_file}')} EXIT")
    elif (done := set(range(job.array[0], job.array[-1])) - set(job.array)) and not chosen.LISTS:
        numbers = "|".join(map(str, sorted(done)))
        lines.append(f'case "$task" in {numbers}) exit 0;; esac  # cells that are done')
    lines.append(f"cd {shlex.quote(str(job.directory))} || exit 1")
    if site.modules:
        lines.append('[ "$(type -t module)" ] || . /etc/profile')
        lines.append(f"module load {shlex.join(site.modules)} || exit 1")
    exported = {"WINDLASS_JOB_DIR": str(job.logs), "WINDLASS_PER_HOST": str(job.ranks_per_node)}
    exported |= {"WINDLASS_LAUNCHER": site.launcher} if site.launcher else {}
    exported |= {"WINDLASS_PROGRAM": site.program} if site.program else {}
    exported |= site.environment
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(exported.items())]
    lines += [*site.setup, ""]
    mark = f'{folder}/".open-${{task:-run}}"'
    limit = seconds_of(job.time or site.time)
    lines += START.format(open=mark, most=job.max_restarts, limit=limit).splitlines()
    if job.before:
        rates = f'{folder}/"check_{chosen.JOB_SHELL}.out"'
        lines += CHECK.format(rates=rates, command=shlex.join(job.before)).splitlines()
    lines += [IGNORE, f"{command} &"]
    lines += WAIT.format(
        timer=TIMER.format(limit=limit, lead=job.lead) if limit else "",
        again=chosen.requeue(job),
        most=job.max_restarts,
        scheduler=scheduler,
        submitted=f'{folder}/"job-$task.json"' if job.array else f"{folder}/{SUBMITTED}",
    ).splitlines()
    return [*lines, "exit $code"]
