"""The numbers of a scaling study, from its runs' ledgers alone: rows of setups, efficiencies, where the time went. No torch.

A setup is the cells that are equal but for `repeat`. What a row does not have has a reason in words in `ScalingRow.missing`.
The definitions and formulas are in docs/scale.md.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from windlass.estimate.memory import Layout, layout_of
from windlass.estimate.steptime import Tensors, collectives, predict
from windlass.fileio import read_json
from windlass.model.size import CountedSizes, block_parameters, flops_per_token
from windlass.run import Line, Run, last_start
from windlass.study.grid import AXES_ONLY, REPEAT, Assignment, Cell, Scaling, short_names
from windlass.study.result import CellResult
from windlass.study.steps import measure, times, windows
from windlass.study.study import Study

LOW = 0.7  # an efficiency below this one is remarked on
PARTS = {
    "compute_ms": "computing",
    "exposed_ms": "communication",
    "data_ms": "waiting for data",
    "host_ms": "the host",
}
"""The parts of a step, by name; they sum to it."""
# with the baseline
COMPARED = ("speedup", "efficiency", "serial_fraction", "samples_factor", "runtime_factor", "ratio")

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
    "steps_per_s": "steps a second, without warm-up",
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
    "startup_s": "from the start of the process to its first evaluation or step",
    "compile_s": "compiling",
    "runtime_s": "wall time of the whole run",
    "samples_per_s_whole_run": "all samples over the wall time of the run, without its start-up",
    "train_loss": "the last training loss",
    "train_loss_mean": "mean training loss of the run's steps",
    "peak_mem_mb": "peak memory of the fullest rank: allocated on its GPU, or resident on a CPU",
    "util_pct": "utilisation of the device in training steps, mean over the ranks: of the GPU, or of a CPU's threads",
    "exact_match": "SQuAD's exact match at the last evaluation, if the suite is on",
    "f1": "SQuAD's F1 at the last evaluation, if the suite is on",
    "pareto": "whether no setup is both faster and smaller in memory",
    "recommended": "whether it is the recommended setup",
}


@dataclass(frozen=True)
class ScalingRow:
    """A setup of a scaling study: its numbers are medians over the repeats that finished."""

    setup: str  # its name: `1 host, 4 ranks`, or the settings that a study of strategies varies
    assignment: Assignment  # what its cells set, without the repeat
    results: list[CellResult]  # one a repeat
    state: str  # of its cells; of several states the one furthest from finished
    reason: str = ""
    values: dict[str, Any] = field(default_factory=dict)  # by name: see NAMES
    spread: dict[str, tuple[float, float]] = field(
        default_factory=dict
    )  # lowest and highest over the repeats, by name
    missing: dict[str, str] = field(default_factory=dict)  # why a number of NAMES is not there
    remarks: list[str] = field(default_factory=list)  # low efficiency, oversubscribed cores, noise
    start: Line = field(default_factory=dict)  # the last start of its first repeat that finished

    @property
    def world(self) -> int:
        return int(self.values["world"])

    @property
    def measured(self) -> bool:
        return "step_ms" in self.values

    @property
    def recipe(self) -> Any:
        return self.results[0].cell.recipe

    @property
    def hosts(self) -> set[str]:
        """Of the runs that finished."""
        ranks = (
            rank
            for r in self.results
            if r.state == "finished"
            for rank in r.run.environment.get("ranks", ())
        )
        return {str(rank.get("host")) for rank in ranks}

    @property
    def on_cpu(self) -> bool:
        return str(self.start.get("device")).upper() == "CPU"

    @property
    def layout(self) -> Layout:
        """How its ranks divide the model and the batch."""
        device = "cpu" if self.on_cpu else "cuda"
        layout = layout_of(self.recipe, self.world, device, self.start["precision"])
        return replace(
            layout, strategy=self.start["strategy"], accumulation=self.start["accumulation"]
        )

    @property
    def flops(self) -> int:
        """FLOPs of a token, forward and backward."""
        if self.start.get("network") or self.recipe.model.freeze:
            return CountedSizes(
                self.start["parameters"], self.start["trained"], 0
            ).flops_per_token()
        return flops_per_token(self.recipe.model, self.start["data"]["vocab"])

    @property
    def tensors(self) -> Tensors:
        """The parameters as strategies send them; of a model of `transformers` blocks are all but one table of tokens."""
        total, trained, network = (
            self.start["parameters"],
            self.start["trained"],
            self.start.get("network"),
        )
        if not network:
            return Tensors(
                total, trained, block_parameters(self.recipe.model), self.recipe.model.layers
            )
        layers, table = (
            int(network.get("layers") or 0),
            int(network.get("vocab", 0)) * int(network.get("width", 0)),
        )
        return Tensors(total, trained, (total - table) // layers if layers else 0, layers)


def rows(study: Study, results: Sequence[CellResult] | None = None) -> list[ScalingRow]:
    """A row for each setup of a scaling study, by the ledgers of its cells and probes, and by its `machine.json`."""
    scaling, groups = study.scaling or Scaling("strategies"), dict[str, list[CellResult]]()
    for result in study.results() if results is None else results:
        groups.setdefault(repr(_without_repeat(result.cell)), []).append(result)
    table = [_row(study, scaling, group) for group in groups.values()]
    rates = read_json(study.path / "machine.json")
    for row in table:
        if row.measured:
            _divide(row, _probe(study, row, scaling.warmup))
            _predict(row, rates)
            row.remarks.extend(filter(None, [oversubscribed(row)]))
    if scaling.mode == "strategies":
        _choose(table)
    else:
        table.sort(key=lambda row: (row.values["nodes"], row.world))
        _compare(table, scaling)
    for row in table:
        row.missing.update(
            {name: why for name, why in _reasons(row, scaling).items() if name not in row.values}
        )
    return table


def _without_repeat(cell: Cell) -> Assignment:
    return {key: value for key, value in cell.assignment.items() if key != REPEAT}


def _row(study: Study, scaling: Scaling, results: list[CellResult]) -> ScalingRow:
    """A setup with the medians of its repeats, without what is compared with other setups."""
    cell, done = results[0].cell, [r for r in results if r.state == "finished"]
    order = ("failed", "diverged", "pruned", "interrupted", "running", "waiting", "finished")
    worst = min(results, key=lambda r: order.index(r.state))
    start = last_start(done[0].run.ledger()) if done else {}
    numbers = [measure(r.run, scaling.warmup) for r in done]
    names = dict.fromkeys(name for one in numbers for name in one)
    columns = {name: [one[name] for one in numbers if name in one] for name in names}
    values: dict[str, Any] = _shape(study, cell, start) | {
        n: statistics.median(c) for n, c in columns.items()
    }
    row = ScalingRow(
        _name(study, scaling, cell, values),
        _without_repeat(cell),
        results,
        worst.state,
        worst.reason,
        values,
        {n: (min(c), max(c)) for n, c in columns.items() if len(c) > 1},
        start=start,
    )
    if 0 < len(done) < len(results):
        row.remarks.append(f"{len(done)} of {len(results)} repeats have finished")
    if row.measured:  # of the median step, so that they agree with it
        steps_per_s = 1e3 / values["step_ms"]
        values["steps_per_s"] = steps_per_s
        values["samples_per_s"] = values["global_batch"] * steps_per_s
        values["tokens_per_s"] = values["tokens_per_step"] * steps_per_s
        values["tokens_per_s_per_device"] = values["tokens_per_s"] / row.world
        values["flops_per_device"] = row.flops * values["padded_tokens_per_step"] / row.world
    return row


def _shape(study: Study, cell: Cell, start: Line) -> dict[str, Any]:
    """Ranks, hosts, layers, batch and parameters, as far as they are known before a run."""
    model, world = cell.recipe.model, int(start.get("world") or cell.world or cell.nodes)
    batch = start.get("global_batch", cell.recipe.train.global_batch)
    shape = {
        "world": world,
        "nodes": cell.nodes,
        "global_batch": batch,
        "batch_per_device": batch / world,
        "layers": (start.get("network") or {}).get("layers")
        or (model.layers if model.kind == "gpt" else None),
        "parameters": start.get("parameters"),
    }
    return {name: value for name, value in shape.items() if value is not None}


def _name(study: Study, scaling: Scaling, cell: Cell, values: Mapping[str, Any]) -> str:
    """A setup as its row is headed: hosts, ranks, and what else tells it from the others."""
    if scaling.mode == "strategies":
        words, names = [], short_names(cell.assignment)
        for key, value in cell.assignment.items():
            name = names[key].removeprefix("activation_")
            if key in AXES_ONLY or len(study.values[key]) < 2:
                continue
            if name in ("strategy", "precision"):  # their values say what they are
                words.append(str(value))
            elif value not in (False, 0, "none"):
                words.append(name if value is True else f"{name} {value}")
        return ", ".join(words) or "the recipe"
    hosts, ranks = values["nodes"], values["world"]
    text = f"{hosts} host{'s' * (hosts > 1)}, {ranks} rank{'s' * (ranks > 1)}"
    return (
        f"{text}, {values['layers']} layers"
        if scaling.grow == "model" and "layers" in values
        else text
    )


def _probe(study: Study, row: ScalingRow, warmup: int) -> Mapping[str, float]:
    """The medians of the probes of a row's cells: a step without communication; of one rank its own step.

    Empty where there is none, with the reason in the row.
    """
    if row.world == 1:
        return row.values
    ranks, why = list[dict[str, float]](), "no probe without communication was run"
    if row.recipe.parallel.offload:
        why = "offloading takes time that a probe without communication does not have"
    for result in row.results:
        directory = study.probe_dir(result.cell)
        ended = read_json(directory / "probe.json")
        if ended.get("reason"):
            why = f"the probe failed: {ended['reason']}"
        elif ended:
            shared = directory.with_name(ended.get("of", directory.name))
            runs = [Run(path.parent) for path in sorted(shared.glob("*/metrics.jsonl"))]
            ranks += filter(
                None, (times(windows(run.ledger(), warmup, ended["together"])) for run in runs)
            )
    if not ranks:
        row.missing.update(dict.fromkeys(("compute_ms", "exposed_ms", "host_ms"), why))
    return {
        name: statistics.median(one[name] for one in ranks if name in one)
        for one in ranks
        for name in one
    }


def _divide(row: ScalingRow, probe: Mapping[str, float]) -> None:
    """Divide a row's step into PARTS, which sum to it.

    Computing and host are those of the probe, its forward and backward pass by the tokens of a rank's step, padding included;
    what the step takes beyond the probe, both without waiting for data, is communication that computing does not hide. A
    negative difference is noise.
    """
    values = row.values
    values.setdefault("data_ms", 0.0)
    if not probe:
        return
    step, tokens = (
        values["step_ms"] - values["data_ms"],
        values["padded_tokens_per_step"] / row.world,
    )
    passes, update = probe["forward_ms"] + probe["backward_ms"], probe["optimizer_ms"]
    host = max(0.0, probe["step_ms"] - probe["data_ms"] - passes - update)
    compute = (
        passes * tokens / probe["padded_tokens_per_step"] + update
    )  # other rows, other padding
    alone = compute + host
    share = min(1.0, step / alone)  # below 1 where the difference is negative
    values |= {"compute_ms": compute * share, "update_ms": update * share, "host_ms": host * share}
    if row.world > 1:
        values["exposed_ms"] = max(0.0, step - alone)
        if step < alone:
            text = f"the probe's step without communication took {alone - step:.3g} ms more than the step with it"
            row.remarks.append(f"{text}: noise, shown as no exposed communication")


def _predict(row: ScalingRow, rates: Mapping[str, Any]) -> None:
    """The time of a row's step by the measured rates of its machine."""
    machine = rates.get(f"{row.values['nodes']}x{row.world}")
    if row.recipe.parallel.offload:
        row.missing["predicted_ms"] = "copies to and from the host are not in the formula"
        return
    if not machine:
        row.missing["predicted_ms"] = "the rates of these hosts and ranks were not measured"
        return
    sent = collectives(row.layout, row.tensors, row.recipe.parallel.bucket_mb)
    step = predict(machine, row.values["flops_per_device"], row.layout, sent)
    if step.compute is None or step.communication is None:
        row.missing["predicted_ms"] = step.reason
        return
    row.values["predicted_ms"] = 1e3 * (step.compute + step.communication)
    row.values["predicted_error"] = row.values["predicted_ms"] / row.values["step_ms"] - 1


