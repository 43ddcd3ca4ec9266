"""What a start does in a run directory: begin a new run, resume, extend or branch. Decided from files, then written down.

- No torch here: the command line, the launcher and every rank decide alike from the same files, before a process group exists.
- `resolve_start` changes nothing, so what is refused has done no harm. Rank 0 alone writes.
- The order of writes matters. The lineage (the checkpoint that the run's present steps continue from) is durable before the
  recipe of a new or longer run is; a kill or power cut between any two writes leaves a run that resumes from where it was,
  or as the command asked.
- A scheduler that restarts a job repeats its command line. What the command says about the start (`--fresh`,
  `--branch-from`, `checkpoint.resume`) was done by the job's first attempt; a restart resumes from the newest checkpoint.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

from windlass.checkpoint import load as checkpoints
from windlass.checkpoint.format import list_entries, step_dir
from windlass.checkpoint.load import Checkpoint, Choice
from windlass.checkpoint.retention import LINEAGE, Lineage, lineage_at, read_lineage, write_lineage
from windlass.errors import RunFailed, UserError
from windlass.fileio import Files
from windlass.parallel.env import detect_env
from windlass.recipe import Horizon, Recipe
from windlass.run import LOCK, OCCUPIED, Run, lock_held, read_lines

if TYPE_CHECKING:
    from windlass.data.dataset import Data
    from windlass.parallel.dist import Ranks

Value = TypeVar("Value")

BRANCH_MAY_CHANGE = ("optim.", "train.steps", "train.on_", "train.spike_sigmas", "train.max_skips", "train.grad_clip")
"""Settings in which a branch may differ from the run it comes from; model, data, seed and batch stay."""
LEFT_OVER = {
    LOCK, "heartbeat", LINEAGE, f".{LINEAGE}.new", ".recipe.toml.new", ".recipe.toml.partial", "log.txt", "tokenizer",
}  # fmt: skip
"""What a start that failed before it wrote its recipe may leave behind; a new run may begin among these files."""
LOCK_WAIT_SECONDS = 10.0
"""How long to wait for the lock of a run directory: a process that was just killed may still be ending."""


@dataclass(frozen=True)
class StartPlan:
    """What a start does in its run directory."""

    recipe: Recipe
    run: Run
    resuming: bool = False  # the directory holds a run of this recipe, which continues
    finished: bool = False  # that run has done all its steps: there is nothing to do
    extends_from: int = 0  # with `--extend-to`: the steps of the run so far; else 0
    branch_from: Path | None = None  # with `--branch-from`: the checkpoint to start from
    fresh: bool = False  # what is in the directory is set aside first
    restarted: bool = False
    """A scheduler or launcher restarted the job that began the run, or its present lineage."""

    @property
    def new_lineage(self) -> bool:
        """Whether an existing run leaves its lineage: the steps after the chosen checkpoint are done again."""
        return bool(self.extends_from) or (not self.restarted and self.recipe.checkpoint.resume != "latest")


def resolve_start(
    recipe: Recipe, *, fresh: bool = False, extend_to: int = 0, branch_from: str = "",
    environ: Mapping[str, str] = os.environ,
) -> StartPlan:  # fmt: skip
    """Decide what is to be done in the recipe's run directory; changes nothing.

    Raises UserError where the directory holds a run of another recipe (the changed settings are shown) or other files, or
    where an extension or a branch does not fit.
    """
    run = Run(recipe.run_dir)
    if run.path.exists() and not run.path.is_dir():
        raise UserError(f"{run.path} is a file; give another run.dir")
    exists = run.recipe_path.is_file()
    restarted = exists and is_restart(run, environ)
    fresh = fresh and not restarted
    if fresh or not exists:
        return _resolve_new(recipe, run, fresh, extend_to, branch_from)
    old = run.recipe
    if extend_to and old.train.steps == extend_to:  # the same command again: the run is that long already
        recipe = recipe.with_overrides(f"train.steps={extend_to}")
    elif extend_to:
        if not isinstance(old.train.steps, int) or extend_to <= old.train.steps:
            raise UserError(f"--extend-to {extend_to} is not past the run's {old.train.steps} steps")
        longer = old.with_overrides(f"train.steps={extend_to}", f"run.dir={run.path.as_posix()!r}")
        _refuse_changes(run, [c for c in changed_settings(longer, recipe) if not c.startswith("train.steps:")])
        return StartPlan(longer, run, resuming=True, extends_from=old.train.steps)
    _refuse_changes(run, changed_settings(old, recipe))
    if branch_from:
        _refuse_other_origin(run, branch_from)
    return StartPlan(recipe, run, resuming=True, finished=_is_finished(run, recipe), restarted=restarted)


def _resolve_new(recipe: Recipe, run: Run, fresh: bool, extend_to: int, branch_from: str) -> StartPlan:
    if not fresh and run.path.is_dir() and any(p.name not in LEFT_OVER for p in run.path.iterdir()):
        raise UserError(f"{run.path} is not empty and holds no run; give another run.dir, or --fresh to set it aside")
    if extend_to:
        raise UserError(f"there is no run at {run.path} to extend")
    if branch_from:
        return StartPlan(recipe, run, branch_from=_branch_source(recipe, branch_from), fresh=fresh)
    wanted = recipe.checkpoint.resume
    if wanted not in ("latest", "best", "never"):  # said before anything is set aside
        advice = "leave checkpoint.resume or --fresh out" if fresh else "leave checkpoint.resume out"
        if wanted.isdigit():
            raise UserError(f"checkpoint.resume is {wanted}, and {run.path} is a new run without checkpoints: {advice}")
        if not Path(wanted).is_dir():
            raise UserError(f"checkpoint.resume is {wanted!r}: there is no such checkpoint; {advice}")
        if fresh and Path(wanted).resolve().is_relative_to(run.path.resolve()):
            raise UserError(f"checkpoint.resume is {wanted!r}, which --fresh would set aside with its run: {advice}")
    return StartPlan(recipe, run, fresh=fresh)


def changed_settings(old: Recipe, new: Recipe) -> list[str]:
    """Settings that change the training and differ, one line each: `optim.lr: 0.001 -> 0.002`."""
    before, after = old.semantic_settings(), new.semantic_settings()
    keys = [*before, *(k for k in after if k not in before)]
    return [f"{k}: {before.get(k)!r} -> {after.get(k)!r}" for k in keys if before.get(k) != after.get(k)]


def _refuse_changes(run: Run, changed: list[str]) -> None:
    if not changed:
        return
    lines = [f"{run.path} holds a run of another recipe:", *(f"  {line}" for line in changed)]
    if len(changed) == 1 and changed[0].startswith("train.steps:"):
        lines.append("to change a run's length, use --extend-to STEPS (longer) or --stop-at STEP (shorter);")
    lines.append("give another run.dir for a new run, --fresh to set the old one aside, or undo the changes")
    raise UserError("\n".join(lines))


def _is_finished(run: Run, recipe: Recipe) -> bool:
    """Whether the ledger ends with the end of a run of this length: one that is being extended has an earlier end, too."""
    lines = list(read_lines(run.metrics_path))
    if run.state_by(lines) != "finished":
        return False
    end = next(line["step"] for line in reversed(lines) if line.get("event") == "finished")
    return not isinstance(recipe.train.steps, int) or end == recipe.train.steps


def _branch_source(recipe: Recipe, branch_from: str) -> Path:
    """The checkpoint that `--branch-from RUN@STEP` names."""
    place, at, step = branch_from.rpartition("@")
    if not at or not step.isdigit():
        raise UserError(f"--branch-from {branch_from!r}: write RUN@STEP, for example runs/quickstart-1a2b3c4d@300")
    origin = Run.open(place)
    if origin.path.resolve() == recipe.run_dir.resolve():
        raise UserError("a branch is a new run: give it another run.dir than the run it comes from")
    checkpoint = step_dir(origin.checkpoints_dir, int(step))
    if not checkpoint.is_dir():
        steps = sorted(e.step for e in list_entries(origin.checkpoints_dir))
        raise UserError(f"{place} has no checkpoint of step {step}; there are: {', '.join(map(str, steps)) or 'none'}")
    changed = [c for c in changed_settings(origin.recipe, recipe) if not c.startswith(BRANCH_MAY_CHANGE)]
    if changed:
        raise UserError("\n".join(["a branch keeps model, data, seed and batch of the run it comes from:", *changed]))
    if isinstance(recipe.train.steps, int) and recipe.train.steps <= int(step):
        raise UserError(f"train.steps = {recipe.train.steps} is not past the step {step} to branch from")
    return checkpoint


def _refuse_other_origin(run: Run, branch_from: str) -> None:
    """A branch that exists resumes; with another origin it would be another run."""
    lineage = read_lineage(run.path)
    if lineage is None or not Path(lineage.checkpoint).is_absolute():
        return
    place, _, step = branch_from.rpartition("@")
    wanted = step_dir(Path(place).resolve() / "checkpoints", int(step) if step.isdigit() else 0)
    if wanted != Path(lineage.checkpoint):
        raise UserError(f"{run.path} begins at {lineage.checkpoint}, not at {branch_from}; give another run.dir")


def job_id(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What names the job of this process and stays the same when it is restarted; empty strings where there is none.

    `launch`: our launcher's process, or torchrun's run id; `slurm`: the number of the SLURM job.
    """
    ours = detect_env(environ).launcher == "windlass"
    launch = f"{socket.gethostname()}/{os.getppid()}" if ours else environ.get("TORCHELASTIC_RUN_ID", "")
    return {"launch": launch, "slurm": environ.get("SLURM_JOB_ID", "")}


