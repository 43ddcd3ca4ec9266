"""`windlass verify`: the proof on the user's own machine."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from windlass.verification import Result


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("verify")(verify)


def verify(
    recipe: str = typer.Argument("", metavar="[RECIPE]", help="A recipe to prove instead of a tiny one."),
    overrides: list[str] = typer.Argument(None, metavar="[KEY=VALUE]...", help="Settings to change."),
    world: int = typer.Option(0, min=0, help="Use at most so many ranks; default: 4 on a CPU, else one a GPU."),
    kills: int = typer.Option(10, min=1, help="Kill a saving run so often."),
    json_: bool = typer.Option(False, "--json", help="Print the results as JSON."),
    keep: str = typer.Option("", metavar="DIR", help="Keep the runs of the proofs in this directory."),
) -> int:
    """Prove, on this machine, that nothing is lost and nothing is wrong in silence.

    Six proofs with real runs, in a few minutes: resume is bit-exact at every step; strategies agree with one process; world
    size, micro-batch and accumulation change nothing but rounding; the sample sequence has no repeat and no gap over worlds;
    kills at random moments of saving lose no checkpoint; export gives equal logits.

    Exit codes: 0 all proved, 1 a proof failed, 2 bad input.
    """
    import tempfile
    from pathlib import Path

    from windlass import verification as proofs

    with tempfile.TemporaryDirectory(prefix="windlass-verify-") as temporary:
        folder = Path(keep or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        worlds = tuple(w for w in (1, 2, 4) if w <= (world or _ranks()))
        bench = proofs.prepare_bench(recipe, folder.resolve(), kills, worlds)
        for text in overrides or []:
            key, _, value = text.partition("=")
            bench.base[key] = value
        if recipe:
            from windlass.recipe import Recipe

            Recipe.load(recipe, bench.overrides("check"))
        if not json_:
            typer.echo(f"worlds {', '.join(map(str, worlds))}; {_conditions()}\n")
        results = []
        for result in proofs.verify(bench):
            results.append(result)
            if not json_:
                _show(result)
    if json_:
        import dataclasses
        import json

        typer.echo(
            json.dumps({"conditions": _conditions(), "proofs": [dataclasses.asdict(r) for r in results]}, indent=1)
        )
    failed = [r.name for r in results if r.passed is False]
    if not json_:
        typer.echo(f"\n{len(failed)} failed: {', '.join(failed)}" if failed else "\nproved")
    return 1 if failed else 0


def _ranks() -> int:
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 4


def _conditions() -> str:
    import platform

    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU {platform.machine()}"
    return (
        f"bits are compared for equal world, micro-batch, threads ({torch.get_num_threads()}) and versions (torch "
        f"{torch.__version__}, {device}), with train.deterministic=true and train.compile=false"
    )


def _show(result: Result) -> None:
    word = {True: "proved", False: "FAILED", None: "not tried"}[result.passed]
    style = {True: typer.colors.GREEN, False: typer.colors.RED, None: typer.colors.YELLOW}[result.passed]
    typer.echo(f"{typer.style(f'{word:<9}', fg=style)} {result.claim} ({result.seconds:.0f} s)")
    for line in result.measured.splitlines():
        typer.echo(f"          {line}")
    sys.stdout.flush()