def oversubscribed(row: ScalingRow) -> str:
    """A remark where a host of CPU ranks has fewer cores than they have threads; else empty."""
    environment = next(r.run.environment for r in row.results if r.state == "finished")
    cores, ranks = environment.get("machine", {}).get("cores"), environment.get("ranks", [])
    for host in sorted({str(rank.get("host")) for rank in ranks}) if row.on_cpu and cores else ():
        threads = [int(rank.get("threads") or 1) for rank in ranks if str(rank.get("host")) == host]
        if sum(threads) > cores:
            text = f"{len(threads)} ranks with {sum(threads)} threads share the {cores} cores of {host}"
            return f"oversubscribed: {text}, so that this says nothing of {len(threads)} devices"
    return ""


def baseline(table: Sequence[ScalingRow]) -> ScalingRow:
    """The setup that the others are compared with, measured or not: the smallest number of ranks."""
    return min(table, key=lambda row: (row.world, row.values["nodes"]))


def _compare(table: list[ScalingRow], scaling: Scaling) -> None:
    """Speed-up, efficiency and factors over the baseline."""
    base = baseline(table)
    for row in table:
        if row is not base and not base.measured:
            row.missing.update(
                dict.fromkeys(COMPARED, f"the baseline, {base.setup}, has no numbers")
            )
        if not row.measured or not base.measured:
            continue
        values, first, p = row.values, base.values, row.world / base.world
        faster = values["samples_per_s"] / first["samples_per_s"]
        efficiency = first["step_ms"] / values["step_ms"] if scaling.mode == "weak" else faster / p
        values |= {"efficiency": efficiency, "speedup": efficiency * p, "samples_factor": faster}
        if scaling.mode != "weak" and p > 1:
            values["serial_fraction"] = (1 / values["speedup"] - 1 / p) / (1 - 1 / p)
        values["ratio"] = values["runtime_s"] / first["runtime_s"]
        values["runtime_factor"] = 1 / values["ratio"]
        if efficiency < LOW:
            row.remarks.append(f"low efficiency, {100 * efficiency:.0f} %: {_grown(row, base)}")


