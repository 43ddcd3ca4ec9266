"""`windlass track`: replay a run's ledger into a tracker."""

from __future__ import annotations

import typer


def track(
    run: str = typer.Argument(..., metavar="RUN", help="A run directory."),
    to: str = typer.Option(..., "--to", metavar="wandb|mlflow|tensorboard", help="The tracker."),
    timeout: float = typer.Option(
        0.0, "--timeout", min=0, help="Give up after so many seconds; 0: wait as long as it takes."
    ),
) -> None:
    """Replay a run's ledger into a tracker; twice gives no duplicate."""
    from windlass.run import Run
    from windlass.telemetry.trackers import replay

    for note in replay(Run.open(run), to, timeout):
        typer.echo(note.text)
