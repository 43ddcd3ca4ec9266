"""A study as an array job of SLURM or PBS: one task a cell, each calling `windlass sweep --only N`. No torch."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.errors import DONE, FAILED, UserError
from windlass.study.study import Study
from windlass.study.sweep import Options

SUBMIT = {"slurm": "sbatch", "pbs": "qsub"}
SLURM_NAMES = {
    "-J": "--job-name", "-a": "--array", "-N": "--nodes", "-n": "--ntasks", "-c": "--cpus-per-task", "-o": "--output",
    "-G": "--gpus-per-task", "--gpus": "--gpus-per-task", "--gres": "--gpus-per-task", "--gpus-per-node": "--gpus-per-task",
}  # fmt: skip
"""Other names of what the script asks for, so that a user's word replaces it."""


def array_script(
    study: Study,
    scheduler: str,
    options: Options,
    cells: Sequence[int],
    directory: Path,
    python: str,
    arguments: Sequence[str] = (),
) -> str:
    """The batch script over the cells with these numbers; a pure function of its arguments.

    An array job, but for a single cell of PBS, which knows no array of one. `arguments` are the scheduler's own
    (`--time=04:00:00`); they replace what would be asked for else: a core a rank, and where the recipe says
    `parallel.device = "cuda"`, a device a rank. A task whose time runs out is warned by the scheduler, saves and ends with
    75; submitting again goes on.
    """
    words = [python, "-m", "windlass", "sweep", str(study.path / "recipe.toml"), *study.axes]
    words += ["--dir", str(study.path), "--world", str(options.world)]
    words += ["--stop-diverged"] if options.stop_diverged else []
    words += ["--retry-failed"] if options.retry_failed else []
    chosen = [study.cells[number] for number in cells]
    ranks = max(cell.world or options.world for cell in chosen)
    devices = ranks if any(cell.recipe.parallel.device == "cuda" for cell in chosen) else 0
    heads = _slurm if scheduler == "slurm" else _pbs
    index = "$SLURM_ARRAY_TASK_ID" if scheduler == "slurm" else "$PBS_ARRAY_INDEX"
    if scheduler == "pbs" and len(cells) == 1:
        index = str(cells[0])
    given = {_option(text, scheduler) for text in arguments}
    asked = [text for text in heads(study.path, cells, ranks, devices) if _option(text, scheduler) not in given]
    mark = "#SBATCH" if scheduler == "slurm" else "#PBS"
    body = [
        f"cd {shlex.quote(str(directory))}",
        f"{' '.join(map(shlex.quote, words))} --only {index} &",
        "job=$!",
        "trap 'kill -TERM $job; wait $job; exit $?' TERM",
        "wait $job",
    ]
    return "\n".join(["#!/bin/bash", *(f"{mark} {text}" for text in [*asked, *arguments]), "", *body, ""])


def _slurm(path: Path, cells: Sequence[int], ranks: int, devices: int) -> list[str]:
    return [
        f"--job-name=windlass-{path.name}",
        f"--array={','.join(map(str, cells))}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={ranks}",
        *([f"--gpus-per-task={devices}"] if devices else []),
        f"--output={path}/slurm-%A_%a.out",
        "--signal=B:TERM@120",
        "--requeue",
    ]


def _pbs(path: Path, cells: Sequence[int], ranks: int, devices: int) -> list[str]:
    return [
        f"-N windlass-{path.name}"[:18],
        *([f"-J {cells[0]}-{cells[-1]}"] if len(cells) > 1 else []),
        f"-l select=1:ncpus={ranks}" + (f":ngpus={devices}" if devices else ""),
        "-r y",
        "-j oe",
    ]


def _option(text: str, scheduler: str) -> str:
    """What an argument of a scheduler sets, by its long name; of PBS's resources the first one's name too: `-l select`."""
    words = re.split(r"[=\s]+", text.strip(), maxsplit=2)
    if scheduler == "slurm":
        word = words[0] if words[0].startswith("--") else words[0][:2]  # also -c4
        return SLURM_NAMES.get(word, word)
    return f"-l {words[1]}" if words[0] == "-l" and len(words) > 1 else words[0]


def submit_array(
    study: Study,
    scheduler: str,
    options: Options,
    *,
    dry_run: bool,
    arguments: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> int:
    """Write the script into the study's directory and submit it; with `dry_run` print it only.

    Raises UserError for an unknown scheduler, where it is not on this machine, and with halving, whose cells are compared
    by the one process that runs them.
    """
    if scheduler not in SUBMIT:
        raise UserError(f"--submit {scheduler}: there are slurm and pbs")
    if options.halving:
        raise UserError("--halving compares cells while one sweep runs them: it does not go with --submit")
    states = [study.state_of(cell)[0] for cell in study.cells]
    wanted = ("waiting", "interrupted", *(("failed", "diverged") if options.retry_failed else ()))
    left = [number for number, state in enumerate(states) if state in wanted]
    running = [number for number, state in enumerate(states) if state == "running"]
    if running:
        say(f"running already, so not submitted: cell {', '.join(map(str, running))}")
    if not left:
        say("nothing to submit: no cell is open")
        return DONE
    script = array_script(study, scheduler, options, left, Path.cwd(), sys.executable, arguments)
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
