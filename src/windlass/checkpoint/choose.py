"""From a run to a checkpoint without damage.

One rank calls `candidates`, which lists the possible checkpoints in order of preference. All ranks
call `first_undamaged`, which shares the hashing and stops at the first good one. Only `recover`,
`discard` and `rename_damaged` change the disk.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.checkpoint.format import DIGEST, MANIFEST, STEP_DIR, is_whole, names_in
from windlass.checkpoint.lineage import Lineage, read_lineage
from windlass.checkpoint.load import Checkpoint, checkpoints_in, read_checkpoint
from windlass.checkpoint.retention import policy_of, retain
from windlass.errors import UserError, argument
from windlass.fileio import Files
from windlass.recipe import Horizon
from windlass.recipe.settings import LOSS_SUITE
from windlass.run import Run, last_start
from windlass.telemetry.scores import scores_by_step

if TYPE_CHECKING:
    from windlass.parallel.dist import Ranks


def candidates(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> list[Path]:
    """The checkpoints to which `checkpoint.resume` refers, in order of preference.

    - `latest`: the run's current lineage (see lineage.py), newest commit first, then the
      one that the lineage started from; with `up_to`, only up to this step.
    - `best`: by their scores of `measure` (by default `checkpoint.best`) in the ledger.
    - a step: its checkpoint alone; UserError if it does not exist.
    """
    run = Run(run_dir)
    entries = checkpoints_in(run.checkpoints_dir)
    if resume == "latest":
        return _latest(run, entries, up_to)
    if resume == "best":
        return _best(run, entries, measure)
    if of_step := [e.path for e in entries if e.step == int(resume)]:
        return of_step
    steps = ", ".join(str(s) for s in sorted({e.step for e in entries})) or "none"
    raise UserError(f"{run.path} has no checkpoint of step {int(resume)}; there are: {steps}")


def _latest(run: Run, entries: list[Checkpoint], up_to: int | None) -> list[Path]:
    lineage, limit = read_lineage(run.path) or Lineage(), float("inf") if up_to is None else up_to
    origin = run.path / lineage.checkpoint if lineage.checkpoint else None
    # A damaged one without a serial may belong to the lineage, so it is tried and reported.
    ours = (e for e in entries if e.content is None or e.serial > lineage.serial)
    paths = [e.path for e in ours if e.step <= limit and e.path != origin]
    if origin is None or lineage.step > limit:
        return paths
    if not paths and not origin.is_dir():
        problem = f"{run.path} has no checkpoint since it started from {origin}, which is gone"
        raise UserError(f"{problem}: restore it, or name another one (checkpoint.resume=STEP)")
    return [*paths, *([origin] if origin.is_dir() else [])]


def _best(run: Run, entries: list[Checkpoint], measure: str) -> list[Path]:
    if not measure:
        measure = run.recipe.checkpoint.best if run.exists else LOSS_SUITE
    lineage, scores = read_lineage(run.path), scores_by_step(run.ledger(), measure)
    if lineage is not None:  # the ledger's scores of abandoned steps may be of other weights
        oldest, last = lineage.serial, lineage.step
        entries = [e for e in entries if not e.content or e.serial > oldest or e.step <= last]
    scored = [e for step in scores.ranked() for e in entries if e.step == step]
    return [e.path for e in (*scored, *(e for e in entries if e.step not in scores))]


def first_undamaged(paths: Sequence[Path], ranks: Ranks | None = None) -> Checkpoint | None:
    """The first checkpoint without damage; None if `paths` is empty, UserError if all are damaged.

    Collective over `ranks`, which pass the same paths: each hashes its share of the files.
    """
    damaged: tuple[Checkpoint, ...] = ()
    rank, world = (ranks.rank, ranks.world) if ranks else (0, 1)
    for path in paths:
        checkpoint = read_checkpoint(path)
        problem = checkpoint.verify(rank, world)
        problems = ranks.all_gather_object("verified", problem) if ranks else [problem]
        checkpoint = replace(checkpoint, passed_over=damaged)
        if not (problem := next(filter(None, problems), "")):
            return checkpoint
        damaged += (replace(checkpoint, problem=problem),)
    if not damaged:
        return None
    advice = f"use {argument('fresh')} to start over, or name another (checkpoint.resume=STEP)"
    notes = Checkpoint(paths[0], 0, None, passed_over=damaged).notes
    raise UserError("\n  ".join(["no checkpoint can be used:", *notes]) + f"\n{advice}")


def choose_checkpoint(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> Checkpoint | None:
    """The `first_undamaged` of the `candidates`; None if the run lacks checkpoints."""
    return first_undamaged(candidates(run_dir, resume, measure=measure, up_to=up_to))


def find_checkpoint(source: str | Path, ranks: Ranks | None = None) -> Checkpoint:
    """The checkpoint that a user names: `RUN` (the newest), `RUN@STEP`, `RUN@best` or a path.

    Collective over `ranks`, which hash every byte. UserError if it does not exist or is damaged.
    """
    run, which = os.fspath(source), "latest"
    text, at, word = run.rpartition("@")
    if at and Path(text).is_dir() and not Path(run).is_dir():
        run, which = text, word
        if not (which.isdigit() or which in ("best", "latest")):
            raise UserError(f"{source}: write RUN@STEP, RUN@best or RUN@latest")
    if not Path(run).is_dir():
        raise UserError(f"there is no run or checkpoint at {source}; by default runs lie in runs/")
    paths = [Path(run)] if (Path(run) / MANIFEST).is_file() else candidates(run, which)
    if choice := first_undamaged(paths, ranks):
        return choice
    raise UserError(f"{run} has no checkpoint yet")


def recover(directory: Path, files: Files | None = None) -> list[str]:
    """Remove temporary directories from a run's `checkpoints`; returns a note on each.

    A checkpoint gets its name back if the save in its place was interrupted.
    """
    files, notes = files or Files(), list[str]()
    for name in names_in(directory):
        path = directory / name
        if name.startswith("."):
            files.remove_tree(path)
            if name.startswith(".saving-"):
                step = int(name.split("-")[1])
                notes.append(f"removed the files of an interrupted save of step {step}")
        elif STEP_DIR.match(name) and path.is_dir() and not is_whole(path):
            files.remove_tree(path)
            notes.append(f"removed the rest of {name}: its removal had been interrupted")
    for name in names_in(directory):
        if name.endswith(".replaced") and STEP_DIR.match(name):
            successor = directory / name.removesuffix(".replaced")
            if is_whole(successor) and not read_checkpoint(successor).problem:
                discard(directory / name, files)
            else:
                discard(successor, files)
                files.rename(directory / name, successor)
                files.sync_dir(directory)
                notes.append(f"restored {successor.name}: a save in its place was interrupted")
    return notes


def discard(path: Path, files: Files) -> None:
    """Remove a checkpoint: first its digest, durably, so that a kill leaves it temporary."""
    if is_whole(path):
        files.unlink(path / DIGEST)
        files.sync_dir(path)
    files.remove_tree(path)


def rename_damaged(choice: Checkpoint, run: Path) -> None:
    """Rename the run's own damaged checkpoints of a choice to `bad-...`, which nothing reads."""
    files = Files()
    for path in (other.path for other in choice.passed_over):
        if path.resolve().is_relative_to(run.resolve()):
            bad, number = path.with_name(f"bad-{path.name}"), 0
            while bad.exists():
                number += 1
                bad = path.with_name(f"bad-{path.name}.{number}")
            files.rename(path, bad)
            files.sync_dir(path.parent)


