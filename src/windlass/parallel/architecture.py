"""Whether an installed torch has code for a device, as a pure function. No torch."""

from __future__ import annotations

import re
from collections.abc import Sequence


def code_for(
    name: str, capability: tuple[int, int], built_for: Sequence[str], torch: str, cuda: str
) -> tuple[str, str]:
    """A sentence about a device, and the remedy if torch has no code for it, else empty.

    `built_for` is torch.cuda.get_arch_list(). A device runs code for an earlier minor number of its
    generation, and compiles PTX (`compute_`) of any earlier one.
    """
    own = f"sm_{capability[0]}{capability[1]}"
    same = [m for m in (re.fullmatch(rf"sm_{capability[0]}(\d)[a-z]?", a) for a in built_for) if m]
    ptx = [m for m in (re.fullmatch(r"compute_(\d+)(\d)[a-z]?", a) for a in built_for) if m]
    if any(int(m[1]) <= capability[1] for m in same) or any(
        (int(m[1]), int(m[2])) <= capability for m in ptx
    ):
        return f"{name} ({own}); torch {torch} for CUDA {cuda} has code for it", ""
    wheel = f"install a torch whose wheel was built for {own}"
    if (5, 0) <= capability <= (7, 0):
        index = "install torch from the index whose name ends in cu126"
        wheel = f"the wheels of the same torch for CUDA 12.6 have it: {index}"
    architectures = ", ".join(built_for)
    problem = (
        f"{name} is {own}, and torch {torch} for CUDA {cuda} was built for {architectures} only"
    )
    return problem, wheel
