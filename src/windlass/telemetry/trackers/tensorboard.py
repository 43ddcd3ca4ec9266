"""TensorBoard: one event file in the run's `tensorboard` directory, of TensorBoard's own records, without torch."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from windlass.run import Run
from windlass.telemetry.trackers.exporter_process import Point


class Backend:
    """Writes the whole effective ledger into a new file at each start and each replay, then removes the file before it.

    Events cannot be taken out of a file, and not every reader heeds the mark that says to forget them; so no point
    is ever there twice, whenever a kill came.
    """

    def __init__(self, run: Run, id: str, settings: dict[str, Any], started: float):
        self.marks: dict[str, int] = {}
        directory = run.path / "tensorboard"
        self.hint = f"tensorboard --logdir {shlex.quote(str(directory))}"
        directory.mkdir(parents=True, exist_ok=True)
        self._old = list(directory.glob("events.out.tfevents.*"))
        # readers go through the files by name, so a later one must sort after
        self._file = open(directory / f"events.out.tfevents.{time.time_ns()}.windlass", "xb")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # a running server forgets what it has read
        self._event(started, file_version="brain.Event:2")
        self._event(started, step=0, session_log=restart)
        hparams = {key: value if isinstance(value, int | float) else str(value) for key, value in settings.items()}
        self._event(started, summary=hparams_pb(hparams, trial_id=run.path.resolve().name, start_time_secs=started))

    def write(self, points: Iterator[Point]) -> None:
        """Append the points; the file before this one can go then."""
        for point in points:
            values = [summary_pb2.Summary.Value(tag=tag, simple_value=x) for tag, x in point.scalars.items()]
            for tag, text in point.texts.items():
                values += text_pb(tag, text.encode("utf-8", "replace")).value
            self._event(point.time, step=point.step, summary=summary_pb2.Summary(value=values))
        self._file.flush()
        while self._old:
            self._old.pop().unlink(missing_ok=True)

    def close(self, state: str, ended: float) -> None:
        """Close the file; TensorBoard knows no state of a run."""
        self._file.close()

    def _event(self, wall_time: float, **fields: object) -> None:
        self._writer.write(event_pb2.Event(wall_time=wall_time, **fields).SerializeToString())
