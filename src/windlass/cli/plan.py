"""`windlass plan`: what a run will take before it starts, and what is left of one that is under way."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from windlass.run import Run


def plan(
    recipe: str = typer.Argument(..., metavar="RECIPE|RUN", help="A preset's name, a .toml file or a run directory."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Settings to change, as optim.lr=3e-4."),
    world: int = typer.Option(0, min=0, help="Ranks; default: 1, or those of the run."),
    device: str = typer.Option("", metavar="NAME", help="A kind of device, as A100-80GB; default: this machine's."),
    memory: float = typer.Option(0.0, min=0, metavar="GB", help="Memory of the device, where it is not in the table."),
    mfu: float = typer.Option(0.4, min=0.001, max=1, help="Share of the peak to assume where nothing was measured."),
    from_: list[str] = typer.Option([], "--from", metavar="RUN|STUDY", help="Take the speed from past runs' ledgers."),
    measure: bool = typer.Option(False, "--measure", help="Make a few real steps here, and take the speed from them."),
    json_: bool = typer.Option(False, "--json", help="Print everything as JSON: bytes, seconds, tokens a second."),
) -> None:
    """Say what a run needs: parameters, steps, FLOPs, memory for each strategy, time, disk, and what happens when.

    All of it is arithmetic from the recipe, and takes no torch. A Hugging Face model's parameters are counted on torch's
    meta device, without its weights. Time comes from a measured speed (--from, --measure, or the recipe's own run
    directory) or from the device's published peak and an assumed MFU; the output says which. A run directory gives the plan
    of what is left of it, by its own ledger. What is not known before the data is prepared is shown as such.
    """
    from rich.console import Console

    from windlass.estimate.plan import plan as make_plan
    from windlass.estimate.text import print_plan

    result = make_plan(
        recipe, overrides or [], world=world, device=device, memory_bytes=int(memory * 1e9) or None,
        past=[runs_in(place) for place in from_], measure=measure, mfu=mfu, notify=lambda text: typer.echo(text, err=True),
    )  # fmt: skip
    if json_:
        typer.echo(json.dumps(result.as_dict(), indent=1))
    else:
        print_plan(result, Console(highlight=False))


def runs_in(place: str) -> list[Run]:
    """The run at a path, or those of a study or of a directory of runs; raises UserError where there is none."""
    from windlass.errors import UserError
    from windlass.run import Run
    from windlass.study.study import Study

    if Study.is_study(place):
        return Study.open(place).runs()
    if (Path(place) / "recipe.toml").is_file():
        return [Run(Path(place))]
    runs = [Run(path.parent) for path in sorted(Path(place).glob("*/recipe.toml"))]
    if not runs:
        raise UserError(f"{place} is neither a run nor a directory of runs")
    return runs
