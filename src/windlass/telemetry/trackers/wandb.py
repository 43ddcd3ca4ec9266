"""Weights & Biases: online where the library gets in, else a complete offline directory to be synced later."""

from __future__ import annotations

import html
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.errors import first_line
from windlass.run import Run
from windlass.telemetry.environment import scrub
from windlass.telemetry.trackers.exporter_process import Point

SETTINGS: dict[str, Any] = {  # nothing of the machine, the code, or the console; retries that end
    "silent": True, "console": "off", "disable_code": True, "disable_git": True, "reinit": "create_new",
    "x_disable_meta": True, "x_disable_stats": True, "x_disable_machine_info": True, "x_save_requirements": False,
    "init_timeout": 20.0, "x_graphql_retry_max": 3, "x_graphql_timeout_seconds": 10.0,
}  # fmt: skip


class Backend:
    """One W&B run under a stable id.

    Online, a resume continues the same run; which steps the server has is in the run's own summary, as `marks/*`. An
    offline file cannot be appended to, so each start writes the whole effective ledger into a new one and then removes
    those before it. The key is taken by the library itself from `WANDB_API_KEY`, never read or written here.
    """

    def __init__(self, run: Run, id: str, settings: dict[str, Any], started: float):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.marks: dict[str, int] = {}
        self._old: list[Path] = []
        self._run: Any = None
        mode = why = os.environ.get("WANDB_MODE", "online")
        if mode == "disabled":
            raise RuntimeError("WANDB_MODE=disabled")
        arguments: dict[str, Any] = {
            "project": settings["telemetry.project"], "id": id, "name": run.path.resolve().name, "notes": settings["run.notes"] or None,
            "config": settings, "dir": str(run.path), "settings": wandb.Settings(**SETTINGS),
        }  # fmt: skip
        if mode == "online":
            try:
                self._run = wandb.init(**arguments, mode="online", resume="allow")
            except Exception as error:  # no key, no network, no answer, a wrong one: offline loses nothing
                why = scrub(first_line(error))
                wandb.teardown()
        if self._run is None:
            self._run = wandb.init(**arguments, mode="offline")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("marks/*", hidden=True)
        if self._run.settings._offline:
            directory = run.path / "wandb" / Path(self._run.settings.sync_dir).name
            self.hint = f"wandb sync {shlex.quote(str(directory))}  (offline: {why})"
            self._old = [path for path in directory.parent.glob(f"offline-run-*-{id}") if path != directory]
        else:
            self.hint = str(self._run.url)
            summary = dict(self._run.summary) if self._run.resumed else {}
            self.marks = {key.removeprefix("marks/"): int(x) for key, x in summary.items() if key.startswith("marks/")}

    def write(self, points: Iterator[Point]) -> None:
        """A row for each point, with its mark in the row itself."""
        import wandb

        for point in points:
            row = {**point.scalars, "step": point.step, "_timestamp": point.time, f"marks/{point.stream}": point.step}
            row |= {tag: wandb.Html(f"<pre>{html.escape(x)}</pre>", inject=False) for tag, x in point.texts.items()}
            # the server would refuse a row before its last one; under the next free number it still has its own `step`
            self._run.log(row, step=point.step if point.step >= self._run.step else None)

    def close(self, state: str, ended: float) -> None:
        """The state, and all that waits; then the offline directories before this one can go."""
        import wandb

        self._run.summary["state"] = state
        self._run.finish(exit_code=0 if state in ("finished", "running") else 1)
        wandb.teardown()
        for path in self._old:
            shutil.rmtree(path, ignore_errors=True)
