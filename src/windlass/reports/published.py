"""The tables of published pieces of work, filled from a run or a study by the name of its preset;
a reason in words stands for each missing value."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from windlass.errors import UserError, argument, plural
from windlass.reports.study import StudyView
from windlass.reports.tables import Column, Table
from windlass.reports.view import RunView
from windlass.study.setups import Setup
from windlass.study.study import Study
from windlass.telemetry.measures import EPOCH_LOSS, RUN, SETUP, Measure, of_result

WAITING = {"waiting": "not run yet", "running": "not finished", "interrupted": "not finished"}
COUNTS = ("world", "batch_per_device")  # also without a GPU
SOURCES = {"run": "runs", "cell": "a sweep", "setup": "a scaling study"}  # by a table's `rows`


class Heading(NamedTuple):
    """A published column: its heading, which has the unit, and the measure or setting below it."""

    text: str
    name: str
    kind: str  # of its number
    factor: float  # to the heading's unit: MB as GB, fractions as %
    on_gpu: bool  # whether only a GPU has it


def heading_of(text: str, name: str) -> Heading:
    measure = (RUN | SETUP).get(name) or Measure(name, kind="")
    measure = of_result(name) if name.startswith(EPOCH_LOSS) else measure
    kind, factor = measure.kind, 1.0
    if kind == "mb" and "GB" in text:
        kind, factor = "hours", 1e-3
    elif kind == "share":
        kind, factor = "rate", 100.0
    on_gpu = measure.gpu or ("GPU" in text and name not in COUNTS)
    return Heading(text, name, kind, factor, on_gpu)


class Row(NamedTuple):
    """A run, cell or setup."""

    values: Mapping[str, Any]  # settings and measures by name
    state: str
    gpus: bool | None  # None: it has not begun
    reasons: Mapping[str, str] = {}  # why a measure is missing

    def cell(self, heading: Heading) -> Any:
        """The value of a measure or setting, or why it is missing."""
        name, value = heading.name, self.values.get(heading.name)
        if name == "world" and not self.gpus and value:
            return plural(value, "CPU rank")
        if self.gpus is False and heading.on_gpu:
            return "no GPU"
        if value is not None:
            return value if heading.factor == 1 else heading.factor * value
        if name in self.reasons:
            return self.reasons[name]
        if self.state != "finished":
            return WAITING.get(self.state, self.state)
        if name.startswith(EPOCH_LOSS):
            return f"no evaluation at epoch {name.removeprefix(EPOCH_LOSS)}"
        return "not measured"


def specifications() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text("utf-8"))


def published(
    views: Sequence[RunView], study: StudyView | None = None, name: str = ""
) -> Table | None:
    """The published table of a study's or all runs' preset, or the table called `name`.

    None if the preset lacks a table, or if the study varies settings that the table does not have.
    UserError if no table is called `name`, or if these are not its sources.
    """
    specs, wanted = specifications(), name or _preset(views, study.study if study else None)
    if name and name not in specs:
        listed = ", ".join(specs)
        raise UserError(f"{argument('table', name)}: no such table; the tables are {listed}")
    if wanted not in specs:
        return None
    spec = specs[wanted]
    headings = [heading_of(*column) for column in spec["columns"].items()]
    rows = list[Row]()
    if spec["rows"] == "run" and not study:
        rows = [_run_row(view) for view in views]
        if len(views) > 1:
            headings.insert(0, heading_of("Run", "run"))
    elif spec["rows"] == "cell" and study:
        # the table cannot tell the cells apart if the study varies another setting
        if name or set(study.varied) <= {heading.name for heading in headings}:
            begun = {view.run.path: _run_row(view) for view in study.views}
            for result in study.results:
                row = begun.get(result.run.path, Row({}, "", None))
                values = {**row.values, **result.cell.assignment}
                rows.append(row._replace(values=values, state=result.state))
    elif spec["rows"] == "setup" and study:
        gpus = any(map(_on_gpus, study.views)) if study.views else None
        rows = [_setup_row(study, setup, gpus) for setup in study.setups]
    if not rows:
        if name:
            what = SOURCES[spec["rows"]]
            raise UserError(f"{argument('table', name)} is a table of {what}; give it {what}")
        return None
    columns = [Column(heading.text, heading.text, heading.kind) for heading in headings]
    cells = [[row.cell(heading) for heading in headings] for row in rows]
    notes = [spec["note"]] if "note" in spec else []
    return Table(wanted, columns, cells, spec["title"], notes)


def of_study(study: Study) -> Table | None:
    """The published table of a study's preset, from the study on disk; None if there is none."""
    if _preset((), study) not in specifications():
        return None  # without reading the runs
    seen = StudyView(study.path)
    return published(seen.views, seen)


def _preset(views: Sequence[RunView], study: Study | None) -> str:
    if study:
        return (study.scaling and study.scaling.preset) or study.recipe.preset
    names = {str(view.settings["preset"]) for view in views}
    return names.pop() if len(names) == 1 else ""


def _on_gpus(view: RunView) -> bool:
    return view.run.on_gpus or "avg_mem_alloc_mb" in view.numbers.summary


def _run_row(view: RunView) -> Row:
    state = "finished" if view.state == "finished" else "running"
    if not view.numbers.step:
        state = "waiting"
    nodes = (view.run.environment.get("launch") or {}).get("nodes", 1)
    setup = f"{plural(nodes, 'host')}, {plural(int(view.values.get('world') or 1), 'rank')}"
    values = {**view.settings, **view.values, "run": view.label, "setup": setup}
    return Row(values, state, _on_gpus(view))


def _setup_row(study: StudyView, setup: Setup, gpus: bool | None) -> Row:
    values = {**setup.recipe.flat(), **setup.assignment}
    for view in study.views:
        if view.run.path == setup.result.run.path and setup.result.state == "finished":
            values |= view.values
    values |= setup.values
    if "precision" in setup.start:
        values["train.precision"] = setup.start["precision"]  # what `auto` was
    return Row(values | {"setup": setup.name}, setup.result.state, gpus, setup.missing)
