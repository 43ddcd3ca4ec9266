"""The tables of published pieces of work, filled from a run or a study by the name of its preset.

A reason in words stands for each missing value. If all runs are on CPUs, people see no columns of
GPUs, but a line that names them; the CSV has them, with "no GPU" in every row.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windlass.errors import UserError, argument, plural
from windlass.reports.scaling import ScalingView
from windlass.reports.study import StudyView
from windlass.reports.table import Column, Table
from windlass.reports.view import RunView
from windlass.study.study import Study
from windlass.telemetry.measures import EPOCH_LOSS, of_published

WAITING = {"waiting": "not run yet", "running": "not finished", "interrupted": "not finished"}
SOURCES = {"run": "runs", "cell": "a sweep", "setup": "a scaling study"}
"""What a table is filled from, by the `rows` of its specification."""


class Row(NamedTuple):
    """A run, cell or setup."""

    values: Mapping[str, Any]  # settings and measures by name
    state: str
    gpus: bool | None  # None: not known yet
    reasons: Mapping[str, str] = {}  # why a measure is missing

    def cell(self, name: str) -> Any:
        """The value of a measure or setting, or why there is none."""
        measure, reason = of_published(name), self.reason(name)
        value, ranks = self.values.get(measure.of or name), self.values.get("world")
        if name == "gpus" and not self.gpus and ranks:
            return plural(ranks, "CPU rank")
        if reason or value is None:
            return reason
        return value if measure.factor == 1 else measure.factor * value

    def reason(self, name: str) -> str:
        """Why a measure is missing; empty if it is there."""
        measure = of_published(name)
        if self.gpus is False and measure.gpu:
            return "no GPU"
        if self.values.get(measure.of or name) is not None:
            return ""
        if reason := self.reasons.get(measure.of or name):
            return reason
        if self.state != "finished":
            return WAITING.get(self.state, self.state)
        if name.startswith(EPOCH_LOSS):
            return f"no evaluation at epoch {name.removeprefix(EPOCH_LOSS)}"
        return "not measured"


def specifications() -> dict[str, dict[str, Any]]:
    """The tables in published.toml, by the name of the preset."""
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))


def published(
    views: Sequence[RunView],
    study: StudyView | None = None,
    name: str = "",
    setups: Sequence[Mapping[str, Any]] = (),
) -> Table | None:
    """The published table of a study's or all runs' preset, or the table called `name`.

    None if the preset has no table, or if the study varies settings that the table does not have.
    `setups`: for a scaling study the result of `scaling.setup_values`.

    Raises:
        UserError: no table is called `name`, or it is a table of something else than these sources.
    """
    specs, wanted = specifications(), name or _preset(views, study.study if study else None)
    if name and name not in specs:
        listed = ", ".join(specs)
        raise UserError(f"{argument('table', name)}: no such table; the tables are {listed}")
    if wanted not in specs:
        return None
    spec = specs[wanted]
    columns, rows = dict[str, str](spec["columns"]), list[Row]()
    if spec["rows"] == "run" and not study:
        rows = list(map(_run_row, views))
        columns = {"Run": "run", **columns} if len(views) > 1 else columns
    elif spec["rows"] == "cell" and study:
        varied = {key for key, values in study.study.values.items() if len(values) > 1}
        # the table cannot tell the cells apart if the study varies another setting
        rows = _cell_rows(study) if name or varied <= {*columns.values()} else []
    elif spec["rows"] == "setup":
        gpus = any(map(_on_gpus, views)) if views else None
        rows = [Row(values, values["state"], gpus, values["reasons"]) for values in setups]
    if not rows:
        if name:
            what = SOURCES[spec["rows"]]
            raise UserError(f"{argument('table', name)} is a table of {what}; give it {what}")
        return None
    empty = [x for x in spec.get("optional", ()) if all(r.values.get(x) is None for r in rows)]
    columns = {heading: x for heading, x in columns.items() if x not in empty}
    cells = [[row.cell(x) for x in columns.values()] for row in rows]
    measures = {heading: of_published(x) for heading, x in columns.items()}
    on_cpus = any(row.gpus is False for row in rows) and not any(row.gpus for row in rows)
    hidden = {x: "not measured without a GPU" for x, m in measures.items() if m.gpu and on_cpus}
    for heading, x in columns.items():  # one reason for the whole column is a note
        reasons = {row.reason(x) for row in rows if row.state == "finished"}
        if len(rows) > 1 and len(reasons) == 1 and (reason := reasons.pop()):
            hidden.setdefault(heading, reason)
    heads = [Column(x, x, m.kind, shown=x not in hidden) for x, m in measures.items()]
    notes = [
        f"{', '.join(x for x in hidden if hidden[x] == reason)}: {reason}."
        for reason in dict.fromkeys(hidden.values())
    ]
    notes += [spec["note"]] if "note" in spec else []
    return Table(wanted, heads, cells, spec["title"], notes)


def of_study(study: Study) -> Table | None:
    """The published table of a study's preset, from the study on disk; None if there is none."""
    if _preset((), study) not in specifications():
        return None  # without reading the runs
    seen = StudyView(study.path)
    setups = ScalingView(seen).values if study.scaling else ()
    return published(seen.views, seen, setups=setups)


def _preset(views: Sequence[RunView], study: Study | None) -> str:
    """The preset of a study, or of all runs; empty if they have several."""
    if study:
        return (study.scaling and study.scaling.preset) or study.recipe.preset
    names = {str(view.settings["preset"]) for view in views}
    return names.pop() if len(names) == 1 else ""


def _on_gpus(view: RunView) -> bool:
    return view.run.on_gpus or "avg_mem_alloc_mb" in view.summary


def _run_row(view: RunView) -> Row:
    state = "waiting" if not view.step else "finished" if view.state == "finished" else "running"
    nodes = (view.run.environment.get("launch") or {}).get("nodes", 1)
    setup = f"{plural(nodes, 'host')}, {plural(int(view.values.get('world') or 1), 'rank')}"
    own = {**view.settings, **view.values, "run": view.label, "setup": setup}
    return Row(own, state, _on_gpus(view))


def _cell_rows(study: StudyView) -> list[Row]:
    """Each cell of a sweep, in the order of the grid."""
    begun, rows = {view.run.path: _run_row(view) for view in study.views}, []
    for result in study.results:
        row = begun.get(result.run.path, Row({}, "", None))
        values = {**row.values, **result.cell.assignment}
        rows.append(row._replace(values=values, state=result.state))
    return rows
