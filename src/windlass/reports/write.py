"""Writes a report: page, Markdown, CSV and plots, from runs or a study. The same runs give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import UserError
from windlass.reports.charts import charts
from windlass.reports.page import page
from windlass.reports.study import StudyView, cell_table, seed_table, winner, winner_command, winner_text
from windlass.reports.study_page import study_page
from windlass.reports.tables import (
    PRINCIPAL,
    Table,
    comparison,
    curves,
    evaluations,
    results,
    results_shown,
    settings_table,
)
from windlass.reports.text import markdown_cell, markdown_table, show
from windlass.reports.view import RunView, views
from windlass.run import Run

SIDE_BY_SIDE = 6
OURS = ("loss-late", "goodput", "heat-map", "heat-map-final")


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    markdown: Path
    tables: list[Path] = field(default_factory=list)
    plots: dict[str, Path] = field(default_factory=dict)

    @property
    def paths(self) -> list[Path]:
        """Every file of the report."""
        return [self.page, self.markdown, *self.tables, *self.plots.values()]


def write_report(runs: Sequence[Run], out: Path, *, plots: bool = True, skip: int | None = None) -> Report:
    """Report on one run, or compare several.

    Args:
        runs: run directories.
        out: the directory to write into; made where it is missing.
        plots: whether to draw the PNG files, which takes most of the time.
        skip: the second picture of the loss leaves out the steps before this one; None: the first tenth.

    Raises:
        UserError: there is no run, or one of them cannot be read, or the directory cannot be written.
    """
    if not runs:
        raise UserError("there is no run to report on")
    seen = views(runs)
    out = _directory(out)
    drawn: dict[str, Path] = {}
    if plots:
        from windlass.reports.plots import write_plots

        drawn = draw_again(lambda: write_plots(seen, out / "plots", skip), out)
    tables = {"results.csv": comparison(seen) if len(seen) > 1 else results(seen), **_long_tables(seen)}
    tables["settings.csv"] = settings_table(seen)
    return _write(out, page(seen), _markdown(seen, drawn), tables, drawn)


def write_study_report(study: StudyView, out: Path, *, plots: bool = True, skip: int | None = None) -> Report:
    """Report on a study, see `write_report`."""
    if not study.views:
        raise UserError(f"no cell of {study.path or study.name} has begun yet; `windlass sweep` trains them")
    out = _directory(out)
    drawn: dict[str, Path] = {}
    if plots:
        from windlass.reports.study_plots import write_study_plots

        drawn = draw_again(lambda: write_study_plots(study, out / "plots", skip), out)
    tables = {"cells.csv": cell_table(study.cells), "results.csv": comparison(study.views), **_long_tables(study.views)}
    seeds = seed_table(study.cells)
    if seeds is not None:
        tables["seeds.csv"] = seeds
    return _write(out, study_page(study), _study_markdown(study, drawn), tables, drawn)


def _directory(out: Path) -> Path:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {out}: {error.strerror}; give another place with --out"
        ) from None
    return out


def draw_again(write: Callable[[], dict[str, Path]], out: Path) -> dict[str, Path]:
    """Draw, and take away the pictures of an earlier report on this place that were not drawn again."""
    try:
        drawn = write()
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {out}: {error.strerror}; give another place with --out"
        ) from None
    for old in sorted((out / "plots").glob("*.png")):
        if old not in drawn.values() and _ours(old.stem):
            old.unlink()
    return drawn


def _ours(stem: str) -> bool:
    from windlass.reports.charts import LOSS, RANK_CHARTS, TRAIN_CHARTS

    names = {chart.id for chart in (LOSS, *TRAIN_CHARTS, *RANK_CHARTS)} | set(OURS)
    return stem in names or stem.startswith(("suite-", "loss-against-"))


def _write(out: Path, html: str, markdown: str, tables: dict[str, Table], drawn: dict[str, Path]) -> Report:
    report = Report(out / "index.html", out / "report.md", [out / name for name in tables], drawn)
    try:
        for name, found in tables.items():
            _whole(out / name, found.csv())
        _whole(report.markdown, markdown)
        _whole(report.page, html)
    except OSError as error:
        raise UserError(
            f"the report cannot be written to {out}: {error.strerror}; give another place with --out"
        ) from None
    return report


def _whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", newline="\n")
    partial.replace(path)


def _long_tables(seen: Sequence[RunView]) -> dict[str, Table]:
    """The evaluations and the train lines of all runs, each with the run's name first where there are several."""
    evals = [(view, suite, found) for view in seen for found, suite in evaluations(view)]
    found: dict[str, Table] = {
        "train.csv": _stacked([((view.label,), curves(view)) for view in seen], ("run",), len(seen))
    }
    if evals:
        parts = [((view.label, suite), one) for view, suite, one in evals]
        found["evaluations.csv"] = _stacked(parts, ("run", "suite"), 2)
    return found


