"""MLflow: one run in a local SQLite store beside the runs, or wherever `MLFLOW_TRACKING_URI` points."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from windlass.run import Run
from windlass.telemetry.environment import scrub
from windlass.telemetry.trackers.exporter_process import Point

DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # we try again anyway
    "MLFLOW_DISABLE_TELEMETRY": "true", "GIT_PYTHON_REFRESH": "quiet",
}  # fmt: skip
ID_TAG, MARKS_TAG = "windlass.id", "windlass.marks"
MAX_METRICS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 6000
"""MLflow's own limits of one request."""
STATUS = {"finished": "FINISHED", "preempted": "KILLED", "failed": "FAILED"}


class Backend:
    """One MLflow run, found again by a tag; the steps that it has are in another tag, in the store itself.

    Metrics carry the ledger's own times, so lines that are sent again after a kill are, to the store, the same rows.
    Points of steps that a resume does again cannot be taken back: those of the first attempt stay, none comes twice.
    """

    def __init__(self, run: Run, id: str, settings: dict[str, Any], started: float):
        os.environ.update({key: os.environ.get(key, value) for key, value in DEFAULTS.items()})
        import mlflow
        from mlflow.entities import Param

        home = Path(os.path.relpath(run.path.resolve().parent))
        uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{home / 'mlflow.db'}"
        artifacts = (home / "mlartifacts").resolve().as_uri() if "MLFLOW_TRACKING_URI" not in os.environ else None
        self._client = client = mlflow.MlflowClient(tracking_uri=uri)
        existing = client.get_experiment_by_name(settings["telemetry.project"])
        experiment = (
            existing.experiment_id if existing else client.create_experiment(settings["telemetry.project"], artifacts)
        )
        runs = client.search_runs([experiment], f"tags.`{ID_TAG}` = '{id}'", max_results=1)
        if not runs:
            tags = {ID_TAG: id, "mlflow.runName": run.path.resolve().name, "mlflow.note.content": settings["run.notes"]}
            runs = [client.create_run(experiment, start_time=round(started * 1e3), tags=tags)]
        self._id, data = runs[0].info.run_id, runs[0].data
        params = [Param(k, str(v)[:MAX_PARAM_LENGTH]) for k, v in settings.items() if k not in data.params]
        for first in range(0, len(params), MAX_PARAMS):  # those that are there cannot be changed and need not be
            client.log_batch(self._id, params=params[first : first + MAX_PARAMS])
        self.marks: dict[str, int] = json.loads(data.tags.get(MARKS_TAG, "{}"))
        self.hint = f"mlflow ui --backend-store-uri {shlex.quote(scrub(uri))}"
        if uri.startswith(("http://", "https://")):
            self.hint = f"{scrub(uri).rstrip('/')}/#/experiments/{experiment}/runs/{self._id}"

    def write(self, points: Iterator[Point]) -> None:
        """Metrics first, then the marks: after a kill in between, the store gets equal rows again and keeps one."""
        from mlflow.entities import Metric

        self._client.update_run(self._id, status="RUNNING")
        metrics: list[Metric] = []
        for point in points:
            metrics += [Metric(key, value, round(point.time * 1e3), point.step) for key, value in point.scalars.items()]
            for key, text in point.texts.items():
                self._client.log_text(self._id, text, f"{key}/step-{point.step:08d}.txt")
            while len(metrics) > MAX_METRICS:
                self._client.log_batch(self._id, metrics=metrics[:MAX_METRICS])
                del metrics[:MAX_METRICS]
        self._client.log_batch(self._id, metrics=metrics)
        self._client.set_tag(self._id, MARKS_TAG, json.dumps(self.marks))

    def close(self, state: str, ended: float) -> None:
        """The status and the time of the end."""
        if state in STATUS:
            self._client.set_terminated(self._id, STATUS[state], end_time=round(ended * 1e3))
