"""The questions that Windlass asks a scheduler; each module beside this one answers for one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from windlass.errors import UserError

if TYPE_CHECKING:
    from windlass.launch.job import Job, Site

GRACE_SECONDS = 120  # between the signal and the time limit
SECOND_SHELL = 'run `windlass env --save` in the job\'s own shell, and eval "$(windlass env)" here'
Ask = Callable[[list[str]], str]  # runs a command and returns its output


@dataclass(frozen=True)
class Nodes:
    """The hosts of a job or step, its tasks on each (empty: unknown), and the job's host file."""

    hosts: Sequence[str]
    tasks: Sequence[int]
    file: str = ""


Step = Callable[[Mapping[str, str]], Nodes | None]
OwnLauncher = Callable[[Sequence[str], Sequence[int], Mapping[str, str], int], list[str]]


class Scheduler(Protocol):
    """One scheduler; a module with these names satisfies it."""

    TITLE: str  # as its users write it
    SUBMIT: str  # the program that submits a script
    LAUNCHERS: tuple[str, ...]  # what can start ranks; the first is the default

    MARK: str  # begins a line of options in a script
    WARNS: bool  # sends SIGUSR1 before the time limit; else the script counts the time
    WRITES_LOG: bool  # writes `<name>_<id>.out`; else the script does
    LISTS: bool  # an array may leave tasks out
    JOB_SHELL: str  # the job's id, in shell
    JOB_ID: str  # variable: the id of the job that a process is in
    MACHINE: str  # variable: the machine's name
    NODEFILE: str  # variable: the path of the job's host file; empty: it has none
    LOGGED: tuple[str, ...]  # variables that a run keeps in environment.json
    JOB_VARIABLES: str  # regular expression: variables that another shell of the job needs
    TASK_VARIABLES: str  # regular expression: the ones among them that belong to a single task
    RANK: Mapping[str, str]  # variables of a rank started by its own launcher; may be empty

    def header(self, job: Job, site: Site) -> list[str]: ...
    def option(self, directive: str) -> str: ...  # the option that a line of the header sets
    def task(self, array: Sequence[int]) -> str: ...  # the number of the array's task, in shell
    def requeue(self, job: Job) -> str: ...  # shell; `new` holds the id of a job that follows

    def submit(self, script: Path) -> list[str]: ...
    def submitted(self, output: str) -> str: ...  # the job's id
    def query(self, job: str) -> list[str]: ...
    def state(self, output: str) -> str: ...  # in words; empty: the job is over
    def cancel(self, job: str, state: str, ask: Ask) -> list[list[str]]: ...

    def nodes(self, environ: Mapping[str, str]) -> Nodes: ...
    def restarts(self, environ: Mapping[str, str]) -> int: ...  # earlier starts of this job
    def step(self, environ: Mapping[str, str], /) -> Nodes | None: ...  # see mpiexec_only
    def own_launcher(
        self,
        hosts: Sequence[str],
        per_host: Sequence[int],
        environ: Mapping[str, str],
        cores: int,
        /,
    ) -> list[str]: ...


def mpiexec_only() -> tuple[Mapping[str, str], Step, OwnLauncher]:
    """`RANK`, `step` and `own_launcher` of a scheduler that has no launcher of its own.

    `step` returns the hosts and ranks of the launcher's step that a process is a rank of, else
    None. `own_launcher` returns the words in front of the ranks' command; `cores` is how many times
    a rank's cores each task gets.
    """
    return {}, lambda environ: None, lambda hosts, per_host, environ, cores: []


def quoted(value: str) -> str:
    """A value as the option lines of a script need it: in quotes if it has a space."""
    return f'"{value}"' if any(character.isspace() for character in value) else value


def read_nodefile(environ: Mapping[str, str], job: str, variable: str) -> Nodes:
    """A host file, which names a host once for each of its tasks."""
    path = environ.get(variable, "")
    try:
        lines = Path(path).read_text().split()
    except OSError:
        message = f"{job}={environ.get(job, '')} is set and {variable}={path!r} cannot be read"
        raise UserError(f"{message}: {SECOND_SHELL}") from None
    counts = {host: lines.count(host) for host in dict.fromkeys(lines)}
    return Nodes(list(counts), list(counts.values()), path)
