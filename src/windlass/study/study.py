"""A study on disk: one directory of runs, made from one recipe and a grid. No torch.

    studies/<name>/
      recipe.toml      the recipe that all cells share
      study.json       the axes as they were typed, and the cells: what each sets, and its run directory
      verdicts.json    what was decided about cells from outside: diverged, pruned, failed, interrupted, each with its reason
      runs/<cell>/     a run directory each

Everything else (states, losses, the winner) is read from the runs' ledgers when it is asked for.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.run import Run, cell_state
from windlass.study.grid import Assignment, Cell, cell_of, expand, parse_axis
from windlass.study.progress import ledger_of

VERSION = 1


@dataclass(frozen=True)
class Study:
    """A study's directory; the recipe and the axes never change, the runs and verdicts grow."""

    path: Path
    recipe: Recipe
    axes: list[str]
    cells: list[Cell] = field(repr=False)

    @staticmethod
    def create(recipe: Recipe, axes: list[str], path: Path | None = None) -> Study:
        """The study of a recipe and a grid: opened where the directory holds the same one, made where it is new.

        Raises UserError where the directory holds another study, or a cell's recipe cannot work.
        """
        base = recipe.with_overrides("run.dir=''", "run.name=''")
        cells = expand(base, [parse_axis(text) for text in axes])
        path = path or Path("studies") / default_name(base, axes)
        if (path / "study.json").is_file():
            there = Study.open(path)
            if there.axes != axes or there.recipe.config_hash != base.config_hash:
                raise UserError(
                    f"{path} holds another study ({' '.join(there.axes)} of a recipe with digest {there.recipe.config_hash}); "
                    "give another --dir"
                )
            return there
        study = Study(path, base, list(axes), cells)
        path.mkdir(parents=True, exist_ok=True)
        _write(path / "recipe.toml", base.toml())
        listed = [
            {"assignment": c.assignment, "run": c.place, "digest": c.recipe.config_hash, "key": c.key} for c in cells
        ]
        _write(
            path / "study.json",
            json.dumps({"version": VERSION, "kind": "sweep", "axes": axes, "cells": listed}, indent=1),
        )
        return study

    @staticmethod
    def open(path: str | Path) -> Study:
        """The study at `path`, its cells as they were written down when it was made.

        Raises UserError where there is none, and where this version makes another recipe of a cell than the one it was
        begun with.
        """
        path = Path(path)
        if not Study.is_study(path):
            raise UserError(f"{path} is no study: it has no study.json")
        recipe = Recipe.load(path / "recipe.toml")
        try:
            known = json.loads((path / "study.json").read_text(encoding="utf-8"))
            axes, listed = list(known["axes"]), [(dict(x["assignment"]), x) for x in known["cells"]]
            cells = [cell_of(recipe, sets, x.get("key") or x["digest"], x["run"]) for sets, x in listed]
            changed = [c for c, (_, x) in zip(cells, listed, strict=True) if c.recipe.config_hash != x["digest"]]
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path / 'study.json'} is damaged ({error!r}); give another --dir, or mend it") from None
        if changed:
            raise UserError(
                f"{path}: {changed[0].label} is another recipe now than when the study was begun (its recipe.toml was "
                f"changed, or this version of Windlass has other settings; {len(changed)} of {len(cells)} cells): go on with "
                "what it was begun with, or give another --dir"
            )
        return Study(path, recipe, axes, cells)

    @staticmethod
    def is_study(path: str | Path) -> bool:
        """Whether a directory holds a study."""
        return (Path(path) / "study.json").is_file()

    def run_of(self, cell: Cell) -> Run:
        """The cell's run, whether it has begun or not."""
        return Run(self.path / cell.place)

    def runs(self) -> list[tuple[Assignment, Run]]:
        """Every cell that has begun: what it sets, and its run."""
        pairs = [(cell.assignment, self.run_of(cell)) for cell in self.cells]
        return [(assignment, run) for assignment, run in pairs if run.recipe_path.is_file()]

    def verdicts(self) -> dict[str, dict[str, str]]:
        """What was decided about cells: digest -> `state` (diverged, pruned, failed, interrupted) and `reason`."""
        try:
            found: Any = json.loads((self.path / "verdicts.json").read_text(encoding="utf-8"))
        except (FileNotFoundError, json.JSONDecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    def judge(self, cell: Cell, state: str, reason: str) -> None:
        """Write down a verdict; an empty state takes it back."""
        with _alone(self.path / ".verdicts.lock"):
            verdicts = self.verdicts()
            verdicts.pop(cell.key, None)
            if state:
                verdicts[cell.key] = {"state": state, "reason": reason}
            _write(self.path / "verdicts.json", json.dumps(verdicts, indent=1))

    def state_of(self, cell: Cell) -> tuple[str, str]:
        """`waiting`, `running`, `interrupted`, `finished`, `failed`, `diverged` or `pruned`, and the reason, where one is known."""
        run = self.run_of(cell)
        ledger = ledger_of(run)
        return cell_state(run.state_by(ledger.seams), ledger.lines, self.verdicts().get(cell.key))


def default_name(recipe: Recipe, axes: list[str]) -> str:
    """`<preset>-<digest of recipe and axes>`."""
    text = json.dumps([recipe.config_hash, axes])
    return f"{recipe.preset}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Hold a lock: the tasks of an array job judge their cells at the same time. Without locks, go on without."""
    with path.open("a") as file:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)  # given back when the file closes
        yield


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
