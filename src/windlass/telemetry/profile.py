"""A profile of some steps, and the largest blocks of a GPU's memory, as files in a run's directory.

The profile is torch's: a trace for https://ui.perfetto.dev, and a table of operators.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

ROWS = 60  # of the table of operators
LARGEST = 5  # groups of blocks that a message names
FRAMES = 3  # of a group's place in the code: the innermost ones outside torch


class StepProfile:
    """Profiles the steps that `telemetry.profile` names, on rank 0 or on all ranks."""

    def __init__(self, setting: str, directory: Path, rank: int, device: torch.device, steps: int):
        """`steps`: of the whole run, whose end also ends the profile."""
        first, count, *every = setting.split(":") if setting else ("0", "0")
        self.first, self.last = int(first), min(int(first) + int(count) - 1, steps)
        self.enabled = bool(setting) and (rank == 0 or bool(every))
        self.name = directory / "profile" / f"steps-{self.first}-{self.last}-rank-{rank}"
        self.on_gpu = device.type == "cuda"
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        """Before a step."""
        if self.enabled and step == self.first:
            gpu = [ProfilerActivity.CUDA] * self.on_gpu
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            self._profile.start()

    def ends(self, step: int) -> bool:
        """Whether this step is the last one."""
        return self._profile is not None and step >= self.last

    def write(self) -> tuple[str, list[str]]:
        """Stop the profile, and write its files; returns a message, and their paths in the run."""
        assert self._profile is not None
        running, self._profile = self._profile, None
        running.stop()
        trace, table = (self.name.with_name(self.name.name + end) for end in (".json.gz", ".txt"))
        by = "self_device_time_total" if self.on_gpu else "self_cpu_time_total"
        try:
            self.name.parent.mkdir(exist_ok=True)
            table.write_text(running.key_averages().table(sort_by=by, row_limit=ROWS))
            running.export_chrome_trace(str(trace))
        except OSError as error:
            return f"the profile was not written: {error}", []
        names = [f"profile/{path.name}" for path in (trace, table)]
        return f"profile: {' and '.join(names)}", names

    def close(self) -> None:
        """Stop a profile that a failure or a stop cuts off."""
        if self._profile is not None:
            self._profile.stop()


def record_memory() -> None:
    """From now on remember where each block of CUDA memory was allocated."""
    torch.cuda.memory._record_memory_history(max_entries=100_000, stacks="python")


def save_memory(path: Path) -> str:
    """Write a snapshot for https://docs.pytorch.org/memory_viz; returns its largest blocks."""
    with contextlib.suppress(OSError):  # the largest blocks are worth more
        torch.cuda.memory._dump_snapshot(str(path))
    return largest_blocks(torch.cuda.memory._snapshot()["segments"])


def largest_blocks(segments: Iterable[Mapping[str, Any]]) -> str:
    """The live blocks with the most bytes, by the code that allocated them."""
    sizes, counts = Counter[str](), Counter[str]()
    for block in (block for segment in segments for block in segment["blocks"]):
        if block["state"] == "active_allocated":
            frames = [f for f in block.get("frames", ()) if "/torch/" not in f["filename"]]
            place = [f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in frames[:FRAMES]]
            where = " < ".join(place) or "an unknown place"
            sizes[where] += block["size"]
            counts[where] += 1
    return "; ".join(
        f"{size / 1e9:.3g} GB in {counts[where]} block{'s' * (counts[where] > 1)} from {where}"
        for where, size in sizes.most_common(LARGEST)
    )
