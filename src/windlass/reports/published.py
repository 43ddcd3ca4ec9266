"""The tables of published pieces of work, with their columns, filled from a run or a study by the name of its preset.

A value that is not there is a reason in words: on a CPU what the driver of a GPU reports is "no GPU".
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any, NamedTuple

from windlass.errors import UserError, argument
from windlass.reports.scaling import setup_values
from windlass.reports.study import StudyView, read_study
from windlass.reports.tables import EPOCH_LOSS, MEASURES, Column, Table, label, measures
from windlass.reports.view import RunView
from windlass.study.study import Study

GPU_ONLY = (
    "mem_alloc_mb",
    "mem_reserved_mb",
    "driver_mem_mb",
    "peak_mem_mb",
)  # the last is resident memory on a CPU
KINDS = {
    "runtime_s": "rate",
    "samples_per_s": "rate",
    "samples_factor": "hours",
    "runtime_factor": "hours",
    "gpu_hours": "hours",
    "steps_per_s": "hours",
    "exact_match": "rate",
    "f1": "rate",
}
Values = Mapping[str, Any]
Reason = Callable[[str], str]  # why there is no value of a name
Row = tuple[Values, Reason]


class Published(NamedTuple):
    """A table under the name of its preset."""

    name: str
    title: str
    note: str  # what its columns mean
    table: Table


def specifications() -> dict[str, dict[str, Any]]:
    """The tables as published.toml has them, by the name of the preset."""
    return tomllib.loads(
        (resources.files("windlass.reports") / "published.toml").read_text("utf-8")
    )


def published(
    views: Sequence[RunView],
    study: StudyView | None = None,
    name: str = "",
    setups: Sequence[Values] = (),
) -> Published | None:
    """The published table of the preset that a study or all runs have, or the one called `name`; None where there is none.

    `setups`: of a scaling study what `scaling.setup_values` gives. Raises UserError where there is no table `name`, or it is one of
    studies and these are runs.
    """
    specs, wanted = specifications(), name or preset_of(views, study.study if study else None)
    if wanted not in specs:
        if name:
            raise UserError(
                f"{argument('table', name)}: there is no such table; there are {', '.join(specs)}"
            )
        return None
    spec = specs[wanted]
    columns: dict[str, str] = spec["columns"]
    rows: list[Row] = []
    if spec["rows"] == "run" and not study:
        rows = list(map(run_row, views))
        columns = {"Run": "run", **columns} if len(views) > 1 else columns
    elif spec["rows"] == "cell" and study:
        varied = {key for key, values in study.study.values.items() if len(values) > 1}
        # a study that varies something else has rows that the table cannot tell apart
        rows = cell_rows(study) if name or varied <= {*columns.values()} else []
    elif spec["rows"] == "setup":
        gpus = any(map(on_gpus, views)) if views else None
        rows = [
            (with_units(x, bool(gpus)), why_not(x["state"], gpus, x["reasons"])) for x in setups
        ]
    if not rows:
        if name:
            what = {"run": "runs", "cell": "a sweep", "setup": "a scaling study"}[spec["rows"]]
            raise UserError(
                f"{argument('table', name)}: that is a table of {what}, and this is none"
            )
        return None
    absent = {x for x in spec.get("optional", ()) if all(row.get(x) is None for row, _ in rows)}
    columns = {heading: x for heading, x in columns.items() if x not in absent}
    cells = [
        tuple(why(x) if row.get(x) is None else row[x] for x in columns.values())
        for row, why in rows
    ]
    table = Table([Column(heading, heading, kind(x)) for heading, x in columns.items()], cells)
    return Published(wanted, spec["title"], spec.get("note", ""), table)


def of_study(study: Study) -> Published | None:
    """The published table of a study's preset, with the study as it is on disk; None where there is none."""
    if preset_of((), study) not in specifications():
        return None  # without reading the runs
    seen = read_study(study.path)
    return published(seen.views, seen, setups=setup_values(seen) if study.scaling else ())


def preset_of(views: Sequence[RunView], study: Study | None) -> str:
    """The preset's name that a study was made by, or that all runs have; else empty."""
    if study:
        return (study.scaling.preset if study.scaling else "") or study.recipe.preset
    names = {str(view.settings["preset"]) for view in views}
    return names.pop() if len(names) == 1 else ""


def kind(name: str) -> str:
    """The kind of number of a value, for `text.show`: seconds stay seconds, for the heading names the unit."""
    if name.endswith("_gb"):
        return "hours"
    measure = label(name)[1] if name in MEASURES or name.startswith(EPOCH_LOSS) else ""
    return KINDS.get(name, "rate" if name.endswith("_pct") else measure)


def on_gpus(view: RunView) -> bool:
    return view.run.on_gpus or "avg_mem_alloc_mb" in view.summary


def run_values(view: RunView) -> dict[str, Any]:
    """The settings and measures of a run, also in the units of tables."""
    return with_units({**view.settings, **measures(view)}, on_gpus(view))


def with_units(values: Values, gpus: bool) -> dict[str, Any]:
    """Measures, also in the units of tables (`x_gb`, `x_pct`), and those of GPUs alone only where there are some."""
    more, world = dict(values), values.get("world")
    if gpus:
        more |= {
            "gpus": world,
            "gpu_util_pct": more.get("util_pct"),
            "gpu_hours": more.get("device_hours"),
        }
    else:
        more |= dict.fromkeys(GPU_ONLY) | {
            "gpus": f"{world} CPU rank{'s' * (world != 1)}" if world else None
        }
    more |= {f"{name[:-3]}_gb": more[name] / 1e3 for name in GPU_ONLY if more.get(name) is not None}
    return more | {
        f"{name}_pct": 100 * more[name] for name in ("efficiency", "ratio") if name in more
    }


def why_not(
    state: str, gpus: bool | None, reasons: Mapping[str, str] = MappingProxyType({})
) -> Reason:
    """Why there is no value of a name; `state`: of a run, cell or setup, `gpus`: None where that is not known yet."""

    def why(name: str) -> str:
        if gpus is False and (name.startswith("gpu_") or name.replace("_gb", "_mb") in GPU_ONLY):
            return "no GPU"
        if reason := reasons.get(name.removesuffix("_pct")):
            return reason
        if state != "finished":
            words = {
                "waiting": "not run yet",
                "running": "not finished",
                "interrupted": "not finished",
            }
            return words.get(state, state)
        if name.startswith(EPOCH_LOSS):
            return f"no evaluation at epoch {name.removeprefix(EPOCH_LOSS)}"
        return "not measured"

    return why


def run_row(view: RunView) -> Row:
    state = "waiting" if not view.step else "finished" if view.state == "finished" else "running"
    nodes, world = (
        (view.run.environment.get("launch") or {}).get("nodes", 1),
        int(measures(view).get("world") or 1),
    )
    setup = f"{nodes} host{'s' * (nodes > 1)}, {world} rank{'s' * (world > 1)}"
    return run_values(view) | {"run": view.label, "setup": setup}, why_not(state, on_gpus(view))


def cell_rows(study: StudyView) -> list[Row]:
    """Each cell of a sweep, in the order of the grid."""
    views, rows = {view.run.path: view for view in study.views}, list[Row]()
    for result in study.results:
        view = views.get(result.run.path)
        values = (run_values(view) if view else {}) | result.cell.assignment
        rows.append((values, why_not(result.state, on_gpus(view) if view else None)))
    return rows
