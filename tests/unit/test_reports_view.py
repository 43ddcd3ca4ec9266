import numpy as np
import pytest
from report_fixtures import build_run, loss_at

from windlass.reports.view import RunView


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    return RunView(build_run(tmp_path_factory.mktemp("runs") / "straight"))


def test_a_killed_and_resumed_run_is_one_curve_with_the_losses_of_an_unbroken_one(one, straight):
    assert list(one.train["step"]) == list(range(10, 401, 10))
    assert list(one.train["loss"]) == list(straight.train["loss"])
    assert one.train["loss"][3] == loss_at(40, 1)
    assert list(one.evals["loss"]["step"]) == list(range(0, 401, 50))
    trained_on = one.evals["loss"]["step"] * 2048
    assert one.evals["loss"]["tokens"] == pytest.approx(trained_on)
    assert [(r.step, r.what, r.tokens) for r in one.restarts] == [(200, "resumed", 200 * 2048)]
    assert straight.restarts == [] and (np.diff(one.train["hours"]) > 0).all()
    # without the pause, the start-up and the steps done twice
    assert one.train["hours"] * 3600 == pytest.approx(straight.train["hours"] * 3600, abs=0.01)


def test_samples_of_devices_in_the_pause_and_in_lost_work_are_left_out(one, monkeypatch):
    track = one.ranks[0]
    assert (np.diff(track["hours"]) >= 0).all()
    assert track["hours"].max() <= one.train["hours"][-1] + 10 / 3600
    assert [t.rank for t in one.ranks] == [0, 1] and set(np.unique(track["training"])) == {0.0, 1.0}
    assert np.nanmean(track["util_pct"]) == pytest.approx(93, abs=0.5), "in training steps only"
    # of a large file evenly spread lines are read
    monkeypatch.setattr("windlass.reports.view.MAX_DEVICE_BYTES", 60_000)
    part = RunView(one.run).ranks[0]
    assert 0.1 < len(part["hours"]) / len(track["hours"]) < 0.9
    assert part["hours"].max() > 0.9 * track["hours"].max()
