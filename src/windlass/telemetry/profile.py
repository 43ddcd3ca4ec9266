"""Torch's profile of some steps, as files in a run's directory: a trace for
https://ui.perfetto.dev, and a table of operators."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

ROWS = 60  # of the table of operators


class StepProfile:
    """Profiles the steps that `telemetry.profile` names, on rank 0."""

    def __init__(self, setting: str, directory: Path, rank: int, device: torch.device, steps: int):
        """`steps`: of the whole run, whose end also ends the profile."""
        first, count = setting.split(":") if setting else ("0", "0")
        self.first, self.last = int(first), min(int(first) + int(count) - 1, steps)
        self.enabled = bool(setting) and rank == 0
        self.name = directory / "profile" / f"steps-{self.first}-{self.last}"
        self.on_gpu = device.type == "cuda"
        self._profile: profile | None = None

    def begin(self, step: int) -> None:
        if self.enabled and step == self.first:
            gpu = [ProfilerActivity.CUDA] * self.on_gpu
            self._profile = profile(activities=[ProfilerActivity.CPU, *gpu], acc_events=True)
            self._profile.start()

    def ends(self, step: int) -> bool:
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
        if self._profile is not None:
            self._profile.stop()
