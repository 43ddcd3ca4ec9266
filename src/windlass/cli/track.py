"""`windlass track`: replay a run's ledger into a tracker."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("track")(track)


def track(
    run: str = typer.Argument(..., metavar="RUN", help="A run directory."),
    to: str = typer.Option(..., "--to", metavar="wandb|mlflow|tensorboard", help="The tracker."),
    timeout: float = typer.Option(0.0, "--timeout", help="Give up after so many seconds; 0: wait as long as it takes."),
) -> None:
    """Replay a run's ledger into a tracker; twice gives no duplicate."""
    from importlib.util import find_spec

    from windlass.errors import UserError
    from windlass.run import Run
    from windlass.telemetry.trackers import TRACKERS, replay

    if to not in TRACKERS:
        raise UserError(f"--to {to}: there are {', '.join(TRACKERS)}")
    if timeout < 0:
        raise UserError(f"--timeout {timeout:g}: seconds, or 0 to wait as long as it takes")
    opened = Run.open(run)
    if not opened.ledger():
        raise UserError(f"{run} has no ledger yet ({opened.metrics_path.name}): train first")
    if find_spec(to) is None:
        raise UserError(f"{to} is not installed: pip install 'windlass[{to}]'")
    for note in replay(opened, to, timeout or None):
        typer.echo(note, err=note.warning)
