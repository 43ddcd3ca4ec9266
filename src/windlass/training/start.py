"""Decide what a start does in a run directory: return a finished run, resume or extend a run, begin
a new one, perhaps as a branch. It writes nothing, so command line, launcher and ranks reach the
same decision from the same files."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from windlass.checkpoint.choose import candidates, named_candidates, read_lineage
from windlass.checkpoint.format import checkpoints_in, read_checkpoint, step_dir
from windlass.errors import UserError, argument, plural
from windlass.launch.schedulers import SCHEDULERS, find_job
from windlass.ledger import last_start
from windlass.optim.schedule import phases
from windlass.parallel.env import detect_env
from windlass.recipe import Horizon, Recipe
from windlass.recipe.layers import LINEAGE
from windlass.recipe.load import UNRECORDED
from windlass.recipe.units import EPOCHS
from windlass.run import LOCK, Run

# A branch may change settings with these prefixes; model, data, seed and batch stay. The
# fingerprint of the data rejects other sources in a mixture.
BRANCHES = (
    "optim.",
    "data.mix",
    "data.stages",
    "train.steps",
    "train.average",
    "train.on_nonfinite",
    "train.max_skips",
    "train.grad_clip",
)
# Files of `windlass submit`, or of a start that failed before it wrote its recipe; a new run may
# begin beside them.
LEFT_OVER = re.compile(
    rf"{LOCK}|\.?{LINEAGE}(\.new)?|heartbeat|log\.txt|tokenizer|\.recipe\.toml\.(new|partial)"
    r"|origin|\.origin\.partial"
    r"|submit\.(sh|toml)|job(-.*)?\.json|\.(open|ends)-.*|.*\.(out|OU)"
)


@dataclass(frozen=True)
class Start:
    """What a start does in its run directory."""

    recipe: Recipe
    run: Run
    resuming: bool = False  # the directory holds a run of this recipe, which continues
    finished: bool = False  # that run has done all its steps
    extends_from: int = 0  # with `--extend-to`: the steps of the run so far; else 0
    branch_from: Path | None = None  # with `--branch-from`: the checkpoint to start from
    fresh: bool = False  # the directory is renamed first
    restarted: bool = False  # by the scheduler or launcher of the job that began the lineage
    changes: dict[str, list[Any]] = field(default_factory=dict)  # key -> [old, new], of a resume
    began: float = field(default_factory=time.time)  # Unix time

    @property
    def from_checkpoint(self) -> bool:
        """Whether the start continues a training, whose prepared data it needs as they were."""
        resumes = self.resuming and bool(checkpoints_in(self.run.checkpoints_dir))
        return resumes or self.branch_from is not None


def resolve_start(
    recipe: Recipe, *, fresh: bool = False, extend_to: int | str = 0, branch_from: str = ""
) -> Start:
    """Decide what a start does in the recipe's run directory. UserError if this holds other files
    or a run of another recipe, or an extension or branch does not fit it."""
    if branch_from and not re.fullmatch(r".+@(\d+|best)", branch_from):
        option = argument("branch_from", branch_from)
        raise UserError(f"{option}: write RUN@STEP or RUN@best, as runs/quickstart-1a2b3c4d@300")
    run = Run(recipe.run_dir)
    if branch_from and Path(branch_from.rpartition("@")[0]).resolve() == run.path.resolve():
        raise UserError("a branch is a new run: give it another run.dir than the run it comes from")
    if run.exists:
        restarted = is_restart(run, os.environ)
        if restarted or not fresh:
            return continue_run(recipe, run, restarted, extend_to, branch_from)
    return begin_run(recipe, run, fresh, extend_to, branch_from)


def continue_run(
    recipe: Recipe, run: Run, restarted: bool, extend_to: int | str, branch_from: str
) -> Start:
    """The start of a run that exists: resume or extend it, or return it if it is finished."""
    extends_from = 0
    if extend_to:
        length, extends_from = extension(run, extend_to)
        recipe = recipe.replace({"train.steps": length})
    longer = f"{argument('extend_to', 'STEPS')}, {argument('stop_at', 'STEP')}"
    rename = f"{argument('fresh')} to rename the old run"
    branch = argument("branch_from", f"{run.path}@STEP")
    refuse_changes(
        f"{run.path} holds a run of another recipe:",
        run.recipe,
        recipe,
        allowed=("train.steps",) if extends_from else (),
        advice=f"undo them, give another run.dir (as a branch: {branch}), or {rename}; for other "
        f"steps {longer}",
    )
    if branch_from:
        check_same_branch(run, branch_from)
    unrecorded: tuple[str, ...] = (*UNRECORDED, "train.steps")
    if recipe.run.base in ("", run.recipe.run.base):
        unrecorded += ("run.base",)
    old = run.recipe.flat()
    changes = {
        key: [old.get(key), value]
        for key, value in recipe.flat().items()
        if not key.startswith(unrecorded) and old.get(key) != value
    }
    finished = not extends_from and is_finished(recipe, run, restarted)
    return Start(recipe, run, True, finished, extends_from, restarted=restarted, changes=changes)


def begin_run(
    recipe: Recipe, run: Run, fresh: bool, extend_to: int | str, branch_from: str
) -> Start:
    """The start of a new run: at step 0, or from a checkpoint of another run."""
    if fresh and run.path.name in ("", ".."):  # after the rename `.` is still the old directory
        problem = f"{argument('fresh')} renames {run.path.resolve()}, the directory of this shell"
        raise UserError(f"{problem}: start from another one")
    left_over = run.path.iterdir() if run.path.is_dir() and not fresh else ()
    if not all(LEFT_OVER.fullmatch(entry.name) for entry in left_over):
        advice = f"give another run.dir, or {argument('fresh')} to rename it"
        raise UserError(f"{run.path} is not empty and not a run; {advice}")
    if extend_to:
        option = argument("extend_to", extend_to)
        raise UserError(f"{run.path} is not a run: leave {option} out to begin one")
    if branch_from:
        checkpoint = branch_checkpoint(recipe, branch_from)
        return Start(recipe, run, branch_from=checkpoint, fresh=fresh)
    if (resume := recipe.checkpoint.resume).isdigit():
        problem = f"checkpoint.resume: a new {run.path} will lack step {resume}"
        raise UserError(f"{problem}; leave it or {argument('fresh')} out")
    if recipe.model.init_from:
        check_init_from(recipe.model.init_from, run.path if fresh else None)
    return Start(recipe, run, fresh=fresh)


def extension(run: Run, extend_to: int | str) -> tuple[int | str, int]:
    """`train.steps` of an extended run, and its steps so far; 0 if it has the new length already,
    because this command extended it before."""
    length = int(extend_to) if str(extend_to).isdigit() else extend_to
    option = argument("extend_to", extend_to)
    if not (isinstance(length, int) or EPOCHS.fullmatch(length)):
        raise UserError(f'{option}: write steps (4576) or epochs ("3 epochs")')
    steps, new = steps_of(run, run.recipe.train.steps), steps_of(run, length)
    if steps is None or new is None:
        raise UserError(f"{run.path} has not begun to train: start it without {option}")
    if new < steps:
        raise UserError(f"{option} is not past the run's {plural(steps, 'step')}")
    return (length, steps) if new > steps else (run.recipe.train.steps, 0)


def is_finished(recipe: Recipe, run: Run, restarted: bool) -> bool:
    """Whether a run has done all its steps, and nobody goes back or went back to an earlier one."""
    if run.state != "finished":
        return False
    end = next(line for line in reversed(run.events) if line["event"] == "finished")
    if end["step"] != steps_of(run, run.recipe.train.steps):
        return False  # an extension was killed, and the ledger has the earlier end
    resume = "latest" if restarted else recipe.checkpoint.resume
    if resume == "latest" and not step_dir(run.checkpoints_dir, end["step"]).exists():
        return True  # the user has deleted the end
    paths = candidates(run.path, resume, measure=recipe.checkpoint.best)
    return not paths or read_checkpoint(paths[0]).step == end["step"]


def check_same_branch(run: Run, branch_from: str) -> None:
    """Raise UserError if an existing run began elsewhere than at the checkpoint `branch_from`."""
    lineage = read_lineage(run.path)
    begins_at = Path(lineage.checkpoint if lineage is not None else "")
    if begins_at.name and not begins_at.is_absolute():
        return  # since then the run went back to a checkpoint of its own
    origin, _, which = branch_from.rpartition("@")
    directory = Path(origin).resolve() / "checkpoints"
    name = begins_at.name.removesuffix(".replaced")
    # The best checkpoint of the other run may have changed since then.
    same_step = which == "best" or name == step_dir(directory, int(which)).name
    if begins_at.parent != directory or not same_step:
        begin = begins_at if begins_at.name else "step 0"
        raise UserError(f"{run.path} begins at {begin}, not at {branch_from}; give another run.dir")


def steps_of(run: Run, length: int | str) -> int | None:
    """A value of `train.steps` as the run's steps; None if the run has not begun to train."""
    began = last_start(run.ledger())
    if isinstance(length, int) or not began:
        return length if isinstance(length, int) else None
    if length == "compute-optimal":
        return int(began["steps"])
    horizon = run.recipe.horizon(0, began["samples_per_epoch"])
    return max(1, horizon.steps_in(length))


