"""What a start does in a run directory: begin a new run, resume, extend or branch. Decided from
files, then written.

`resolve_start` changes nothing and needs no torch: command line, launcher and ranks decide alike
from the same files. Rank 0 alone writes, the lineage (the checkpoint that the present steps
continue from) before the recipe, so that a kill between two writes leaves a run that resumes. A
scheduler that restarts a job repeats its command line: what that says about the start was done by
the first attempt, and a restart resumes from the newest checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from windlass.checkpoint.format import list_entries, step_dir
from windlass.checkpoint.load import Choice, candidates, first_undamaged, open_checkpoint
from windlass.checkpoint.retention import LINEAGE, lineage_at, read_lineage, write_lineage
from windlass.data.shards import Index
from windlass.errors import RunFailed, UserError, argument
from windlass.fileio import Files, LockHeld, acquire_lock, lock_held
from windlass.launch.schedulers import SCHEDULERS, find_job
from windlass.optim.schedule import phases
from windlass.parallel.env import detect_env
from windlass.recipe import Horizon, Recipe, typed
from windlass.recipe.load import UNRECORDED
from windlass.recipe.units import EPOCHS
from windlass.run import LOCK, OCCUPIED, Run, last_start

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks

Value = TypeVar("Value")

# In these settings a branch may differ from the run it comes from; model, data, seed and batch
# stay.
BRANCH_MAY_CHANGE = (
    "optim.",
    "train.steps",
    "train.on_",
    "train.spike_sigmas",
    "train.max_skips",
    "train.grad_clip",
)
LEFT_OVER = {
    LOCK,
    "heartbeat",
    LINEAGE,
    f".{LINEAGE}.new",
    ".recipe.toml.new",
    ".recipe.toml.partial",
    "log.txt",
    "tokenizer",
    "submit.sh",
    "submit.toml",
    "job.json",
    "job-*.json",
    ".exit",
    ".open-*",
    ".ends-*",
    "*.out",
    "*.OU",
}
"""What a start that failed before it wrote its recipe, or `windlass submit`, leaves behind; a new
run may begin among these."""
LOCK_WAIT_SECONDS = (
    10.0  # for the lock of a run directory: a process that was just killed may still be ending
)


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
    # a scheduler or launcher restarted the job that began the run, or its present lineage
    restarted: bool = False
    changes: tuple[Change, ...] = ()  # settings that a resume has otherwise than the run so far

    @property
    def why_finished(self) -> str:
        """Of a finished run: whether all its steps are done, and that changes of this command had
        no effect."""
        reason = next(
            (e.get("reason") for e in reversed(self.run.events) if e["event"] == "finished"), None
        )
        ended = reason and f"{reason}; a larger train.early_stop, or 0, continues it"
        changed = f"; without effect: {', '.join(map(str, self.changes))}" if self.changes else ""
        return (ended or f"all {self.run.summary.get('steps', '')} steps are done") + changed


class Change(NamedTuple):
    """A setting of a run that a resume changes."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.key} {typed(self.old)} -> {typed(self.new)}"


def resolve_start(
    recipe: Recipe, *, fresh: bool = False, extend_to: int | str = 0, branch_from: str = ""
) -> StartPlan:
    """Decide what a start does in the recipe's run directory; changes nothing.

    UserError: the directory holds other files or a run of another recipe, or an extension or branch
    does not fit it.
    """
    run = Run(recipe.run_dir)
    origin, at, step = branch_from.rpartition("@")
    if branch_from and not (at and (step.isdigit() or step == "best")):
        example = "for example runs/quickstart-1a2b3c4d@300"
        option = argument("branch_from", branch_from)
        raise UserError(f"{option}: write RUN@STEP or RUN@best, {example}")
    exists = run.recipe_path.is_file()
    restarted = exists and is_restart(run, os.environ)
    fresh = fresh and not restarted
    if fresh or not exists:
        left_over = run.path.iterdir() if run.path.is_dir() and not fresh else ()
        if not all(any(fnmatch(p.name, pattern) for pattern in LEFT_OVER) for p in left_over):
            advice = f"give another run.dir, or {argument('fresh')} to rename it"
            raise UserError(f"{run.path} is not empty and not a run; {advice}")
        if extend_to:
            raise UserError(f"there is no run at {run.path} to extend")
        branch = _branch_checkpoint(recipe, Run.open(origin), step) if branch_from else None
        _check_resume(recipe, run, fresh, branch)
        return StartPlan(recipe, run, branch_from=branch, fresh=fresh)

    recipe, extends_from = _extension(run, recipe, extend_to) if extend_to else (recipe, 0)
    longer = f"{argument('extend_to', 'STEPS')}, {argument('stop_at', 'STEP')}"
    rename = f"{argument('fresh')} to rename the old run"
    advice = f"undo them, give another run.dir, or {rename}; for other steps {longer}"
    allowed = ("train.steps",) if extends_from else ()
    problem = f"{run.path} holds a run of another recipe:"
    refuse_changes(problem, run.recipe, recipe, allowed, advice)
    lineage = read_lineage(run.path)
    begins_at = Path(lineage.checkpoint if lineage is not None else "")  # absolute: of another run
    of_origin = Path(origin).resolve() / "checkpoints"
    # The best checkpoint of the other run may have changed since then.
    same_step = begins_at == step_dir(of_origin, int(step) if step.isdigit() else 0)
    wanted = begins_at.parent == of_origin if step == "best" else same_step
    if branch_from and begins_at.is_absolute() and not wanted:
        problem = f"{run.path} begins at {begins_at}, not at {branch_from}"
        raise UserError(f"{problem}; give another run.dir")
    old, new, recorded = run.recipe.flat(), recipe.flat(), (*UNRECORDED, "train.steps")
    differ = [key for key in new if not key.startswith(recorded) and old.get(key) != new[key]]
    return StartPlan(
        recipe,
        run,
        resuming=True,
        finished=not extends_from and _is_finished(run, recipe),
        extends_from=extends_from,
        restarted=restarted,
        changes=tuple(Change(key, old.get(key), new[key]) for key in differ),
    )


