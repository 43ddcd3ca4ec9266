"""Where a start of a run begins from: step 0, a checkpoint of its own, or one of another run. Decided, then written down.

The order matters. What is refused changes nothing; `beginning.json`, which tells where the present line of the run began,
is durable before the recipe of a new length or of a new run is; so a kill or a power cut between any two writes leaves a run
that goes on from where it was, or as it was asked to. Rank 0 alone calls what is here, and tells the others.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from windlass.checkpoint import catalog
from windlass.checkpoint import load as checkpoints
from windlass.checkpoint.lineage import Lineage, lineage_at, read_lineage, write_lineage
from windlass.checkpoint.load import Checkpoint, Choice
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import Horizon, Recipe
from windlass.run import Run
from windlass.training.claim import Claim, differences, job

if TYPE_CHECKING:
    from windlass.data.dataset import Data

FREE = ("train.steps:",)
"""May differ between a run and the checkpoint at a path that it resumes from."""


def of_new(claim: Claim) -> Choice | None:
    """The checkpoint outside that a new run begins at; None: step 0. Raises UserError where it is damaged or does not fit."""
    if claim.branch_from is not None:
        found = checkpoints.open_checkpoint(claim.branch_from)  # every byte of it
        return Choice(claim.branch_from, found.step)
    wanted = claim.recipe.checkpoint.resume
    if wanted in ("latest", "best", "never") or wanted.isdigit():
        return None
    return _from_path(claim, wanted)


def of_old(claim: Claim, horizon: Horizon) -> Choice | None:
    """The checkpoint that an existing run goes on from; None: it has none yet, and begins at step 0.

    `checkpoint.resume` says which, but at a restart of the job that did so already: then it is the newest. A WSD run that
    is extended goes back to its newest checkpoint before the decay. Raises UserError where that cannot be.
    """
    recipe, path = claim.recipe, claim.run.path
    wanted = "latest" if claim.restart else recipe.checkpoint.resume
    if claim.extends_from and recipe.optim.schedule.kind == "wsd":
        return _before_decay(claim, horizon)
    if wanted == "latest":
        return checkpoints.latest_on_lineage(path, read_lineage(path))
    if wanted in ("best", "never") or wanted.isdigit():
        return checkpoints.choose(path, wanted)
    return _from_path(claim, wanted)


def _before_decay(claim: Claim, horizon: Horizon) -> Choice | None:
    path, fork = claim.run.path, read_lineage(claim.run.path)
    old = Horizon(claim.extends_from, horizon.samples_per_epoch, horizon.samples_per_step)
    plateau_ends = old.steps - old.steps_in(claim.recipe.optim.schedule.decay)
    there = sorted(e.step for e in catalog.entries(path / "checkpoints"))
    choice = checkpoints.latest_on_lineage(path, fork, up_to=plateau_ends)
    if choice is None and (there or (fork is not None and fork.checkpoint)):
        raise UserError(
            f"the decay of {path} began at step {plateau_ends}, and no checkpoint from before it is kept (there "
            f"are {', '.join(map(str, there)) or 'none'}): a decayed run cannot be extended; set checkpoint.keep_every next time"
        )
    return choice


def _from_path(claim: Claim, wanted: str) -> Choice | None:
    """A checkpoint at a path; one of another run only where that run's recipe is this one, but for the steps."""
    choice = checkpoints.choose(claim.run.path, wanted)
    if choice is None:
        return None
    if not choice.path.resolve().is_relative_to(claim.run.path.resolve()):
        _refuse_other_recipe(claim.recipe, checkpoints.open_checkpoint(choice.path, deep=False))
    return choice


def _refuse_other_recipe(recipe: Recipe, checkpoint: Checkpoint) -> None:
    saved = checkpoint.meta
    if lineage_hash(recipe) == saved.get("line") or recipe.config_hash == saved.get("recipe"):
        return
    origin = Run(checkpoint.path.resolve().parent.parent)
    changed = []
    if origin.recipe_path.is_file():
        changed = [line for line in differences(origin.recipe, recipe) if not line.startswith(FREE)]
        if not changed and origin.recipe.config_hash == saved.get("recipe"):
            return
    shown = changed or [f"its recipe's digest is {saved.get('recipe')}, and this one's is {recipe.config_hash}"]
    lines = [f"checkpoint.resume: {checkpoint.path} is of another recipe:", *(f"  {line}" for line in shown)]
    lines.append("take the changes back, or use --branch-from RUN@STEP, which may change optimizer, schedule and steps")
    raise UserError("\n".join(lines))


def lineage_hash(recipe: Recipe) -> str:
    """The recipe's digest with the steps left out: equal for runs of which one is the other, longer or shorter."""
    settings = {key: value for key, value in recipe.semantic_settings().items() if key != "train.steps"}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:12]


def begins_anew(claim: Claim) -> bool:
    """Whether a start leaves the run's present line for a new one, and must say so first."""
    return bool(claim.extends_from) or (not claim.restart and claim.recipe.checkpoint.resume != "latest")


def moments_of(checkpoint: Checkpoint, recipe: Recipe) -> tuple[bool, list[str]]:
    """Whether the optimizer's moments can be taken over, and what is to be said where not: a branch may change `optim.kind`."""
    kind = checkpoint.meta.get("optimizer")
    if kind is None:  # saved before it was written down
        origin = Run(checkpoint.path.resolve().parent.parent)
        kind = origin.recipe.optim.kind if origin.recipe_path.is_file() else recipe.optim.kind
    if kind == recipe.optim.kind:
        return True, []
    return False, [
        f"{checkpoint.path} has the moments of {kind}, of which {recipe.optim.kind} has no use: they begin anew"
    ]


def write_new(claim: Claim, choice: Choice | None, files: Files | None = None) -> Lineage:
    """Make a new run durable: its directory and those above it, where it begins, its recipe; in this order."""
    files, path = files or Files(), claim.run.path
    files.make_dirs(path)
    return write_line(claim, choice, files, recipe=True)


def write_line(claim: Claim, choice: Choice | None, files: Files | None = None, recipe: bool = False) -> Lineage:
    """Write down where a new line begins, and then, where it is new or longer, the recipe."""
    files, run = files or Files(), claim.run
    at = choice.path if choice is not None else None
    fork = lineage_at(run.path, at, choice.step if choice is not None else 0, job())
    write_lineage(run.path, fork, files)
    if recipe or claim.extends_from:
        files.replace(run.recipe_path, claim.recipe.toml().encode())
    return fork


def write_tokenizer(run: Run, data: Data, files: Files | None = None) -> None:
    """The run's copy of its tokenizer, durable."""
    data.save_tokenizer(run.path)
    if (folder := run.path / "tokenizer").is_dir():
        (files or Files()).sync_tree(folder)
        (files or Files()).sync_dir(run.path)
