"""`windlass report`: tables, plots and one interactive page from runs or a study."""

from __future__ import annotations

import typer


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

    One run is shown in full, several are compared, with the settings that differ first, and a study shows its measure
    against the swept settings, and its winner. The page opens from disk in any browser and needs no network. The same
    runs give the same bytes. A recipe's name stands for the run directory it would train in.
    """
    from windlass.reports.terminal import curve, last_sample, results_text
    from windlass.reports.view import views
    from windlass.reports.write import open_runs
    from windlass.reports.write import report as write_report

    if text or demo:
        seen = views(open_runs(paths))
        for view in seen:
            typer.echo("\n".join([*([view.label] if len(seen) > 1 else []), curve(view), ""]))
            if demo and view.samples:
                typer.echo(f"{last_sample(view)}\n")
        if text:
            typer.echo(f"{results_text(seen)}\n")
    written = write_report(paths, out or None, skip=None if skip < 0 else skip, plots=plots)
    typer.echo(f"report: {written.page}")
