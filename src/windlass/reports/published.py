"""The tables of published pieces of work, with their columns, filled from a run or a study by the name of its preset.

A value that is not there is a reason in words: on a CPU what the driver of a GPU reports is "no GPU".
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import resources
from typing import Any, NamedTuple

from windlass.errors import UserError
from windlass.reports.study import StudyView
from windlass.reports.tables import MEASURES, Column, Table, label, measures
from windlass.reports.view import RunView

GPU_ONLY = ("mem_alloc_mb", "mem_reserved_mb", "driver_mem_mb", "peak_mem_mb")  # the last is resident memory on a CPU
KINDS = {
    "runtime_s": "rate", "speedup": "hours", "runtime_factor": "hours", "samples_per_s": "rate", "gpu_hours": "hours",
    "train_loss_mean": "loss", "samples_per_s_whole_run": "rate",
}  # fmt: skip
EVAL_LOSS = "eval_loss_epoch_"
Values = Mapping[str, Any]
Reason = Callable[[str], str]  # why there is no value of a name


class Published(NamedTuple):
    """A table under the name of its preset."""

    name: str
    title: str
    note: str  # what its columns mean
    table: Table


def specifications() -> dict[str, dict[str, Any]]:
    """The tables as published.toml has them, by the name of the preset."""
    return tomllib.loads((resources.files("windlass.reports") / "published.toml").read_text("utf-8"))


def published(
    views: Sequence[RunView], study: StudyView | None = None, name: str = "", setups: Sequence[Values] = ()
) -> Published | None:
    """The published table of the preset that a study or all runs have, or the one called `name`; None where there is none.

    `setups`: of a scaling study the values of each setup. Raises UserError where there is no table `name`, or it is one of
    studies and these are runs.
    """
    known, wanted = specifications(), name or preset_of(views, study)
    if wanted not in known:
        if name:
            raise UserError(f"--table {name}: there is no such table; there are {', '.join(known)}")
        return None
    spec = known[wanted]
    columns: dict[str, str] = spec["columns"]
    rows: list[tuple[Values, Reason]] = []
    if spec["rows"] == "run" and not study:
        rows = [(run_values(view) | {"run": view.label}, partial(missing, view=view)) for view in views]
        columns = {"Run": "run", **columns} if len(views) > 1 else columns
    elif spec["rows"] == "cell" and study:
        varied = {key for key, values in study.study.values.items() if len(values) > 1}
        # a study that varies something else has rows that the table cannot tell apart
        rows = cell_rows(study) if name or varied <= {*columns.values()} else []
    elif spec["rows"] == "setup":
        gpus = any(map(on_gpus, views))
        rows = [(with_units(one, gpus), partial(missing, view=None, gpus=gpus)) for one in setups]
    if not rows:
        if name:
            what = {"run": "runs", "cell": "a sweep", "setup": "a scaling study"}[spec["rows"]]
            raise UserError(f"--table {name}: that is a table of {what}, and this is none")
        return None
    cells = [tuple(why(x) if row.get(x) is None else row[x] for x in columns.values()) for row, why in rows]
    table = Table([Column(heading, heading, kind(x)) for heading, x in columns.items()], cells)
    return Published(wanted, spec["title"], spec.get("note", ""), table)


def preset_of(views: Sequence[RunView], study: StudyView | None) -> str:
    """The preset's name that a study was made by, or that all runs have; else empty."""
    if study:
        return getattr(getattr(study.study, "scaling", None), "preset", "") or study.study.recipe.preset
    names = {str(view.settings["preset"]) for view in views}
    return names.pop() if len(names) == 1 else ""


def kind(name: str) -> str:
    """The kind of number of a value, for `text.show`: seconds stay seconds, for the heading names the unit."""
    if name.endswith("_gb"):
        return "hours"
    return KINDS.get(name, "rate" if name.endswith("_pct") else label(name)[1] if name in MEASURES else "")


def on_gpus(view: RunView) -> bool:
    return view.run.on_gpus or "avg_mem_alloc_mb" in view.summary


def run_values(view: RunView) -> dict[str, Any]:
    """The settings and measures of a run, also in the units of tables."""
    return with_units({**view.settings, **measures(view)}, on_gpus(view))


def with_units(values: Values, gpus: bool) -> dict[str, Any]:
    """Measures, also in the units of tables (`x_gb`, `x_pct`), and those of GPUs alone only where there are some."""
    found, world = dict(values), values.get("world")
    if gpus:
        found |= {"gpus": world, "gpu_util_pct": found.get("util_pct"), "gpu_hours": found.get("device_hours")}
    else:
        found |= dict.fromkeys(GPU_ONLY) | {"gpus": f"{world} CPU rank{'s' * (world != 1)}" if world else None}
    found |= {f"{name[:-3]}_gb": found[name] / 1e3 for name in GPU_ONLY if found.get(name) is not None}
    found |= {
        f"{name}_pct": 100 * found[name] for name in ("efficiency", "ratio") if isinstance(found.get(name), float)
    }
    if world and found.get("train.global_batch"):
        found["device_batch"] = found["train.global_batch"] / world
    return found


def missing(name: str, view: RunView | None, state: str = "", gpus: bool = False) -> str:
    """Why there is no value of a name; `view`: the run, `state`: of the cell, `gpus`: where there is no run."""
    if (name.startswith("gpu_") or name.replace("_gb", "_mb") in GPU_ONLY) and not (
        on_gpus(view) if view else gpus or state
    ):
        return "no GPU"
    if state in ("failed", "diverged", "pruned"):
        return state
    if state == "waiting" or (view and not view.step):
        return "not run yet"
    if view and name.startswith(EVAL_LOSS) and view.state == "finished":
        return f"no evaluation at epoch {name.removeprefix(EVAL_LOSS)}"
    return "not measured" if view is None or view.state == "finished" else "not finished"


def cell_rows(study: StudyView) -> list[tuple[Values, Reason]]:
    """Values and reasons of each cell of a sweep, in the order of the grid."""
    views, rows = {view.run.path: view for view in study.views}, list[tuple[Values, Reason]]()
    for result in study.results:
        view = views.get(result.run.path)
        values = (run_values(view) if view else {}) | result.cell.assignment
        rows.append((values, partial(missing, view=view, state=result.state)))
    return rows