def _grown(row: ScalingRow, base: ScalingRow) -> str:
    """Which part of the step took most more than perfect scaling: computing as its FLOPs, the rest as in the baseline."""
    if "compute_ms" not in row.values or "compute_ms" not in base.values:
        return "without a probe it is not known which part of the step grew"
    ideal = {part: base.values.get(part, 0.0) for part in PARTS}
    ideal["compute_ms"] *= row.values["flops_per_device"] / base.values["flops_per_device"]
    more = {part: row.values.get(part, 0.0) - ms for part, ms in ideal.items()}
    part = max(more, key=lambda part: more[part])
    return f"what grew most is {PARTS[part]}, {more[part]:.3g} ms of a step more than if scaling were perfect"


def _choose(table: list[ScalingRow]) -> None:
    """Mark the Pareto front of memory and throughput, and the recommended setup.

    Recommended is the fastest; of those within the spread of its repeats, or 2 % of it, the one with least memory.
    """
    rivals = [row for row in table if row.measured and "peak_mem_mb" in row.values]
    if not rivals:
        return
    points = [(row.values["samples_per_s"], row.values["peak_mem_mb"]) for row in rivals]
    for row, (speed, memory) in zip(rivals, points, strict=True):
        beaten = any(s >= speed and m <= memory and (s, m) != (speed, memory) for s, m in points)
        row.values.update(pareto=not beaten, recommended=False)
    fastest = max(rivals, key=lambda row: row.values["samples_per_s"])
    best = fastest.values["samples_per_s"]
    limit = min(0.98 * best, fastest.spread.get("samples_per_s", (best, best))[0])
    near = [
        row
        for row in rivals
        if row.spread.get("samples_per_s", (0, row.values["samples_per_s"]))[1] >= limit
    ]
    chosen = min(near, key=lambda row: row.values["peak_mem_mb"])
    chosen.values["recommended"] = True
    if chosen is not fastest:
        saved = 1 - chosen.values["peak_mem_mb"] / fastest.values["peak_mem_mb"]
        how = f"as fast as the fastest, {fastest.setup}, within 2 % or the spread of its repeats"
        chosen.remarks.append(f"recommended: {how}, with {100 * saved:.0f} % less memory")
    else:
        chosen.remarks.append("recommended: the fastest")


