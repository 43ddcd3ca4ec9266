"""The checkpoints that stay, and those that belong to the run's current steps. No torch.

Scores come from the ledger, because a save begins before the evaluation of its step.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from windlass.checkpoint.format import Count, Manifest, manifests_in
from windlass.errors import UserError
from windlass.fileio import Files
from windlass.recipe import Horizon, Recipe
from windlass.recipe.layers import LINEAGE, RECIPE
from windlass.recipe.settings import CheckpointSettings
from windlass.telemetry.measures import lower_is_better

# The reason of a checkpoint: it was due; the best so far; the run had to stop; the end of the run.
PERIODIC, BEST, EMERGENCY, FINAL = "periodic", "best", "signal", "final"
LOSS = "loss"
SAME_ITEMS = ("samples", "items", "items_hash")
"""The fields of an `eval` line that identify the measured items."""


@dataclass(frozen=True)
class Policy:
    """The settings of retention, as in `[checkpoint]`."""

    last: int = 10
    best: bool = True
    keep_forever: Callable[[int], bool] = lambda step: False
    measure: str = LOSS
    signal: int = 0
    start: int | None = None  # the step of the lineage's first checkpoint, if it is the run's own


def policy_of(
    settings: CheckpointSettings, horizons: Sequence[Horizon], lineage: Lineage | None = None
) -> Policy:
    """The policy of a run; `keep_every` holds for each of `horizons` (an extended run has two)."""
    inside = lineage and lineage.checkpoint and not Path(lineage.checkpoint).is_absolute()
    return Policy(
        settings.keep_last,
        settings.keep_best,
        lambda step: any(h.due(settings.keep_every, step) for h in horizons),
        settings.best,
        settings.keep_signal,
        lineage.step if lineage and inside and not lineage.skipped else None,
    )


class Scores(dict[int, float]):
    """Values of a measure by step; `lower`: whether less is better."""

    def __init__(self, values: Mapping[int, float] = MappingProxyType({}), lower: bool = True):
        super().__init__(values)
        self.lower = lower

    def ranked(self) -> list[int]:
        """The steps with a finite value, the best first; among equals the earliest first."""
        sign = 1 if self.lower else -1
        finite = [step for step, value in self.items() if math.isfinite(value)]
        return sorted(finite, key=lambda step: (sign * self[step], step))

    @property
    def best(self) -> int | None:
        """The step with the best value."""
        return next(iter(self.ranked()), None)


def scores_by_step(lines: Iterable[Mapping[str, Any]], measure: str) -> Scores:
    """The finite, `comparable` values of a measure (`loss` or `SUITE.NAME`) in `eval` lines."""
    suite, _, name = measure.partition(".")
    own = [x for x in lines if x["kind"] == "eval" and x.get("suite", LOSS) == suite]
    values = {int(x["step"]): float(x.get(name or suite, math.nan)) for x in comparable(own)}
    finite = {step: value for step, value in values.items() if math.isfinite(value)}
    return Scores(finite, lower_is_better(measure, own))


def without_improvement(lines: Sequence[Mapping[str, Any]], measure: str) -> int:
    """The number of evaluations of a measure since the best one."""
    top, suite = scores_by_step(lines, measure).best, measure.partition(".")[0]
    own = comparable([x for x in lines if x.get("suite", LOSS) == suite])
    return sum(top is None or step > top for step in {x["step"] for x in own})


def comparable(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The `eval` lines of a suite on the items of the last one: a resume may change the items."""
    return [x for x in lines if all(x.get(key) == lines[-1].get(key) for key in SAME_ITEMS)]


def retain(checkpoints: Iterable[Manifest], policy: Policy, scores: Scores) -> dict[int, list[str]]:
    """Why each checkpoint stays, by serial number; one with an empty list may be deleted.

    These stay:

    - the newest;
    - the last `policy.last` that were due or final;
    - the last `policy.signal` that were written because the run had to stop;
    - the best, by `scores`: values of `policy.measure` by step;
    - final ones, because the first end of an extended run is a result;
    - the steps of `policy.keep_forever`, and the first checkpoint of the current lineage.
    """
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    regular = [c for c in newest_first if c.reason in (PERIODIC, FINAL)]
    last = {c.serial for c in (*newest_first[:1], *regular[: policy.last])}
    signal = {c.serial for c in [c for c in newest_first if c.reason == EMERGENCY][: policy.signal]}
    steps = {c.step for c in newest_first}
    present = {step: score for step, score in scores.items() if step in steps}
    top = Scores(present, scores.lower).best if policy.best else None
    # An older checkpoint of the same step is another one: only the newest of it has the score.
    best_serial = next((c.serial for c in newest_first if c.step == top), None)
    why = {}
    for c in newest_first:
        reasons = {
            "last": c.serial in last,
            "best": c.serial == best_serial,
            "final": c.reason == FINAL,
            "signal": c.serial in signal,
            "every": policy.keep_forever(c.step),
            "start": c.step == policy.start,
        }
        why[c.serial] = [reason for reason, applies in reasons.items() if applies]
    return why


# -- lineage
# A run may go back: an extension from before its decay, a resume from an earlier step, a branch of
# another run. Until the next save, the newest commit belongs to the abandoned lineage. So
# `lineage.json` records the new one, durably, before its first step.


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
    saved = manifests_in(run / "checkpoints").values()
    serial = max((manifest.serial for manifest in saved), default=0)
    before = read_lineage(run) or Lineage()
    kept: dict[str, Any] = {"recipe": before.recipe, "replaced": before.replaced}
    if checkpoint is None:
        return Lineage(serial=serial, job=dict(job), **kept)
    here, there = run.resolve(), checkpoint.resolve()
    path = there.relative_to(here) if there.is_relative_to(here) else there
    kept |= {"checkpoint": path.as_posix(), "step": step, "skipped": left_out(run, checkpoint)}
    return Lineage(serial=serial, job=dict(job), **kept)


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
            f"{path}, which says where the run's current steps began, cannot be read: restore it, "
            "or delete it and name the checkpoint to resume from (checkpoint.resume=STEP)"
        ) from None


def write_lineage(run: Path, lineage: Lineage, files: Files) -> None:
    """Replace the run's lineage, durably."""
    files.replace(run / LINEAGE, lineage.model_dump_json().encode() + b"\n")


def record(run: Path, lineage: Lineage, recipe: Recipe, files: Files) -> None:
    """Write a run's lineage with its recipe, durably, and then `recipe.toml` for the user.

    The recipe has no path of the run, which may move, and no setting of one start alone.
    """
    own = {"run.dir": "", "run.base": recipe.run.base if recipe.home else str(Path.cwd())}
    path, recipe = run / RECIPE, recipe.replace(own, {"checkpoint.resume": "latest"})
    text = recipe.toml().encode()
    before = path.read_bytes() if path.is_file() else b""
    replaced = hashlib.sha256(before).hexdigest()
    lineage = lineage.model_copy(update={"recipe": recipe.tree(), "replaced": replaced})
    write_lineage(run, lineage, files)
    files.replace(path, text)
    if before:  # so that the user can write it again
        write_lineage(run, lineage.model_copy(update={"replaced": ""}), files)
