"""`windlass sweep`: a grid of settings as a study, worked through cell by cell, kill-safe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from windlass.study.study import Study

EPILOG = """\b
Axes, which are crossed:
    optim.lr=1e-2,1e-3,1e-4              three values
    optim.lr=1e-4:1e-2:log:5             five values from 1e-4 to 1e-2, evenly on a logarithmic axis
    model.width=128:512:lin:4            four values evenly on a linear axis (whole numbers stay whole)
    optim.lr+train.global_batch=1e-3+64,5e-4+128
                                         a zip: both change together, two values
    run.seed=1,2,3                       seeds: the table adds medians and spread
    parallel.strategy=ddp,full_shard     any setting of a recipe, also those that change no result
    parallel.world=1,2,4                 the ranks of a cell: no setting, but an axis; overrides --world
"""


def sweep(
    recipe: str = typer.Argument(..., metavar="RECIPE", help="The recipe that all cells share."),
    axes: list[str] = typer.Argument(..., metavar="KEY=A,B,C...", help="Axes: values, ranges and zips; see below."),
    set_: list[str] = typer.Option([], "--set", metavar="KEY=VALUE", help="A setting that all cells share."),
    dir_: str = typer.Option("", "--dir", help="The study's directory; default: studies/<preset>-<hash>."),
    world: int = typer.Option(1, min=1, help="Ranks of each cell; parallel.world=1,2,4 makes them an axis."),
    workers: int = typer.Option(1, min=1, help="Cells side by side, each with its share of threads or devices."),
    stop_diverged: bool = typer.Option(False, help="Stop a cell whose loss is not finite or 1 nat above its first."),
    halving: bool = typer.Option(
        False,
        help="Asynchronous successive halving: at its 1st, 2nd, 4th, ... evaluation a cell continues only if it is in the "
        "better half, by checkpoint.best, of those that came there before it.",
    ),
    retry_failed: bool = typer.Option(False, help="Train failed and diverged cells again."),
    submit: str = typer.Option("", metavar="slurm|pbs", help="Submit the open cells as an array job instead."),
    submit_arg: list[str] = typer.Option(
        [], metavar="ARG", help="An argument for the scheduler, as --submit-arg=--time=04:00:00; may be repeated."
    ),
    dry_run: bool = typer.Option(False, help="With --submit: print the batch script, write and submit nothing."),
    only: int = typer.Option(-1, hidden=True, help="Work on one cell by number; what an array job's tasks call."),
    json_: bool = typer.Option(False, "--json", help="Print the table as JSON at the end."),
) -> int:
    """Train every cell of a grid, and tabulate what came out.

    Each cell is a run like any other, in its own directory. Kill it anywhere and give the same command again: finished
    cells are left alone, interrupted ones resume. A failed cell stays in the table with its reason, and does not stop the
    others. With run.seed as an axis the table adds medians and spread.

    Exit codes: 0 all cells done, 1 some failed, 2 bad input, 75 stopped by a signal with everything saved.
    """
    from windlass.errors import DONE, FAILED, UserError
    from windlass.recipe import Recipe
    from windlass.study.submit import submit_sweep
    from windlass.study.sweep import DONE_STATES
    from windlass.study.sweep import sweep as run_sweep

    base, path = Recipe.load(recipe, set_), Path(dir_) if dir_ else None
    if not submit and (submit_arg or dry_run):
        raise UserError("--submit-arg and --dry-run go with --submit slurm or --submit pbs")
    if submit:
        script = submit_sweep(
            base, axes, submit, path=path, world=world, stop_diverged=stop_diverged, halving=halving,
            retry_failed=retry_failed, arguments=submit_arg, dry_run=dry_run, notify=typer.echo,
        )  # fmt: skip
        typer.echo(script if dry_run else "", nl=False)
        return DONE
    with Screen(errors=json_) as screen:
        study = run_sweep(
            base, axes, path=path, world=world, workers=workers, stop_diverged=stop_diverged, halving=halving,
            retry_failed=retry_failed, only=only if only >= 0 else None, show=screen.show, notify=screen.print,
        )  # fmt: skip
    results = study.results()
    if json_:
        typer.echo(json.dumps([result.row() for result in results], indent=1))
    screen.end(study, world)
    worked_on = [results[only]] if only >= 0 else results
    return DONE if all(result.state in DONE_STATES for result in worked_on) else FAILED


class Screen:
    """The study's table, redrawn in a terminal once a second; elsewhere a line whenever a cell's state changes."""

    def __init__(self, *, errors: bool = False) -> None:
        """With `errors` everything goes to stderr: stdout is for JSON alone."""
        from rich.console import Console

        self.console = Console(stderr=errors)
        if not self.console.is_terminal:  # a file has no width
            self.console = Console(stderr=errors, width=140)
        self.live: Any = None
        self.study: Study | None = None
        self.states: dict[str, str] = {}

    def __enter__(self) -> Screen:
        if self.console.is_terminal:
            from rich.live import Live

            draw = lambda: table(self.study) if self.study else ""  # noqa: E731
            self.live = Live(console=self.console, get_renderable=draw, refresh_per_second=1)
            self.live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.live.stop()  # draws once more

    def print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, study: Study) -> None:
        self.study = study
        for number, result in enumerate(study.results() if not self.live else (), 1):
            key, state = result.cell.key, result.state
            if state != self.states.get(key, "waiting"):
                self.states[key] = state
                reason = f" ({result.reason})" if result.reason else ""
                self.print(f"[{number}/{len(study.cells)}] {result.cell.label}: {state}{reason}")

    def end(self, study: Study, world: int) -> None:
        """The final table, medians over seeds, and the command that trains the winner."""
        if not self.live:
            self.console.print(table(study))
        for group in study.groups():
            if group.seeds and group.median is not None:
                low, high = min(group.scores), max(group.scores)
                self.print(f"{group.label}: median {group.median:.4f}, {low:.4f} to {high:.4f} over {group.seeds}")
        if best := study.winner():
            name = "validation loss" if study.measure == "loss" else study.measure
            of = f", median of {best.seeds}" if best.seeds else ""
            self.print(f"best: {best.label} ({name} {best.median:.4f}{of})")
            self.print("\n".join(f"  {line}" for line in study.winner_command(best.assignment, world) if line))
        self.print(f"report: windlass report {study.path}")


def table(study: Study) -> Table:
    """The study as a table for a terminal; in a narrow one numbers continue on the next line."""
    from rich.table import Table

    best = "best" if study.measure == "loss" else f"best {study.measure}"
    names = ["state", "step", "loss", "val loss", best, "tokens/s", "device-h", "reason"]
    drawn = Table(title=str(study.path), title_justify="left")
    for name in [*(key.rsplit(".", 1)[-1] for key in study.keys), *names]:
        drawn.add_column(name, justify="left" if name in ("state", "reason") else "right", overflow="fold")
    for r in study.results():
        settings = [f"{v:g}" if isinstance(v, float) else str(v) for v in r.cell.assignment.values()]
        step = f"{r.step}/{r.steps or '?'}" if r.step or r.steps else ""
        numbers = ["" if v is None else f"{v:.4f}" for v in (r.loss, r.eval_loss, r.score)]
        speed = f"{r.tokens_per_s:,.0f}" if r.tokens_per_s else ""
        hours = "" if r.device_hours is None else f"{r.device_hours:.3g}"
        drawn.add_row(*settings, r.state, step, *numbers, speed, hours, r.reason)
    return drawn
