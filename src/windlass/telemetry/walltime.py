"""Where a run's wall time went, over all its starts, from the raw ledger. No torch: reports read it too."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from typing import Any

RUN_PHASES = ("startup", "compile", "data", "train", "eval", "save", "sample")
"""What a run's wall time is told apart into, as it passes; `lost` is found afterwards, see `wall_time`."""

Seconds = dict[str, float]


def wall_time(lines: Iterable[dict[str, Any]]) -> Seconds:
    """Seconds by phase over all starts of a run, from the raw ledger (`run.read_lines`): with `lost`, and `total`.

    Each line's `seconds` are those of its process so far. Where an attempt goes on from step *s*, whatever the attempts
    before it did after their checkpoint of step *s* was done in vain and counts as `lost`. The parts sum to `total`. Time
    between an attempt's last line and its death is not known and not in it.
    """
    attempts = _attempts(lines)
    totals = dict.fromkeys((*RUN_PHASES, "lost"), 0.0)
    for number, own in attempts.items():
        resumed = [later[0][0] for other, later in attempts.items() if other > number]
        last = own[-1][1]
        kept = last if not resumed else _seconds_at(own, min(resumed))
        for name in last:
            totals[name] = totals.get(name, 0.0) + kept.get(name, 0.0)
            totals["lost"] += last[name] - kept.get(name, 0.0)
    found = {name: round(value, 3) for name, value in totals.items()}
    return found | {"total": round(sum(found.values()), 3)}


def device_hours(lines: Iterable[dict[str, Any]]) -> float:
    """Hours of wall time times ranks, over all starts of a run, from the raw ledger; `world` is in the events of starting.

    After a rewind the same ranks go on, so `world` holds until an event says another.
    """
    lines = list(lines)
    world: dict[int, int] = {}
    for line in lines:
        if isinstance(line.get("world"), int):
            world[int(line.get("attempt", 0))] = line["world"]
    hours, ranks = 0.0, 1
    for number, own in sorted(_attempts(lines).items()):
        ranks = world.get(number, ranks)
        hours += sum(own[-1][1].values()) * ranks / 3600
    return hours


def _attempts(lines: Iterable[dict[str, Any]]) -> dict[int, list[tuple[int, Seconds]]]:
    """Step and seconds of each line by attempt. A rewind begins a new attempt in the same process, whose clock runs on:
    what it showed then belongs to the attempt before."""
    attempts: dict[int, list[tuple[int, Seconds]]] = {}
    base: Seconds = {}
    for line in lines:
        seconds = line.get("seconds")
        if not isinstance(seconds, dict):
            continue
        number = int(line.get("attempt", 0))
        if number not in attempts:
            rewound = line.get("event") == "rewound" and bool(attempts)
            if rewound:
                before = max(attempts)
                attempts[before].append((_NEVER, {n: s - base.get(n, 0.0) for n, s in seconds.items()}))
            base = seconds if rewound else {}
            attempts[number] = []
        attempts[number].append((line["step"], {name: value - base.get(name, 0.0) for name, value in seconds.items()}))
    return attempts


_NEVER = 2**63
"""The step of what an attempt did after its last line: beyond every step that is kept."""


def _seconds_at(lines: list[tuple[int, Seconds]], step: int) -> Seconds:
    """What an attempt had spent when it had made step `step` and nothing beyond; nothing where it began beyond it.

    The event of a checkpoint comes when it is written, which in the background may be steps later: what it shows then is
    not taken for the time of its own step once there was a line beyond it.
    """
    within = [seconds for _, seconds in takewhile(lambda line: line[0] <= step, lines)]
    return within[-1] if within else {}
