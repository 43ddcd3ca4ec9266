"""`windlass checkpoints`: what a run has saved, why it is kept, and whether every byte of it is good."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from windlass.checkpoint.load import CheckpointList

MEANING = {
    "last": "among the last", "best": "best", "every": "kept forever", "final": "end of the run",
    "start": "resumed from",
}  # fmt: skip
WIDTH = 120
"""Characters that a row may take where the terminal is narrower, so that no number and no reason is cut."""


def checkpoints(
    run: Path = typer.Argument(..., metavar="RUN", help="A run directory."),
    verify: bool = typer.Option(False, "--verify", help="Read every byte and compare it with what was written."),
    json_: bool = typer.Option(False, "--json", help="Print JSON, for scripts."),
) -> None:
    """List the checkpoints of a run: step, time, size, loss, why each is kept, good or bad. Exit 1 if one is bad."""
    from windlass.checkpoint.load import list_checkpoints
    from windlass.errors import FAILED

    listing = list_checkpoints(run, verify)
    if json_:
        import json
        from dataclasses import asdict

        typer.echo(json.dumps(asdict(listing), indent=1, default=str))
    else:
        _print(listing)
    if any(row.problem for row in listing.checkpoints):
        raise typer.Exit(FAILED)


def _print(listing: CheckpointList) -> None:
    from rich.console import Console
    from rich.table import Table

    from windlass.checkpoint.commit import format_bytes

    if not listing.checkpoints:
        typer.echo(f"{listing.run} has no checkpoint yet")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    measures = list(dict.fromkeys(("loss", listing.measure)))
    for name in ("step", "saved (UTC)", "size", *measures):
        table.add_column(name, justify="left" if name.startswith("saved") else "right", no_wrap=True)
    table.add_column("kept because", no_wrap=True)
    table.add_column("state", no_wrap=True)
    good = "every byte good" if listing.verified else "whole"
    for row in listing.checkpoints:
        table.add_row(
            f"{row.step:,}",
            row.time[:19].replace("T", " ") if row.time else "",
            format_bytes(row.bytes) if row.bytes is not None else "",
            *(f"{row.scores[m]:.4f}" if m in row.scores else "" for m in measures),
            ", ".join(MEANING[why] for why in row.kept),
            "BAD" if row.problem else good,
        )
    Console(width=max(WIDTH, Console().width), soft_wrap=False).print(table)
    for row in listing.checkpoints:
        if row.problem:
            typer.echo(f"step {row.step} is bad: {row.problem}")
    total = format_bytes(sum(row.bytes or 0 for row in listing.checkpoints))
    hint = "" if listing.verified else "; --verify reads every byte"
    typer.echo(f"{len(listing.checkpoints)} checkpoints, {total}{hint}")
    for name in listing.temporary:
        typer.echo(f"{name} is being written or removed, or was left by a kill: the next start of the run removes it")
    for name in listing.set_aside:
        typer.echo(f"{name} was damaged and set aside; nothing reads it, delete it when you like")
