"""Reads back what trackers stored, each with its own reader: (stream of steps and values by name)."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Curves = dict[str, list[tuple[int, float]]]


def tensorboard(directory: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    everything = dict.fromkeys(("scalars", "tensors", "images", "histograms", "compressedHistograms", "audio"), 0)
    return EventAccumulator(str(directory), size_guidance=everything).Reload()


def tensorboard_curves(events: Any) -> Curves:
    return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def mlflow_run(uri: str, project: str) -> tuple[Any, Any]:
    """The client and the one run of the experiment."""
    import mlflow

    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name(project).experiment_id])
    assert len(runs) == 1, "one run in the tracker for a run of ours"
    return client, runs[0]


def mlflow_curves(client: Any, run: Any) -> Curves:
    return {
        name: [(x.step, x.value) for x in client.get_metric_history(run.info.run_id, name)] for name in run.data.metrics
    }


def wandb_records(directory: Path) -> Iterator[Any]:
    """The records of the one offline run under a directory.

    A `.wandb` file is a LevelDB log: after a header of 7 bytes, blocks of 32 KiB; in them chunks of checksum (4 bytes),
    length (2), kind (1: whole, 2: first, 3: middle, 4: last), data; a block's last bytes are void where no header fits.
    """
    from wandb.proto.wandb_internal_pb2 import Record

    (path,) = directory.glob("offline-run-*/run-*.wandb")
    data, at, whole = path.read_bytes(), 7, b""
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        chunk, at = data[at + 7 : at + 7 + length], at + 7 + length
        whole = chunk if kind in (1, 2) else whole + chunk
        if kind in (1, 4):
            yield Record.FromString(whole)


def wandb_history(records: list[Any]) -> list[dict[str, Any]]:
    import json

    rows = []
    for record in records:
        if record.WhichOneof("record_type") == "history":
            rows.append(
                {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            )
    return rows


def wandb_curves(rows: list[dict[str, Any]]) -> Curves:
    curves: Curves = {}
    for row in rows:
        for key, value in row.items():
            if isinstance(value, (int, float)) or value in ("NaN", "Infinity", "-Infinity"):
                curves.setdefault(key, []).append((row["step"] if "step" in row else row["_step"], float(value)))
    return curves
