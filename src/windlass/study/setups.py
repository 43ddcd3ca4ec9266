"""How well a study scales: time of a step, speed-up, efficiency, and the parts of a step.

docs/guides/scale.md has the formulas.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from windlass.errors import plural
from windlass.estimate.devices import NO_PEAK
from windlass.estimate.rank import flops_of_run
from windlass.ledger import Line
from windlass.recipe import Recipe
from windlass.recipe.settings import SQUAD_SUITE
from windlass.recipe.strategies import Sizes
from windlass.study.grid import AXES_ONLY, Assignment, short_names
from windlass.study.numbers import WARMUP, step_medians, windows
from windlass.study.probes import probe_medians
from windlass.study.results import CellResult
from windlass.study.study import Scaling, Study
from windlass.telemetry.measures import SETUP

# Numbers of a whole run, by their names in `measures.RUN`.
WHOLE_RUN = (
    *("train_loss", "train_loss_mean", "runtime_s", "samples_per_s_whole_run"),
    *("startup_s", "peak_mem_mb", "util_pct"),
)
# Numbers that compare a setup with the baseline.
COMPARED = ("speedup", "efficiency", "samples_factor", "runtime_factor", "ratio")


@dataclass
class Setup:
    """A setup of a scaling study, with the numbers of its cell."""

    name: str  # `1 host, 4 ranks`, or the settings that strategies vary
    result: CellResult
    values: dict[str, Any] = field(default_factory=dict)  # by a name of `measures.SETUP`
    missing: dict[str, str] = field(default_factory=dict)  # why a number is missing
    remarks: list[str] = field(default_factory=list)  # noise, too few cores
    recommended_because: str = ""  # empty: it is not the recommended setup
    start: Line = field(default_factory=dict)  # the last start, if the cell is finished

    @property
    def world(self) -> int:
        return int(self.values["world"])

    @property
    def measured(self) -> bool:
        return "step_ms" in self.values

    @property
    def assignment(self) -> Assignment:
        return self.result.cell.assignment

    @property
    def recipe(self) -> Recipe:
        return self.result.cell.recipe

    @property
    def on_cpu(self) -> bool:
        return str(self.start.get("device")).upper() == "CPU"


def read_setups(study: Study, results: Sequence[CellResult] | None = None) -> list[Setup]:
    """The setups of a study with all their numbers, by rising hosts and ranks."""
    scaling = study.scaling or Scaling("strategies")
    results = study.results() if results is None else results
    table = [_setup(study, scaling, result) for result in results]
    for setup in table:
        if setup.measured:
            _divide(study, setup)
            _remark_on_cores(setup)
    if scaling.mode == "strategies":
        _recommend(table)
    else:
        table.sort(key=lambda setup: (setup.values["nodes"], setup.world))
        _compare(table, scaling)
    for setup in table:
        reasons = _reasons(setup, scaling)
        setup.missing.update({n: why for n, why in reasons.items() if n not in setup.values})
    return table


def _setup(study: Study, scaling: Scaling, result: CellResult) -> Setup:
    """A setup that is not yet compared with other setups."""
    cell, recipe, is_finished = result.cell, result.cell.recipe, result.state == "finished"
    start = result.numbers.start if is_finished else {}
    world = int(start.get("world") or cell.world or cell.nodes)
    batch = start.get("global_batch", recipe.train.global_batch)
    layers = (start.get("network") or {}).get("layers")
    if not layers and recipe.model.kind == "gpt":
        layers = recipe.model.layers
    sizes = Sizes(**start["mesh"]) if "mesh" in start else recipe.sizes(world)
    values: dict[str, Any] = {"world": world, "nodes": cell.nodes, "global_batch": batch}
    values["batch_per_device"] = batch / sizes.data_world
    if layers:
        values["layers"] = layers
    if start.get("parameters"):
        values["parameters"] = start["parameters"]
    if is_finished:
        lines, whole = windows(result.run.ledger()), result.numbers.values()
        values |= step_medians(lines)
        if lines and all("mfu" in line for line in lines):
            values["mfu"] = statistics.median(line["mfu"] for line in lines)
        values |= {name: whole[name] for name in WHOLE_RUN if name in whole}
        if result.numbers.wall["compile"]:
            values["compile_s"] = result.numbers.wall["compile"]
        for name in ("exact_match", "f1"):
            if f"{SQUAD_SUITE}_{name}" in whole:
                values[name] = whole[f"{SQUAD_SUITE}_{name}"]
    if "step_ms" in values:
        steps_per_s = values["steps_per_s"] = 1e3 / values["step_ms"]
        values["samples_per_s"] = batch * steps_per_s
        values["tokens_per_s"] = values["tokens_per_step"] * steps_per_s
        values["tokens_per_s_per_device"] = values["tokens_per_s"] / world
        tokens = values["padded_tokens_per_step"] / world
        values["flops_per_device"] = flops_of_run(recipe, start) * tokens
    words = [plural(cell.nodes, "host"), plural(world, "rank")]
    if scaling.mode == "strategies":
        words = _differences(study, cell.assignment)
    elif scaling.grow == "model" and layers:
        words.append(plural(layers, "layer"))
    name = ", ".join(filter(None, [*words, sizes.layout])) or "the recipe"
    return Setup(name, result, values, start=start)


def _differences(study: Study, assignment: Assignment) -> list[str]:
    """The settings that distinguish a setup of a study of strategies from the others."""
    words, names = list[str](), short_names(assignment)
    for key, value in assignment.items():
        name = names[key].removeprefix("activation_")
        if key in AXES_ONLY or len(study.values[key]) < 2:
            continue
        if name in ("strategy", "precision"):  # their values need no name
            words.append(str(value))
        elif value not in (False, 0, "none"):
            words.append(name if value is True else f"{name} {value}")
    return words


def _remark_on_cores(setup: Setup) -> None:
    environment = setup.result.run.environment
    cores, threads = environment.get("machine", {}).get("cores"), dict[str, list[int]]()
    for rank in environment.get("ranks", ()) if setup.on_cpu and cores else ():
        threads.setdefault(str(rank.get("host")), []).append(int(rank.get("threads") or 1))
    crowded = [(host, own) for host, own in sorted(threads.items()) if sum(own) > cores]
    for host, own in crowded[:1]:
        ranks, devices = plural(len(own), "rank"), plural(len(own), "device")
        shared = f"{sum(own)} threads of {ranks} share the {cores} cores of {host}"
        setup.remarks.append(f"oversubscribed: {shared}, which says nothing about {devices}")


def _divide(study: Study, setup: Setup) -> None:
    """Divide a setup's step into STEP_PARTS.

    Computing and host are the probe's; its passes are scaled to the tokens of a rank's step,
    padding included. The step's excess over the probe, both without waiting for data, is
    communication that computing does not hide. A negative excess is noise.
    """
    values, why = setup.values, ""
    probe: Mapping[str, float] = values
    if setup.world > 1:
        probe, why = probe_medians(study, setup.result.cell)
    values.setdefault("data_ms", 0.0)
    if why:
        setup.missing.update(dict.fromkeys(("compute_ms", "exposed_ms", "host_ms"), why))
    if not probe:
        return
    step = values["step_ms"] - values["data_ms"]
    tokens = values["padded_tokens_per_step"] / setup.world
    passes, update = probe["forward_ms"] + probe["backward_ms"], probe["optimizer_ms"]
    host = max(0.0, probe["step_ms"] - probe["data_ms"] - passes - update)
    compute = passes * tokens / probe["padded_tokens_per_step"] + update
    alone = compute + host
    shrink = min(1.0, step / alone)
    values["compute_ms"] = compute * shrink
    values["host_ms"] = host * shrink
    if setup.world > 1:
        values["exposed_ms"] = max(0.0, step - alone)
        if step < alone:
            excess = f"the probe's step took {alone - step:.3g} ms longer than the step itself"
            setup.remarks.append(f"{excess}: noise, shown as no exposed communication")


def baseline(table: Sequence[Setup]) -> Setup:
    """The setup with the fewest ranks, measured or not; the others are compared with it."""
    return min(table, key=lambda setup: (setup.world, setup.values["nodes"]))


def _compare(table: list[Setup], scaling: Scaling) -> None:
    base = baseline(table)
    if not base.measured:
        why = dict.fromkeys(COMPARED, f"the baseline, {base.name}, lacks numbers")
        for setup in table:
            setup.missing.update({} if setup is base else why)
        return
    for setup in (setup for setup in table if setup.measured):
        values, first, p = setup.values, base.values, setup.world / base.world
        faster = values["samples_per_s"] / first["samples_per_s"]
        efficiency = first["step_ms"] / values["step_ms"] if scaling.mode == "weak" else faster / p
        if scaling.grow == "model":  # embedding and head do not grow
            efficiency *= values["flops_per_device"] / first["flops_per_device"]
        values |= {"speedup": efficiency * p, "samples_factor": faster}
        values["ratio"] = values["runtime_s"] / first["runtime_s"]
        values["runtime_factor"] = 1 / values["ratio"]
        values["efficiency"] = efficiency


def _recommend(table: list[Setup]) -> None:
    """Mark the recommended setup: among those within 2 % of the fastest the one with the least
    memory."""
    rivals = [setup for setup in table if setup.measured and "peak_mem_mb" in setup.values]
    if not rivals:
        return
    fastest = max(rivals, key=lambda setup: setup.values["samples_per_s"])
    limit = 0.98 * fastest.values["samples_per_s"]
    near = [setup for setup in rivals if setup.values["samples_per_s"] >= limit]
    smallest = min(near, key=lambda setup: setup.values["peak_mem_mb"])
    for setup in rivals:
        setup.values["recommended"] = setup is smallest
    why = "the fastest"
    if smallest is not fastest:
        saved = 1 - smallest.values["peak_mem_mb"] / fastest.values["peak_mem_mb"]
        why = f"as fast as {fastest.name}, within 2 %, with {100 * saved:.0f} % less memory"
    smallest.recommended_because = why


def _reasons(setup: Setup, scaling: Scaling) -> dict[str, str]:
    """For each number why a setup would lack it."""
    if not setup.start:
        state = ": ".join(filter(None, [setup.result.state, setup.result.reason]))
        return dict.fromkeys(SETUP, "not run yet" if state == "waiting" else state)
    if not setup.measured:
        why = f"no line of the ledger begins after {WARMUP} steps of warm-up"
        return dict.fromkeys(SETUP, why)
    reasons = dict.fromkeys(SETUP, "not measured") | {
        "mfu": NO_PEAK if setup.on_cpu else f"the peak of {setup.start.get('device')} is unknown",
        "compile_s": "not compiled",
        "exposed_ms": "one rank does not communicate",
        "exact_match": "eval.suites does not have squad",
        "f1": "eval.suites does not have squad",
    }
    if scaling.mode == "strategies":
        reasons |= dict.fromkeys(COMPARED, "all setups have the same number of ranks")
    else:
        reasons["recommended"] = "not a study of strategies"
    return reasons | setup.missing
