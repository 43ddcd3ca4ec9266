"""`windlass checkpoints`: what a run has saved, why it is kept, and whether every byte of it is good."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("checkpoints")(checkpoints)


def checkpoints(
    run: Path = typer.Argument(..., metavar="RUN", help="A run directory."),
    verify: bool = typer.Option(False, "--verify", help="Read every byte and compare it with what was written."),
    json_: bool = typer.Option(False, "--json", help="Print JSON, for scripts."),
) -> None:
    """List the checkpoints of a run: step, time, size, loss, why each is kept, good or bad. Exit 1 if one is bad."""
    from windlass.errors import FAILED

    rows = table_rows(run, verify)
    if json_:
        import json

        found = {"run": str(run), "verified": verify, "checkpoints": rows, "uncommitted": _uncommitted(run)}
        typer.echo(json.dumps(found, indent=1))
    else:
        _print(run, rows, verify)
    if any(row["problem"] for row in rows):
        raise typer.Exit(FAILED)


def table_rows(run: Path, verify: bool) -> list[dict[str, Any]]:
    """One row a checkpoint, in the order of the steps; `problem` is empty where it is good."""
    from windlass.checkpoint import catalog
    from windlass.run import Run

    opened = Run.open(run)
    index = opened.checkpoint_index()
    known = {row.get("path"): row for row in index.get("checkpoints", []) if isinstance(row, dict)}
    rows = []
    for one in sorted(catalog.entries(opened.checkpoints_dir, deep=verify), key=lambda e: e.step):
        manifest = one.manifest
        rows.append(
            {
                "step": one.step,
                "path": f"checkpoints/{one.path.name}",
                "time": manifest.time if manifest else None,
                "bytes": manifest.bytes if manifest else None,
                "loss": one.loss,
                "scores": one.scores,
                "world": manifest.world if manifest else None,
                "kept": known.get(one.path.name, {}).get("kept", []),
                "problem": one.problem,
            }
        )
    return rows


def _uncommitted(run: Path) -> list[str]:
    """Directories with a checkpoint's name and without its commit marker: they count for nothing."""
    from windlass.checkpoint.format import committed

    return sorted(p.name for p in (run / "checkpoints").glob("step-*") if p.is_dir() and not committed(p))


MEANING = {
    "last": "among the last",
    "best": "best",
    "every": "for good",
    "final": "end of the run",
    "start": "gone on from",
}

WIDTH = 120
"""Characters that a row may take where the terminal is narrower, so that no number and no reason is cut."""


def _print(run: Path, rows: list[dict[str, Any]], verify: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from windlass.checkpoint.load import best_by
    from windlass.checkpoint.retention import LOSS
    from windlass.checkpoint.space import gb

    if not rows:
        typer.echo(f"{run} has no checkpoint yet")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    by = best_by(run)
    measures = [LOSS] if by == LOSS else [LOSS, by]
    for name in ("step", "saved (UTC)", "size", *measures):
        table.add_column(name, justify="left" if name.startswith("saved") else "right", no_wrap=True)
    table.add_column("kept because", no_wrap=True)
    table.add_column("state", no_wrap=True)
    good = "every byte good" if verify else "whole"
    for row in rows:
        table.add_row(
            f"{row['step']:,}",
            row["time"][:19].replace("T", " ") if row["time"] else "",
            gb(row["bytes"]) if row["bytes"] is not None else "",
            *(
                "" if value is None else f"{value:.4f}"
                for value in ({LOSS: row["loss"], **row["scores"]}.get(m) for m in measures)
            ),
            ", ".join(MEANING.get(why, why) for why in row["kept"]),
            "BAD" if row["problem"] else good,
        )
    Console(width=max(WIDTH, Console().width), soft_wrap=False).print(table)
    for row in rows:
        if row["problem"]:
            typer.echo(f"step {row['step']} is bad: {row['problem']}")
    total = sum(row["bytes"] or 0 for row in rows)
    typer.echo(f"{len(rows)} checkpoints, {gb(total)}" + ("" if verify else "; --verify reads every byte"))
    for name in _uncommitted(run):
        typer.echo(
            f"{name} has no commit marker: it is just being saved, or its save was cut off; the next start completes it where "
            "every byte is there, and takes it away where not"
        )
    for path in sorted((run / "checkpoints").glob("bad-*")):
        typer.echo(f"{path.name} was found damaged and set aside; nothing reads it, delete it when you like")
