"""The numbers of a scaling study, from its runs' ledgers alone: rows of setups, efficiencies, where the time went. No torch.

`rows` has a row a setup: the cells that are equal but for `repeat`. `ScalingRow.values` has its numbers by name, the median
over the repeats: see NAMES. What is not there has a reason in words in `ScalingRow.missing`. The definitions and formulas
are in docs/scale.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windlass.study.grid import Assignment, Scaling
from windlass.study.study import CellResult

__all__ = ["NAMES", "Scaling", "ScalingRow"]

NAMES: dict[str, str] = {
    "world": "ranks",
    "nodes": "hosts",
    "layers": "layers of the model",
    "batch_per_device": "samples of a rank in a step",
    "global_batch": "samples of a step",
    "parameters": "parameters of the model",
    "flops_per_device": "FLOPs of a rank in a step, forward and backward",
    "step_ms": "time of a step, without warm-up: median over the windows of `train` lines",
    "samples_per_s": "samples of a step over its time",
    "tokens_per_s": "tokens a second, all ranks",
    "tokens_per_s_per_device": "tokens a second of a rank",
    "mfu": "model FLOPs utilisation",
    "speedup": "throughput over the baseline's; weak: efficiency times ranks over the baseline's ranks",
    "efficiency": "strong and fixed-data T(N0) N0 / (T(N) N), weak T(N0) / T(N); 1 at the baseline",
    "serial_fraction": "Karp-Flatt: (1/speed-up - 1/p) / (1 - 1/p) with p = N/N0",
    "samples_factor": "samples/s over the baseline's",
    "runtime_factor": "the baseline's runtime over this one's",
    "ratio": "this runtime over the baseline's: what an exercise prints as weak efficiency",
    "compute_ms": "of a step: forward, backward and optimizer of the probe without communication",
    "exposed_ms": "of a step: communication that computing does not hide",
    "data_ms": "of a step: waiting for data",
    "host_ms": "of a step: the rest",
    "predicted_ms": "time of a step from the machine's measured rates",
    "predicted_error": "predicted over measured time of a step, less 1",
    "startup_s": "from the start of the process to the first step",
    "compile_s": "compiling",
    "runtime_s": "wall time of the whole run",
    "run_samples_per_s": "all samples over the wall time of the whole run",
    "train_loss": "the last training loss",
    "train_loss_mean": "mean training loss of the run, lines weighted by their steps",
    "eval_loss": "the last evaluation loss",
    "memory_mb": "peak memory of the fullest rank: allocated on its GPU, or resident on a CPU",
    "pareto": "whether no setup is both faster and smaller in memory",
    "recommended": "whether it is the recommended setup",
}  # fmt: skip


@dataclass(frozen=True)
class ScalingRow:
    """A setup of a scaling study: its numbers are medians over the repeats that finished."""

    setup: str  # its name: `1 host, 4 ranks`, or the settings that a study of strategies varies
    assignment: Assignment  # what its cells set, without the repeat
    results: list[CellResult]  # one a repeat
    state: str  # of its cells; of several states the one furthest from finished
    reason: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # by name: see NAMES
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)  # lowest and highest over the repeats, by name
    missing: dict[str, str] = field(default_factory=dict)  # why a number of NAMES is not there
    remarks: tuple[str, ...] = ()  # what a reader of this row must know: low efficiency, oversubscribed cores, noise
