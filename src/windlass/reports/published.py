"""The tables of published pieces of work, filled from a run or a study by the name of its preset.

A reason in words stands for each missing value: the driver's numbers are "no GPU" on a CPU.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

from windlass.errors import UserError, argument
from windlass.reports.scaling import setup_values
from windlass.reports.study import StudyView, read_study
from windlass.reports.table import Column, Table
from windlass.reports.text import plural
from windlass.reports.view import RunView
from windlass.study.study import Study
from windlass.telemetry.measures import EPOCH_LOSS, of_published

# the last one is resident memory on a CPU
GPU_ONLY = ("mem_alloc_mb", "mem_reserved_mb", "driver_mem_mb", "peak_mem_mb")
WAITING = {"waiting": "not run yet", "running": "not finished", "interrupted": "not finished"}
Values = Mapping[str, Any]
Reason = Callable[[str], str]  # why a name has no value
Row = tuple[Values, Reason]


def specifications() -> dict[str, dict[str, Any]]:
    """The tables in published.toml, by the name of the preset."""
    file = resources.files("windlass.reports") / "published.toml"
    return tomllib.loads(file.read_text("utf-8"))


def published(
    views: Sequence[RunView],
    study: StudyView | None = None,
    name: str = "",
    setups: Sequence[Values] = (),
) -> Table | None:
    """The published table of a study's or all runs' preset, or the table called `name`.

    None if the preset has no table, or if the study's cells have nothing in common with its rows.
    `setups`: for a scaling study the result of `scaling.setup_values`.

    Raises:
        UserError: no table is called `name`, or it is a table of something else than these sources.
    """
    specs, wanted = specifications(), name or preset_of(views, study.study if study else None)
    if wanted not in specs:
        if name:
            listed = ", ".join(specs)
            raise UserError(f"{argument('table', name)}: no such table; the tables are {listed}")
        return None
    spec = specs[wanted]
    columns: dict[str, str] = spec["columns"]
    rows: list[Row] = []
    if spec["rows"] == "run" and not study:
        rows = list(map(run_row, views))
        columns = {"Run": "run", **columns} if len(views) > 1 else columns
    elif spec["rows"] == "cell" and study:
        varied = {key for key, values in study.study.values.items() if len(values) > 1}
        # the table cannot tell the cells apart if the study varies another setting
        rows = cell_rows(study) if name or varied <= {*columns.values()} else []
    elif spec["rows"] == "setup":
        gpus = any(map(on_gpus, views)) if views else None
        for values in setups:
            why = why_not(values["state"], gpus, values["reasons"])
            rows.append((with_units(values, bool(gpus)), why))
    if not rows:
        if name:
            what = {"run": "runs", "cell": "a sweep", "setup": "a scaling study"}[spec["rows"]]
            raise UserError(f"{argument('table', name)} is a table of {what}; give it {what}")
        return None
    absent = {x for x in spec.get("optional", ()) if all(row.get(x) is None for row, _ in rows)}
    columns = {heading: x for heading, x in columns.items() if x not in absent}
    cells = [
        [why(x) if row.get(x) is None else row[x] for x in columns.values()] for row, why in rows
    ]
    heads = [Column(heading, heading, of_published(x).kind) for heading, x in columns.items()]
    return Table(wanted, heads, cells, spec["title"], [spec["note"]] if "note" in spec else [])


def of_study(study: Study) -> Table | None:
    """The published table of a study's preset, from the study on disk; None if there is none."""
    if preset_of((), study) not in specifications():
        return None  # without reading the runs
    seen = read_study(study.path)
    return published(seen.views, seen, setups=setup_values(seen) if study.scaling else ())


def preset_of(views: Sequence[RunView], study: Study | None) -> str:
    """The preset of a study, or of all runs; empty if they have several."""
    if study:
        return (study.scaling.preset if study.scaling else "") or study.recipe.preset
    names = {str(view.settings["preset"]) for view in views}
    return names.pop() if len(names) == 1 else ""


def on_gpus(view: RunView) -> bool:
    return view.run.on_gpus or "avg_mem_alloc_mb" in view.summary


def run_values(view: RunView) -> dict[str, Any]:
    """The settings and measures of a run, also in the units of tables."""
    return with_units({**view.settings, **view.values}, on_gpus(view))


def with_units(values: Values, gpus: bool) -> dict[str, Any]:
    """Measures, also in the units of tables (`x_gb`, `x_pct`); without GPUs no GPU's measures."""
    more, world = dict(values), values.get("world")
    if gpus:
        more["gpus"], more["gpu_hours"] = world, more.get("device_hours")
        more["gpu_util_pct"] = more.get("util_pct")
    else:
        more |= dict.fromkeys(GPU_ONLY)
        more["gpus"] = plural(world, "CPU rank") if world else None
    more |= {f"{name[:-3]}_gb": more[name] / 1e3 for name in GPU_ONLY if more.get(name) is not None}
    shares = ("efficiency", "ratio")
    return more | {f"{name}_pct": 100 * more[name] for name in shares if name in more}


def why_not(
    state: str, gpus: bool | None, reasons: Mapping[str, str] = MappingProxyType({})
) -> Reason:
    """Why a name has no value; `state`: of a run, cell or setup, `gpus`: None if not known yet."""

    def why(name: str) -> str:
        if gpus is False and (name.startswith("gpu_") or name.replace("_gb", "_mb") in GPU_ONLY):
            return "no GPU"
        if reason := reasons.get(name.removesuffix("_pct")):
            return reason
        if state != "finished":
            return WAITING.get(state, state)
        if name.startswith(EPOCH_LOSS):
            return f"no evaluation at epoch {name.removeprefix(EPOCH_LOSS)}"
        return "not measured"

    return why


def run_row(view: RunView) -> Row:
    state = "waiting" if not view.step else "finished" if view.state == "finished" else "running"
    nodes = (view.run.environment.get("launch") or {}).get("nodes", 1)
    setup = f"{plural(nodes, 'host')}, {plural(int(view.values.get('world') or 1), 'rank')}"
    values = run_values(view) | {"run": view.label, "setup": setup}
    return values, why_not(state, on_gpus(view))


def cell_rows(study: StudyView) -> list[Row]:
    """Each cell of a sweep, in the order of the grid."""
    views, rows = {view.run.path: view for view in study.views}, list[Row]()
    for result in study.results:
        view = views.get(result.run.path)
        values = (run_values(view) if view else {}) | result.cell.assignment
        rows.append((values, why_not(result.state, on_gpus(view) if view else None)))
    return rows
