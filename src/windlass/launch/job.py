"""A job to submit, and a site's settings. No torch."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.errors import UserError
from windlass.variables import SECRET_NAME

SCRIPT = "submit.sh"  # in the directory of a run or of an array's logs
INDEX = "{index}"  # in a job's command: the number of the array's task
TIME = r"\d+:[0-5]\d:[0-5]\d"
GPU_RANK_CORES = 4  # Python, autograd, NCCL's proxy, saving; small nodes have only four


class Site(BaseModel):
    """A site's settings for every job, from `~/.config/windlass/site.toml` or `--site FILE`."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    scheduler: str = ""
    """`slurm` or `pbs`; empty: the one that is installed."""
    partition: str = ""
    """The partition (SLURM) or queue (PBS)."""
    account: str = ""
    """The account that pays for the time."""
    time: str = Field("", pattern=f"^({TIME})?$")
    """The default of `--time`, as HH:MM:SS."""
    gpus_per_node: int = Field(0, ge=0)
    """GPUs of a node: the default of `--gpus-per-node`; 0: not given."""
    cpus_per_rank: int = Field(0, ge=0)
    """Cores for each rank; 0: 4 for a rank with a GPU, else 1."""
    memory_per_rank: int = Field(-1, ge=-1)
    """GB of host memory for each rank; -1: computed from the recipe; 0: the job asks for none."""
    constraint: str = ""
    """Features of the nodes: SLURM's `--constraint`, or resources that PBS adds to each chunk
    (`system=polaris`)."""
    directives: list[Annotated[str, Field(pattern="^-")]] = []
    """More options of the scheduler, as after `#SBATCH` or `#PBS`; they replace Windlass's options
    of the same name."""
    modules: list[str] = []
    """Modules to load."""
    setup: list[str] = []
    """Lines of shell to run first, such as `source ~/venv/bin/activate`."""
    environment: dict[str, str] = {}
    """Variables to export. No secrets: the script is a file."""
    launcher_options: str = ""
    """More options of the launcher: srun under SLURM, mpiexec under PBS."""
    program: str = ""
    """The ranks' command in place of `windlass`, such as
    `apptainer exec /images/windlass.sif windlass`; empty: the Python that submits."""

    def cores(self, gpus: int) -> int:
        return self.cpus_per_rank or (GPU_RANK_CORES if gpus else 1)


def site_file() -> Path:
    config = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
    return Path(config, "windlass", "site.toml")


def read_site(path: Path | None = None) -> Site:
    """The site file, or the defaults if the user has none. UserError if it is not valid."""
    file = path or site_file()
    if path is None and not file.is_file():
        return Site()
    try:
        site = Site(**tomllib.loads(file.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"the site file {file} cannot be read: {error}") from None
    except ValidationError as error:
        lines = [f"{file}:"]
        for e in error.errors():
            name = ".".join(map(str, e["loc"]))
            key = Site.model_fields.get(str(e["loc"][0]))
            wrong = f"= {e['input']!r}: {e['msg']}. {key.description}" if key else "is not a key"
            lines.append(f"  {name} {wrong}")
        lines.append(f"  The keys are {', '.join(sorted(Site.model_fields))}")
        raise UserError("\n".join(lines)) from None
    if secret := [name for name in site.environment if SECRET_NAME.search(name)]:
        raise UserError(
            f"{file}: environment has {', '.join(secret)}, but others may read a batch script: "
            'export it in the shell that submits (PBS: with `directives = ["-V"]`)'
        )
    return site


def seconds_of(time: str) -> int:
    """The seconds of HH:MM:SS; 0 for an empty text."""
    hours, minutes, seconds = map(int, (time or "0:0:0").split(":"))
    return 3600 * hours + 60 * minutes + seconds


@dataclass(frozen=True)
class Job:
    """A job to submit; paths are absolute."""

    name: str
    command: Sequence[str]  # run once, in the job's shell; `windlass launch` starts all ranks
    directory: Path  # in which it runs
    logs: Path  # the directory of the script and of `<name>_<id>.out`
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    memory_gb: int = 0  # of a host; 0: the scheduler's default
    time: str = ""  # HH:MM:SS; empty: the site's
    array: Sequence[int] = ()  # task numbers, which the command gets as INDEX
    # a check that must succeed first, with a log of its own; its exit code ends the job
    before: Sequence[str] = ()
    max_restarts: int = 3  # after lost hosts
    lead: int = 120  # seconds between the signal to stop and the time limit, by `stop_lead`

    @property
    def script(self) -> Path:
        return self.logs / SCRIPT

    def short_name(self) -> str:
        """The name without the characters that schedulers reject or replace."""
        return re.sub(r"[^\w.+-]", "_", self.name)
