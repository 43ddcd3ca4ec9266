"""Whether a run directory is ours to use, and how: new, resumed, extended, branched, finished. No torch.

Decided from files alone, before any process group exists, by the launcher and again by every rank; written by rank 0 only.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from windlass.checkpoint.lineage import BEGINNING, read_lineage
from windlass.errors import UserError
from windlass.parallel.env import detect_env
from windlass.recipe import Recipe
from windlass.run import LOCK, Run, lock_held, read_lines
from windlass.training.occupancy import WAIT_SECONDS, acquire_run_lock

BRANCH_MAY_CHANGE = ("optim.", "train.steps", "train.on_", "train.spike_sigmas", "train.max_skips", "train.grad_clip")
"""What a branch may do otherwise than the run it comes from; model, data, seed and batch stay."""

LEFT_OVER = {
    LOCK,
    "heartbeat",
    BEGINNING,
    f".{BEGINNING}.new",
    ".recipe.toml.new",
    ".recipe.toml.partial",
    "log.txt",
    "tokenizer",
}
"""What a start that failed before its recipe was written may leave, and the next one finds no fault with."""


@dataclass(frozen=True)
class Claim:
    """What is to be done in a run directory."""

    recipe: Recipe
    run: Run
    resuming: bool
    """The directory holds a ledger of the same recipe: go on from its newest committed checkpoint."""
    finished: bool
    """The run has done all its steps: there is nothing to do."""
    extends_from: int = 0
    """With `--extend-to`: the steps of the old horizon; else 0."""
    branch_from: Path | None = None
    """With `--branch-from`: the checkpoint to start from."""
    fresh: bool = False
    """What is in the directory is to be set aside first."""
    restart: bool = False
    """The same job began the run, or this line of it, and was started again: go on from the latest checkpoint."""

    @property
    def run_dir(self) -> Path:
        """The run's directory."""
        return self.run.path


def differences(old: Recipe, new: Recipe) -> list[str]:
    """What matters and is not equal, one line each: `optim.lr: 0.001 -> 0.002`."""
    before, after = old.semantic_settings(), new.semantic_settings()
    keys = [*before, *(k for k in after if k not in before)]
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if before.get(k) != after.get(k)]


def claim(
    recipe: Recipe,
    *,
    fresh: bool = False,
    extend_to: int = 0,
    branch_from: str = "",
    environ: Mapping[str, str] = os.environ,
) -> Claim:
    """Look at the run's directory and say what is to be done there; changes nothing.

    Where a job is started again (`--max-restarts`, torchrun, a requeued SLURM job) with the command that began the run,
    what that command said of the beginning (`fresh`, `branch_from`, `checkpoint.resume`) has been done already.

    Raises UserError where the directory holds a run of another recipe (the differences are shown), is no run directory at
    all, or where an extension or a branch does not fit.
    """
    run = Run(recipe.run_dir)
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path} is a file; give another run.dir")
    restart = run.recipe_path.is_file() and started_again(run, environ)
    fresh = fresh and not restart
    if fresh or not run.recipe_path.is_file():
        if not fresh and run.path.is_dir() and any(p.name not in LEFT_OVER for p in run.path.iterdir()):
            raise UserError(
                f"{run.path} is not empty and holds no run; give another run.dir, or --fresh to set it aside"
            )
        if extend_to:
            raise UserError(f"there is no run at {run.path} to extend")
        if not branch_from:
            _refuse_resume(recipe, run, fresh)
        source = _branch_source(recipe, branch_from) if branch_from else None
        return Claim(recipe, run, resuming=False, finished=False, branch_from=source, fresh=fresh)
    old = run.recipe
    if extend_to and old.train.steps == extend_to:  # the same command again: the run is that long already
        recipe = recipe.with_overrides(f"train.steps={extend_to}")
    elif extend_to:
        return _extension(recipe, run, old, extend_to)
    changed = differences(old, recipe)
    if changed:
        raise UserError(_refusal(run, changed))
    if branch_from:
        _refuse_other_origin(run, branch_from)
    return Claim(recipe, run, resuming=True, finished=_finished(run, recipe), restart=restart)


def _finished(run: Run, recipe: Recipe) -> bool:
    """Whether the ledger ends with the end of a run of this length: a run that is being extended has an end before it."""
    lines = list(read_lines(run.metrics_path))
    if run.state_by(lines) != "finished":
        return False
    end = next(line["step"] for line in reversed(lines) if line.get("event") == "finished")
    return not isinstance(recipe.train.steps, int) or end == recipe.train.steps


