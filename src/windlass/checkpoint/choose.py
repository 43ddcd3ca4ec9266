"""Which checkpoints a run keeps (`retain`), from which it continues (`Lineage`), and which of them
is without damage. One rank lists the `candidates`; all ranks hash them in `first_undamaged`."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.checkpoint.format import (
    MANIFEST,
    Checkpoint,
    Count,
    Manifest,
    checkpoints_in,
    read_checkpoint,
)
from windlass.errors import UserError, argument
from windlass.fileio import Files
from windlass.recipe import Horizon, Recipe
from windlass.recipe.layers import LINEAGE, RECIPE
from windlass.recipe.settings import LOSS_SUITE, CheckpointSettings
from windlass.run import Run
from windlass.telemetry.summary import Scores, scores_by_step

if TYPE_CHECKING:
    from windlass.parallel.ranks import Ranks

# The reason of a checkpoint: it was due; the best so far; the run had to stop; the end of the run.
PERIODIC, BEST, EMERGENCY, FINAL = "periodic", "best", "signal", "final"


def retain(
    checkpoints: Iterable[Manifest],
    settings: CheckpointSettings,
    horizons: Sequence[Horizon],
    scores: Scores,
) -> dict[int, list[str]]:
    """Why each checkpoint stays, by serial number; one with an empty list may be deleted. `scores`:
    values of `checkpoint.best` by step. `keep_every` holds for each of `horizons` (an extended run
    has two)."""
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    regular = [c for c in newest_first if c.reason in (PERIODIC, FINAL)]
    last = {c.serial for c in (*newest_first[:1], *regular[: settings.keep_last])}
    steps = {c.step for c in newest_first}
    present = {step: score for step, score in scores.items() if step in steps}
    best_step = Scores(present, scores.lower).best_step if settings.keep_best else None
    # If a step was saved twice, its score belongs to the newer checkpoint.
    best_serial = next((c.serial for c in newest_first if c.step == best_step), None)
    why = {}
    for c in newest_first:
        reasons = {
            "last": c.serial in last,
            "best": c.serial == best_serial,
            "final": c.reason == FINAL,  # the first end of an extended run is a result
            "every": any(horizon.due(settings.keep_every, c.step) for horizon in horizons),
        }
        why[c.serial] = [reason for reason, applies in reasons.items() if applies]
    return why


class Lineage(BaseModel):
    """The checkpoint from which the current steps of a run continue (older steps are abandoned),
    and the recipe that they are trained with."""

    model_config = ConfigDict(frozen=True)
    version: Literal[1] = 1
    checkpoint: str = ""  # its path, relative to the run if it is the run's own; empty: step 0
    step: Count = 0
    serial: Count = 0  # of the last commit before the lineage: only later ones belong to it
    # The job that began the lineage, to recognise its restarts.
    job: dict[str, str] = Field(default_factory=dict)
    recipe: dict[str, Any] = {}
    replaced: str = ""  # SHA-256 of the `recipe.toml` before it


def lineage_at(run: Path, checkpoint: Path | None, step: int, job: Mapping[str, str]) -> Lineage:
    """A lineage of the run's recipe that begins now, at a checkpoint of any run, or at step 0."""
    serial = max((c.serial for c in checkpoints_in(run / "checkpoints")), default=0)
    before = read_lineage(run) or Lineage()
    current: dict[str, Any] = {"recipe": before.recipe, "replaced": before.replaced}
    if checkpoint is not None:
        directory, path = run.resolve(), checkpoint.resolve()
        path = path.relative_to(directory) if path.is_relative_to(directory) else path
        current |= {"checkpoint": path.as_posix(), "step": step}
    return Lineage(serial=serial, job=dict(job), **current)


def read_lineage(run: Path) -> Lineage | None:
    """The run's current lineage; None without a file, when every checkpoint belongs to it.
    UserError if the file is malformed, because a guess could resume from wrong weights."""
    path = run / LINEAGE
    try:
        return Lineage.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError):
        raise UserError(
            f"{path}, which names the start of the current steps, cannot be read: restore it, "
            "or delete it and name the checkpoint to resume from (checkpoint.resume=STEP)"
        ) from None


def write_lineage(run: Path, lineage: Lineage, files: Files) -> None:
    files.replace(run / LINEAGE, lineage.model_dump_json().encode() + b"\n")


