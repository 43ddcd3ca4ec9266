"""TensorBoard event files in the run's `tensorboard` directory, written with TensorBoard's own records, without torch."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import socket
import struct
import time
from pathlib import Path
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2, tensor_shape_pb2, types_pb2
from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from windlass.telemetry.trackers.exporter import Source
from windlass.telemetry.trackers.points import Marks, Point, pending, scalars_of


class TensorBoard:
    """One event file, written anew from the whole effective ledger each time it is opened.

    Events cannot be taken out of a file, and not every reader heeds the mark that says to forget them. So a resume, and
    a replay that finds something new, write a new file and then remove the one before it: no point is ever there twice,
    whenever a kill came. How far the file is, is kept beside it, so that deleting the directory starts afresh.
    """

    def __init__(self) -> None:
        self._directory = Path()
        self._file = -1
        self._id = ""
        self._before: list[Path] = []
        self._owed = 0

    @property
    def hint(self) -> str:
        """The command that shows the run."""
        return f"tensorboard --logdir {shlex.quote(str(self._directory))}"

    @property
    def _state_path(self) -> Path:
        return self._directory / ".windlass.json"

    def open(self, source: Source) -> Marks:
        """Begin an event file, where there is or will be anything to write."""
        self._directory, self._id = source.run.path / "tensorboard", source.id
        state = _read(self._state_path)
        if not source.live and state.get("id") == source.id and not source.pending(state["marks"]):
            marks: Marks = state["marks"]
            return marks
        self._directory.mkdir(parents=True, exist_ok=True)
        self._before = sorted(self._directory.glob("events.out.tfevents.*"))
        self._owed = len(pending(source.lines, {}))
        path = self._directory / _next_name(self._before)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            self._append(_beginning(source))
        except OSError:
            path.unlink()
            raise
        return {}

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
        self._owed -= len(batch)
        if self._owed <= 0:  # all that was there when this file was begun is in it
            self._replace()
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
        self._replace()
        self._remember(marks)

    def _replace(self) -> None:
        for path in self._before:
            path.unlink(missing_ok=True)
        self._before = []

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
        state = {"id": self._id, "marks": marks}
        temporary = self._state_path.with_suffix(".tmp")
        temporary.write_text(json.dumps(state), encoding="utf-8")
        os.replace(temporary, self._state_path)


def _beginning(source: Source) -> list[event_pb2.Event]:
    """What a file begins with: a word to a server that is looking to forget the file before it, and the recipe."""
    forget = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
    info = plugin_data_pb2.HParamsPluginData(session_start_info=_session_start(source))
    settings = "\n".join(f"    {key} = {value}" for key, value in source.flat_settings.items())
    about = [_hparams(metadata.SESSION_START_INFO_TAG, info), _text("recipe", settings)]
    return [
        event_pb2.Event(wall_time=source.began, file_version="brain.Event:2"),
        event_pb2.Event(wall_time=source.began, step=0, session_log=forget),
        event_pb2.Event(wall_time=source.began, summary=summary_pb2.Summary(value=about)),
    ]


def _next_name(there: list[Path]) -> str:
    """A name that sorts after those of the event files there are: readers go through them by name."""
    stamps = [path.name.split(".")[3] for path in there]
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