def branch_checkpoint(recipe: Recipe, branch_from: str) -> Path:
    """The checkpoint from which a new run of this recipe branches."""
    origin_path, _, which = branch_from.rpartition("@")
    origin = Run.open(origin_path)
    paths = candidates(origin.path, which)
    if not paths:
        raise UserError(f"{origin.path} holds no checkpoint yet")
    checkpoint = paths[0]
    problem = f"a branch keeps model, data, seed and batch of {origin.path}:"
    advice, same = "undo the changes", {"init_from": ""}
    if recipe.model.model_copy(update=same) == origin.recipe.model.model_copy(update=same):
        weights = f"model.init_from={origin.path}@{which} data.tokenizer=auto"
        advice += f", or begin a new run with its weights ({weights})"
    refuse_changes(problem, origin.recipe, recipe, BRANCHES, advice)
    step, steps = read_checkpoint(checkpoint).step, recipe.train.steps
    if isinstance(steps, int) and steps <= step:
        raise UserError(f"train.steps = {steps} is not past the step {step} to branch from")
    return checkpoint


def refuse_changes(
    problem: str, old: Recipe, new: Recipe, allowed: tuple[str, ...], advice: str
) -> None:
    """Raise UserError if a setting that changes the numbers differs, with a line for each."""
    before, after = old.semantic_settings(), new.semantic_settings()
    changes = [
        f"  {key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in before | after
        if before.get(key) != after.get(key) and not key.startswith(allowed)
    ]
    if changes:
        raise UserError("\n".join([problem, *changes, advice]))


