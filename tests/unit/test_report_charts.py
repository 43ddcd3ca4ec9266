import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_fixtures import build_run

from windlass.reports.charts import charts, rank_curves, smoothed, steps_at, thin
from windlass.reports.devices import RankTrack, grid, on_grid
from windlass.reports.payload import numbers, payload, rounded
from windlass.reports.view import Track, view


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder):
    return view(build_run(folder / "one", killed_at=263))


@given(st.lists(st.one_of(st.floats(-1e6, 1e6), st.just(math.nan)), min_size=1, max_size=2000), st.integers(6, 300))
def test_thinned_curves_keep_ends_extremes_and_gaps(values, limit):
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)
    places = thin(x, y, limit)
    assert (np.diff(places) > 0).all()
    assert places[0] == 0
    assert places[-1] == len(y) - 1
    if len(y) <= limit:
        assert len(places) == len(y)
    assert len(places) <= max(len(y) if len(y) <= limit else 0, 4 * (limit // 3) + 6)
    if np.isfinite(y).any():
        assert np.nanmin(y[places]) == np.nanmin(y)
        assert np.nanmax(y[places]) == np.nanmax(y)
    assert np.isnan(y[places]).any() == np.isnan(y).any()


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=40), st.floats(0, 0.99))
def test_smoothing_is_the_weighted_mean_that_it_says(values, weight):
    got = smoothed(np.array(values), weight)
    for n in range(len(values)):
        weights = [weight ** abs(n - i) for i in range(len(values))]
        expected = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
        assert got[n] == pytest.approx(expected, abs=1e-9)


def test_smoothing_passes_over_what_is_not_finite():
    got = smoothed(np.array([1.0, math.nan, 1.0, math.inf, 1.0]), 0.5)
    assert got[[0, 2, 4]] == pytest.approx([1, 1, 1])
    assert np.isnan(got[[1, 3]]).all()


def test_a_grid_averages_what_falls_into_each_span():
    track = RankTrack(0, {"hours": np.array([0.0, 0.1, 0.9, 1.0]), "x": np.array([1.0, 3.0, math.nan, 7.0])})
    late = RankTrack(1, {"hours": np.array([0.95]), "x": np.array([5.0])})
    assert grid([track, late], 4) == pytest.approx([0.125, 0.375, 0.625, 0.875])
    table = on_grid([track, late], "x", 4)
    assert table[0] == pytest.approx([2, math.nan, math.nan, 7], nan_ok=True)
    assert table[1] == pytest.approx([math.nan, math.nan, math.nan, 5], nan_ok=True)


def test_utilisation_is_drawn_while_training_only(one):
    curves = rank_curves(one, "util_pct")
    assert list(curves.lines) == ["rank 0", "rank 1"]
    assert np.nanmin(curves.lines["rank 0"]) > 85
    assert np.nanmin(rank_curves(one, "power_w").lines["rank 0"]) > 200
    assert rank_curves(one, "nonsense") is None
    assert (np.diff(curves.steps) >= 0).all()
    assert curves.tokens[-1] == pytest.approx(400 * 2048, rel=0.01)


def test_many_ranks_become_mean_range_and_extremes(folder):
    seen = view(build_run(folder / "many", ranks=12, steps=30))
    curves = rank_curves(seen, "util_pct")
    assert curves.many
    assert list(curves.lines) == ["rank 0", "rank 11"]
    assert (curves.low <= curves.mean).all()
    assert (curves.mean <= curves.high).all()
    assert np.nanmean(curves.lines["rank 11"]) < np.nanmean(curves.lines["rank 0"]) - 10


def test_steps_at_hours(one):
    assert steps_at(one.train["hours"], one) == pytest.approx(one.train["step"])


def test_only_charts_with_numbers_are_drawn(one, folder):
    assert [c.id for c in charts([one])] == [
        "loss", "suite-hellaswag", "lr", "grad_norm", "throughput", "step_time", "mfu", "memory", "utilisation", "power",
    ]  # fmt: skip
    cpu = view(build_run(folder / "cpu", device="cpu", ranks=1, steps=30))
    assert {"resident", "utilisation"} <= {c.id for c in charts([cpu])}
    assert not {"memory", "power"} & {c.id for c in charts([cpu])}


def test_samples_a_second_have_a_chart_where_they_tell_more_than_tokens(one):
    uneven = one.train["tokens_per_s"] / np.linspace(100, 200, len(one.train))
    other = replace(one, train=Track({**one.train.columns, "samples_per_s": uneven}))
    assert "samples_per_s" in [c.id for c in charts([other])]
    assert "samples_per_s" not in [c.id for c in charts([one])]


def test_numbers_for_the_page():
    assert numbers([1.0, math.nan, math.inf, 1 / 3, 2e20, 1234567.8]) == [1, None, None, 0.333333, 2e20, 1234570]
    assert isinstance(rounded(3.0), int)


def test_long_runs_are_thinned_on_the_page(folder):
    seen = view(build_run(folder / "long", ranks=1, steps=100))
    n = 20_000
    steps = np.arange(1.0, n + 1)
    loss = 2 + np.sin(steps / 50)
    loss[12_345] = 9.0
    columns = {"step": steps, "tokens": steps * 10, "hours": steps / 3600, "loss": loss}
    long = replace(seen, train=Track(columns))
    found = payload([long], charts([long]))["runs"][0]["train"]
    assert 2000 < len(found["step"]) < 6000
    assert max(found["loss"]) == 9
    assert found["step"][found["loss"].index(9)] == 12_346
