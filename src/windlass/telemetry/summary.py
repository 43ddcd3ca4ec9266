"""The samples of all ranks' devices merged into a run's summary: by rank and over all. No torch."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from windlass.run import Run, read_lines

MAX_BYTES = 24_000_000
"""All ranks' files together are read whole up to this size; of larger ones evenly spaced blocks, the first and the last."""
_BLOCK = 65_536

_MEANS = {
    "cuda": {"util_pct": "gpu_util_pct", "mem_alloc_mb": "mem_alloc_mb", "mem_reserved_mb": "mem_reserved_mb"},
    "cpu": {"util_pct": "cpu_util_pct", "rss_mb": "rss_mb"},
}
_PEAKS = {"cuda": "peak_alloc_mb", "cpu": "rss_mb"}


def summarise_devices(run: Run) -> dict[str, Any]:
    """Utilisation and memory while training, for the `summary` line.

    On GPUs `avg_gpu_util_pct`, `std_gpu_util_pct`, `avg_mem_alloc_mb`, `avg_mem_reserved_mb` and `peak_mem_mb` (the
    allocator's peak on the fullest rank); on CPUs `avg_cpu_util_pct`, `std_cpu_util_pct`, `avg_rss_mb` and `peak_mem_mb`
    (the largest resident memory). MB are 10^6 bytes. `by_rank` has the same for each rank, with its share of the samples
    a second. Only what was sampled in the phase `train` counts for means and deviations, so that an evaluation does not
    look like an idle device; a peak is one in any phase. Starts with another number of ranks than the last are left out.
    """
    raw = list(read_lines(run.metrics_path))
    attempts = _same_world(raw)
    files = sorted(run.devices_dir.glob("rank-*.jsonl"))
    by_rank: dict[str, dict[str, float]] = {}
    pooled: list[dict[str, Any]] = []
    steps_per_s = _steps_per_s(run)
    for path in files:
        rank = int(re.sub(r"\D", "", path.stem) or 0)
        samples = [
            x for x in _read(path, MAX_BYTES // len(files)) if attempts is None or x.get("attempt", 0) in attempts
        ]
        if not samples:
            continue
        by_rank[f"rank_{rank}"] = _statistics(samples)
        pooled += samples
    if not pooled:
        return {}
    if steps_per_s is not None:
        share = run.recipe.train.global_batch / len(by_rank)
        for found in by_rank.values():
            found |= {"steps_per_s_mean": steps_per_s, "samples_per_s_mean": steps_per_s * share}
    return _statistics(pooled) | {"by_rank": by_rank}


def _same_world(raw: Iterable[dict[str, Any]]) -> set[int] | None:
    """The attempts with as many ranks as the last one; None where the ledger does not tell."""
    worlds: dict[int, int] = {}
    last = 0
    for line in raw:
        number = int(line.get("attempt", 0))
        last = line["world"] if isinstance(line.get("world"), int) else last
        worlds[number] = last
    return {number for number, world in worlds.items() if world == last} if worlds else None


def _steps_per_s(run: Run) -> float | None:
    times = [line["step_ms"] / 1e3 for line in run.lines("train") if line.get("step_ms")]
    times = times[1:]  # the first waits for caches and compilation
    return len(times) / sum(times) if times else None


def _statistics(samples: list[dict[str, Any]]) -> dict[str, float]:
    kind = "cuda" if any("mem_alloc_mb" in sample for sample in samples) else "cpu"
    training = [sample for sample in samples if sample.get("phase") == "train"]
    found: dict[str, float] = {}
    for field, name in _MEANS[kind].items():
        values = [float(sample[field]) for sample in training if field in sample]
        if not values:
            continue
        mean = math.fsum(values) / len(values)
        found[f"avg_{name}"] = round(mean, 3)
        if field == "util_pct":
            found[f"std_{name}"] = round(math.sqrt(math.fsum((x - mean) ** 2 for x in values) / len(values)), 3)
    peaks = [float(sample[_PEAKS[kind]]) for sample in samples if _PEAKS[kind] in sample]
    return found | ({"peak_mem_mb": max(peaks)} if peaks else {})


def _read(path: Path, limit: int) -> Iterator[dict[str, Any]]:
    with open(path, "rb") as file:
        size = path.stat().st_size
        if size <= limit:
            yield from _parse(file.read().split(b"\n"))
            return
        blocks = max(2, limit // _BLOCK)
        for number in range(blocks):
            file.seek(number * (size - _BLOCK) // (blocks - 1))
            yield from _parse(file.read(_BLOCK).split(b"\n")[1:])


def _parse(texts: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for text in texts:
        try:
            line = json.loads(text)
        except ValueError:
            continue  # torn by a kill, or by the edge of a block
        if isinstance(line, dict) and "phase" in line:
            yield line
