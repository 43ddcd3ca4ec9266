"""Weights & Biases: online where there is a key and a network, else a complete offline directory to be synced later."""

from __future__ import annotations

import html
import json
import os
import shlex
import shutil
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from windlass.telemetry.trackers.exporter import Source
from windlass.telemetry.trackers.points import Marks, Point, scalars_of, texts_of

_DEFAULT_URL = "https://api.wandb.ai"
_REACH_SECONDS = 5.0

_QUIET = {"WANDB_SILENT": "true", "WANDB_ERROR_REPORTING": "false", "WANDB_DISABLE_CODE": "true"}


class WandB:
    """One W&B run under a stable id.

    Online, a resume goes on in the same run; what the server has already is told by the run's own summary, which holds
    the last step of each stream. An offline file cannot be appended to, so each start writes the whole effective ledger
    into a new one and then removes the ones before it: to the server they are one run, and no point comes twice.

    The key is taken by the library itself from `WANDB_API_KEY`, never read, passed or written here.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._offline = True
        self._directory = Path()
        self._state: dict[str, Any] = {}
        self._hint = ""

    @property
    def hint(self) -> str:
        """The run's address, or the command that uploads it."""
        return self._hint

    @property
    def _state_path(self) -> Path:
        return self._directory / "wandb" / "windlass.json"

    def open(self, source: Source) -> Marks:
        """Go on in the run, or begin an offline directory, where there is or will be anything to write."""
        self._directory = source.run.path
        os.environ.update({key: os.environ.get(key, value) for key, value in _QUIET.items()})
        mode, why = _mode(os.environ)
        self._state = _read(self._state_path)
        offline = self._state.get("id") == source.id and self._state.get("directory")
        if mode == "offline" and offline and not source.live and Path(self._directory, "wandb", offline).is_dir():
            marks: Marks = self._state["marks"]
            if not source.pending(marks):
                self._hint = self._sync_command(offline)
                return marks
        return self._begin(source, mode, why)

    def _begin(self, source: Source, mode: str, why: str) -> Marks:
        import wandb

        arguments: dict[str, Any] = {
            "project": source.project,
            "id": source.id,
            "name": source.name,
            "notes": source.notes or None,
            "tags": [f"{key}:{value}"[:64] for key, value in source.tags.items()],
            "config": source.settings,
            "dir": str(self._directory),
        }
        if mode == "online":
            try:
                settings = _settings(wandb)
                self._run = wandb.init(**arguments, mode="online", resume="allow", settings=settings)
            except Exception as error:  # not let in, no answer, a wrong one: the offline way loses nothing
                why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                wandb.teardown()
        if self._run is None:
            self._run = wandb.init(**arguments, mode="offline", settings=_settings(wandb))
        self._offline = bool(self._run.settings._offline)
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("marks/*", hidden=True)
        if not self._offline:
            self._hint = str(self._run.url)
            self._state = {"id": source.id}
            return _served(self._run.summary, bool(self._run.resumed))
        name = Path(self._run.settings.sync_dir).name
        self._hint = f"{self._sync_command(name)}  (offline: {why})"
        before = self._state.get("directories", []) if self._state.get("id") == source.id else []
        self._state = {"id": source.id, "directory": None, "directories": [*before, name], "marks": {}}
        self._remember()
        return {}

    def write(self, batch: list[Point], marks: Marks) -> None:
        """A row for each step: what belongs to one step comes together in one row."""
        import wandb

        for point in batch:
            row: dict[str, Any] = {**point.scalars, "step": point.step, "_timestamp": point.time}
            row[f"marks/{point.stream}"] = point.step
            for tag, text in point.texts.items():
                row[tag] = text
                row[f"{tag}_page"] = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
            # a row before the server's last one would be refused; under the next free number it still has its own `step`
            self._run.log(row, step=point.step if point.step >= self._run.step else None)
            if point.summary:
                self._run.summary.update({**scalars_of(point.summary), **texts_of(point.summary)})
        if self._offline:
            self._state["marks"] = marks

    def finish(self, source: Source, state: str, figures: dict[str, Path], marks: Marks) -> None:
        """The figures, the state, and all that waits; then the offline directories before this one can go."""
        if self._run is None:
            return
        import wandb

        for name, path in figures.items():
            self._run.log({f"figures/{name}": wandb.Image(str(path))})
        self._run.summary.update({"state": state, **{f"marks/{key}": mark for key, mark in marks.items()}})
        self._run.finish(exit_code=0 if state in ("finished", "running") else 1)
        wandb.teardown()
        if self._offline:
            *before, current = self._state["directories"]
            for name in before:
                shutil.rmtree(self._directory / "wandb" / name, ignore_errors=True)
            self._state |= {"directory": current, "directories": [current], "marks": marks}
            self._remember()

    def _sync_command(self, name: str) -> str:
        return f"wandb sync {shlex.quote(str(self._directory / 'wandb' / name))}"

    def _remember(self) -> None:
        self._state_path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(self._state), encoding="utf-8")
        os.replace(temporary, self._state_path)


def _mode(environ: Any) -> tuple[str, str]:
    """`online` or `offline`, and why offline: asked for, no key in the environment, or no way to the server."""
    asked = environ.get("WANDB_MODE", "").lower()
    if asked == "disabled":
        raise RuntimeError("WANDB_MODE=disabled")
    if asked in ("offline", "dryrun"):
        return "offline", f"WANDB_MODE={asked}"
    if not environ.get("WANDB_API_KEY"):
        return "offline", "no WANDB_API_KEY in the environment"
    url = urlsplit(environ.get("WANDB_BASE_URL") or _DEFAULT_URL)
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    if any(environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        return "online", ""  # the way leads through a proxy, which the library knows
    try:
        socket.create_connection((host, port), timeout=_REACH_SECONDS).close()
    except OSError as error:
        return "offline", f"no way to {host}: {error}"
    return "online", ""


def _settings(wandb: Any) -> Any:
    """Nothing of the machine, the code, or the console; retries that end."""
    return wandb.Settings(
        silent=True,
        console="off",
        disable_code=True,
        disable_git=True,
        save_code=False,
        reinit="create_new",
        x_disable_meta=True,
        x_disable_stats=True,
        x_disable_machine_info=True,
        x_save_requirements=False,
        init_timeout=20.0,
        x_graphql_retry_max=3,
        x_graphql_timeout_seconds=10.0,
    )


def _served(summary: Any, resumed: bool) -> Marks:
    """How far the server is, from the run's summary."""
    if not resumed:
        return {}
    found = dict(summary)
    return {key.removeprefix("marks/"): int(step) for key, step in found.items() if key.startswith("marks/")}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
