"""The proof on the user's own machine."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windlass.errors import UserError, did_you_mean
from windlass.verification.bench import Bench
from windlass.verification.proofs import PROOFS, Outcome


@dataclass
class Proof:
    """A promise, and the outcome of its proof (`Outcome`)."""

    name: str
    claim: str
    passed: bool | None
    measured: str
    seconds: float = 0.0
    untried: list[str] = field(default_factory=list)


def verify(
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    world: int = 0,
    kills: int = 10,
    show: Callable[[Proof], None] = lambda proof: None,
    only: Sequence[str] = (),
) -> list[Proof]:
    """Prove, with real runs on this machine, that nothing is lost or silently wrong.

    The ranks are processes of `multiprocessing`, which import the script that calls this. Put the
    call there under `if __name__ == "__main__":`.

    Args:
        recipe: A recipe to prove, shortened to 12 steps of 8 samples, instead of a tiny one.
        overrides: Settings to change (`KEY=VALUE`); UserError for a wrong one.
        world: The most ranks; 0: 4 on a CPU, else one for each GPU.
        kills: How often to kill a run that saves.
        show: Called with each result at once.
        only: Names of the proofs to make; none: all.
    """
    import torch

    most = world or (torch.cuda.device_count() if torch.cuda.is_available() else 4)
    if unknown := sorted(set(only) - set(PROOFS)):
        raise UserError(f"{unknown[0]} is not a proof; {did_you_mean(unknown[0], PROOFS)}")
    results = []
    worlds = [w for w in (1, 2, 4, 8) if w <= most]
    with tempfile.TemporaryDirectory(prefix="windlass-verify-") as folder:
        bench = Bench(Path(folder), recipe or "", overrides, worlds, kills)
        for name, (claim, prove) in PROOFS.items():
            if only and name not in only:
                continue
            began = time.monotonic()
            try:
                outcome = prove(bench)
            except Exception as error:
                outcome = Outcome(False, f"{type(error).__name__}: {error}")
            passed, measured, untried = outcome
            seconds = time.monotonic() - began
            results.append(Proof(name, claim, passed, measured, seconds, list(untried)))
            show(results[-1])
    return results
