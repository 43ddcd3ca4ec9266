"""TensorBoard, MLflow and W&B: each a class whose constructor connects to a run in the tracker.

- `hint`: the place at which to look at the run.
- `marks`: the last step of each stream that the tracker has.
- `write(points)`, in the order of their steps: after it the tracker has them.
- `close(state, ended)`: returns when all is delivered; any error means that something is not.
"""

from __future__ import annotations

import html
import json
import os
import re
import shlex
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windlass.ledger import ENDINGS
from windlass.recipe.settings import TelemetrySettings
from windlass.run import Run
from windlass.variables import scrub

PROJECT = str(TelemetrySettings.model_fields["project"].default)


class Point(NamedTuple):
    """The numbers and texts of one ledger line for a tracker."""

    step: int
    time: float  # seconds since 1970
    stream: str
    scalars: dict[str, float]
    texts: dict[str, str]


class TensorBoard:
    """Writes the effective ledger into a new file at each start: events cannot be removed."""

    def __init__(self, run: Run, run_id: str, settings: dict[str, Any], started: float):
        from tensorboard.compat.proto import event_pb2
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        self.marks: dict[str, int] = {}
        directory = run.path / "tensorboard"
        self.hint = f"tensorboard --logdir {shlex.quote(str(directory))}"
        directory.mkdir(parents=True, exist_ok=True)
        self._old = list(directory.glob("events.out.tfevents.*"))
        # Readers read the files in the order of their names.
        self._file = (directory / f"events.out.tfevents.{time.time_ns()}.windlass").open("xb")
        self._writer, self._event = RecordWriter(self._file), event_pb2.Event
        hparams = {k: v if isinstance(v, int | float) else str(v) for k, v in settings.items()}
        session = hparams_pb(hparams, trial_id=run.path.resolve().name, start_time_secs=started)
        # A START makes a running server forget what it has read.
        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        self._add(started, file_version="brain.Event:2")
        self._add(started, step=0, session_log=restart)
        self._add(started, summary=session)

    def _add(self, time: float, **fields: Any) -> None:
        self._writer.write(self._event(wall_time=time, **fields).SerializeToString())

    def write(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.summary_v2 import text_pb

        for point in points:
            values = [Summary.Value(tag=tag, simple_value=x) for tag, x in point.scalars.items()]
            for tag, text in point.texts.items():
                values += text_pb(tag, text.encode("utf-8", "replace")).value
            self._add(point.time, step=point.step, summary=Summary(value=values))
            self.marks[point.stream] = point.step
        self._file.flush()
        while self._old:
            self._old.pop().unlink(missing_ok=True)

    def close(self, state: str, ended: float) -> None:
        self._file.close()


MLFLOW_DEFAULTS = {  # short, because the exporter tries again anyway
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "GIT_PYTHON_REFRESH": "quiet",
}
MAX_METRICS, MAX_PARAMS, MAX_PARAM_LENGTH = 1000, 100, 6000  # MLflow's own limits of one request
UNKNOWN_TO_MLFLOW = re.compile(r"[^\w/.\- :]")  # in the name of a metric


class MLflow:
    """One MLflow run, which a tag identifies, in `MLFLOW_TRACKING_URI` or a SQLite store beside the
    runs. MLflow cannot remove points: if a resume repeats steps, their first points stay."""

    def __init__(self, run: Run, run_id: str, settings: dict[str, Any], started: float):
        for key, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(key, value)
        import mlflow
        from mlflow.entities import Param

        path, project = run.path.resolve(), settings["telemetry.project"]
        if project == PROJECT:
            project = os.environ.get("MLFLOW_EXPERIMENT_NAME") or project
        default = f"sqlite:///{os.path.relpath(path.parent / 'mlflow.db')}"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or default
        artifacts = (path.parent / "mlartifacts").as_uri() if uri.startswith("sqlite:///") else None
        self._client = client = mlflow.MlflowClient(tracking_uri=uri)
        if earlier := client.get_experiment_by_name(project):
            experiment = earlier.experiment_id
        else:
            experiment = client.create_experiment(project, artifacts)
        runs = client.search_runs([experiment], f"tags.`windlass.id` = '{run_id}'", max_results=1)
        if not runs:
            tags = {
                "windlass.id": run_id,
                "mlflow.runName": path.name,
                "mlflow.note.content": settings["run.notes"],
            }
            if "study" in settings:
                tags["group"] = settings["study"]
            runs = [client.create_run(experiment, start_time=round(started * 1e3), tags=tags)]
        self._id, data = runs[0].info.run_id, runs[0].data
        shown = scrub(uri).rstrip("/")
        if uri.startswith("http"):
            self.hint = f"{shown}/#/experiments/{experiment}/runs/{self._id}"
        else:
            self.hint = f"mlflow ui --backend-store-uri {shlex.quote(shown)}"
        # Existing parameters cannot be changed and need not be.
        new = [(k, str(v)) for k, v in settings.items() if k not in data.params]
        params = [Param(key, value[:MAX_PARAM_LENGTH]) for key, value in new]
        for first in range(0, len(params), MAX_PARAMS):
            client.log_batch(self._id, params=params[first : first + MAX_PARAMS])
        self.marks: dict[str, int] = json.loads(data.tags.get("windlass.marks", "{}"))

    def write(self, points: Sequence[Point]) -> None:
        # Metrics come before the marks. After a kill between the two, the store gets equal rows
        # again, with the ledger's own times, and keeps one.
        from mlflow.entities import Metric

        self._client.update_run(self._id, status="RUNNING")
        metrics: list[Metric] = []
        for point in points:
            ms = round(point.time * 1e3)
            for key, x in point.scalars.items():
                metrics.append(Metric(UNKNOWN_TO_MLFLOW.sub("_", key), x, ms, point.step))
            for key, text in point.texts.items():
                self._client.log_text(self._id, text, f"{key}/step-{point.step:08d}.txt")
            self.marks[point.stream] = point.step
        for first in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + MAX_METRICS])
        self._client.set_tag(self._id, "windlass.marks", json.dumps(self.marks))

    def close(self, state: str, ended: float) -> None:
        if state in ENDINGS:
            status = "KILLED" if state in ("stopped", "preempted") else state.upper()
            self._client.set_terminated(self._id, status, end_time=round(ended * 1e3))


