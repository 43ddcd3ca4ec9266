"""TensorBoard event files in the run's `tensorboard` directory, written with TensorBoard's own records, without torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import socket
import struct
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from windlass.telemetry.feeder import Source
from windlass.telemetry.points import Marks, Point, scalars_of


class TensorBoard:
    """Appends event files: one for each time it is opened.

    A file of events cannot be changed, but a later one can tell the reader to forget all from a step on (the `START` of a
    session). So each opening begins at the last step that may not be whole, forgets from there on, and writes it again:
    neither a kill in the middle nor a resume leaves a point twice. What there is, is kept beside the files, so that
    deleting the directory starts afresh.
    """

    def __init__(self) -> None:
        self._directory = Path()
        self._file = -1
        self._id = ""
        self._seams = 0
        self._whole_below = 0

    @property
    def hint(self) -> str:
        """The command that shows the run."""
        return f"tensorboard --logdir {shlex.quote(str(self._directory))}"

    @property
    def _state_path(self) -> Path:
        return self._directory / ".windlass.json"

    def open(self, source: Source) -> Marks:
        """Begin an event file, where there is or will be anything to write."""
        self._directory = source.run.path / "tensorboard"
        state = _read(self._state_path)
        known = state.get("id") == source.id
        self._id, self._seams = source.id, len(source.seams)
        self._whole_below = state["whole_below"] if known else 0
        marks: Marks = dict(state["marks"]) if known else {}
        if known and (back := source.seams[state["seams"] :]):
            self._whole_below = min(self._whole_below, min(back) + 1)
            marks = _lower(marks, min(back))
        if not source.live and not source.pending(marks):
            return marks
        self._begin_file(source)
        return _lower(marks, self._whole_below - 1)

    def _begin_file(self, source: Source) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        again = any(
            self._directory.glob("events.out.tfevents.*")
        )  # also of a start that was killed before its first mark
        path = self._directory / _next_name(self._directory)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        events = [event_pb2.Event(wall_time=source.began, file_version="brain.Event:2")]
        if again:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            events.append(event_pb2.Event(wall_time=source.began, step=self._whole_below, session_log=start))
        if self._whole_below == 0:
            info = plugin_data_pb2.HParamsPluginData(session_start_info=_session_start(source))
            settings = "\n".join(f"    {key} = {value}" for key, value in source.flat_settings.items())
            about = [_hparams(metadata.SESSION_START_INFO_TAG, info), _text("recipe", settings)]
            events.append(event_pb2.Event(wall_time=source.began, summary=summary_pb2.Summary(value=about)))
        self._append(events)

    def write(self, batch: list[Point], marks: Marks) -> None:
        """Append the points, then note how far we are."""
        events = []
        for point in batch:
            values = [
                summary_pb2.Summary.Value(tag=tag, simple_value=value)
                for tag, value in {**point.scalars, **scalars_of(point.summary)}.items()
            ]
            values += [_text(tag, text) for tag, text in point.texts.items()]
            summary = summary_pb2.Summary(value=values)
            events.append(event_pb2.Event(wall_time=point.time, step=point.step, summary=summary))
        self._append(events)
        self._whole_below = max(self._whole_below, batch[-1].step)
        self._remember(marks)

    def finish(self, source: Source, state: str, figures: dict[str, Path], marks: Marks) -> None:
        """Append the figures and the session's end, and close the file."""
        if self._file < 0:
            return
        step = max(line["step"] for line in source.lines)
        images = [_image(f"figures/{name}", path) for name, path in figures.items()]
        if images:
            event = event_pb2.Event(wall_time=source.ended, step=step, summary=summary_pb2.Summary(value=images))
            self._append([event])
        if state != "running":
            status = api_pb2.STATUS_SUCCESS if state == "finished" else api_pb2.STATUS_FAILURE
            end = plugin_data_pb2.SessionEndInfo(status=status, end_time_secs=source.ended)
            value = _hparams(metadata.SESSION_END_INFO_TAG, plugin_data_pb2.HParamsPluginData(session_end_info=end))
            self._append([event_pb2.Event(wall_time=source.ended, summary=summary_pb2.Summary(value=[value]))])
        with contextlib.suppress(OSError):
            os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        self._remember(marks)

    def _append(self, events: list[event_pb2.Event]) -> None:
        """Write all events or none, so that a full disk leaves no torn record."""
        buffer = io.BytesIO()
        writer = RecordWriter(buffer)
        for event in events:
            writer.write(event.SerializeToString())
        data, before = memoryview(buffer.getvalue()), os.fstat(self._file).st_size
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def _remember(self, marks: Marks) -> None:
        state = {"id": self._id, "seams": self._seams, "whole_below": self._whole_below, "marks": marks}
        temporary = self._state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state), encoding="utf-8")
        os.replace(temporary, self._state_path)


def _lower(marks: Marks, step: int) -> Marks:
    """The marks after all from `step` + 1 on was forgotten, with the figures, which stand at the end."""
    return {name: min(mark, step) for name, mark in marks.items() if not name.startswith("figure/")}


def _next_name(directory: Path) -> str:
    """A name that sorts after those of all event files there are: readers go through them by name."""
    import time

    stamps = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*")]
    last = max([int(stamp) for stamp in stamps if stamp.isdigit()], default=0)
    return f"events.out.tfevents.{max(int(time.time()), last + 1):010d}.{socket.gethostname()}.{os.getpid()}.0"


def _session_start(source: Source) -> Any:
    info = plugin_data_pb2.SessionStartInfo(group_name=source.name, start_time_secs=source.began)
    for key, value in source.flat_settings.items():
        if isinstance(value, bool):
            info.hparams[key].bool_value = value
        elif isinstance(value, (int, float)):
            info.hparams[key].number_value = value
        else:
            info.hparams[key].string_value = str(value)
    return info


def _hparams(tag: str, data: Any) -> summary_pb2.Summary.Value:
    empty = tensor_pb2.TensorProto(dtype=types_pb2.DT_FLOAT, tensor_shape=tensor_shape_pb2.TensorShapeProto())
    return summary_pb2.Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=empty)


def _text(tag: str, text: str) -> summary_pb2.Summary.Value:
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
    about = summary_pb2.SummaryMetadata(plugin_data=plugin, data_class=summary_pb2.DATA_CLASS_TENSOR)
    shape = tensor_shape_pb2.TensorShapeProto(dim=[tensor_shape_pb2.TensorShapeProto.Dim(size=1)])
    words = [text.encode("utf-8", "replace")]
    tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=words, tensor_shape=shape)
    return summary_pb2.Summary.Value(tag=tag, metadata=about, tensor=tensor)


def _image(tag: str, path: Path) -> summary_pb2.Summary.Value:
    data = path.read_bytes()
    width, height = struct.unpack(">II", data[16:24])  # of a PNG, in its first chunk
    image = summary_pb2.Summary.Image(width=width, height=height, colorspace=4, encoded_image_string=data)
    return summary_pb2.Summary.Value(tag=tag, image=image)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
