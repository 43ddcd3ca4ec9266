"""From a line of the ledger to what a tracker shows: the same grouped names in every tracker. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from windlass.telemetry.ledger import Line

_HIDDEN = {"kind", "step", "time", "attempt", "suite", "index", "event", "seconds", "text", "prompt"}
_PLAIN_WORDS = ("NaN", "Infinity", "-Infinity")

Marks = dict[str, int]
"""The last step that a tracker has of each stream (see `stream`): its high-water marks."""


@dataclass
class Point:
    """What one line gives a tracker at one step."""

    step: int
    time: float
    """Seconds since 1970."""
    stream: str
    """To which sequence of steps it belongs; no stream has two points at one step."""
    scalars: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    """Of a `summary` line: its values, flat, for the tracker's own summary."""


def stream(line: Line) -> str | None:
    """The stream a line belongs to; None for a line that trackers do not get."""
    match line["kind"]:
        case "train" | "summary":
            return str(line["kind"])
        case "eval":
            return f"eval/{line.get('suite', 'loss')}"
        case "sample":
            return f"sample/{line.get('index', 0)}"
    return None


def pending(lines: Iterable[Line], marks: Marks) -> list[Line]:
    """The lines that a tracker with these marks does not have yet."""
    return [line for line in lines if (name := stream(line)) is not None and line["step"] > marks.get(name, -1)]


def point(line: Line, devices: Mapping[str, float] | None = None) -> Point:
    """What a line gives a tracker; with the devices' means since the line before it."""
    name = stream(line)
    assert name is not None
    found = Point(line["step"], seconds(line["time"]), name)
    match line["kind"]:
        case "train":
            found.scalars = {group(key): value for key, value in numbers(line).items()}
            found.scalars |= {f"goodput/{key}_s": value for key, value in numbers(line.get("seconds") or {}).items()}
            found.scalars["run/attempt"] = float(line.get("attempt", 0))
            found.scalars |= devices or {}
        case "eval":
            suite = line.get("suite", "loss")
            prefix = "eval/" if suite == "loss" else f"eval/{suite}/"
            found.scalars = {prefix + key: value for key, value in numbers(line).items()}
        case "sample":
            found.texts = {f"samples/{line.get('index', 0)}": str(line.get("text", ""))}
        case "summary":
            found.summary = flat(line)
    return found


def group(key: str) -> str:
    """The grouped name of a field of a `train` line."""
    if key.endswith("_ms"):
        return f"time/{key}"
    if "per_s" in key or key == "mfu":
        return f"throughput/{key}"
    if key.endswith("_mb"):
        return f"memory/{key}"
    return f"train/{key}"


def numbers(line: Mapping[str, Any]) -> dict[str, float]:
    """The numeric fields of a line, with the words that stand for what JSON cannot say turned back into floats."""
    found = {}
    for key, value in line.items():
        if key in _HIDDEN or isinstance(value, bool):
            continue
        if isinstance(value, (int, float)) or value in _PLAIN_WORDS:
            found[key] = float(value)
    return found


def flat(line: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A line's fields under names with slashes: numbers as floats, texts as they are, lists by their place."""
    found: dict[str, Any] = {}
    for key, value in line.items():
        if not prefix and key in ("kind", "step", "time", "attempt", "seconds"):
            continue
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}/")
        elif isinstance(value, (list, tuple)):
            found |= flat({str(place): inner for place, inner in enumerate(value)}, f"{prefix}{key}/")
        elif isinstance(value, bool) or value is None or isinstance(value, str):
            found[prefix + key] = float(value) if value in _PLAIN_WORDS else value
        else:
            found[prefix + key] = float(value)
    return found


def seconds(time: str) -> float:
    """A ledger line's time as seconds since 1970."""
    return datetime.fromisoformat(time.replace("Z", "+00:00")).timestamp()


def device_means(samples: Iterable[Line]) -> dict[str, float]:
    """Means of sampled device values as `device/<field>/rank_<n>`: one tracker point out of many samples."""
    sums: dict[str, list[float]] = {}
    for sample in samples:
        rank = sample.get("rank", 0)
        for key, value in numbers(sample).items():
            if key not in ("rank", "world", "every", "cores", "memory_mb"):
                sums.setdefault(f"device/{key}/rank_{rank}", []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def run_id(first: Line) -> str:
    """Twelve hexadecimal digits that name a run in every tracker, from the first line that its ledger ever had.

    The ledger only grows, so the name is the same after a resume, or when the directory moves; and no two runs share it.
    """
    return hashlib.sha256(json.dumps(first, sort_keys=True).encode()).hexdigest()[:12]


def seams(lines: Iterable[Line]) -> list[int]:
    """The steps at which a raw ledger went back and on again: the first step of each attempt but the first, and rewinds."""
    found, attempt = [], None
    for line in lines:
        number = int(line.get("attempt", 0))
        again = attempt is not None and number > attempt
        if again or (line["kind"] == "event" and line.get("event") == "resumed"):
            found.append(line["step"])
        attempt = number if attempt is None else max(attempt, number)
    return found


def scalars_of(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a summary, as `summary/<name>`."""
    return {
        f"summary/{key}": value
        for key, value in summary.items()
        if isinstance(value, float) and not isinstance(value, bool)
    }


def texts_of(summary: Mapping[str, Any]) -> dict[str, str]:
    """What else a summary has, as `summary/<name>`."""
    return {f"summary/{key}": str(value) for key, value in summary.items() if not isinstance(value, float)}
