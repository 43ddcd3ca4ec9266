"""A profiler's trace of some steps, for `--profile N`."""

from __future__ import annotations

from pathlib import Path

import torch

WARM_UP = 2
"""Steps before those that are traced: one to leave out, one to warm the profiler up."""


class Profile:
    """Traces `steps` steps of this rank from now on into a file that Perfetto opens."""

    def __init__(self, steps: int, place: Path, cuda: bool):
        self.place, self._left = place, steps + WARM_UP
        activities = [torch.profiler.ProfilerActivity.CPU]
        if cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(
            activities=activities,
            schedule=torch.profiler.schedule(wait=1, warmup=WARM_UP - 1, active=steps),
            record_shapes=True,
        )
        self._profiler.start()

    def step(self) -> bool:
        """A step is done; whether the last of them was."""
        self._profiler.step()
        self._left -= 1
        return self._left <= 0

    def stop(self) -> str:
        """Write the trace; what to say of it."""
        self._profiler.stop()
        self.place.parent.mkdir(exist_ok=True)
        self._profiler.export_chrome_trace(str(self.place))
        return f"profile: {self.place}; open it at https://ui.perfetto.dev (drag the file into the page)"