def _check_resume(recipe: Recipe, run: Run, fresh: bool, branch: Path | None) -> None:
    """Raise UserError if a new run cannot have `checkpoint.resume`, before `fresh` renames
    anything."""
    resume = recipe.checkpoint.resume
    if branch is not None or resume in ("latest", "best", "never"):
        return
    inside = fresh and Path(resume).resolve().is_relative_to(run.path.resolve())
    if inside or resume.isdigit() or not Path(resume).is_dir():
        problem = f"checkpoint.resume: a new {run.path} will lack {resume}"
        raise UserError(f"{problem}; leave it or {argument('fresh')} out")


def _is_finished(run: Run, recipe: Recipe) -> bool:
    """Whether the run is done, also by a recipe with more patience."""
    if run.state != "finished":
        return False
    # The last event is the one of the highest step.
    end = next(line for line in reversed(run.events) if line["event"] == "finished")
    if early := end.get("early_stop", 0):
        return 0 < recipe.train.early_stop <= early
    # A run whose extension was killed has an earlier end in its ledger.
    return bool(end["step"] == steps_of(run, run.recipe.train.steps))


def _extension(run: Run, recipe: Recipe, extend_to: int | str) -> tuple[Recipe, int]:
    """The recipe of a run that is extended, and the run's steps so far; 0: the run has that length
    already."""
    length, asked = (
        int(extend_to) if str(extend_to).isdigit() else extend_to,
        argument("extend_to", extend_to),
    )
    if not (isinstance(length, int) or EPOCHS.fullmatch(length)):
        raise UserError(f'{asked}: write steps (4576) or epochs ("3 epochs")')
    steps, new = steps_of(run, run.recipe.train.steps), steps_of(run, length)
    if steps is None or new is None:
        raise UserError(f"{run.path} has not begun to train: start it without {asked}")
    if new < steps:
        raise UserError(f"{asked} is not past the run's {steps} steps")
    if new == steps:  # the same command again
        return recipe.replace({"train.steps": run.recipe.train.steps}), 0
    return recipe.replace({"train.steps": length}), steps


def steps_of(run: Run, length: int | str) -> int | None:
    """A length in steps, epochs or `compute-optimal` as the steps of a run; None if the run has not
    begun to train."""
    began = last_start(run.ledger())
    if isinstance(length, int) or not began:
        return length if isinstance(length, int) else None
    if length == "compute-optimal":
        return int(began["steps"])
    horizon = Horizon(0, began["samples_per_epoch"], run.recipe.train.global_batch)
    return max(1, horizon.steps_in(length))


def _branch_checkpoint(recipe: Recipe, origin: Run, which: str) -> Path:
    """The checkpoint (a step, or `best`) of a run from which a run of this recipe may branch."""
    if origin.path.resolve() == recipe.run_dir.resolve():
        raise UserError("a branch is a new run: give it another run.dir than the run it comes from")
    if which == "best":
        paths = candidates(origin.path, which)
        step = int(paths[0].name.removeprefix("step-")) if paths else 0
    else:
        step = int(which)
    checkpoint = step_dir(origin.checkpoints_dir, step)
    if not checkpoint.is_dir():
        steps = sorted(entry.step for entry in list_entries(origin.checkpoints_dir))
        raise UserError(f"{origin.path} has no checkpoint of step {step}; there are: {steps}")
    problem = f"a branch keeps model, data, seed and batch of {origin.path}:"
    refuse_changes(problem, origin.recipe, recipe, BRANCH_MAY_CHANGE, "undo the changes")
    if isinstance(recipe.train.steps, int) and recipe.train.steps <= step:
        raise UserError(
            f"train.steps = {recipe.train.steps} is not past the step {step} to branch from"
        )
    return checkpoint


