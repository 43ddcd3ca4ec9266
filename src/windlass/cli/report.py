"""`windlass report`: tables, plots and one interactive page from runs or a study."""

from __future__ import annotations

import typer


def report(
    paths: list[str] = typer.Argument(..., metavar="RUN|STUDY...", help="Run directories, or a study."),
    out: str = typer.Option("", metavar="DIR", help="Where to write; default: report/ in the run or study, else here."),
    skip: int = typer.Option(
        -1, min=-1, metavar="N", help="The second loss plot leaves out N steps; default: a tenth."
    ),
    plots: bool = typer.Option(True, help="Draw the PNG files (--no-plots: page and tables alone)."),
    text: bool = typer.Option(False, "--text", help="Also print the loss curve, the last sample and the results here."),
) -> None:
    """Write a report: index.html, report.md, CSV tables and PNG plots; print the page's path.

    One run is shown in full, several are compared, with the settings that differ first, and a study shows its measure
    against the swept settings, and its winner. The page opens from disk in any browser and needs no network. The same
    runs give the same bytes.
    """
    from windlass.reports.page import report as write_report
    from windlass.reports.tables import results
    from windlass.reports.text import curve, last_sample

    written = write_report(paths, out or None, skip=None if skip < 0 else skip, plots=plots)
    for view in written.views if text else ():
        rows = results(view, for_people=True).rows
        width = max(len(name) for name, _ in rows)
        table = "\n".join(f"{name:<{width}}  {value:>14}" for name, value in rows)
        typer.echo("\n\n".join(part for part in (view.label, curve(view), last_sample(view), table) if part) + "\n")
    typer.echo(f"report: {written.page}")
