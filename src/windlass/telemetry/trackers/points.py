"""From a line of the ledger to what a tracker shows: the same grouped names in every tracker. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from windlass.recipe.load import flatten
from windlass.telemetry.ledger import Line

NO_METRIC = {"kind", "step", "time", "attempt", "suite", "index", "rank", "cores"}


@dataclass
class Point:
    """What one line gives a tracker at one step."""

    step: int
    time: float
    """Seconds since 1970."""
    stream: str
    """The sequence of steps it belongs to; no stream has two points at one step."""
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)


def stream(line: Line) -> str:
    """The stream of a line; empty for a line that trackers do not get."""
    names = {"train": "train", "summary": "summary", "eval": f"eval/{line.get('suite', 'loss')}"}
    return (names | {"sample": f"sample/{line.get('index', 0)}"}).get(line["kind"], "")


def point(line: Line, device_samples: Iterable[Line] = ()) -> Point:
    """What a line gives a tracker; of the devices' samples since the line before it, the means by rank."""
    shown = Point(line["step"], seconds(line["time"]), stream(line))
    if line["kind"] == "train":
        shown.scalars = {_group(key): value for key, value in numbers(line).items()} | device_means(device_samples)
        shown.scalars |= {f"goodput/{key}_s": value for key, value in numbers(line.get("seconds", {})).items()}
        shown.scalars["run/attempt"] = float(line.get("attempt", 0))
    elif line["kind"] == "sample":
        shown.texts = {f"samples/{line.get('index', 0)}": str(line.get("text", ""))}
    else:
        prefix = "eval" if shown.stream == "eval/loss" else shown.stream
        fields = numbers(flatten({**line, "seconds": None}))
        shown.scalars = {f"{prefix}/{key.replace('.', '/')}": value for key, value in fields.items()}
    return shown


def _group(key: str) -> str:
    if key.endswith("_ms"):
        return f"time/{key}"
    return f"throughput/{key}" if "per_s" in key or key == "mfu" else f"train/{key}"


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a line; the words that stand for what JSON cannot say become floats again."""
    numeric = {k: v for k, v in line.items() if isinstance(v, int | float) or v in ("NaN", "Infinity", "-Infinity")}
    return {key: float(v) for key, v in numeric.items() if key not in NO_METRIC and not isinstance(v, bool)}


def seconds(time: str) -> float:
    """A ledger line's time as seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()


def device_means(samples: Iterable[Line]) -> dict[str, float]:
    """Means of sampled device values as `device/<field>/rank_<n>`."""
    values: dict[str, list[float]] = {}
    for sample in samples:
        for key, value in numbers(sample).items():
            values.setdefault(f"device/{key}/rank_{sample.get('rank', 0)}", []).append(value)
    return {name: sum(some) / len(some) for name, some in values.items()}