def check_init_from(name: str, renamed: Path | None) -> None:
    """Raise UserError if `model.init_from` is not an adapter or a run with a checkpoint, or in the
    directory that `--fresh` renames. The load looks for damage and compares the settings."""
    path = Path(name).expanduser()
    is_run = Run(path).exists
    if (path / "adapter_config.json").is_file() and not is_run:
        return
    try:
        if name.startswith("hf:") or ((path / "config.json").is_file() and not is_run):
            trained = f"model.kind=hf model.name={name.removeprefix('hf:')}"
            raise UserError(f"it is a model of transformers, which {trained} trains")
        checkpoint = named_candidates(name)[0].resolve()
        if renamed and checkpoint.is_relative_to(renamed.resolve()):
            raise UserError(f"{argument('fresh')} renames this directory; give another run.dir")
    except UserError as error:
        raise UserError(f"model.init_from = {name}: {error}") from None


def candidate_checkpoints(start: Start, horizon: Horizon) -> list[Path]:
    """The checkpoints to start from, the first choice first; empty: step 0. A restart takes the
    newest, an extended WSD run the newest before its decay; else by `checkpoint.resume`."""
    settings, run = start.recipe.checkpoint, start.run.path
    if not start.resuming:
        return [start.branch_from] if start.branch_from is not None else []
    schedule = start.recipe.optim.schedule
    if start.extends_from and schedule.kind == "wsd":
        before = phases(schedule, replace(horizon, steps=start.extends_from))
        if before != phases(schedule, horizon):  # the decay moves
            paths = candidates(run, up_to=before[1])
            if not paths and candidates(run):
                problem = f"{run} lacks a checkpoint from before step {before[1]}, when it decays"
                advice = "a decayed run cannot be extended; set checkpoint.keep_every next time"
                raise UserError(f"{problem}: {advice}")
            return paths
    resume = "latest" if start.restarted else settings.resume
    return candidates(run, resume, measure=settings.best)


def job_id(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The identity of this process's job, which survives a restart; empty strings outside a job:
    torchrun's run id, or the launcher's process on a single host; and the scheduler's id."""
    env, launch = detect_env(environ), environ.get("TORCHELASTIC_RUN_ID", "")
    if launch == "none":  # the default of torchrun, in every job
        launch = ""
    if env.launcher == "windlass" or (env.launcher == "torchrun" and not launch and env.nodes == 1):
        launch = f"{socket.gethostname()}/{os.getppid()}"
    return {"launch": launch, "scheduled": find_job(environ)[1]}


def is_restart(run: Run, environ: Mapping[str, str]) -> bool:
    """Whether this process is a restart of the job that began the run's present lineage."""
    env, lineage, job = detect_env(environ), read_lineage(run.path), job_id(environ)
    if lineage is None:
        return False
    scheduler = SCHEDULERS.get(find_job(environ)[0])
    if scheduler and scheduler.restarts(environ):
        return lineage.job.get("scheduled") == job["scheduled"]
    same_launch = job["launch"] != "" and lineage.job.get("launch") == job["launch"]
    return env.attempt > 0 and env.launcher not in SCHEDULERS and same_launch
