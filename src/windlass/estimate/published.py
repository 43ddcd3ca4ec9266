"""Published measurements of trainings, and the plan's error on each of them. No torch.

`published.csv` has one run a row: facts that others measured and published, with their source. Its
programs are not Windlass. The columns `stream` to `weight` say what differs (`rank.Program`): the
bytes of a number in the residual stream, the bytes held and moved for a logit, the part of the
products that selective checkpointing repeats, and the bytes of a reduced gradient and of a weight.
`fused`: norms and activations are fused, by `torch.compile` or by hand. `tokens_per_s` is that of a
GPU, and `memory_gb` the peak that the allocator reserved.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass.estimate.devices import USABLE, Device, table
from windlass.estimate.memory import memory
from windlass.estimate.rank import Layout, Program, Rank, ranks_of
from windlass.estimate.step import MANY, Constants, Links, published_speeds, step_time
from windlass.estimate.work import Work, work_of
from windlass.recipe.network import ModelSettings
from windlass.recipe.strategies import STRATEGIES
from windlass.telemetry.timing import peak_flops

FAILURES = {
    "nanogpt-124m-1xA100-eager": "attention by hand and a nightly of PyTorch 2.0, of 2022",
    "nanogpt-124m-1xA100-compile": "attention by hand and a nightly of PyTorch 2.0, of 2022",
    "pythia-1b-64xA100": "only the GPU hours of a whole run are published",
}
"""Rows that the model does not describe, and the fit leaves out."""


@dataclass(frozen=True)
class PublishedRun:
    """A published run, as the plan sees it."""

    id: str
    source: str
    device: Device
    rank: Rank
    work: Work
    optimizer: str
    links: Links
    tokens_per_s: float  # of a GPU
    memory_gb: float | None

    @property
    def family(self) -> str:
        return self.device.family

    @property
    def tokens(self) -> int:
        """Tokens of a GPU in a step."""
        layout = self.rank.layout
        return layout.micro_batch * layout.accumulation * self.rank.model.context

    def predicted(self, fitted: Constants | None = None) -> float:
        """The predicted tokens a second of a GPU."""
        peak = peak_flops(self.device.name, "bf16")
        assert peak is not None
        speeds = published_speeds(self.device, peak, self.links, fitted)
        return self.tokens / step_time(self.rank, self.work, speeds, self.optimizer).total

    def error(self, fitted: Constants | None = None) -> float:
        """Predicted tokens a second over the measured ones, minus 1."""
        return self.predicted(fitted) / self.tokens_per_s - 1

    @property
    def predicted_gb(self) -> float:
        """The memory that the allocator would reserve: the tensors' is USABLE of it."""
        rank = self.rank
        return memory(rank.model, rank.vocab, rank.layout, self.optimizer).total / USABLE / 1e9


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """The rows of `published.csv`."""
    devices = table()
    with Path(__file__).with_name("published.csv").open(encoding="utf-8", newline="") as file:
        return tuple(_run(row, devices[row["device"]]) for row in csv.DictReader(file))


def _run(row: dict[str, str], device: Device) -> PublishedRun:
    names = "layers width heads kv_heads ff_width context micro_batch stream logits logit_traffic"
    n = {name: int(row[name]) for name in [*names.split(), "reduced", "weight", "vocab", "gpus"]}
    bias = row["bias"] == "1"
    model = ModelSettings(
        **{name: n[name] for name in names.split()[:6]},
        activation=row["activation"],  # type: ignore[arg-type]
        norm=row["norm"],  # type: ignore[arg-type]
        position=row["position"],  # type: ignore[arg-type]
        tie_head=row["tie_head"] == "1",
        qk_norm=row["qk_norm"] == "1",
        attn_bias=bias,
        ff_bias=bias,
        norm_bias=bias,
    )
    world, per_host = n["gpus"], int(row["per_host"])
    layout = Layout(
        row["strategy"],
        world,
        world if STRATEGIES[row["strategy"]].shards_optimizer else 1,
        "bf16",
        row["checkpointing"],
        micro_batch=n["micro_batch"],
        accumulation=int(row["sequences"]) // world // n["micro_batch"],
        device="cuda",
        reduce_each=row["reduce_each"] == "1",
        workspace=device.workspace_bytes,
        compile=row["fused"] == "1",
        program=Program(
            n["weight"],
            n["stream"],
            n["reduced"],
            n["logits"],
            float(row["repeated"]),
            n["logit_traffic"],
            gathers_all=True,
        ),
    )
    [rank] = ranks_of(model, n["vocab"], layout)
    work = work_of(rank)
    network = float(row["host_gb_s"]) * 1e9 / per_host
    links = Links(device.link, network, per_host if per_host < world else 0)
    speed, peak = float(row["tokens_per_s"]), float(row["memory_gb"] or 0) or None
    how = (row["id"], row["source"], device, rank, work, row["optimizer"], links)
    return PublishedRun(*how, speed, peak)


class Errors(NamedTuple):
    """The errors of several predictions: the measured numbers are 1."""

    rows: int
    median: float  # of their absolute values
    signed: float  # the median with its sign
    low: float  # 10 % are lower; of few rows the lowest
    high: float  # 10 % are higher; of few rows the highest


def errors(values: Iterable[float]) -> Errors:
    """The statistics of some errors."""
    own = np.array(list(values))
    ends = (10, 50, 90) if len(own) >= MANY else (0, 50, 100)
    low, signed, high = np.percentile(own, ends)
    return Errors(len(own), float(np.median(abs(own))), float(signed), float(low), float(high))


def validation(runs: Sequence[PublishedRun] = ()) -> list[tuple[str, str, Errors, Errors | None]]:
    """Rows of a table: source, family, and the errors of tokens a second and of memory.

    The last rows have all sources of a family, and everything. Failures have rows of their own.
    """
    runs = runs or published_runs()
    groups: dict[tuple[str, str], list[PublishedRun]] = {}
    for run in runs:
        source = f"{run.source}: left out" if run.id in FAILURES else run.source
        groups.setdefault((source, run.family), []).append(run)
    kept = [run for run in runs if run.id not in FAILURES]
    for name in dict.fromkeys(run.family for run in kept):
        groups["all sources", name] = [run for run in kept if run.family == name]
    groups["all sources", "all"] = kept
    rows = []
    for (source, name), own in groups.items():
        sizes = [run.predicted_gb / run.memory_gb - 1 for run in own if run.memory_gb]
        speeds = errors(run.error() for run in own)
        rows.append((source, name, speeds, errors(sizes) if sizes else None))
    return rows
