"""MLflow: one run in a local SQLite store beside the runs, or wherever `MLFLOW_TRACKING_URI` points."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from windlass.telemetry.environment import scrub
from windlass.telemetry.trackers.exporter import Source
from windlass.telemetry.trackers.points import Marks, Point, scalars_of, texts_of

_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
"""Settings of MLflow's where the user has none: a server that is away is found out in seconds; we try again anyway."""

ID_TAG, MARKS_TAG = "windlass.id", "windlass.marks"

_METRICS_AT_ONCE, _OTHERS_AT_ONCE = 1000, 100
_LONGEST_PARAM, _LONGEST_TAG = 6000, 5000

_STATUS = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED", "running": "RUNNING"}


class MLflow:
    """One MLflow run, found again by a tag; how far it is stands in another, in the store itself.

    Metrics carry the ledger's own times. So lines that are sent again after a kill are, to the store, the same rows.
    What a resume made void cannot be taken back: the points of the first attempt stand, and none comes twice.
    """

    def __init__(self) -> None:
        self._run = ""
        self._uri = ""
        self._client: Any = None

    @property
    def hint(self) -> str:
        """The command or address that shows the run."""
        if self._uri.startswith(("http://", "https://")):
            return scrub(f"{self._uri.rstrip('/')}/#/experiments/{self._experiment}/runs/{self._run}")
        return f"mlflow ui --backend-store-uri {shlex.quote(scrub(self._uri))}"

    def open(self, source: Source) -> Marks:
        """Find or make experiment and run."""
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow

        home = Path(os.path.relpath(source.run.path.resolve().parent))
        self._uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}"
        self._client = client = mlflow.MlflowClient(tracking_uri=self._uri)
        place = None if "MLFLOW_TRACKING_URI" in os.environ else (home / "mlartifacts").resolve().as_uri()
        self._experiment = _experiment(client, source.project, place)
        found = client.search_runs([self._experiment], f"tags.`{ID_TAG}` = '{source.id}'", max_results=1)
        if not found:
            tags = {ID_TAG: source.id, "mlflow.runName": source.name, "mlflow.source.name": "windlass"}
            tags |= {"mlflow.note.content": source.notes} if source.notes else {}
            found = [client.create_run(self._experiment, start_time=round(source.began * 1e3), tags=tags)]
        run = found[0]
        self._run = run.info.run_id
        marks: Marks = json.loads(run.data.tags.get(MARKS_TAG, "{}"))
        if source.live or source.pending(marks):
            if run.info.status != "RUNNING":
                client.update_run(self._run, status="RUNNING")
            self._settings(source, set(run.data.params))
        return marks

    def _settings(self, source: Source, known: set[str]) -> None:
        """The recipe as params; those that are there already cannot be changed and need not be."""
        from mlflow.entities import Param, RunTag

        flat = source.flat_settings.items()
        params = [Param(key, str(value)[:_LONGEST_PARAM]) for key, value in flat if key not in known]
        tags = [RunTag(f"windlass.{key}", value) for key, value in source.tags.items()]
        for begin in range(0, len(params), _OTHERS_AT_ONCE):
            self._client.log_batch(self._run, params=params[begin : begin + _OTHERS_AT_ONCE])
        self._client.log_batch(self._run, tags=tags)

    def write(self, batch: list[Point], marks: Marks) -> None:
        """Metrics first, then the mark: a kill in between makes the store see equal rows again, which it keeps once."""
        from mlflow.entities import Metric, RunTag

        metrics, tags = [], []
        for point in batch:
            when = round(point.time * 1e3)
            scalars = {**point.scalars, **scalars_of(point.summary)}
            metrics += [Metric(key, value, when, point.step) for key, value in scalars.items()]
            tags += [
                RunTag(key.replace("/", "."), text[:_LONGEST_TAG]) for key, text in texts_of(point.summary).items()
            ]
            for key, text in point.texts.items():
                self._client.log_text(self._run, text, f"{key}/step-{point.step:08d}.txt")
        for begin in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + _METRICS_AT_ONCE])
        for begin in range(0, len(tags), _OTHERS_AT_ONCE):
            self._client.log_batch(self._run, tags=tags[begin : begin + _OTHERS_AT_ONCE])
        self._client.log_batch(self._run, tags=[RunTag(MARKS_TAG, json.dumps(marks))])

    def finish(self, source: Source, state: str, figures: dict[str, Path], marks: Marks) -> None:
        """The figures, the status and the time of the end."""
        from mlflow.entities import RunTag

        for name, path in figures.items():
            self._client.log_artifact(self._run, str(path), f"figures/{name}")
        self._client.log_batch(self._run, tags=[RunTag(MARKS_TAG, json.dumps(marks)), RunTag("windlass.state", state)])
        if state != "running":
            self._client.set_terminated(self._run, _STATUS[state], end_time=round(source.ended * 1e3))


def _experiment(client: Any, name: str, place: str | None) -> str:
    found = client.get_experiment_by_name(name)
    if found is None:
        from mlflow.exceptions import MlflowException

        try:
            return str(client.create_experiment(name, artifact_location=place))
        except MlflowException:  # another run made it in the meantime
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)
