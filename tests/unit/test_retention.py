"""What stays and what goes, as examples and as properties."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windlass.checkpoint.retention import EMERGENCY, FINAL, PERIODIC, Kept, Policy, best, better, retain


def steps_kept(checkpoints: list[Kept], policy: Policy) -> dict[int, list[str]]:
    steps = {c.serial: c.step for c in checkpoints}
    return {steps[serial]: why for serial, why in retain(checkpoints, policy).items() if why}


def row(*steps: int, **reasons: str) -> list[Kept]:
    return [Kept(i + 1, step, reason=reasons.get(f"s{step}", PERIODIC)) for i, step in enumerate(steps)]


def test_the_last_n() -> None:
    assert steps_kept(row(10, 20, 30, 40), Policy(last=2, best=False)) == {40: ["last"], 30: ["last"]}


def test_the_best_stays_however_old() -> None:
    checkpoints = [Kept(1, 10, 3.0), Kept(2, 20, 2.0), Kept(3, 30, 2.5), Kept(4, 40), Kept(5, 50, float("nan"))]
    assert steps_kept(checkpoints, Policy(last=1)) == {50: ["last"], 20: ["best"]}
    assert steps_kept(checkpoints, Policy(last=1, best=False)) == {50: ["last"]}


def test_the_first_of_equally_good_ones() -> None:
    """As training has it, which saves for the sake of a value only where it is better than any before."""
    assert best([Kept(1, 10, 2.0), Kept(2, 20, 2.0)]) == Kept(1, 10, 2.0)
    assert best([Kept(1, 10)]) is None


def test_the_best_by_another_measure_is_the_highest() -> None:
    def scored(serial: int, loss: float | None, **scores: float) -> Kept:
        return Kept(serial, 10 * serial, loss, scores={name.replace("_", "."): v for name, v in scores.items()})

    rows = [
        scored(1, 1.0, squad_f1=20.0),
        scored(2, 2.0, squad_f1=80.0),
        scored(3, None, squad_f1=float("nan")),
        scored(4, 0.5),
        scored(5, 3.0, squad_f1=80.0),
        scored(6, 3.0, squad_f1=float("inf")),
        scored(7, float("-inf"), squad_f1=float("-inf")),
    ]
    assert best(rows, "squad.f1") is rows[1] and best(rows) is rows[3]
    assert best(rows, "hellaswag.acc") is None
    assert steps_kept(rows, Policy(last=1, measure="squad.f1")) == {70: ["last"], 20: ["best"]}
    assert steps_kept(rows, Policy(last=1)) == {70: ["last"], 40: ["best"]}


def test_only_a_finite_value_is_ever_better() -> None:
    assert better(2.0, None, "loss") and better(1.0, 2.0, "loss") and not better(3.0, 2.0, "loss")
    assert better(0.0, None, "squad.f1") and better(3.0, 2.0, "squad.f1") and not better(1.0, 2.0, "squad.f1")
    for measure in ("loss", "squad.f1"):
        assert not better(2.0, 2.0, measure)
        for bad in (float("nan"), float("inf"), float("-inf")):
            assert not better(bad, None, measure) and not better(bad, 1.0, measure)


def test_for_good() -> None:
    policy = Policy(last=1, for_good=lambda step: step % 20 == 0)
    assert steps_kept(row(10, 20, 30, 40, 50), policy) == {50: ["last"], 40: ["every"], 20: ["every"]}


def test_preemptions_do_not_push_out_regular_ones() -> None:
    checkpoints = row(10, 20, 23, 27, s23=EMERGENCY, s27=EMERGENCY)
    assert steps_kept(checkpoints, Policy(last=2)) == {27: ["last"], 20: ["last"], 10: ["last"]}
    followed = row(10, 20, 23, 27, 30, s23=EMERGENCY, s27=EMERGENCY)
    assert steps_kept(followed, Policy(last=2)) == {30: ["last"], 20: ["last"]}


def test_the_end_of_a_run_stays_when_it_is_extended() -> None:
    assert steps_kept(row(10, 20, 30, 40, s20=FINAL), Policy(last=1)) == {40: ["last"], 20: ["final"]}


def test_newest_means_the_last_commit_not_the_highest_step() -> None:
    """The run went back to step 20 and was trained anew from there."""
    assert steps_kept(row(20, 40, 60, 30), Policy(last=2)) == {30: ["last"], 60: ["last"]}


kept = st.builds(
    Kept, st.integers(1, 50), st.integers(0, 500), st.none() | st.floats(allow_nan=True),
    st.sampled_from([PERIODIC, EMERGENCY, FINAL, "best"]),
)  # fmt: skip


@given(st.lists(kept, unique_by=lambda c: c.serial), st.integers(1, 5), st.booleans())
def test_properties(checkpoints: list[Kept], last: int, keep_best: bool) -> None:
    why = retain(checkpoints, Policy(last, keep_best))
    assert set(why) == {c.serial for c in checkpoints}
    if not checkpoints:
        return
    staying = [c for c in checkpoints if why[c.serial]]
    assert max(checkpoints, key=lambda c: c.serial) in staying
    regular = sorted((c for c in checkpoints if c.reason in (PERIODIC, FINAL)), key=lambda c: -c.serial)
    assert all(c in staying for c in regular[:last])
    lowest = best(checkpoints)
    assert not keep_best or lowest is None or lowest in staying
    # What stays would stay again: a second look deletes nothing more.
    assert all(retain(staying, Policy(last, keep_best)).values())
