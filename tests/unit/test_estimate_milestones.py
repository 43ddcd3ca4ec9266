import pytest

from windlass.estimate.milestones import Milestone, clock, milestones, occurrences, rows
from windlass.recipe import Horizon, Recipe


@pytest.mark.parametrize(
    "every", [0, 1, 7, 250, 0.1, 0.34, 1.0, "1 epoch", "0.5 epochs", "2.5 epochs", "0.001 epochs", "40 epochs"]
)
@pytest.mark.parametrize("sizes", [(100, 333, 10), (97, 12, 5), (50, 3, 16), (10, 160, 16), (1, 1, 1)])
def test_occurrences_are_where_they_are_due(every, sizes):
    horizon = Horizon(*sizes)
    assert occurrences(horizon, every) == [s for s in range(sizes[0] + 1) if horizon.due(every, s)]


def recipe(**overrides):
    return Recipe().with_overrides(**{"train.steps": 100, "train.global_batch": 4, **overrides})


def test_milestones_by_hand():
    r = recipe(**{
        "optim.schedule.kind": "wsd", "optim.schedule.warmup": 5, "optim.schedule.decay": 0.3, "eval.every": 0.4,
        "checkpoint.every": 60,
    })  # fmt: skip
    got = [(m.step, m.what) for m in milestones(r, Horizon(100, 130, 4))]
    assert got == [
        (0, "evaluation"), (5, "warm-up ends"), (33, "epoch ends"), (40, "evaluation"), (60, "checkpoint"),
        (65, "epoch ends"), (70, "decay starts"), (80, "evaluation"), (98, "epoch ends"), (100, "evaluation"),
        (100, "checkpoint"), (100, "end"),
    ]  # fmt: skip


def test_no_evaluation_no_epochs_when_unknown():
    got = {m.what for m in milestones(recipe(**{"eval.every": 0, "optim.schedule.kind": "cosine"}), Horizon(100, 0, 4))}
    assert got == {"warm-up ends", "checkpoint", "end"}


def test_rows_of_what_is_left():
    found = milestones(recipe(**{"eval.every": 30, "checkpoint.every": 25}), Horizon(100, 0, 4))
    whole = {r.what: r for r in rows(found)}
    assert (whole["evaluation"].first, whole["evaluation"].last, whole["evaluation"].left) == (0, 100, 5)
    assert whole["evaluation"].every == 30 and whole["checkpoint"].every == 25
    left = {r.what: r for r in rows(found, now=60)}
    assert (left["evaluation"].first, left["evaluation"].left) == (90, 2)
    assert (left["checkpoint"].first, left["checkpoint"].left) == (75, 2)
    assert "warm-up ends" not in left and [r.what for r in rows(found, now=60)][-1] == "end"
    assert rows(found, now=100) == []


def test_uneven_places_have_no_period():
    found = [Milestone("epoch ends", s, n) for n, s in enumerate([33, 65, 98, 130], 1)]
    assert rows(found)[0].every is None


def test_clock_counts_what_happens_on_the_way():
    found = milestones(recipe(**{"eval.every": 50, "checkpoint.every": 50}), Horizon(100, 0, 4))
    seconds = clock(found, 0, 2.0, {"evaluation": 10.0, "checkpoint": 1.0})
    assert seconds(0) == 10 and seconds(49) == 108 and seconds(50) == 121 and seconds(100) == 232
    later = clock(found, 50, 2.0, {"evaluation": 10.0})
    assert later(50) == 0 and later(60) == 20 and later(100) == 110