def job(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What names the job that this process belongs to, and stays the same when it is started again.

    `launch`: our launcher's process or torchrun's run id; `slurm`: the number of the SLURM job. Empty where there is none.
    """
    launcher = detect_env(environ).launcher
    ours = f"{socket.gethostname()}/{os.getppid()}" if launcher == "windlass" else ""
    return {
        "launch": ours or environ.get("TORCHELASTIC_RUN_ID", ""),
        "slurm": environ.get("SLURM_JOB_ID", ""),
    }


def started_again(run: Run, environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to a restart of the very job that began the present line of the run."""
    place = detect_env(environ)
    requeued = environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    if not (place.attempt or requeued):
        return False
    fork, here = read_lineage(run.path), job(environ)
    if fork is None:
        return False
    if requeued and here["slurm"] and fork.job.get("slurm") == here["slurm"]:
        return True
    return place.attempt > 0 and place.launcher != "slurm" and fork.job.get("launch", "") == here["launch"]


def _refuse_other_origin(run: Run, branch_from: str) -> None:
    """A branch goes on from where it was; another origin would be another run."""
    fork = read_lineage(run.path)
    if fork is None or not Path(fork.checkpoint).is_absolute():
        return
    place, _, step = branch_from.rpartition("@")
    wanted = Path(place).resolve() / "checkpoints" / f"step-{int(step) if step.isdigit() else 0:08d}"
    if wanted != Path(fork.checkpoint):
        raise UserError(f"{run.path} begins at {fork.checkpoint}, not at {branch_from}; give another run.dir")


def _refuse_resume(recipe: Recipe, run: Run, fresh: bool) -> None:
    """Where a new run is asked to go on from a checkpoint that is not there, say so before anything is set aside."""
    wanted = recipe.checkpoint.resume
    if wanted in ("latest", "best", "never"):
        return
    advice = "leave checkpoint.resume or --fresh out" if fresh else "leave checkpoint.resume out"
    if wanted.isdigit():
        raise UserError(
            f"{run.path} would be a new run, which has no checkpoint of step {int(wanted)} to go on from: {advice}"
        )
    if not Path(wanted).is_dir():
        raise UserError(f"checkpoint.resume is {wanted!r}: there is no such checkpoint; {advice}")
    if fresh and Path(wanted).resolve().is_relative_to(run.path.resolve()):
        raise UserError(f"checkpoint.resume is {wanted!r}, which --fresh would set aside with its run: {advice}")


def _refusal(run: Run, changed: list[str]) -> str:
    lines = [f"{run.path} holds a run of another recipe:", *(f"  {line}" for line in changed)]
    if [line for line in changed if line.startswith("train.steps:")] == changed:
        lines.append("to change a run's length, use --extend-to STEPS (longer) or --stop-at STEP (shorter);")
    lines.append("give another run.dir for a new run, --fresh to set the old one aside, or take the changes back")
    return "\n".join(lines)


def _extension(recipe: Recipe, run: Run, old: Recipe, extend_to: int) -> Claim:
    if not isinstance(old.train.steps, int) or extend_to <= old.train.steps:
        raise UserError(f"--extend-to {extend_to} is not past the run's {old.train.steps} steps")
    longer = old.with_overrides(f"train.steps={extend_to}", f"run.dir={run.path.as_posix()!r}")
    changed = [c for c in differences(longer, recipe) if not c.startswith("train.steps:")]
    if changed:
        raise UserError(_refusal(run, changed))
    return Claim(longer, run, resuming=True, finished=False, extends_from=old.train.steps)


def _branch_source(recipe: Recipe, branch_from: str) -> Path:
    place, at, step = branch_from.rpartition("@")
    if not at or not step.isdigit():
        raise UserError(f"--branch-from {branch_from!r}: write RUN@STEP, for example runs/quickstart-1a2b3c4d@300")
    origin = Run.open(place)
    if origin.path.resolve() == recipe.run_dir.resolve():
        raise UserError("a branch is a new run: give it another run.dir than the run it comes from")
    folder = origin.checkpoints_dir / f"step-{int(step):08d}"
    if not folder.is_dir():
        there = sorted(int(p.name[5:]) for p in origin.checkpoints_dir.glob("step-????????"))
        raise UserError(
            f"{place} has no checkpoint of step {int(step)}; there are {', '.join(map(str, there)) or 'none'}"
        )
    changed = [c for c in differences(origin.recipe, recipe) if not c.startswith(BRANCH_MAY_CHANGE)]
    if changed:
        raise UserError("\n".join(["a branch keeps model, data, seed and batch of the run it comes from:", *changed]))
    if isinstance(recipe.train.steps, int) and recipe.train.steps <= int(step):
        raise UserError(f"train.steps = {recipe.train.steps} is not past the step {int(step)} to branch from")
    return folder


def set_aside(path: Path, seconds: float = WAIT_SECONDS) -> Path | None:
    """Rename a run directory out of the way (`--fresh`); returns where it lies now, None where there was none.

    Raises UserError where a process trains in it, or may do so on another host: it would go on under the new name.
    """
    if not path.exists():
        return None
    run = Run(path)
    if lock_held(run.lock_path) is None and run.state == "running":
        raise UserError(
            f"{path} has a fresh heartbeat: a process on another host may train in it, and is not to lose its directory; "
            "stop it, or try again in a minute"
        )
    lock = acquire_run_lock(path, seconds)
    try:
        number = 1
        while (aside := path.with_name(f"{path.name}.old-{number}")).exists():
            number += 1
        path.rename(aside)
    finally:
        if lock is not None:
            lock.close()
    return aside