def _stacked(parts: Sequence[tuple[tuple[str, ...], Table]], names: tuple[str, ...], count: int) -> Table:
    columns = list(dict.fromkeys(name for _, one in parts for name in one.columns))
    rows = []
    for labels, one in parts:
        places = {name: i for i, name in enumerate(one.columns)}
        for row in one.rows:
            rows.append((*labels, *(row[places[name]] if name in places else None for name in columns)))
    if count == 1:
        return Table(tuple(columns), [row[1:] for row in rows])
    return Table((*names, *columns), rows)


# ---------------------------------------------------------------- Markdown


def _markdown(seen: Sequence[RunView], drawn: dict[str, Path]) -> str:
    title = seen[0].label if len(seen) == 1 else f"{len(seen)} runs"
    parts = [f"# {markdown_cell(title)}\n", _state_line(seen)]
    if len(seen) > 1:
        parts += ["\n## Results\n", comparison(seen, PRINCIPAL).markdown()]
    if len(seen) <= SIDE_BY_SIDE:
        parts += ["\n## Results\n" if len(seen) == 1 else "\n### Every measure\n", results_shown(seen).markdown()]
    parts += _pictures(drawn, seen)
    for found, suite in evaluations(seen[0]) if len(seen) == 1 else ():
        parts += [f"\n## Evaluations: {markdown_cell(suite)}\n", found.markdown()]
    return "\n".join([*parts, *_settings(seen)])


def _state_line(seen: Sequence[RunView]) -> str:
    if len(seen) > 1:
        return "A comparison; the page beside this file is interactive.\n"
    view = seen[0]
    seams = "".join(f" {seam.what.capitalize()} at step {seam.step:,.0f} ({seam.stamp})." for seam in view.seams)
    return f"State: {view.state}, {view.step:,} steps.{seams} The page beside this file is interactive.\n"


def _pictures(drawn: dict[str, Path], seen: Sequence[RunView]) -> list[str]:
    titles = {chart.id: chart.title for chart in charts(seen)}
    titles |= {
        "loss-late": "Loss without its beginning",
        "goodput": "Where the time went",
        "heat-map": "Heat map",
        "heat-map-final": "Heat map of the final loss",
    }
    found = ["\n## Plots\n"] if drawn else []
    for name, path in drawn.items():
        title = titles.get(name, name.replace("-", " ").capitalize())
        found.append(f"![{markdown_cell(title)}](plots/{path.name})\n")
    return found


def _settings(seen: Sequence[RunView]) -> list[str]:
    from windlass.reports.tables import all_settings

    found = [s for s in all_settings(seen) if s.differs or s.changed]
    rows = [(s.key, *(show(value) for value in s.values)) for s in found]
    head = ("Setting", *(view.label for view in seen))
    note = "Those that differ between the runs first, then those changed from the defaults.\n"
    return [
        "\n## Settings\n",
        note if len(seen) > 1 else "Those changed from the defaults.\n",
        markdown_table(head, rows),
    ]


def _study_markdown(study: StudyView, drawn: dict[str, Path]) -> str:
    parts = [f"# {markdown_cell(study.name)}\n"]
    best = winner(study.cells)
    if best is not None:
        command, remark = winner_command(study, best.assignment)
        what, measure = winner_text(best)
        parts.append(f"The winner: {markdown_cell(what)}, {measure}. {remark}\n")
        parts.append(f"```\n{command}\n```\n")
    parts += ["\n## Cells\n", cell_table(study.cells).markdown()]
    seeds = seed_table(study.cells)
    if seeds is not None:
        parts += ["\n## Over the seeds\n", seeds.markdown()]
    return "\n".join([*parts, *_pictures(drawn, study.views)])