def refuse_changes(
    problem: str, old: Recipe, new: Recipe, allowed: tuple[str, ...], advice: str
) -> None:
    """Raise UserError where a setting that changes the training differs: `optim.lr: 0.001 ->
    0.002`, one line each."""
    before, after = old.semantic_settings(), new.semantic_settings()
    differ = [
        key
        for key in before | after
        if before.get(key) != after.get(key) and not key.startswith(allowed)
    ]
    if differ:
        changes = [f"  {key}: {before.get(key)!r} -> {after.get(key)!r}" for key in differ]
        raise UserError("\n".join([problem, *changes, advice]))


def job_id(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """What identifies the job of this process and survives a restart; empty strings outside a job.

    `launch`: the process of Windlass's launcher, or torchrun's run id; `scheduled`: the id that the
    scheduler gave the job.
    """
    ours = detect_env(environ).launcher == "windlass"
    launch = (
        f"{socket.gethostname()}/{os.getppid()}" if ours else environ.get("TORCHELASTIC_RUN_ID", "")
    )
    return {"launch": launch, "scheduled": find_job(environ)[1]}


def is_restart(run: Run, environ: Mapping[str, str]) -> bool:
    """Whether this process belongs to a restart of the job that began the present lineage of the
    run."""
    env, lineage, job = detect_env(environ), read_lineage(run.path), job_id(environ)
    if lineage is None:
        return False
    scheduler = SCHEDULERS.get(find_job(environ)[0])
    if scheduler and scheduler.restarts(environ):
        return lineage.job.get("scheduled") == job["scheduled"]
    return (
        env.attempt > 0
        and env.launcher not in SCHEDULERS
        and lineage.job.get("launch", "") == job["launch"]
    )


def decide_on_rank_0(ranks: Ranks, name: str, decide: Callable[[], Value]) -> Value:
    """What rank 0 decides (anything that JSON holds), on every rank; its error is raised on every
    rank."""
    value, error, failed = None, "", False
    if ranks.main:
        try:
            value = decide()
        except (UserError, RunFailed) as raised:
            error, failed = raised.text, isinstance(raised, RunFailed)
        except OSError as raised:
            error = f"{raised.filename}: {raised.strerror}; give another run.dir"
    value, error, failed = ranks.broadcast_object(name, [value, error, failed])
    if error:
        raise RunFailed(error) if failed else UserError(error)
    return value  # type: ignore[return-value]


def choose_undamaged(ranks: Ranks, candidates: Callable[[], list[Path]]) -> Choice | None:
    """The first undamaged one of the checkpoints that rank 0 lists; each rank hashes its share of
    the files."""
    paths = decide_on_rank_0(ranks, "candidates", lambda: list(map(str, candidates())))
    return first_undamaged([Path(path) for path in paths], ranks)


def check_shared(ranks: Ranks, run: Path, data: Path | None) -> None:
    """Refuse directories that not every host sees, before anything slow: what rank 0 creates there
    must be there for all.

    Where rank 0 has prepared data (which may be read-only, or a copy on a host's own disk), all
    must have the same.
    """
    index = Index.load(data) if data is not None else None
    places = {
        "run.dir": run.absolute(),
        **({"data.dir": data.absolute()} if data is not None else {}),
    }

    def create() -> dict[str, str]:
        marks = {}
        for key, place in places.items() if index is None else [("run.dir", places["run.dir"])]:
            there = next(path for path in (place, *place.parents) if path.is_dir())
            try:
                descriptor, marks[key] = tempfile.mkstemp(
                    prefix=".windlass-", dir=there
                )  # a name in no cache of NFS
            except OSError as error:
                raise UserError(
                    f"{there} cannot be written ({error.strerror}); give another {key}"
                ) from None
            os.close(descriptor)
        return marks

    marks = decide_on_rank_0(ranks, "shared", create)
    prepared = ranks.broadcast_object("prepared", index and index.fingerprint)
    missing = [key for key, mark in marks.items() if not Path(mark).exists()]
    same = data is None or not prepared or (index is not None and index.fingerprint == prepared)
    missing += [] if same else ["data.dir"]
    hosts = ranks.all_gather_object("shared", [socket.gethostname(), missing])
    for mark in marks.values() if ranks.main else ():
        Path(mark).unlink(missing_ok=True)
    ranks.broadcast_object("removed")  # nobody continues while they lie there
    for key, place in places.items():
        if blind := sorted(
            {f"{host} (rank {rank})" for rank, (host, keys) in enumerate(hosts) if key in keys}
        ):
            problem = f"{key}: {place} of {hosts[0][0]} (rank 0) is not seen by {', '.join(blind)}"
            raise UserError(f"{problem}: put it on a file system that all hosts share ({key}=PATH)")


def candidate_checkpoints(plan: StartPlan, horizon: Horizon) -> list[Path]:
    """The checkpoints to start from, in the order in which they are tried; empty: step 0. On rank
    0.

    `checkpoint.resume` names them, but a restart takes the newest, and a WSD run that is extended
    the newest from before its decay. UserError: the one that was asked for is missing or of another
    recipe.
    """
    recipe, run = plan.recipe, plan.run.path
    if plan.branch_from is not None:
        return [plan.branch_from]
    resume = "latest" if plan.restarted else recipe.checkpoint.resume
    is_path = resume not in ("latest", "best", "never") and not resume.isdigit()
    if not plan.resuming and not is_path:
        return []
    schedule, old = recipe.optim.schedule, replace(horizon, steps=plan.extends_from)
    if (
        plan.extends_from
        and schedule.kind == "wsd"
        and phases(schedule, old) != phases(schedule, horizon)
    ):
        decay_begins = phases(schedule, old)[1]
        paths = candidates(run, up_to=decay_begins)
        if not paths and candidates(run):
            problem = f"no checkpoint of {run} is left from before step {decay_begins}, where its decay began"
            raise UserError(
                f"{problem}: a decayed run cannot be extended; set checkpoint.keep_every next time"
            )
        return paths
    paths = candidates(run, resume, measure=recipe.checkpoint.best)
    if (
        is_path and paths and not paths[0].resolve().is_relative_to(run.resolve())
    ):  # another run's: the same recipe?
        meta, origin = (
            open_checkpoint(paths[0], deep=False).meta,
            Run(paths[0].resolve().parent.parent),
        )
        if meta.get("line") != hash_without_steps(recipe):
            problem = f"checkpoint.resume: {paths[0]} is of another recipe:"
            if origin.recipe_path.is_file():
                branch = argument("branch_from", "RUN@STEP")
                advice = (
                    f"undo them, or use {branch}, which may change optimizer, schedule and steps"
                )
                refuse_changes(problem, origin.recipe, recipe, ("train.steps",), advice)
            raise UserError(
                f"{problem} config hash {meta.get('recipe')}, and here {recipe.config_hash}"
            )
    return paths


def hash_without_steps(recipe: Recipe) -> str:
    """The recipe's config hash with `train.steps` left out: equal for runs that differ in length
    alone."""
    settings = {
        key: value for key, value in recipe.semantic_settings().items() if key != "train.steps"
    }
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def write_start(plan: StartPlan, choice: Choice | None, files: Files | None = None) -> None:
    """Make the start durable: a new run's directory, then the lineage, then the recipe where it is
    new or longer."""
    files, run = files or Files(), plan.run
    if not plan.resuming:
        files.make_dirs(run.path)
    lineage = lineage_at(
        run.path, choice.path if choice else None, choice.step if choice else 0, job_id()
    )
    write_lineage(run.path, lineage, files)
    if not plan.resuming or plan.extends_from:
        longer = {"train.steps": plan.recipe.train.steps}
        recipe = run.recipe.replace(**longer) if plan.resuming else plan.recipe
        files.replace(run.recipe_path, recipe.toml().encode())


def write_settings(plan: StartPlan) -> None:
    """The run's recipe has the settings that hold from here on; what one start alone does stays as
    it was."""
    once = {"checkpoint.resume": plan.run.recipe.checkpoint.resume}
    Files().replace(plan.run.recipe_path, plan.recipe.replace(**once).toml().encode())


def set_aside(path: Path, seconds: float = LOCK_WAIT_SECONDS) -> Path | None:
    """Rename a run directory (`--fresh`) and return its new path; UserError where a process trains
    in it, or may."""
    if not path.exists():
        return None
    run = Run(path)
    if lock_held(run.lock_path) is None and run.state == "running":
        raise UserError(
            f"{path} has a fresh heartbeat: another host may train in it; try again in a minute"
        )
    lock = acquire_run_lock(path, seconds)
    names = (path.with_name(f"{path.name}.old-{number}") for number in itertools.count(1))
    aside = next(name for name in names if not name.exists())
    path.rename(aside)
    if lock is not None:
        lock.close()
    return aside


def acquire_run_lock(run: Path, seconds: float = LOCK_WAIT_SECONDS) -> IO[str] | None:
    """Hold the lock of a run directory until the returned file is closed or this process ends.

    Returns None if the file system has no locks. Raises UserError, with the holder, after
    `seconds`.
    """
    try:
        return acquire_lock(run / LOCK, seconds)
    except LockHeld as held:
        raise UserError(f"{OCCUPIED} {run} already ({held}); wait for it, or stop it") from None