@dataclass(frozen=True)
class CheckpointList:
    """The content of a run's `checkpoints`."""

    run: Path
    verified: bool  # every byte was hashed; otherwise sizes were compared
    measure: str  # the recipe's `checkpoint.best`
    bases: list[dict[str, Any]]
    """The bases that the checkpoints refer to: `name`, `files`, `bytes`, and with `verified` their
    `problem`."""
    checkpoints: list[dict[str, Any]]
    """By step: `step`, `path`, `time` of the commit (UTC, ISO 8601), `bytes` and `world` (None if
    it is damaged), `scores` of its step in the ledger, why retention has `kept` it, `problem`."""
    temporary: list[str]  # directories of a save or removal that is in progress or interrupted
    bad: list[str]  # damaged ones, renamed to `bad-...`


def list_checkpoints(run_dir: str | Path, verify: bool = False) -> CheckpointList:
    """The checkpoints of a run by step; `verify` hashes every byte. UserError: no such run."""
    run = Run.open(run_dir)
    recipe, ledger, directory = run.recipe, run.ledger(), run.checkpoints_dir
    names, horizons = names_in(directory), list[Horizon]()
    if began := last_start(ledger):
        horizons = [recipe.horizon(began["steps"], began["samples_per_epoch"])]
    policy = policy_of(recipe.checkpoint, horizons, read_lineage(run.path))
    scores = {measure: scores_by_step(ledger, measure) for measure in (LOSS_SUITE, policy.measure)}
    saved = checkpoints_in(directory)
    why = retain([c.content for c in saved if c.content], policy, scores[policy.measure])
    rows = [
        {
            "step": c.step,
            "path": c.path,
            "time": c.content and c.content.time,
            "bytes": c.content and c.content.bytes,
            "world": c.content and c.content.world,
            "scores": {measure: values.get(c.step) for measure, values in scores.items()},
            "kept": why.get(c.serial, []),
            "problem": c.verify() if verify else c.problem,
        }
        for c in sorted(saved, key=lambda c: c.step)
    ]
    bases = {c.content.base.title: c.content.base for c in saved if c.content and c.content.base}
    cut_off = {n for n in names if STEP_DIR.match(n) and not is_whole(directory / n)}
    temporary = [n for n in names if n.startswith(".saving-") or n in cut_off]
    bad = [n for n in names if n.startswith("bad-")]
    listed = [
        {"name": title, "files": len(base.files), "bytes": base.bytes, "problem": ""}
        for title, base in bases.items()
    ]
    if verify and bases:
        from windlass.checkpoint.base import check_base  # imports torch

        for row, base in zip(listed, bases.values(), strict=True):
            row["problem"] = check_base(base, recipe)
    return CheckpointList(run.path, verify, policy.measure, listed, rows, temporary, bad)