def record(run: Path, lineage: Lineage, recipe: Recipe, files: Files) -> None:
    """Write a run's lineage with its recipe, durably, and then `recipe.toml` for the user; without
    the path of the run, which may move, and settings of one start."""
    unset = {"run.dir": "", "run.base": recipe.run.base if recipe.home else str(Path.cwd())}
    path, recipe = run / RECIPE, recipe.replace(unset, {"checkpoint.resume": "latest"})
    text = recipe.toml().encode()
    before = path.read_bytes() if path.is_file() else b""
    replaced = hashlib.sha256(before).hexdigest()
    lineage = lineage.model_copy(update={"recipe": recipe.tree(), "replaced": replaced})
    write_lineage(run, lineage, files)
    files.replace(path, text)


def candidates(
    run_dir: str | Path, resume: str = "latest", *, measure: str = "", up_to: int | None = None
) -> list[Path]:
    """The checkpoints to which `checkpoint.resume` refers, in order of preference.

    - `latest`: the run's current lineage, newest commit first, then the one that the lineage
      started from; with `up_to`, only up to this step.
    - `best`: by their scores of `measure` (by default `checkpoint.best`) in the ledger.
    - a step: only its checkpoint; UserError if it does not exist.
    """
    run = Run(run_dir)
    entries = checkpoints_in(run.checkpoints_dir)
    if resume not in ("latest", "best"):
        if of_step := [e.path for e in entries if e.step == int(resume)]:
            return of_step
        steps = ", ".join(str(s) for s in sorted({e.step for e in entries})) or "none"
        raise UserError(f"{run.path} lacks a checkpoint of step {int(resume)}; it has {steps}")
    lineage = read_lineage(run.path) or Lineage()
    if resume == "best":
        if not measure:
            measure = run.recipe.checkpoint.best if run.exists else LOSS_SUITE
        scores = scores_by_step(run.ledger(), measure)
        # The ledger's scores of abandoned steps may be of other weights.
        oldest, last = lineage.serial, lineage.step
        entries = [e for e in entries if not e.content or e.serial > oldest or e.step <= last]
        scored = [e for step in scores.ranked() for e in entries if e.step == step]
        return [e.path for e in (*scored, *(e for e in entries if e.step not in scores))]
    limit = float("inf") if up_to is None else up_to
    origin = run.path / lineage.checkpoint if lineage.checkpoint else None
    # A damaged one without a serial may belong to the lineage, so it is tried and reported.
    ours = (e for e in entries if e.content is None or e.serial > lineage.serial)
    paths = [e.path for e in ours if e.step <= limit and e.path != origin]
    if origin is None or lineage.step > limit:
        return paths
    if not paths and not origin.is_dir():
        problem = f"{run.path} lacks a checkpoint since its start from {origin}, which is gone"
        raise UserError(f"{problem}: restore it, or name another one (checkpoint.resume=STEP)")
    return [*paths, *([origin] if origin.is_dir() else [])]


def first_undamaged(paths: Sequence[Path], ranks: Ranks | None = None) -> Checkpoint | None:
    """The first checkpoint without damage; None if `paths` is empty, UserError if all are damaged.
    Collective over `ranks`, which pass the same paths: each hashes its share of the files."""
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


def named_candidates(source: str | Path) -> list[Path]:
    """The `candidates` of the checkpoint that a user names: `RUN` (the newest), `RUN@STEP`,
    `RUN@best` or a path. UserError if there are none."""
    run, which = os.path.expanduser(source), "latest"
    text, at, word = run.rpartition("@")
    if at and Path(text).is_dir() and not Path(run).is_dir():
        run, which = text, word
        if not (which.isdigit() or which in ("best", "latest")):
            raise UserError(f"{source}: write RUN@STEP, RUN@best or RUN@latest")
    if not Path(run).is_dir():
        raise UserError(f"{source} is not a run or checkpoint; by default runs lie in runs/")
    paths = [Path(run)] if (Path(run) / MANIFEST).is_file() else candidates(run, which)
    if not paths:
        raise UserError(f"{run} holds no checkpoint yet")
    return paths


def find_checkpoint(source: str | Path, ranks: Ranks | None = None) -> Checkpoint:
    """The first of the `named_candidates` without damage; UserError if there is none.
    Collective over `ranks`, which hash every byte."""
    choice = first_undamaged(named_candidates(source), ranks)
    assert choice is not None
    return choice
