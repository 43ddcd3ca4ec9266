"""The checkpoints of a run for its user: scores, reasons to keep them, damage."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windlass.checkpoint.choose import retain
from windlass.checkpoint.format import checkpoints_in
from windlass.errors import UserError
from windlass.ledger import last_start
from windlass.recipe import Horizon
from windlass.recipe.settings import LOSS_SUITE
from windlass.run import Run
from windlass.telemetry.summary import scores_by_step


@dataclass(frozen=True)
class CheckpointList:
    """The content of a run's `checkpoints`."""

    run: Path
    verified: bool  # every byte was hashed; otherwise sizes were compared
    measure: str  # the recipe's `checkpoint.best`
    bases: list[dict[str, Any]]  # to which the checkpoints refer
    checkpoints: list[dict[str, Any]]  # by step; `time` (UTC), `bytes`, `world`: None if damaged


def list_checkpoints(run_dir: str | Path, verify: bool = False) -> CheckpointList:
    """The checkpoints of a run by step; `verify` hashes every byte. UserError: no such run."""
    run = Run.open(run_dir)
    recipe, ledger, best = run.recipe, run.ledger(), run.recipe.checkpoint.best
    horizons = list[Horizon]()
    if began := last_start(ledger):
        horizons = [recipe.horizon(began["steps"], began["samples_per_epoch"])]
    scores = {measure: scores_by_step(ledger, measure) for measure in (LOSS_SUITE, best)}
    saved = checkpoints_in(run.checkpoints_dir)
    good = [c.content for c in saved if c.content]
    why = retain(good, recipe.checkpoint, horizons, scores[best])
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
    listed = list[dict[str, Any]]()
    for title, base in {c.base.title: c.base for c in good if c.base}.items():
        listed.append({"name": title, "files": len(base.files), "bytes": base.bytes, "problem": ""})
        if verify:
            from windlass.checkpoint.base import open_base  # imports torch

            try:
                open_base(base, recipe, download=False)
            except UserError as error:
                listed[-1]["problem"] = error.text
    return CheckpointList(run.path, verify, best, listed, rows)
