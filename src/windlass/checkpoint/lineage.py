"""Where the present line of a run begins, so that a start never goes on from steps that were given up. Needs no torch.

A run goes back when it is extended from before its decay, or resumed from an earlier step; a branch and a run that resumes
from a path begin at a checkpoint outside. Until the first new save nothing in `checkpoints/` tells of that: the newest commit
is still one of the line that was left. `beginning.json` does, written before the first step of the new line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from windlass.checkpoint import catalog
from windlass.errors import UserError
from windlass.fileio import Files

BEGINNING, VERSION = "beginning.json", 1


@dataclass(frozen=True)
class Lineage:
    """The checkpoint that the present line of a run goes on from."""

    checkpoint: str = ""
    """Its path, relative to the run where it is one of the run's own; empty: the line begins at step 0."""
    step: int = 0
    """Its step."""
    serial: int = 0
    """The highest number of a commit in the run when the line began: only later ones belong to the line."""
    job: Mapping[str, str] = field(default_factory=dict)
    """Who began the line: see `windlass.training.start.job_id`."""

    def path(self, run: Path) -> Path | None:
        """Where the checkpoint lies; None where the line begins at step 0."""
        return run / self.checkpoint if self.checkpoint else None

    def own_step(self) -> int | None:
        """The checkpoint's step where it is one of the run's own, so that it is kept; else None."""
        return self.step if self.checkpoint and not Path(self.checkpoint).is_absolute() else None


def lineage_at(run: Path, checkpoint: Path | None, step: int, job: Mapping[str, str]) -> Lineage:
    """A line that begins now, at a checkpoint of the run or of another one, or at step 0."""
    serial = max((e.serial for e in catalog.entries(run / "checkpoints")), default=0)
    if checkpoint is None:
        return Lineage(serial=serial, job=job)
    here, there = run.resolve(), checkpoint.resolve()
    inside = there.is_relative_to(here)
    return Lineage((there.relative_to(here) if inside else there).as_posix(), step, serial, job)


def read_lineage(run: Path) -> Lineage | None:
    """The run's present line; None where there is no word of it, and so every checkpoint belongs to it.

    Raises UserError where the file is there and cannot be understood: to guess would be to risk wrong weights.
    """
    path = run / BEGINNING
    try:
        tree = json.loads(path.read_bytes())
        if tree["version"] > VERSION:
            raise UserError(f"{path} was written by a newer Windlass: use that one")
        job = {str(key): str(value) for key, value in tree["job"].items()}
        return Lineage(str(tree["checkpoint"] or ""), int(tree["step"]), int(tree["serial"]), job)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{path}, which says where the run's present line begins, cannot be read: bring it back, or delete it and "
            "name the checkpoint to go on from (checkpoint.resume=STEP)"
        ) from None


def write_lineage(run: Path, fork: Lineage, files: Files) -> None:
    """Put the word of a new line in place of the last one, durably."""
    tree = {"version": VERSION, "checkpoint": fork.checkpoint or None, "step": fork.step, "serial": fork.serial}
    files.replace_json(run / BEGINNING, {**tree, "job": dict(fork.job)})


def on_lineage(found: Iterable[catalog.Entry], fork: Lineage | None) -> list[catalog.Entry]:
    """The checkpoints of the present line, as they came; damaged ones too, whose number is not known."""
    return [e for e in found if fork is None or e.manifest is None or e.serial > fork.serial]