def is_restart(run: Run, environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to a restart of the job that began the present lineage of the run."""
    env = detect_env(environ)
    requeued = environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0")
    lineage = read_lineage(run.path) if env.attempt or requeued else None
    if lineage is None:
        return False
    here = job_id(environ)
    if requeued and here["slurm"] and lineage.job.get("slurm") == here["slurm"]:
        return True
    return env.attempt > 0 and env.launcher != "slurm" and lineage.job.get("launch", "") == here["launch"]


def decide_on_rank_0(ranks: Ranks, name: str, decide: Callable[[], Value]) -> Value:
    """What rank 0 decides (anything that JSON holds), on every rank; its error is raised on every rank."""
    answer: dict[str, Any] = {}
    if ranks.main:
        try:
            answer = {"value": decide()}
        except UserError as error:
            answer = {"user_error": str(error)}
        except OSError as error:
            answer = {"user_error": f"{error.filename}: {error.strerror}; give another run.dir"}
        except RunFailed as error:
            answer = {"failure": str(error)}
    answer = ranks.broadcast_object(name, answer)
    if "user_error" in answer:
        raise UserError(answer["user_error"])
    if "failure" in answer:
        raise RunFailed(answer["failure"])
    value: Value = answer["value"]
    return value


# -- which checkpoint to start from; on rank 0 ----------------------------------------------------------------------------


def candidate_checkpoints(plan: StartPlan, horizon: Horizon) -> list[Path]:
    """The checkpoints to start from, in the order in which they are tried (see `checkpoint.load.candidates`); empty: step 0.

    `checkpoint.resume` names them, but a restart takes the newest. A WSD run that is extended returns to its newest checkpoint
    before the decay. Raises UserError where the one that was asked for is missing or of another recipe.
    """
    recipe, path = plan.recipe, plan.run.path
    if plan.branch_from is not None:
        return [plan.branch_from]
    wanted = "latest" if plan.restarted else recipe.checkpoint.resume
    named = wanted in ("latest", "best", "never") or wanted.isdigit()
    if not plan.resuming and named:
        return []
    if plan.extends_from and recipe.optim.schedule.kind == "wsd":
        return _before_decay(plan, horizon)
    paths = checkpoints.candidates(path, wanted, measure=recipe.checkpoint.best)
    if not named and paths and not paths[0].resolve().is_relative_to(path.resolve()):
        _refuse_other_recipe(recipe, checkpoints.open_checkpoint(paths[0], deep=False))
    return paths


def _before_decay(plan: StartPlan, horizon: Horizon) -> list[Path]:
    path, lineage = plan.run.path, read_lineage(plan.run.path)
    old = Horizon(plan.extends_from, horizon.samples_per_epoch, horizon.samples_per_step)
    decay_begins = old.steps - old.steps_in(plan.recipe.optim.schedule.decay)
    paths = checkpoints.candidates(path, up_to=decay_begins)
    steps = sorted(e.step for e in list_entries(plan.run.checkpoints_dir))
    if not paths and (steps or (lineage is not None and lineage.checkpoint)):
        raise UserError(
            f"the decay of {path} began at step {decay_begins}, and no checkpoint from before it is kept (there are: "
            f"{', '.join(map(str, steps)) or 'none'}): a decayed run cannot be extended; set checkpoint.keep_every next time"
        )
    return paths


def _refuse_other_recipe(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """A checkpoint of another run may be resumed from where that run's recipe is this one, but for the steps."""
    saved = checkpoint.meta
    if hash_without_steps(recipe) == saved.get("line") or recipe.config_hash == saved.get("recipe"):
        return
    origin, changed = Run(checkpoint.path.resolve().parent.parent), []
    if origin.recipe_path.is_file():
        changed = [c for c in changed_settings(origin.recipe, recipe) if not c.startswith("train.steps:")]
    changed = changed or [f"config hash: {saved.get('recipe')} -> {recipe.config_hash}"]
    lines = [f"checkpoint.resume: {checkpoint.path} is of another recipe:", *(f"  {line}" for line in changed)]
    lines.append("undo the changes, or use --branch-from RUN@STEP, which may change optimizer, schedule and steps")
    raise UserError("\n".join(lines))


def hash_without_steps(recipe: Recipe) -> str:
    """The recipe's config hash with `train.steps` left out: equal for runs that differ in length alone."""
    settings = {key: value for key, value in recipe.semantic_settings().items() if key != "train.steps"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


# -- what a start writes; on rank 0 ---------------------------------------------------------------------------------------


def write_start(plan: StartPlan, choice: Choice | None, files: Files | None = None) -> Lineage:
    """Make the start durable: a new run's directory, then the lineage, then the recipe where it is new or longer."""
    files, run = files or Files(), plan.run
    if not plan.resuming:
        files.make_dirs(run.path)
    at, step = (choice.path, choice.step) if choice is not None else (None, 0)
    lineage = lineage_at(run.path, at, step, job_id())
    write_lineage(run.path, lineage, files)
    if not plan.resuming or plan.extends_from:
        files.replace(run.recipe_path, plan.recipe.toml().encode())
    return lineage


def write_tokenizer(run: Run, data: Data) -> None:
    """The run's own copy of its tokenizer, durable."""
    data.save_tokenizer(run.path)
    if (folder := run.path / "tokenizer").is_dir():
        Files().sync_tree(folder)
        Files().sync_dir(run.path)


def set_aside(path: Path, seconds: float = LOCK_WAIT_SECONDS) -> Path | None:
    """Rename a run directory out of the way (`--fresh`); returns its new path, None where there was no directory.

    Raises UserError where a process trains in it, or may do so on another host: it would continue under the new name.
    """
    if not path.exists():
        return None
    run = Run(path)
    if lock_held(run.lock_path) is None and run.state == "running":
        raise UserError(
            f"{path} has a fresh heartbeat: a process on another host may train in it; stop it, or try again in a minute"
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


def acquire_run_lock(run: Path, seconds: float = LOCK_WAIT_SECONDS) -> IO[str] | None:
    """Hold the lock of a run directory until the returned file is closed or this process ends, however it ends.

    None where the file system has no locks. Raises UserError, naming the holder, where another process still trains in the
    directory after `seconds`.
    """
    end = time.monotonic() + seconds
    while True:
        run.mkdir(parents=True, exist_ok=True)
        file = (run / LOCK).open("a+", encoding="utf-8")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # --fresh in another process may have renamed the directory while we waited: then this lock is of the old one.
            if os.path.samestat(os.fstat(file.fileno()), (run / LOCK).stat()):
                break
        except BlockingIOError:
            if time.monotonic() >= end:
                file.seek(0)
                holder = file.read()
                file.close()
                raise UserError(f"{OCCUPIED} {run} already ({_process(holder)}); wait for it, or stop it") from None
            time.sleep(0.1)
        except FileNotFoundError:
            pass
        except OSError:
            file.close()
            return None
        file.close()
    file.truncate(0)
    file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    file.flush()
    return file


def _process(holder: str) -> str:
    try:
        known = json.loads(holder)
        return f"process {known['pid']} on {known['host']}"
    except (ValueError, KeyError, TypeError):  # it has the lock and has not written its name yet
        return "an unknown process"
