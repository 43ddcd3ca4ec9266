import pytest

from windlass.telemetry.timing import device_hours, wall_time


def line(attempt, step, event=None, world=None, **seconds):
    found = {"kind": "event" if event else "train", "step": step, "attempt": attempt, "seconds": seconds}
    return found | ({"event": event} if event else {}) | ({"world": world} if world else {})


KILLED = [
    line(0, 0, "started", world=2, startup=4.0),
    line(0, 10, startup=4.0, train=5.0),
    line(0, 10, "checkpoint", startup=4.0, train=5.5, save=1.0),
    line(0, 20, startup=4.0, train=10.5, save=1.0),
    line(1, 10, "resumed", world=4, startup=3.0),
    line(1, 30, startup=3.0, train=10.0),
]


def test_a_resumed_run_by_hand():
    found = wall_time(KILLED)
    assert found["startup"] == 7.0
    assert found["train"] == 15.5
    assert found["save"] == 1.0
    assert found["lost"] == 5.0
    assert found["total"] == pytest.approx(28.5) == pytest.approx(sum(v for k, v in found.items() if k != "total"))


def test_device_hours_count_each_start_with_its_own_ranks():
    assert device_hours(KILLED) == pytest.approx((15.5 * 2 + 13.0 * 4) / 3600)


def test_a_rewind_goes_on_in_the_same_process():
    lines = [
        line(0, 0, "started", world=2, startup=4.0),
        line(0, 10, "checkpoint", startup=4.0, train=5.0, save=1.0),
        line(0, 20, startup=4.0, train=10.0, save=1.0),
        line(1, 10, "rewound", startup=4.0, train=11.0, save=1.0),
        line(1, 30, startup=4.0, train=21.0, save=1.0),
    ]
    found = wall_time(lines)
    assert found["startup"] == 4.0
    assert found["train"] == 15.0
    assert found["lost"] == 6.0
    assert found["total"] == pytest.approx(26.0)
    assert device_hours(lines) == pytest.approx(26.0 * 2 / 3600)


def test_nothing_known_is_nothing_counted():
    assert wall_time([{"kind": "train", "step": 1}])["total"] == 0
    assert device_hours([]) == 0
