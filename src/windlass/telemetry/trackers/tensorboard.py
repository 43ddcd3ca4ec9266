"""TensorBoard: one event file in the run's `tensorboard` directory, of TensorBoard's own records, without torch."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from windlass.telemetry.trackers.exporter_process import Marks, RunInfo
from windlass.telemetry.trackers.points import Point


class Backend:
    """Writes the whole effective ledger into a new file at each start and each replay, then removes the file before it.

    Events cannot be taken out of a file, and not every reader heeds the mark that says to forget them; so no point
    is ever there twice, whenever a kill came.
    """

    def open(self, info: RunInfo) -> Marks:
        """Begin an event file with the recipe, as text and as hyperparameters."""
        directory = info.directory / "tensorboard"
        self.hint = f"tensorboard --logdir {shlex.quote(str(directory))}"
        directory.mkdir(parents=True, exist_ok=True)
        self._old = list(directory.glob("events.out.tfevents.*"))
        # readers go through the files by name, so a later one must sort after
        self._file = open(directory / f"events.out.tfevents.{time.time_ns()}.windlass", "xb")  # noqa: SIM115
        self._writer = RecordWriter(self._file)
        restart = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # a running server forgets what it has read
        self._event(info.began, file_version="brain.Event:2")
        self._event(info.began, step=0, session_log=restart)
        settings = {
            key: value if isinstance(value, int | float) else str(value) for key, value in info.settings.items()
        }
        self._event(info.began, summary=hparams_pb(settings, trial_id=info.name, start_time_secs=info.began))
        recipe = "\n".join(f"    {key} = {value}" for key, value in info.settings.items())
        self._event(info.began, summary=summary_pb2.Summary(value=[_text("recipe", recipe)]))
        return {}

    def write(self, points: Iterator[Point], marks: Marks) -> None:
        """Append the points."""
        for point in points:
            values = [summary_pb2.Summary.Value(tag=tag, simple_value=x) for tag, x in point.scalars.items()]
            values += [_text(tag, text) for tag, text in point.texts.items()]
            self._event(point.time, step=point.step, summary=summary_pb2.Summary(value=values))
        self._file.flush()
        while self._old:
            self._old.pop().unlink(missing_ok=True)

    def close(self, state: str, ended: float) -> None:
        """Close the file; TensorBoard knows no state of a run."""
        self._file.close()

    def _event(self, wall_time: float, **fields: object) -> None:
        self._writer.write(event_pb2.Event(wall_time=wall_time, **fields).SerializeToString())


def _text(tag: str, text: str) -> summary_pb2.Summary.Value:
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
    metadata = summary_pb2.SummaryMetadata(plugin_data=plugin, data_class=summary_pb2.DATA_CLASS_TENSOR)
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    content = [text.encode("utf-8", "replace")]
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=content, tensor_shape=shape)
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata, tensor=tensor)
