"""What stays and what goes, as examples and as properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint.retention import (
    EMERGENCY,
    FINAL,
    PERIODIC,
    Policy,
    Saved,
    best,
    better,
    retain,
    scores_by_step,
)  # fmt: skip

NAN, INF = float("nan"), float("inf")


def steps_kept(
    checkpoints: list[Saved], policy: Policy, scores: dict[int, float] | None = None
) -> dict[int, list[str]]:
    steps = {c.serial: c.step for c in checkpoints}
    return {steps[serial]: why for serial, why in retain(checkpoints, policy, scores or {}).items() if why}


def row(*steps: int, **reasons: str) -> list[Saved]:
    return [Saved(i + 1, step, reasons.get(f"s{step}", PERIODIC)) for i, step in enumerate(steps)]


def test_the_last_n() -> None:
    assert steps_kept(row(10, 20, 30, 40), Policy(last=2)) == {40: ["last"], 30: ["last"]}


def test_the_best_stays_however_old_and_the_first_of_equal_ones() -> None:
    scores = {10: 3.0, 20: 2.0, 30: 2.5, 25: 0.1, 40: 2.0}  # there is no checkpoint of step 25
    assert steps_kept(row(10, 20, 30, 40, 50), Policy(last=1), scores) == {50: ["last"], 20: ["best"]}
    assert steps_kept(row(10, 20, 30, 40, 50), Policy(last=1, best=False), scores) == {50: ["last"]}
    by_f1 = Policy(last=1, measure="squad.f1")
    assert steps_kept(row(10, 20, 30), by_f1, {10: 20.0, 20: 80.0}) == {30: ["last"], 20: ["best"]}
    assert best({}, "loss") is None and best({2: 1.0, 1: 1.0}, "loss") == 1


def test_scores_are_the_finite_values_in_the_ledger() -> None:
    lines = [
        {"kind": "eval", "step": 1, "suite": "loss", "loss": 3.0}, {"kind": "eval", "step": 2, "loss": NAN},
        {"kind": "eval", "step": 1, "suite": "squad", "f1": 10.0, "loss": 9.0}, {"kind": "train", "step": 3, "loss": 1.0},
    ]  # fmt: skip
    assert scores_by_step(lines, "loss") == {1: 3.0}
    assert scores_by_step(lines, "squad.f1") == {1: 10.0} and scores_by_step(lines, "hellaswag.acc") == {}


def test_only_a_finite_value_is_ever_better() -> None:
    assert better(2.0, None, "loss") and better(1.0, 2.0, "loss") and not better(3.0, 2.0, "loss")
    assert better(0.0, None, "squad.f1") and better(3.0, 2.0, "squad.f1") and not better(1.0, 2.0, "squad.f1")
    for measure in ("loss", "squad.f1"):
        assert not better(2.0, 2.0, measure)
        assert not any(better(bad, than, measure) for bad in (NAN, INF, -INF) for than in (None, 1.0))


def test_kept_forever_and_where_the_lineage_started() -> None:
    policy = Policy(last=1, keep_forever=lambda step: step % 20 == 0, start=10)
    assert steps_kept(row(10, 20, 30, 40, 50), policy) == {50: ["last"], 40: ["every"], 20: ["every"], 10: ["start"]}


def test_preemptions_do_not_push_out_regular_ones() -> None:
    checkpoints = row(10, 20, 23, 27, s23=EMERGENCY, s27=EMERGENCY)
    assert steps_kept(checkpoints, Policy(last=2)) == {27: ["last"], 20: ["last"], 10: ["last"]}
    followed = row(10, 20, 23, 27, 30, s23=EMERGENCY, s27=EMERGENCY)
    assert steps_kept(followed, Policy(last=2)) == {30: ["last"], 20: ["last"]}


def test_the_end_of_a_run_stays_when_it_is_extended() -> None:
    assert steps_kept(row(10, 20, 30, 40, s20=FINAL), Policy(last=1)) == {40: ["last"], 20: ["final"]}


def test_newest_means_the_last_commit_not_the_highest_step() -> None:
    assert steps_kept(row(20, 40, 60, 30), Policy(last=2)) == {30: ["last"], 60: ["last"]}


saved = st.builds(Saved, st.integers(1, 50), st.integers(0, 9), st.sampled_from([PERIODIC, EMERGENCY, FINAL, "best"]))


@given(
    st.lists(saved, unique_by=lambda c: c.serial), st.dictionaries(st.integers(0, 9), st.floats(-9, 9)),
    st.integers(1, 5), st.booleans(),
)  # fmt: skip
def test_properties(checkpoints: list[Saved], scores: dict[int, float], last: int, keep_best: bool) -> None:
    why = retain(checkpoints, Policy(last, keep_best), scores)
    assert set(why) == {c.serial for c in checkpoints}
    if not checkpoints:
        return
    staying = [c for c in checkpoints if why[c.serial]]
    assert max(checkpoints, key=lambda c: c.serial) in staying
    regular = sorted((c for c in checkpoints if c.reason in (PERIODIC, FINAL)), key=lambda c: -c.serial)
    assert all(c in staying for c in regular[:last])
    measured = {c.step: scores[c.step] for c in checkpoints if c.step in scores}
    assert not keep_best or not measured or best(measured, "loss") in {c.step for c in staying}
    # What stays would stay again: a second look deletes nothing more.
    assert all(retain(staying, Policy(last, keep_best), scores).values())


def test_a_policy_with_two_horizons_keeps_what_either_wants() -> None:
    from windlass.checkpoint.retention import Lineage, policy_of
    from windlass.recipe import Horizon
    from windlass.recipe.settings import CheckpointSettings

    settings = CheckpointSettings(keep_every=0.5, keep_last=3)
    policy = policy_of(
        settings, [Horizon(16, 100, 1), Horizon(12, 100, 1)], Lineage(checkpoint="checkpoints/step-00000004", step=4)
    )
    assert [s for s in range(17) if policy.keep_forever(s)] == [6, 8, 12, 16] and (policy.last, policy.start) == (3, 4)