# W&B gets nothing of the machine, the code or the console. Its retries end.
WANDB_CHARTS = ("train/*", "throughput/*", "time/*", "eval/*", "log/*", "run/*", "device/*")
WANDB_SETTINGS: dict[str, Any] = {
    "silent": True,
    "console": "off",
    "disable_code": True,
    "disable_git": True,
    "reinit": "create_new",
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_machine_info": True,
    "x_save_requirements": False,
    "init_timeout": 20.0,
    "x_graphql_retry_max": 3,
    "x_graphql_timeout_seconds": 10.0,
}


class WandB:
    """One W&B run under a stable id: online, or in the user's mode `offline` a complete directory
    that `wandb sync` uploads later.

    Online a resume continues the same run; its summary has the steps of the server as `marks/*`. An
    offline start writes the effective ledger into a new directory and removes older ones.
    """

    def __init__(self, run: Run, run_id: str, settings: dict[str, Any], started: float):
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self.marks: dict[str, int] = {}
        self._old: list[Path] = []
        users = wandb.setup().settings  # from variables, and from `wandb offline` or `disabled`
        # W&B itself puts the user's variable for None.
        project: str | None = settings["telemetry.project"]
        if users.project and project == PROJECT:
            project = None
        ours = {k: v for k, v in WANDB_SETTINGS.items() if f"WANDB_{k.upper()}" not in os.environ}
        self._run: Any = wandb.init(
            project=project,
            group=settings.get("study"),
            id=run_id,
            name=users.run_name or run.path.resolve().name,
            dir=os.environ.get("WANDB_DIR") or str(run.path),
            config=settings,
            notes=settings["run.notes"] or None,
            settings=wandb.Settings(**ours),
            resume="allow" if users.mode in ("online", "run") else None,
            mode=users.mode,
        )
        for name in WANDB_CHARTS:
            self._run.define_metric(name, step_metric="step")
        self._run.define_metric("marks/*", hidden=True)  # for a resume, not for a dashboard
        if users.mode == "disabled":
            self.hint = "disabled by W&B's own settings (WANDB_MODE): nothing is sent"
        elif self._run.settings._offline:
            directory = Path(os.path.relpath(self._run.settings.sync_dir))
            self.hint = f"wandb sync {shlex.quote(str(directory))}"
            runs = directory.parent.glob(f"offline-run-*-{run_id}")
            self._old = [path for path in runs if path != directory]
        else:
            self.hint = str(self._run.url)
            for key, step in dict(self._run.summary if self._run.resumed else {}).items():
                if key.startswith("marks/"):
                    self.marks[key.removeprefix("marks/")] = int(step)

    def write(self, points: Sequence[Point]) -> None:
        import wandb

        for point in points:
            row: dict[str, Any] = {"step": point.step, "_timestamp": point.time}
            row[f"marks/{point.stream}"] = point.step
            if point.stream == "summary":  # columns of the table of runs, not charts of one point
                scalars = {key.removeprefix("summary/"): x for key, x in point.scalars.items()}
                self._run.summary.update(scalars)
            else:
                row |= point.scalars
            for tag, text in point.texts.items():
                row[tag] = wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)
            # The server rejects a row before its last one; under the next free number the row still
            # has its own `step`.
            self._run.log(row, step=point.step if point.step >= self._run.step else None)
            self.marks[point.stream] = point.step

    def close(self, state: str, ended: float) -> None:
        import wandb

        self._run.summary["state"] = state
        self._run.finish(exit_code=0 if state in ("finished", "running") else 1)
        wandb.teardown()
        for path in self._old:
            shutil.rmtree(path, ignore_errors=True)


BACKENDS = {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB}
