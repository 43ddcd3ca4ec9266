"""Writes a report: the page, Markdown, CSV tables and PNG plots. The same runs give the same bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import UserError
from windlass.fileio import write_atomic
from windlass.recipe import Recipe, presets
from windlass.reports import tables
from windlass.reports.charts import Chart, charts
from windlass.reports.page import SIDE_BY_SIDE, page
from windlass.reports.study import (
    StudyView,
    cell_table,
    heats,
    looks,
    read_study,
    seed_table,
    sweep_charts,
    winner_text,
)
from windlass.reports.text import markdown_cell
from windlass.reports.view import RunView, views
from windlass.run import Run
from windlass.study.study import Study


@dataclass(frozen=True)
class Report:
    """What was written."""

    page: Path
    markdown: Path
    tables: list[Path] = field(default_factory=list)
    plots: dict[str, Path] = field(default_factory=dict)
    """By the chart's id."""


def report(
    sources: str | Path | Run | Sequence[str | Path | Run],
    out: str | Path | None = None,
    *,
    skip: int | None = None,
    plots: bool = True,
) -> Report:
    """Report on a run, several runs beside each other, or a study.

    Args:
        sources: runs, run directories, names of recipes (for the runs that they train), or one study's directory; a
            study among other sources stands for its runs.
        out: the directory to write into, made where it is missing; None: `report/` in the run or study, of several runs
            `report/` here.
        skip: the second picture of the loss leaves out the steps before this one; None: the first tenth.
        plots: whether to draw the PNG files, which takes most of the time.

    Raises:
        UserError: there is no run, one of them cannot be read, or the directory cannot be written.
    """
    listed = [sources] if isinstance(sources, (str, Path, Run)) else list(sources)
    study = None
    if len(listed) == 1 and not isinstance(listed[0], Run) and Study.is_study(listed[0]):
        study = read_study(listed[0])
        seen, place = study.views, study.study.path / "report"
        if not seen:
            raise UserError(f"no cell of {listed[0]} has begun yet; `windlass sweep` trains them")
    else:
        runs = open_runs(listed)
        seen, place = views(runs), runs[0].report_dir if len(runs) == 1 else Path("report")
    target = place if out is None else Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
        return _write(target, seen, study, skip, plots)
    except OSError as error:
        message = f"the report cannot be written to {target}: {error.strerror}; give another place with --out"
        raise UserError(message) from None


def open_runs(sources: Sequence[str | Path | Run]) -> list[Run]:
    """The runs that are meant, see `report`; raises UserError where there are none."""
    runs: list[Run] = []
    for source in sources:
        if isinstance(source, Run):
            runs.append(source)
        elif Study.is_study(source):
            runs += Study.open(source).runs()
        elif not Path(source).exists() and source in presets():
            run = Run(Recipe.load(str(source)).run_dir)
            if not run.recipe_path.is_file():
                raise UserError(
                    f"{source} has not been trained here: there is no {run.path}; `windlass train {source}` does it"
                )
            runs.append(run)
        else:
            runs.append(Run.open(source))
    if not runs:
        raise UserError("there is no run to report on; `windlass runs` lists the runs")
    return runs


def _write(out: Path, seen: Sequence[RunView], study: StudyView | None, skip: int | None, plots: bool) -> Report:
    run_looks, sweeps = (looks(study), sweep_charts(study)) if study else ((), [])
    described = charts(seen, run_looks)
    drawn: dict[str, Path] = {}
    if plots:
        from windlass.reports.plots import write_plots

        maps = heats(study) if study else []
        drawn = write_plots(seen, [*sweeps, *described], out / "plots", skip, run_looks, maps)
    files = {"settings.csv": tables.settings_table(seen), **_long_tables(seen)}
    if study:
        files |= {"cells.csv": cell_table(study), "results.csv": tables.comparison(seen)}
        files |= {"seeds.csv": seeds} if (seeds := seed_table(study)) else {}
    else:
        files["results.csv"] = tables.comparison(seen) if len(seen) > 1 else tables.results(seen)
    for name, table in files.items():
        write_atomic(out / name, table.csv())
    pictures = _pictures([*sweeps, *described], drawn)
    write_atomic(out / "report.md", (_study_markdown(study) if study else _markdown(seen)) + pictures + _settings(seen))
    write_atomic(out / "index.html", page(seen, described, study))
    return Report(out / "index.html", out / "report.md", [out / name for name in files], drawn)


def _long_tables(seen: Sequence[RunView]) -> dict[str, tables.Table]:
    """The `train` lines and the evaluations of all runs, the run's name first where there are several."""
    if len(seen) == 1:
        files = {"train.csv": tables.curves(seen[0])}
        parts = [((suite,), table) for suite, table in tables.evaluations(seen[0]).items()]
        return files | ({"evaluations.csv": tables.stacked(parts, ["suite"])} if parts else {})
    files = {"train.csv": tables.stacked([((view.label,), tables.curves(view)) for view in seen], ["run"])}
    every = [((view.label, suite), table) for view in seen for suite, table in tables.evaluations(view).items()]
    return files | ({"evaluations.csv": tables.stacked(every, ["run", "suite"])} if every else {})


# --- Markdown --------------------------------------------------------------------------------------------------------


def _markdown(seen: Sequence[RunView]) -> str:
    if len(seen) > 1:
        text = f"# {len(seen)} runs\n\n## Results\n\n{tables.comparison(seen, tables.PRINCIPAL).markdown()}"
        return text + (
            f"\n### Every measure\n\n{tables.results_for_people(seen).markdown()}" if len(seen) <= SIDE_BY_SIDE else ""
        )
    view = seen[0]
    restarts = "".join(f" {r.what.capitalize()} at step {r.step:,.0f} ({r.time})." for r in view.restarts)
    text = f"# {markdown_cell(view.label)}\n\nState: {view.state}, {view.step:,} steps.{restarts}\n"
    text += f"\n## Results\n\n{tables.results_for_people(seen).markdown()}"
    for suite, table in tables.evaluations(view).items():
        text += f"\n## Evaluations: {markdown_cell(suite)}\n\n{table.markdown()}"
    return text


def _study_markdown(study: StudyView) -> str:
    text, best = f"# {markdown_cell(study.name)}\n", study.winner
    if best is not None:
        command, remark = study.study.winner_command(best.assignment)
        what, score = winner_text(study, best)
        text += f"\nThe winner: {markdown_cell(what)}, {score}. {remark}\n\n```\n{command}\n```\n"
    text += f"\n## Cells\n\n{cell_table(study).markdown()}"
    seeds = seed_table(study)
    return text + (f"\n## Over the seeds\n\n{seeds.markdown()}" if seeds else "")


def _pictures(described: Sequence[Chart], drawn: Mapping[str, Path]) -> str:
    titles = {chart.id: chart.title for chart in described}
    titles |= {"loss-late": "Loss without its beginning", "goodput": "Where the time went"}
    lines = []
    for name, path in drawn.items():
        title = titles.get(name, name.replace("-", " ").capitalize())
        lines.append(f"![{markdown_cell(title)}](plots/{path.name})\n")
    return "\n".join(["\n## Plots\n", *lines]) if lines else ""


def _settings(seen: Sequence[RunView]) -> str:
    rows = [row for row in tables.all_settings(seen) if row.differs or row.changed]
    first = "Those that differ between the runs first, then those" if len(seen) > 1 else "Those"
    return f"\n## Settings\n\n{first} changed from the defaults.\n\n{tables.settings_table(seen, rows).markdown()}"
