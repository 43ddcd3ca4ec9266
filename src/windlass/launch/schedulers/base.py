"""What Windlass asks a scheduler; each other module here answers for one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windlass.errors import UserError, plural

if TYPE_CHECKING:
    from windlass.launch.job import Job, Site

SECOND_SHELL = 'run `windlass env --save` in the job\'s own shell, and eval "$(windlass env)" here'


def run_program(command: list[str], cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of the scheduler; UserError if this machine does not have it."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    except FileNotFoundError:
        raise UserError(f"this machine lacks {command[0]}: use a login node") from None


@dataclass(frozen=True)
class Allocation:
    """The hosts of a job, and the number of ranks on each; `scheduler` is `none` outside a job."""

    scheduler: str = "none"
    job: str = ""
    hosts: tuple[str, ...] = ("localhost",)
    per_host: tuple[int, ...] = (1,)
    hostfile: str = ""  # of the schedulers that write one

    @property
    def ranks(self) -> int:
        return sum(self.per_host)

    def with_ranks(self, ranks: int = 0, per_host: int = 0) -> Allocation:
        """With the ranks of `-n` and `--per-host` (0: unchanged); UserError if these disagree."""
        if ranks and not per_host and ranks % len(self.hosts) == 0:
            per_host = ranks // len(self.hosts)
        changed = replace(self, per_host=(per_host,) * len(self.hosts)) if per_host else self
        if ranks and changed.ranks != ranks:
            hosts = plural(len(self.hosts), "host")
            each = f"{plural(changed.per_host[0], 'rank')} on each of {hosts}"
            raise UserError(f"-n {ranks} is not {each}: change -n or --per-host")
        return changed


class Scheduler(Protocol):
    """One scheduler; the defaults are for one that writes a host file and lacks a launcher."""

    TITLE: str  # as its users write it
    SUBMIT: str  # the program that submits a script
    LAUNCHER: str = "mpiexec"  # of ranks

    MARK: str  # begins a line of options in a script
    REPEATED: str = ""  # an option that a script may have several times, each for another resource
    WRITES_LOG: bool = False  # writes `<name>_<id>.out`; else the script does
    LISTS: bool = True  # an array may leave tasks out
    JOB_SHELL: str  # the job's id, in shell
    JOB_ID: str  # variable: the id of the job that a process is in
    MACHINE: str  # variable: the machine's name
    NODEFILE: str = ""  # variable: the path of the job's host file, with a line for each task
    LOGGED: tuple[str, ...]  # variables that a run keeps in environment.json
    JOB_VARIABLES: str  # regular expression: variables that another shell of the job needs
    TASK_VARIABLES: str  # regular expression: the ones among them that belong to a single task
    RANK: Mapping[str, str] = {}  # variables of a rank started by its own launcher

    def options(self, job: Job, site: Site) -> Mapping[str, object]:
        """Templates of option lines, and their values; an empty value leaves its line out."""
        ...

    def option(self, line: str) -> str:
        """The option that a line sets."""
        words = re.split(r"[=\s\"'\[]+", line)
        return " ".join(words[: 2 if words[0] == self.REPEATED else 1])

    def task(self, array: Sequence[int]) -> str: ...  # the number of the array's task, in shell
    def requeue(self, job: Job) -> str: ...  # shell; `new` holds the id of a job that follows

    def submit(self, script: Path) -> list[str]:
        return [self.SUBMIT, str(script)]

    def submitted(self, output: str) -> str:
        """The job's id."""
        return output.rsplit(maxsplit=1)[-1]

    def query(self, job: str) -> list[str]: ...
    def state(self, output: str) -> str: ...  # in words; empty: the job is over

    def tasks(self, job: str, state: str) -> Mapping[str, str]:
        """The states of a job's tasks by their ids; of the job itself if it is not an array."""
        ...

    def cancel(self, job: str, state: str) -> list[list[str]]:
        """The commands that end waiting tasks, and let running ones save."""
        ...

    def allocation(self, environ: Mapping[str, str]) -> Allocation:
        """The hosts of this shell's job and the tasks on each (empty: unknown)."""
        job = environ.get(self.JOB_ID, "")
        path = environ.get(self.NODEFILE, "")
        try:
            lines = Path(path).read_text().split()
        except OSError:
            message = f"{self.JOB_ID}={job} is set and {self.NODEFILE}={path!r} cannot be read"
            raise UserError(f"{message}: {SECOND_SHELL}") from None
        hosts = tuple(dict.fromkeys(lines))
        tasks = tuple(lines.count(host) for host in hosts)
        return Allocation(self.TITLE.lower(), job, hosts, tasks, path)

    def step(self, environ: Mapping[str, str]) -> Allocation | None:
        """The step of the scheduler's own launcher that this process is a rank of."""
        return None

    def restarts(self, environ: Mapping[str, str]) -> int:
        """Earlier starts of this job; 0 if the scheduler does not tell."""
        return 0

    def launcher(self, allocation: Allocation, environ: Mapping[str, str]) -> list[str]:
        """The words of its own launcher; empty for `mpiexec`."""
        return []


def quoted(value: str) -> str:
    """A value as the option lines of a script need it: quoted unless every character is plain."""
    if re.fullmatch(r"[\w./%:+=@-]*", value):
        return value
    return '"{}"'.format(value.replace('"', '\\"'))
