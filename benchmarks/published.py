"""The plan against published runs: the error of each source and family, and of rows left out.

    python benchmarks/published.py            # tables in Markdown
    python benchmarks/published.py --fit      # the constants for estimate/devices.toml

`published.csv` has one run a row: facts that others measured and published, with their source. Its
programs are not Windlass. The columns `stream` to `weight` say what differs (`rank.Program`): the
bytes of a number in the residual stream, the bytes held and moved for a logit, the part of the
products that selective checkpointing repeats, and the bytes of a reduced gradient and of a weight.
`fused`: norms and activations are fused, by `torch.compile` or by hand. `tokens_per_s` is the speed
of one GPU, and `memory_gb` the peak that the allocator reserved.

The fit minimises the logarithms of predicted over measured tokens a second of all rows but the
failures. Few constants have many rows, so a row's neighbours weigh as much as it does. Errors above
5 % count linearly. A constant that hardly any row determines stays near its PRIOR. The second table
leaves one source out at a time: the fit does not see the rows that it then predicts.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from windlass.estimate.devices import USABLE, Device, peak_flops, table
from windlass.estimate.memory import memory
from windlass.estimate.rank import Layout, Program, Rank, ranks_of
from windlass.estimate.step import (
    Constants,
    Links,
    Work,
    constants,
    published_speeds,
    step_time,
    work_of,
)
from windlass.model.size import flops_per_token
from windlass.recipe.network import ModelSettings
from windlass.recipe.strategies import STRATEGIES

FAILURES = {
    "nanogpt-124m-1xA100-eager": "attention by hand and a nightly of PyTorch 2.0, of 2022",
    "nanogpt-124m-1xA100-compile": "attention by hand and a nightly of PyTorch 2.0, of 2022",
    "pythia-1b-64xA100": "only the GPU hours of a whole run are published",
}
"""Rows that the model does not describe, and the fit leaves out."""
PRIOR = {
    "small": 256,  # a product of this width is bound by memory on these devices
    "eager": 2.9,  # passes over the stream without fusion, counted
    "exposed": 0.5,
    "latency": 5e-6,  # of NCCL, a hop
    "A100 products": 0.8,  # cuBLAS on large products
    "H100 products": 0.7,
    "A100 attention": 0.45,  # flash attention 2 reaches 0.5 to 0.7 at best (arXiv 2307.08691)
    "H100 attention": 0.35,
}
MANY = 10  # rows of a source or a family that have a 10th and a 90th percentile
SPREAD, ROUGH, ITERATIONS = 0.05, 0.7, 6  # of a row's logarithm, and of a constant's
MISSED = 0.15  # rows with a larger error are listed by name


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


def as_constants(logarithms: np.ndarray) -> Constants:
    """The constants of a vector in the order of PRIOR."""
    values = dict(zip(PRIOR, map(float, np.exp(logarithms)), strict=True))
    names = ("small", "eager", "exposed", "latency")
    both = {
        kind: tuple(min(1.0, values[f"{family} {kind}"]) for family in ("A100", "H100"))
        for kind in ("products", "attention")
    }
    own = {name: values[name] for name in names}
    own["exposed"] = min(1.0, own["exposed"])
    return replace(constants(), **own, **both)  # type: ignore[arg-type]


def as_vector(c: Constants) -> np.ndarray:
    values = {"small": c.small, "eager": c.eager, "exposed": c.exposed, "latency": c.latency}
    for kind, both in (("products", c.products), ("attention", c.attention)):
        values |= {f"{f} {kind}": x for f, x in zip(("A100", "H100"), both, strict=True)}
    return np.log([values[name] for name in PRIOR])


def residuals(runs: Sequence[PublishedRun], x: np.ndarray) -> np.ndarray:
    fitted = as_constants(x)
    return np.array([np.log1p(run.error(fitted)) for run in runs])


def jacobian(runs: Sequence[PublishedRun], x: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The slopes of the residuals at `x`, where they are `start`."""
    step = 1e-3
    columns = (residuals(runs, x + step * one) - start for one in np.eye(len(x)))
    return np.stack(list(columns), 1) / step


def fit(
    runs: Sequence[PublishedRun], iterations: int = ITERATIONS, slopes: np.ndarray | None = None
) -> np.ndarray:
    """Gauss-Newton from PRIOR; with the `slopes` of all rows at the constants, from the constants.

    The second way is faster, and good enough if few rows are left out.
    """
    prior = np.log(list(PRIOR.values()))
    x = prior if slopes is None else as_vector(constants())
    for _ in range(iterations):
        r = residuals(runs, x)
        j = jacobian(runs, x, r) if slopes is None else slopes
        # Errors beyond SPREAD count linearly (Huber).
        weights = np.sqrt(np.minimum(1, SPREAD / np.maximum(abs(r), 1e-9))) / SPREAD
        a = np.concatenate([j * weights[:, None], np.eye(len(x)) / ROUGH])
        b = np.concatenate([-r * weights, (prior - x) / ROUGH])
        x = x + np.clip(np.linalg.lstsq(a, b, rcond=None)[0], -0.3, 0.3)
    return x


