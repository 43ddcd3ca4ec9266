"""The end of a run as it could be foreseen after the first 5 % of its steps, beside the true one. Pure reading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from windlass.estimate.milestones import milestones
from windlass.estimate.time import speed_of_lines, time_left
from windlass.recipe import Horizon
from windlass.run import effective, read_lines
from windlass.telemetry.timing import wall_time

if TYPE_CHECKING:
    from windlass.run import Line, Run

EARLY = 0.05
"""Share of a run's steps after which its time to finish is predicted."""
STARTING = ("startup", "compile")


def foreseen_time(run: Run) -> dict[str, Any] | None:
    """`predicted` and `measured` seconds of a run that made all its steps, and the step the prediction is from.

    The basis is the first `train` line at or after 5 % of the steps. Of a run that was interrupted the time without its
    pauses counts: neither the steps that were made twice nor the starts after the first one are in either number.

    Returns:
        None for a run that did not come to its end, or whose ledger has no times; `{"why": reason}` where the end could
        not be foreseen.
    """
    raw = list(read_lines(run.metrics_path))
    ledger = effective(raw)
    started = next((x for x in ledger if x["kind"] == "event" and "world" in x and "steps" in x), None)
    if started is None or not any(isinstance(x.get("seconds"), dict) for x in raw):
        return None
    steps = int(started["steps"])
    if ledger[-1]["step"] < steps:
        return None
    worlds = [x["world"] for x in raw if x["kind"] == "event" and isinstance(x.get("world"), int)]
    if len(set(worlds)) > 1:
        return {"why": f"its ranks changed on the way: {', then '.join(str(w) for w in dict.fromkeys(worlds))}"}
    early = (x for x in ledger if x["kind"] == "train" and x["step"] >= max(EARLY * steps, 2) and x["step"] < steps)
    now = next(early, None)
    speed = speed_of_lines([x for x in ledger if now and x["step"] <= now["step"]], run.name)
    if now is None or speed is None or not isinstance(now.get("seconds"), dict):
        return {"why": f"nothing was logged between {100 * EARLY:g} % of the {steps:,} steps and the end"}
    horizon = Horizon(steps, int(started.get("samples_per_epoch", 0)), run.recipe.train.global_batch)
    left = time_left(milestones(run.recipe, horizon), now["step"], steps, now["tokens"] / now["step"], speed)
    spent = without_pauses(raw[: raw.index(now) + 1])
    found = {"predicted": spent + left.seconds, "measured": without_pauses(raw), "after_step": now["step"]}
    starts = len({int(x.get("attempt", 0)) for x in raw})
    return found | ({"starts": starts} if starts > 1 else {})


def without_pauses(raw: list[Line]) -> float:
    """Seconds that the steps of a raw ledger took in one go: without what was lost, and with the first start alone."""
    whole = wall_time(raw)
    first = next((int(x.get("attempt", 0)) for x in raw if isinstance(x.get("seconds"), dict)), 0)
    one = wall_time([x for x in raw if int(x.get("attempt", 0)) == first])
    again = sum(max(0.0, whole.get(phase, 0.0) - one.get(phase, 0.0)) for phase in STARTING)
    return whole["total"] - whole["lost"] - again