def _reasons(row: ScalingRow, scaling: Scaling) -> dict[str, str]:
    """For each number why a row would not have it."""
    if not row.start:
        why = (
            "not run yet"
            if row.state == "waiting"
            else f"{row.state}: {row.reason}"
            if row.reason
            else row.state
        )
        return dict.fromkeys(NAMES, why)
    if not row.measured:
        return dict.fromkeys(
            NAMES, f"no line of the ledger begins after {scaling.warmup} steps of warm-up"
        )
    reasons = dict.fromkeys(NAMES, "not measured")
    reasons |= {
        "mfu": f"no peak is known of {row.start.get('device')}",
        "compile_s": "not compiled",
    }
    reasons |= {"exposed_ms": "no communication on one rank"}
    reasons |= dict.fromkeys(("exact_match", "f1"), "eval.suites does not have squad")
    reasons["serial_fraction"] = (
        "defined for a fixed amount of work" if scaling.mode == "weak" else "the baseline"
    )
    if scaling.mode == "strategies":
        reasons |= dict.fromkeys(COMPARED, "all setups have the same number of ranks")
    else:
        reasons |= dict.fromkeys(("pareto", "recommended"), "not a study of strategies")
    return (
        reasons | {"predicted_error": row.missing.get("predicted_ms", "not measured")} | row.missing
    )
