import numpy as np
import pytest
from report_fixtures import add_lines, build_run, changed, edit, loss_at

from windlass.reports.answers import fast
from windlass.reports.charts import Series, charts
from windlass.reports.page import payload
from windlass.reports.plots import draw
from windlass.reports.view import RunView, Track, views


def test_a_killed_and_resumed_run_is_one_curve_with_the_losses_of_an_unbroken_one(one, tmp_path):
    straight = RunView(build_run(tmp_path / "straight"))
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


def described(*views):
    return {chart.id: chart for chart in charts(views)}


def test_every_series_of_a_long_run_is_thinned_at_its_own_extremes(one):
    n = 30_000
    steps, spikes = np.arange(1.0, n + 1), np.linspace(700, n - 300, 20).astype(int)
    loss, norm = 2 + np.sin(steps / 50), 1 + 0.1 * np.cos(steps / 7)
    norm[spikes], loss[12_345] = 40.0 + np.arange(20), 9.0
    axes = dict.fromkeys(("step", "tokens", "hours"), steps)
    long = changed(one, train=Track(axes | {"loss": loss, "grad_norm": norm}))
    sent = payload([long], charts([long]))
    drawn = {chart["id"]: chart["series"][0] for chart in sent["charts"]}
    series = drawn["grad_norm"]
    shown = dict(zip(sent["points"][series["at"]]["step"], series["y"], strict=True))
    assert [shown.get(int(steps[i])) for i in spikes] == list(40 + np.arange(20)), "all 20 spikes"
    assert max(drawn["loss"]["y"]) == 9 and 800 < len(drawn["loss"]["y"]) < 4000


def test_of_several_runs_each_is_the_mean_and_the_range_of_its_ranks(tmp_path):
    found = described(*(RunView(build_run(tmp_path / name, steps=30)) for name in "abc"))
    for key, word, base in (("memory", "allocated", 1480), ("memory-reserved", "reserved", 1900)):
        chart = found[key]
        assert [s.name for s in chart.series] == list("abc") and chart.title.endswith(word)
        for at, offset in (("y", 30), ("low", 0), ("high", 60)):
            means = [np.nanmean(getattr(s, at)) for s in chart.series]
            assert means == pytest.approx([base + offset] * 3, abs=5)
    assert len(found["utilisation"].series) == 3


def test_a_logged_measure_is_drawn_whatever_its_name(tmp_path):
    names = ("loss", "tokens", "epoch", "hours", "samples", "batches")
    run = build_run(tmp_path / "run", steps=30)
    for step in (10, 20, 30):
        add_lines(run, {"kind": "log", "step": step} | {f"log.{x}": step / 7 for x in names})
    found = described(RunView(run))
    for name in names:
        (series,) = found[f"log-{name}"].series
        assert found[f"log-{name}"].title == f"log.{name}"
        assert series.y.tolist() == [10 / 7, 20 / 7, 30 / 7]
        assert series.at["tokens"][-1] == 30 * 2048, "the axes are the run's"


def test_a_suite_of_several_runs_has_a_chart_for_each_measure(tmp_path):
    runs = [build_run(tmp_path / f"{i:02}", steps=30) for i in range(2)]
    for run in runs:
        line = {"kind": "eval", "step": 0}
        scores = {f"task-{i}/acc": i / 9 for i in range(20)}
        add_lines(run, line | {"suite": "squad", "exact_match": 10.0, "f1": 20.0})
        add_lines(run, line | {"suite": "lm-eval:many"} | scores)
    seen = [RunView(run) for run in runs]
    found = described(*seen)
    titles = [found[f"suite-squad-{name}"].title for name in ("exact-match", "f1")]
    assert titles == ["squad, exact match", "squad, f1"]
    assert [one.y.tolist() for one in found["suite-squad-f1"].series] == [[20.0], [20.0]]
    assert "suite-lm-eval-many" not in described(seen[0]), "a table shows so many scores"
    assert [run["label"] for run in payload(seen, [found["lr"]])["runs"]] == ["00", "01"]
    looked = [Series("", np.zeros(1), number=number) for number in range(40)]
    assert len({(one.colour, one.dash) for one in looked}) == 40, "no two of 40 lines are alike"


def test_ranks_have_a_line_each_and_only_charts_with_numbers_are_drawn(one, tmp_path):
    cuda = described(one)
    cpu = described(RunView(build_run(tmp_path / "cpu", device="cpu", ranks=1, steps=30)))
    assert list(cuda)[:4] == ["loss", "suite-hellaswag", "throughput", "lr"]
    assert {"memory", "power"} <= set(cuda)
    assert {"resident", "utilisation"} <= set(cpu) and not {"memory", "power"} & set(cpu)
    for key in ("memory", "memory-reserved"):
        assert [s.name for s in cuda[key].series] == ["rank 0", "rank 1"]
    first = cuda["utilisation"].series[0]
    assert np.nanmin(first.y) > 85 and (np.diff(first.x) >= 0).all(), "in training steps only"
    assert first.at["tokens"][-1] == pytest.approx(400 * 2048, rel=0.01)
    layout = build_run(tmp_path / "layout", ranks=2, steps=30)
    edit(layout, lambda x: x | {"mesh": {"tp": 2}} if x.get("event") == "started" else x)
    view = RunView(layout)
    names = ["rank 0 (tp 0)", "rank 1 (tp 1)"]
    assert [s.name for s in described(view)["utilisation"].series] == names
    assert view.values["layout"] == "tp 2" and "2 ranks, tp 2" in fast(view).remark
    many = described(RunView(build_run(tmp_path / "many", ranks=12, steps=30)))
    (mean,) = many["utilisation"].series
    assert (mean.low <= mean.y).all() and (mean.y <= mean.high).all()
    assert mean.name == "mean of 12 ranks" and np.nanmean(mean.high - mean.low) > 10


def test_what_is_drawn_are_the_numbers_of_the_run(one):
    figure = draw(described(one)["loss"], [one])
    axes = figure.axes[0]
    assert list(axes.lines[0].get_ydata()) == list(one.train["loss"])
    assert axes.get_legend_handles_labels()[1] == ["training", "validation", "resumed"]
    late = draw(described(one)["loss"], [one], first_step=100).axes[0]
    assert all(min(line.get_xdata()) >= 100 for line in late.lines)


def test_losses_that_spread_have_a_logarithmic_axis(tmp_path):
    one, wild = build_run(tmp_path / "one", steps=100), build_run(tmp_path / "wild", steps=100)
    (loss, *_), (plain, *_) = charts([RunView(one)]), charts(views([one, one]))
    assert not loss.y.log and not plain.y.log
    edit(wild, lambda x: x | {"loss": 90 / x["step"]} if x["kind"] == "train" else x)
    (loss, *_) = charts(views([one, wild]))
    assert loss.y.log
    for bad in ("NaN", 0.0):
        edit(wild, lambda x, bad=bad: x | {"loss": bad} if x["kind"] == "train" else x)
        (loss, *_) = charts(views([one, wild]))
        assert loss.y.log is False  # and the page can hold it as JSON
