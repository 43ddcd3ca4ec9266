"""`windlass verify`: the proof on the user's own machine."""

from __future__ import annotations

import platform
import sys
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from windlass.verification import Proof


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
    size and accumulation change nothing but rounding (with dropout: for equal micro-batches); the sample sequence has no
    repeat and no gap over worlds; kills at random moments of saving lose no checkpoint; export gives equal logits.

    Exit codes: 0 all proved, 1 a proof failed, 2 bad input.
    """
    import dataclasses
    import json

    import torch

    from windlass import verification

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else f"CPU {platform.machine()}"
    conditions = (
        f"bits are compared for equal world, micro-batch, threads ({torch.get_num_threads()}) and versions (torch "
        f"{torch.__version__}, {device}), with train.deterministic=true and train.compile=false"
    )
    if not json_:
        typer.echo(f"{conditions}\n")
    proofs = verification.verify(
        recipe, overrides or [], world, kills, keep or None, show=lambda proof: None if json_ else _show(proof)
    )
    failed = [proof.name for proof in proofs if proof.passed is False]
    if json_:
        fields = [dataclasses.asdict(proof) for proof in proofs]
        typer.echo(json.dumps({"conditions": conditions, "proofs": fields}, indent=1))
    else:
        typer.echo(f"\n{len(failed)} failed: {', '.join(failed)}" if failed else "\nproved")
    return 1 if failed else 0


def _show(proof: Proof) -> None:
    word, color = {True: ("proved", "green"), False: ("FAILED", "red"), None: ("not tried", "yellow")}[proof.passed]
    typer.echo(f"{typer.style(f'{word:<9}', fg=color)} {proof.claim} ({proof.seconds:.0f} s)")
    for line in proof.measured.splitlines():
        typer.echo(f"          {line}")
    sys.stdout.flush()
