"""What is in a run's `checkpoints`, for people: each one's step, size, scores, why it is kept, and whether it is good.
No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from windlass.checkpoint.format import STEP_DIR, Damaged, Entry, is_whole, list_entries, names_in
from windlass.checkpoint.format import verify as verify_files
from windlass.checkpoint.lineage import read_lineage
from windlass.checkpoint.retention import LOSS, Saved, policy_of, retain, scores_by_step
from windlass.recipe import Horizon
from windlass.run import Run


@dataclass(frozen=True)
class CheckpointStatus:
    """A checkpoint of a run as `windlass checkpoints` lists it."""

    step: int
    path: Path
    time: str | None
    """When it was committed (UTC, ISO 8601); None, as the next two, where it is damaged."""
    bytes: int | None
    world: int | None
    scores: dict[str, float]
    """What the ledger has of its step: `loss`, and the recipe's `checkpoint.best`."""
    kept: list[str]
    """Why retention keeps it: `last`, `best`, `final`, `every`, `start`."""
    problem: str
    """What is damaged; empty: it is good, as far as it was read."""


@dataclass(frozen=True)
class CheckpointList:
    """What is in a run's `checkpoints`."""

    run: Path
    verified: bool
    """Every byte was hashed, not just sizes compared."""
    measure: str
    """The recipe's `checkpoint.best`."""
    checkpoints: list[CheckpointStatus]
    temporary: list[str]
    """Directories that are being written or removed, or were left by a kill."""
    set_aside: list[str]


def list_checkpoints(run_dir: str | Path, verify: bool = False) -> CheckpointList:
    """The checkpoints of a run by step.

    Args:
        run_dir: the run.
        verify: read every byte and compare it with the SHA-256 of what was written; else manifests and sizes alone.

    Raises:
        UserError: there is no run.
    """
    run = Run.open(run_dir)
    recipe, ledger, directory = run.recipe, run.ledger(), run.checkpoints_dir
    entries, names, lineage = list_entries(directory), names_in(directory), read_lineage(run.path)
    starts = [x for x in ledger if x["kind"] == "event" and "samples_per_epoch" in x]
    horizons = [Horizon(x["steps"], x["samples_per_epoch"], recipe.train.global_batch) for x in starts[-1:]]
    policy = policy_of(recipe.checkpoint, horizons, lineage.own_step() if lineage else None)
    scores = {measure: scores_by_step(ledger, measure) for measure in (LOSS, policy.measure)}
    saved = [Saved(e.serial, e.step, str(e.manifest.meta.get("reason"))) for e in entries if e.manifest]
    why = retain(saved, policy, scores[policy.measure])
    rows = []
    for e in sorted(entries, key=lambda e: e.step):
        measured = {measure: values[e.step] for measure, values in scores.items() if e.step in values}
        problem = _problem(e) if verify else e.problem
        rows.append(CheckpointStatus(e.step, e.path, *_facts(e), measured, why.get(e.serial, []), problem))
    temporary = [n for n in names if n.startswith(".saving-") or (STEP_DIR.match(n) and not is_whole(directory / n))]
    return CheckpointList(run.path, verify, policy.measure, rows, temporary, [n for n in names if n.startswith("bad-")])


def _facts(entry: Entry) -> tuple[str | None, int | None, int | None]:
    m = entry.manifest
    return (m.time, m.bytes, m.world) if m else (None, None, None)


def _problem(entry: Entry) -> str:
    if entry.manifest is not None:
        try:
            verify_files(entry.path, entry.manifest)
        except Damaged as error:
            return str(error)
    return entry.problem
