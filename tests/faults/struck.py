"""A rank of a real training that something happens to: `python struck.py WHAT PHASE RANK train
RECIPE [KEY=VALUE...]`.

In PHASE (see PLACES; `PHASE@2`: when it comes for the second time) of the first attempt the rank
RANK (-1: every one) does WHAT: `raise` an exception, `kill` itself, or
`wait`: be slow from then on. It leaves the file $STRUCK_HERE when it begins. Everything else is the
command line's own doing.
"""

import importlib
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

what, (phase, _, at), culprit = sys.argv[1], sys.argv[2].partition("@"), int(sys.argv[3])
PLACES = {
    "start": ("windlass.training.rank", "open_data"),
    "choose": ("windlass.training.directory", "candidate_checkpoints"),
    "load": ("windlass.training.rank", "restore"),
    "read": ("windlass.checkpoint.format", "Checkpoint.read_into"),
    "forward": ("windlass.training.trainer", "autocast"),
    "backward": ("torch", "Tensor.backward"),
    "evaluation": ("windlass.evaluation.passes", "max_async"),
    "sample": ("windlass.evaluation.generate", "max_async"),
    "data": ("windlass.data.loader", "Loader._read"),
    "save": ("windlass.training.saver", "gather_shard"),
}
"""By phase: a module, and a name in it that is called in this phase."""
WAIT_SECONDS = {"start": 120.0, "choose": 120.0, "data": 5.0}
SLOW_SECONDS = 0.3


def strike() -> None:
    Path(os.environ["STRUCK_HERE"]).touch()
    if what == "wait":
        until = time.monotonic() + WAIT_SECONDS.get(phase, SLOW_SECONDS)
        while time.monotonic() < until:
            time.sleep(0.05)
    elif what == "raise":
        raise ArithmeticError("struck by the test")
    else:
        os.kill(os.getpid(), signal.SIGKILL)


def struck(original: Callable[..., Any], first: int) -> Callable[..., Any]:
    calls = 0

    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == first or (what == "wait" and calls > first):
            strike()
        return original(*args, **kwargs)

    return call


if os.environ.get("WINDLASS_ATTEMPT", "0") == "0" and culprit in (
    -1,
    int(os.environ.get("RANK", "0")),
):
    module, name = PLACES[phase]
    *path, last = name.split(".")
    place = importlib.import_module(module)
    for part in path:
        place = getattr(place, part)
    setattr(place, last, struck(getattr(place, last), int(at or 1)))

from windlass.cli import main  # noqa: E402 - after what it will call was replaced

main(sys.argv[4:])
