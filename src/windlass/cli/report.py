"""`windlass report`: tables, plots and one interactive page from runs or a study."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from windlass.run import Run


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("report")(report)


def report(
    paths: list[str] = typer.Argument(..., metavar="RUN|STUDY...", help="Run directories, recipes' names, or a study."),
    out: str = typer.Option("", metavar="DIR", help="Where to write; default: report/ in the run or study, else here."),
    skip: int = typer.Option(
        -1, min=-1, metavar="N", help="The second loss plot leaves out N steps; default: a tenth."
    ),
    plots: bool = typer.Option(True, help="Draw the PNG files (--no-plots: page and tables alone)."),
    text: bool = typer.Option(False, "--text", help="Also print the results and the loss curve here."),
    demo: bool = typer.Option(False, "--demo", help="Also print the loss curve and the last sample here."),
) -> None:
    """Write a report: index.html, report.md, CSV tables and PNG plots; print the page's path.

    One run is told in full, several are laid over each other with the settings that differ first, and a study shows the
    loss against what was swept, and its winner. The page opens from disk in any browser and needs no network. The same
    runs give the same bytes. A recipe's name stands for the run directory it would train in.
    """
    from pathlib import Path

    from windlass.reports.study import is_study, read_study
    from windlass.reports.write import write_report, write_study_report

    chosen = None if skip < 0 else skip
    if len(paths) == 1 and is_study(paths[0]):
        where = Path(out) if out else Path(paths[0]) / "report"
        written = write_study_report(read_study(paths[0]), where, plots=plots, skip=chosen)
    else:
        runs = [run for path in paths for run in _runs(path)]
        if text or demo:
            _show(runs, results=text, sample=demo)
        where = Path(out) if out else _place(runs)
        written = write_report(runs, where, plots=plots, skip=chosen)
    typer.echo(f"report: {written.page}")


def _runs(path: str) -> list[Run]:
    """The run at a path, the runs of a study, or the run of a recipe by name."""
    from pathlib import Path

    from windlass.errors import UserError
    from windlass.recipe import Recipe, presets
    from windlass.reports.study import is_study
    from windlass.run import Run

    if is_study(path):
        found = sorted((Path(path) / "runs").glob("*/recipe.toml"))
        return [Run(recipe.parent) for recipe in found]
    if not Path(path).exists() and path in presets():
        run = Run(Recipe.load(path).run_dir)
        if not run.recipe_path.is_file():
            raise UserError(
                f"{path} has not been trained here: there is no {run.path}; `windlass train {path}` does it"
            )
        return [run]
    return [Run.open(path)]


def _place(runs: list[Run]) -> Path:
    from pathlib import Path

    return runs[0].report_dir if len(runs) == 1 else Path("report")


def _show(runs: list[Run], *, results: bool, sample: bool) -> None:
    """Curve, table and sample in the terminal, for who has no browser at hand."""
    from windlass.reports.tables import results_shown
    from windlass.reports.terminal import curve
    from windlass.reports.text import printable
    from windlass.reports.view import views

    seen = views(runs)
    for view in seen:
        if len(seen) > 1:
            typer.echo(view.label)
        typer.echo(f"{curve(view)}\n")
        if sample and view.samples:
            last = view.samples[-1]
            lines = "\n".join(f"  | {line}" for line in printable(last.text).splitlines())
            typer.echo(f"sample at step {last.step:,}:\n{lines}\n")
    if results:
        rows = results_shown(seen).rows
        width = max(len(row[0]) for row in rows)
        for row in rows:
            typer.echo(f"{row[0]:<{width}}  {'  '.join(f'{cell:>14}' for cell in row[1:])}".rstrip())
        typer.echo("")
