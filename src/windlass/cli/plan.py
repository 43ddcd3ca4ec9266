"""`windlass plan`: what a run will take before it starts, and what is left of one that is under way."""

from __future__ import annotations

import json

import typer


def plan(
    recipe: str = typer.Argument(..., metavar="RECIPE|RUN", help="A preset's name, a .toml file or a run directory."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Settings to change, as optim.lr=3e-4."),
    world: int = typer.Option(0, min=0, help="Ranks; default: 1, or those of the run."),
    device: str = typer.Option("", metavar="NAME", help="A kind of device, as A100-80GB; default: this machine's."),
    memory: float = typer.Option(0.0, min=0, metavar="GB", help="Memory of the device, where it is not in the table."),
    mfu: float = typer.Option(0.4, min=0.001, max=1, help="Share of the peak to assume where nothing was measured."),
    from_: list[str] = typer.Option([], "--from", metavar="RUN|STUDY", help="Take the speed from past runs' ledgers."),
    json_: bool = typer.Option(False, "--json", help="Print everything as JSON: bytes, seconds, tokens a second."),
) -> None:
    """Say what a run needs: parameters, steps, FLOPs, memory for each strategy, time, disk, and what happens when.

    All of it is arithmetic from the recipe, and takes no torch. A Hugging Face model's parameters are counted on torch's
    meta device, without its weights. Time comes from a measured speed (--from, or the recipe's own run directory) or from the
    device's published peak and an assumed MFU; the output says which. A run directory gives the plan of what is left of it, by
    its own ledger. What is not known before the data is prepared is shown as such.
    """
    from rich.console import Console

    from windlass.estimate.plan import plan as make_plan
    from windlass.estimate.text import print_plan
    from windlass.run import Run
    from windlass.study.study import Study

    past = [run for path in from_ for run in (Study.open(path).runs() if Study.is_study(path) else [Run.open(path)])]
    size = int(memory * 1e9) or None
    result = make_plan(recipe, overrides or [], world=world, device=device, memory_bytes=size, past=past, mfu=mfu)
    if json_:
        typer.echo(json.dumps(result.as_dict(), indent=1))
    else:
        print_plan(result, Console(highlight=False))
