"""Where the run's current steps began, so that a start never resumes from steps that were given up. Needs no torch.

A run goes back when it is extended from before its decay, or resumed from an earlier step; a branch and a run that
resumes from a path start at a checkpoint outside. Until the first new save nothing in `checkpoints/` shows that: the
newest commit still belongs to the lineage that was left. `lineage.json` does, written before the first step of the new
lineage.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.checkpoint.format import Count, list_entries
from windlass.errors import UserError
from windlass.fileio import Files

LINEAGE = "lineage.json"


class Lineage(BaseModel):
    """The checkpoint that the current steps of a run continue from."""

    model_config = ConfigDict(frozen=True)
    version: Literal[1] = 1
    checkpoint: str = ""
    """Its path, relative to the run where it is one of the run's own; empty: the lineage starts at step 0."""
    step: Count = 0
    """Its step."""
    serial: Count = 0
    """The highest number of a commit in the run when the lineage began: only later commits belong to it."""
    job: dict[str, str] = Field(default_factory=dict)
    """The job that began the lineage, to recognise its restarts."""

    def origin(self, run: Path) -> Path | None:
        """Where the checkpoint lies; None where the lineage starts at step 0."""
        return run / self.checkpoint if self.checkpoint else None

    def own_step(self) -> int | None:
        """The checkpoint's step where it is one of the run's own, so that retention keeps it; else None."""
        return self.step if self.checkpoint and not Path(self.checkpoint).is_absolute() else None


def lineage_at(run: Path, checkpoint: Path | None, step: int, job: Mapping[str, str]) -> Lineage:
    """A lineage that begins now, at a checkpoint of the run or of another one, or at step 0."""
    serial = max((e.serial for e in list_entries(run / "checkpoints")), default=0)
    if checkpoint is None:
        return Lineage(serial=serial, job=dict(job))
    here, there = run.resolve(), checkpoint.resolve()
    path = there.relative_to(here) if there.is_relative_to(here) else there
    return Lineage(checkpoint=path.as_posix(), step=step, serial=serial, job=dict(job))


def read_lineage(run: Path) -> Lineage | None:
    """The run's current lineage; None where none was written, and so every checkpoint belongs to it.

    Raises UserError where the file is there and cannot be understood: to guess would be to risk wrong weights.
    """
    path = run / LINEAGE
    try:
        return Lineage.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValidationError):
        raise UserError(
            f"{path}, which says where the run's current steps began, cannot be read: restore it, or delete it "
            "and name the checkpoint to resume from (checkpoint.resume=STEP)"
        ) from None


def write_lineage(run: Path, lineage: Lineage, files: Files) -> None:
    """Put a new lineage in place of the last one; durable when this returns."""
    files.replace(run / LINEAGE, lineage.model_dump_json().encode() + b"\n")
