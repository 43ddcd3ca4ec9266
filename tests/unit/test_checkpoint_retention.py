"""Which checkpoints stay, as examples and as properties."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint.choose import EMERGENCY, FINAL, PERIODIC, retain
from windlass.recipe import Horizon
from windlass.recipe.settings import CheckpointSettings
from windlass.telemetry.summary import Scores


class Saved(NamedTuple):
    """What retention reads of a checkpoint."""

    serial: int
    step: int
    reason: str


def row(*steps: int, stops: Sequence[int] = (), final: int = 0) -> list[Saved]:
    """Checkpoints in the order of their commits."""
    reasons = dict.fromkeys(stops, EMERGENCY) | {final: FINAL}
    return [Saved(i, step, reasons.get(step, PERIODIC)) for i, step in enumerate(steps, 1)]


STOPS = 23, 27, 29
BEST = {10: 3.0, 20: 2.0, 30: 2.5, 25: 0.1, 40: 2.0}  # there is no checkpoint of step 25
TWO = Horizon(160, 100, 1), Horizon(120, 100, 1)  # of a run that was extended


@pytest.mark.parametrize(
    ("checkpoints", "settings", "scores", "expected"),
    [
        (row(10, 20, 30, 40), {"keep_last": 2}, {}, "40 last, 30 last"),
        # The best stays however old, and the first of equal ones.
        (row(10, 20, 30, 40, 50), {}, BEST, "50 last, 20 best"),
        (row(10, 20, 30, 40, 50), {"keep_best": False}, BEST, "50 last"),
        (row(10, 20, 30), {"best": "squad.f1"}, {10: 20, 20: 80}, "30 last, 20 best"),
        (row(10, 20, 30, 40, 50), {"keep_every": 20}, {}, "50 last, 40 every, 20 every"),
        # Half of either horizon.
        (
            row(60, 70, 80, 100, 120, 160, 30),
            {"keep_every": 0.5},
            {},
            "30 last, 160 every, 120 every, 80 every, 60 every",
        ),
        # Preemptions do not push out regular ones.
        (row(10, 20, *STOPS[:2], stops=STOPS), {"keep_last": 2}, {}, "27 last, 20 last, 10 last"),
        (row(10, 20, *STOPS[:2], 30, stops=STOPS), {"keep_last": 2}, {}, "30 last, 20 last"),
        # The end of a run stays when it is extended.
        (row(10, 20, 30, 40, final=20), {}, {}, "40 last, 20 final"),
        # The newest is the last commit, not the highest step.
        (row(20, 40, 60, 30), {"keep_last": 2}, {}, "30 last, 60 last"),
    ],
)
def test_what_stays_and_why(checkpoints, settings: dict[str, Any], scores, expected) -> None:
    policy = CheckpointSettings(**{"keep_last": 1, **settings})
    why = retain(checkpoints, policy, TWO, Scores(scores, policy.best == "loss"))
    reasons = [f"{c.step} {' '.join(why[c.serial])}" for c in checkpoints[::-1] if why[c.serial]]
    assert reasons == expected.split(", ")


saved = st.builds(
    Saved,
    st.integers(1, 50),
    st.integers(0, 9),
    st.sampled_from([PERIODIC, EMERGENCY, FINAL, "best"]),
)


@given(
    st.lists(saved, unique_by=lambda c: c.serial),
    st.dictionaries(st.integers(0, 9), st.floats(-9, 9)),
    st.integers(1, 5),
    st.booleans(),
)
def test_properties(checkpoints, scores, last, keep_best):
    settings = CheckpointSettings(keep_last=last, keep_best=keep_best)
    why = retain(checkpoints, settings, (), Scores(scores))
    assert set(why) == {c.serial for c in checkpoints}
    staying = [c for c in checkpoints if why[c.serial]]
    newest_first = sorted(checkpoints, key=lambda c: -c.serial)
    regular = [c for c in newest_first if c.reason in (PERIODIC, FINAL)]
    assert all(c in staying for c in (*newest_first[:1], *regular[:last]))
    measured = {c.step: scores[c.step] for c in checkpoints if c.step in scores}
    assert not keep_best or not measured or Scores(measured).best_step in {c.step for c in staying}
    # What stays would stay again: a second look deletes nothing more.
    assert all(retain(staying, settings, (), Scores(scores)).values())
