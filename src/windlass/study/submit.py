"""A study as an array job of SLURM or PBS: one task a cell, each calling `windlass sweep --only N`. No torch."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.errors import RunFailed, UserError
from windlass.recipe import Recipe
from windlass.study.study import Axes, Study

SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}


def submit_sweep(
    recipe: Recipe, axes: Axes, scheduler: str, *, path: Path | None = None, world: int = 1, stop_diverged: bool = False,
    halving: bool = False, retry_failed: bool = False, arguments: Sequence[str] = (), dry_run: bool = False,
    notify: Callable[[str], None] = lambda text: None,
) -> str:  # fmt: skip
    """Write the batch script of a study's open cells into its directory and submit it; with `dry_run` write nothing.

    The arguments are those of `sweep`, and `arguments` for the scheduler itself. Returns the script; empty where no cell
    is open. Raises UserError where the scheduler is unknown or not on this machine, or cells are to be halved, RunFailed
    where the scheduler did not take the job.
    """
    if scheduler not in SUBMIT:
        raise UserError(f"--submit {scheduler}: there are slurm and pbs")
    if halving:
        raise UserError("--halving compares cells while one sweep runs them: it does not go with --submit")
    study = Study.create(recipe, axes, path, write=not dry_run)
    states = [result.state for result in study.results()]
    wanted = ("waiting", "interrupted", *(("failed", "diverged") if retry_failed else ()))
    cells = [number for number, state in enumerate(states) if state in wanted]
    if running := [str(number) for number, state in enumerate(states) if state == "running"]:
        notify(f"running already, so not submitted: cell {', '.join(running)}")
    if not cells:
        notify("nothing to submit: no cell is open")
        return ""
    flags = ["--stop-diverged"] * stop_diverged + ["--retry-failed"] * retry_failed
    script = array_script(study, scheduler, cells, world, Path.cwd(), sys.executable, flags, arguments)
    if dry_run:
        return script
    command, path = SUBMIT[scheduler], study.path / f"submit.{scheduler}.sh"
    if shutil.which(command) is None:
        raise UserError(f"there is no {command} on this machine: submit from a login node, or look with --dry-run")
    path.write_text(script, encoding="utf-8")
    if subprocess.run([command, str(path)], check=False).returncode:
        raise RunFailed(f"{command} did not take {path}; its message is above")
    return script


def array_script(
    study: Study, scheduler: str, cells: Sequence[int], world: int, directory: Path, python: str,
    flags: Sequence[str] = (), arguments: Sequence[str] = (),
) -> str:  # fmt: skip
    """The batch script for the cells with these numbers; a pure function of its arguments.

    A rank gets a core and, unless the recipe has `parallel.device = "cpu"`, a GPU. `arguments` are the scheduler's own
    (`--time=04:00:00`) and replace ours of the same name (`--gpus-per-task=0`, `-l select=1:ncpus=8`). A task whose time
    runs out gets a signal, saves and exits with 75; submitting again resumes it.
    """
    chosen, name = [study.cells[number] for number in cells], f"windlass-{study.path.name}"
    ranks = max(cell.world or world for cell in chosen)
    gpus = any(cell.recipe.parallel.device != "cpu" for cell in chosen)
    if scheduler == "slurm":
        mark, index = "#SBATCH", "$SLURM_ARRAY_TASK_ID"
        asked = [
            f"--job-name={name}", f"--array={','.join(map(str, cells))}", "--nodes=1", "--ntasks=1",
            f"--cpus-per-task={ranks}", *([f"--gpus-per-task={ranks}"] if gpus else []),
            f"--output={study.path}/slurm-%A_%a.out", "--signal=B:TERM@120", "--requeue",
        ]  # fmt: skip
    else:  # PBS has no array of one job
        mark, index = "#PBS", "$PBS_ARRAY_INDEX" if len(cells) > 1 else str(cells[0])
        asked = [
            f"-N {name}"[:18], *([f"-J {cells[0]}-{cells[-1]}"] if len(cells) > 1 else []),
            f"-l select=1:ncpus={ranks}" + (f":ngpus={ranks}" if gpus else ""), "-r y", "-j oe",
        ]  # fmt: skip

    def option(text: str) -> str:  # what it sets: `--time`, `-q`, or `-l select`
        return " ".join(re.split(r"[=\s]+", text)[: 2 if text.startswith("-l") else 1])

    header = [*(text for text in asked if option(text) not in map(option, arguments)), *arguments]
    words = [python, "-m", "windlass", "sweep", str(study.path / "recipe.toml"), *study.axes]
    words += ["--dir", str(study.path), "--world", str(world), *flags]
    return "\n".join([
        "#!/bin/bash", *(f"{mark} {text}" for text in header), "",
        f"cd {shlex.quote(str(directory))}",
        f"{shlex.join(words)} --only {index} &",
        "job=$!",
        "trap 'kill -TERM $job; wait $job; exit $?' TERM",  # the scheduler signals the shell alone
        "wait $job", "",
    ])  # fmt: skip
