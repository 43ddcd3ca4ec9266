"""The lineage of a run: where its current steps began.

A run may go back: an extension from before its decay, a resume from an earlier step, a branch of
another run. Until the next save, the newest commit belongs to the abandoned lineage. So
`lineage.json` records the new one, durably, before its first step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.checkpoint.format import Count
from windlass.checkpoint.load import checkpoints_in
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import Recipe
from windlass.recipe.layers import LINEAGE, RECIPE


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
    skipped: list[tuple[int, int]] = []  # samples that rewinds to the checkpoint left out
    recipe: dict[str, Any] = {}
    replaced: str = ""  # SHA-256 of the `recipe.toml` before it


def lineage_at(run: Path, checkpoint: Path | None, step: int, job: Mapping[str, str]) -> Lineage:
    """A lineage of the run's recipe that begins now, at a checkpoint of any run, or at step 0."""
    serial = max((c.serial for c in checkpoints_in(run / "checkpoints")), default=0)
    before = read_lineage(run) or Lineage()
    current: dict[str, Any] = {"recipe": before.recipe, "replaced": before.replaced}
    if checkpoint is None:
        return Lineage(serial=serial, job=dict(job), **current)
    directory, path = run.resolve(), checkpoint.resolve()
    path = path.relative_to(directory) if path.is_relative_to(directory) else path
    current |= {"checkpoint": path.as_posix(), "step": step, "skipped": left_out(run, checkpoint)}
    return Lineage(serial=serial, job=dict(job), **current)


def left_out(run: Path, checkpoint: Path) -> list[tuple[int, int]]:
    """The samples that rewinds to a checkpoint have left out; later checkpoints know of them."""
    lineage = read_lineage(run)
    if lineage is None or (run / lineage.checkpoint).resolve() != checkpoint.resolve():
        return []
    return lineage.skipped


def leave_out(run: Path, checkpoint: Path, step: int, samples: tuple[int, int]) -> None:
    """Record, durably, that the run returns to a checkpoint and leaves out a range of samples."""
    now = lineage_at(run, checkpoint, step, (read_lineage(run) or Lineage()).job)
    write_lineage(run, now.model_copy(update={"skipped": [*now.skipped, samples]}), Files())


def read_lineage(run: Path) -> Lineage | None:
    """The run's current lineage; None without a file, when every checkpoint belongs to it.

    UserError if the file is malformed, because a guess could resume from wrong weights.
    """
    path = run / LINEAGE
    try:
        return Lineage.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError):
        raise UserError(
            f"{path}, which says from where the run continues, cannot be read: restore it, "
            "or delete it and name the checkpoint to resume from (checkpoint.resume=STEP)"
        ) from None


def write_lineage(run: Path, lineage: Lineage, files: Files) -> None:
    """Replace the run's lineage, durably."""
    files.replace(run / LINEAGE, lineage.model_dump_json().encode() + b"\n")


def record(run: Path, lineage: Lineage, recipe: Recipe, files: Files) -> None:
    """Write a run's lineage with its recipe, durably, and then `recipe.toml` for the user.

    Windlass leaves out the path of the run, which may move, and settings of one start.
    """
    unset = {"run.dir": "", "run.base": recipe.run.base if recipe.home else str(Path.cwd())}
    path, recipe = run / RECIPE, recipe.replace(unset, {"checkpoint.resume": "latest"})
    text = recipe.toml().encode()
    before = path.read_bytes() if path.is_file() else b""
    replaced = hashlib.sha256(before).hexdigest()
    lineage = lineage.model_copy(update={"recipe": recipe.tree(), "replaced": replaced})
    write_lineage(run, lineage, files)
    files.replace(path, text)
    if before:  # so that the user can write it again
        write_lineage(run, lineage.model_copy(update={"replaced": ""}), files)
