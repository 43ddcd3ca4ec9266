"""The samples of utilisation and memory that each rank's background thread wrote, as columns over the hours of training."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]

MAX_BYTES = 8_000_000
"""All ranks' files together are read whole up to this size; of larger ones, evenly spaced blocks."""
BLOCK = 16_384

FIELDS = (
    "util_pct", "mem_alloc_mb", "mem_reserved_mb", "mem_used_mb", "peak_alloc_mb", "peak_reserved_mb", "rss_mb",
    "power_w", "temperature_c",
)  # fmt: skip
"""What a sample may hold; `util_pct` of a CPU is the share of the cores that the rank may use."""


@dataclass(frozen=True)
class RankTrack:
    """One rank's samples in order: `hours`, `training` (1 in the phase `train`), and the fields of FIELDS."""

    rank: int
    columns: dict[str, Numbers]

    def __getitem__(self, name: str) -> Numbers:
        found = self.columns.get(name)
        return np.full(len(self.columns["hours"]), math.nan) if found is None else found

    def has(self, name: str) -> bool:
        """Whether the column holds a number."""
        return bool(np.isfinite(self[name]).any())


def read_ranks(folder: Path, hours: Callable[[Any], float]) -> list[RankTrack]:
    """Every rank's samples, without those that fall into a pause or into work that was done again."""
    files = {
        int(m.group(1)): path for path in folder.glob("rank-*.jsonl") if (m := re.search(r"rank-(\d+)", path.name))
    }
    share = MAX_BYTES // max(1, len(files))
    tracks = [_track(rank, _lines(files[rank], share), hours) for rank in sorted(files)]
    return [track for track in tracks if len(track.columns["hours"])]


def _track(rank: int, lines: Iterator[dict[str, Any]], hours: Callable[[Any], float]) -> RankTrack:
    rows = [(at, line) for line in lines if not math.isnan(at := hours(line.get("time")))]
    rows.sort(key=lambda row: row[0])
    columns = {
        name: np.array([_number(line.get(name)) for _, line in rows], dtype=np.float64)
        for name in FIELDS
        if any(name in line for _, line in rows)
    }
    columns["hours"] = np.array([at for at, _ in rows], dtype=np.float64)
    columns["training"] = np.array([line.get("phase", "train") == "train" for _, line in rows], dtype=np.float64)
    return RankTrack(rank, columns)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan


def _lines(path: Path, limit: int) -> Iterator[dict[str, Any]]:
    """The samples in a file; of a file over `limit` bytes, those in evenly spaced blocks, the same ones each time."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= limit:
            yield from _parse(file.read().split(b"\n"))
            return
        blocks = max(2, limit // BLOCK)
        for place in range(blocks):
            file.seek(place * (size - BLOCK) // (blocks - 1))
            yield from _parse(file.read(BLOCK).split(b"\n")[1:-1])


def _parse(raw: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    for text in raw:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if isinstance(line, dict) and line.get("kind", "sample") == "sample":
            yield line


def grid(ranks: Sequence[RankTrack], buckets: int) -> Numbers:
    """The middles of equal spans of time that cover all ranks' samples: [buckets], in hours."""
    edges = _edges(ranks, buckets)
    return (edges[1:] + edges[:-1]) / 2


def _edges(ranks: Sequence[RankTrack], buckets: int) -> Numbers:
    everything = np.concatenate([track["hours"] for track in ranks])
    low, high = float(everything.min()), float(everything.max())
    return np.linspace(low, high if high > low else low + 1e-6, buckets + 1)


def on_grid(ranks: Sequence[RankTrack], name: str, buckets: int) -> Numbers:
    """The mean of a field in each of `buckets` equal spans of time: [ranks, buckets], NaN where a rank has no sample."""
    edges = _edges(ranks, buckets)
    table = np.full((len(ranks), buckets), math.nan)
    for row, track in enumerate(ranks):
        values = track[name]
        good = np.isfinite(values)
        place = np.clip(np.searchsorted(edges, track["hours"][good], side="right") - 1, 0, buckets - 1)
        total = np.bincount(place, weights=values[good], minlength=buckets)
        count = np.bincount(place, minlength=buckets)
        table[row] = np.divide(total, count, out=np.full(buckets, math.nan), where=count > 0)
    return table
