"""A study as an array job of SLURM or PBS: one task a cell, each calling `windlass sweep --only N`. No torch."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from windlass.errors import DONE, FAILED, UserError
from windlass.study.study import Study

SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}


def array_script(study: Study, scheduler: str, world: int, cells: list[int], directory: Path, python: str) -> str:
    """The batch script of an array job over the cells with these numbers; a pure function of its arguments.

    A task whose time runs out is warned by the scheduler, saves and ends with 75; submitting again goes on.
    """
    words = [python, "-m", "windlass", "sweep", str(study.path / "recipe.toml"), *study.axes]
    words += ["--dir", str(study.path), "--world", str(world)]
    line = " ".join(map(shlex.quote, words))
    numbers = ",".join(map(str, cells))
    if scheduler == "slurm":
        head = [
            f"#SBATCH --job-name=windlass-{study.path.name}",
            f"#SBATCH --array={numbers}",
            "#SBATCH --nodes=1",
            "#SBATCH --ntasks=1",
            f"#SBATCH --output={study.path}/slurm-%A_%a.out",
            "#SBATCH --signal=B:TERM@120",
            "#SBATCH --requeue",
        ]
        index = "$SLURM_ARRAY_TASK_ID"
    else:
        head = [
            f"#PBS -N windlass-{study.path.name}"[:22],
            f"#PBS -J {cells[0]}-{cells[-1]}",
            "#PBS -r y",
            "#PBS -j oe",
        ]
        index = "$PBS_ARRAY_INDEX"
    body = [
        f"cd {shlex.quote(str(directory))}",
        f"{line} --only {index} &",
        "job=$!",
        "trap 'kill -TERM $job; wait $job; exit $?' TERM",
        "wait $job",
    ]
    return "\n".join(["#!/bin/bash", *head, "", *body, ""])


def submit_array(study: Study, scheduler: str, world: int, *, dry_run: bool) -> int:
    """Write the script into the study's directory and submit it; with `dry_run` print it only."""
    if scheduler not in SUBMIT:
        raise UserError(f"--submit {scheduler}: there are slurm and pbs")
    states = [study.state_of(cell)[0] for cell in study.cells]
    left = [number for number, state in enumerate(states) if state in ("waiting", "interrupted")]
    if not left:
        print("nothing to submit: no cell is open")
        return DONE
    script = array_script(study, scheduler, world, left, Path.cwd(), sys.executable)
    if dry_run:
        print(script, end="")
        return DONE
    tool = SUBMIT[scheduler]
    if shutil.which(tool) is None:
        raise UserError(f"there is no {tool} on this machine: submit from a login node, or look at it with --dry-run")
    place = study.path / f"submit.{scheduler}.sh"
    place.write_text(script, encoding="utf-8")
    done = subprocess.run([tool, str(place)], check=False)
    return DONE if done.returncode == 0 else FAILED
