"""Writes a report: one HTML page, Markdown, tables as CSV and LaTeX, and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from windlass.errors import UserError, argument, installed, require
from windlass.fileio import make_dir, write_atomic
from windlass.reports.page import Contents, cell_page, page
from windlass.reports.study import StudyView
from windlass.reports.tables import Column, Table, markdown_cell
from windlass.reports.view import RunView, views
from windlass.run import Run
from windlass.study.study import Study

Source = str | Path | Run | Study


@dataclass(frozen=True)
class Report:
    page: Path
    markdown: Path
    tables: list[Path]
    plots: dict[str, Path]  # by the chart's id: its PNG
    views: list[RunView]  # the runs as they were read
    published: Table | None  # the table of the preset's published work

    def __repr__(self) -> str:
        return f"report: {self.page}"  # as the command prints it


def report(
    sources: Source | Sequence[Source],
    out: str | Path | None = None,
    *,
    skip: int | None = None,
    plots: bool | None = None,
    pdf: bool = False,
    table: str = "",
    law: str | Path = "",
) -> Report:
    """Report on a run, on several runs beside each other, or on a study. The same runs give the
    same bytes.

    Args:
        sources: Runs, studies, or their directories; a study among others stands for its runs.
        out: The directory to write into, created if it is missing; None: `report/` in the run or
            study, or `report/` here for several runs.
        skip: The second picture of the loss leaves out the steps before this one; None: the first
            tenth.
        plots: Whether to draw the PNG files, which takes most of the time; None: if matplotlib is
            installed.
        pdf: Whether to draw every plot as PDF too.
        table: The published table to fill, by its preset's name; empty: the runs' own preset's.
        law: A ladder: its law predicts the runs, and the report has both losses.

    Raises:
        UserError: A run or the table is missing, a run is unreadable or does not compare with
            the law, the law is for a study, or the directory cannot be written.
    """
    if plots or pdf:
        require("matplotlib", "a plot")
    plots = pdf or (installed("matplotlib") if plots is None else plots)
    seen, study, place = _read(sources)
    if law and study:
        problem = f"a law predicts runs, and {study.study.path} is a study: name its runs"
        raise UserError(f"{argument('law', law)}: {problem}")
    target, drawn = Path(out) if out else place, dict[str, Path]()
    make_dir(target, f"give another {argument('out', 'DIR')}")
    computed = Contents(seen, study, table, str(law))
    first = math.ceil(max(view.numbers.step for view in seen) / 10) if skip is None else skip
    if plots:
        from windlass.reports.plots import write_plots  # matplotlib takes a second to import

        drawn = write_plots(computed.pictures, computed.views, target / "plots", first, pdf)
    listed = _write_tables(computed, target)
    write_atomic(target / "report.md", markdown(computed, drawn))
    write_atomic(target / "index.html", page(computed))
    if computed.cell_pages:
        (target / "cells").mkdir(exist_ok=True)
    for view in computed.cell_pages:
        write_atomic(target / cell_page(view), page(Contents([view])))
    files = (target / "index.html", target / "report.md", listed, drawn)
    return Report(*files, views=seen, published=computed.published)


def _read(sources: Source | Sequence[Source]) -> tuple[list[RunView], StudyView | None, Path]:
    given = [sources] if isinstance(sources, (str, Path, Run, Study)) else sources
    listed = [source.path if isinstance(source, Study) else source for source in given]
    if len(listed) == 1 and not isinstance(listed[0], Run) and Study.is_study(listed[0]):
        study = StudyView(listed[0])
        if not study.views:
            raise UserError(f"no cell of {listed[0]} has begun yet; run the sweep first")
        return study.views, study, study.study.path / "report"
    runs: list[Run] = []
    for source in listed:
        if isinstance(source, Run):
            runs.append(source)
        else:
            runs += Study.open(source).runs() if Study.is_study(source) else [Run.open(source)]
    if not runs:
        raise UserError("name a run to report on; by default runs lie in runs/")
    return views(runs), None, runs[0].report_dir if len(runs) == 1 else Path("report")


def _write_tables(computed: Contents, out: Path) -> list[Path]:
    written = computed.tables | {"results": computed.results}
    if published := computed.published:
        written["published"] = published
        write_atomic(out / "published.md", with_notes(published))
    files = {f"{name}.csv": table.csv() for name, table in written.items()}
    files |= {f"{name}.tex": table.latex() for name, table in written.items()}
    if published:
        files["published.tex"] += "".join(f"% {note}\n" for note in published.notes)
    for name, text in files.items():
        write_atomic(out / name, text)
    return [out / name for name in files]


def with_notes(table: Table) -> str:
    return table.markdown() + "".join(f"\n{markdown_cell(note)}\n" for note in table.notes)


def markdown(computed: Contents, drawn: dict[str, Path]) -> str:
    """`report.md`; `drawn`: the pictures by the chart's id."""
    head = computed.head
    text = f"# {markdown_cell(head.title)}\n"
    if head.lede:
        text += f"\n{markdown_cell(head.lede)}\n"
    answers = [
        (x.question, "; ".join(filter(None, [x.text, x.remark, *x.more]))) for x in head.answers
    ]
    columns = [Column("", "Question"), Column("", "Answer")]
    text += f"\n{Table('answers', columns, answers).markdown()}"
    for view in computed.views if computed.single else ():
        for r in view.restarts:
            text += f"\nAt step {r.step:,.0f} ({r.time}): {markdown_cell(r.text)}.\n"
    winners = f"\n## {computed.winner_title}\n" if computed.recommendations else ""
    for best in computed.recommendations:
        winners += f"\n{markdown_cell(best.text)}.\n\n```\n{best.command}\n```\n"
    tables = list(computed.tables.values())
    if computed.law and computed.law.remark:
        text += f"\n## The law of scaling\n\n{markdown_cell(computed.law.remark)}\n"
    for table in [computed.published, *tables] if computed.published else tables:
        if table.name == "cells":
            text += winners
        text += f"\n## {markdown_cell(table.title)}\n\n{with_notes(table)}"
    if drawn:
        titles = {"loss-late": "Loss without its first steps"}
        titles |= {chart.id: markdown_cell(chart.title) for chart in computed.pictures}
        pictures = (f"\n![{titles[n]}](plots/{path.name})\n" for n, path in drawn.items())
        text += "\n## Plots\n" + "".join(pictures)
    differing = {"between the runs": computed.differing, f"from {computed.base}": computed.changed}
    for which, rows in differing.items():
        if rows:
            differ = any(row.differs for row in rows)
            names = [view.label for view in computed.views] if differ else ["Value"]
            columns = [Column("", name) for name in ("Setting", *names)]
            lines = [(row.key, *row.values[: len(names)]) for row in rows]
            shown = Table("settings", columns, lines).markdown()
            text += f"\n## Settings that differ {which}\n\n{shown}"
    return text