def left_out(by: Callable[[PublishedRun], str]) -> dict[str, list[tuple[PublishedRun, float]]]:
    """The errors of each source's rows by a fit to the others; a large source's from PRIOR."""
    runs = [run for run in published_runs() if run.id not in FAILURES]
    x = as_vector(constants())
    slopes = jacobian(runs, x, residuals(runs, x))
    result = {}
    for source in dict.fromkeys(map(by, runs)):
        kept = [n for n, run in enumerate(runs) if by(run) != source]
        own = [run for run in runs if by(run) == source]
        near = slopes[kept] if len(own) < MANY else None
        fitted = as_constants(fit([runs[n] for n in kept], slopes=near))
        result[source] = [(run, run.error(fitted)) for run in own]
    return result


def source_of(run: PublishedRun) -> str:
    return run.source


def project_of(run: PublishedRun) -> str:
    return run.source.split()[0]


def ranges() -> dict[str, tuple[int, int, float, float]]:
    """By family of many rows: rows, projects, and the errors between which 8 of 10 rows are.

    A row's error is by a fit without its project. Each project has the same weight in a family,
    because the next program is not the one that published most rows.
    """
    errors_of: dict[str, dict[str, list[float]]] = {}
    for project, rows in left_out(project_of).items():
        for run, error in rows:
            errors_of.setdefault(run.family, {}).setdefault(project, []).append(error)
    table = {}
    for family, projects in errors_of.items():
        pairs = sorted((e, 1 / len(own) / len(projects)) for own in projects.values() for e in own)
        below = np.cumsum([weight for _, weight in pairs])
        low, high = (pairs[int(np.searchsorted(below, part))][0] for part in (0.1, 0.9))
        if len(pairs) >= MANY:
            table[family] = len(pairs), len(projects), low, high
    return table


def one_mfu(by: Callable[[PublishedRun], str]) -> list[float]:
    """The errors with one MFU for each family, the median of the other sources' rows."""
    runs = [run for run in published_runs() if run.id not in FAILURES]
    flops = {r.id: flops_per_token(r.rank.model, r.rank.vocab) * r.tokens_per_s for r in runs}
    peaks = {r.id: peak_flops(r.device.name, "bf16") or 0.0 for r in runs}
    result = []
    for run in runs:
        others = [r for r in runs if r.family == run.family and by(r) != by(run)]
        if others:
            mfu = float(np.median([flops[r.id] / peaks[r.id] for r in others]))
            result.append(mfu * peaks[run.id] / flops[run.id] - 1)
    return result


def cells(e: Errors | None) -> str:
    if e is None:
        return " | | | "
    return " | ".join([str(e.rows), f"{100 * e.median:.1f}", *(f"{100 * v:+.1f}" for v in e[2:])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print the fitted constants")
    if parser.parse_args().fit:
        runs = [run for run in published_runs() if run.id not in FAILURES]
        for name, value in zip(PRIOR, np.exp(fit(runs, 12)), strict=True):
            print(f"{name} = {value:.3g}")
        print("\nwith the constants of devices.toml:\n[speeds.ranges]")
        for family, row in ranges().items():
            print(f"{family} = [{', '.join(f'{x:.3g}' for x in row)}]")
        return
    head = "| source | family | rows | median % | signed % | p10 % | p90 % |"
    print(f"{head} memory: rows | median % | signed % |\n|---|---" + "|---:" * 8 + "|")
    for source, family, speed, sizes in validation():
        peak = " | ".join(cells(sizes).split(" | ")[:3])
        print(f"| {source} | {family} | {cells(speed)} | {peak} |")
    for title, by in (("source left out", source_of), ("project left out", project_of)):
        print(f"\n{head.replace('source', title)}\n|---|---" + "|---:" * 5 + "|")
        result = left_out(by)
        for source, rows in result.items():
            families = "/".join(dict.fromkeys(run.family for run, _ in rows))
            print(f"| {source} | {families} | {cells(errors(e for _, e in rows))} |")
        every = [pair for rows in result.values() for pair in rows]
        print(f"| all | all | {cells(errors(e for _, e in every))} |")
        print(f"| one MFU for a family instead | all | {cells(errors(one_mfu(by)))} |")
    print("\n| row that misses by more than 15 % | error % |\n|---|---:|")
    for run in published_runs():
        if abs(error := run.error()) > MISSED:
            why = f": {FAILURES[run.id]}" if run.id in FAILURES else ""
            print(f"| {run.id}{why} | {100 * error:+.0f} |")


if __name__ == "__main__":
    main()
