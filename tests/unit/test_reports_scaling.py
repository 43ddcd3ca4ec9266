"""The report of a scaling study: tables, text, charts and the page, made from ledgers alone."""

import csv
import io

import pytest
from report_fixtures import rows_of
from scaling_fixtures import build_scaling, phases, worlds

from windlass.reports.plots import draw
from windlass.reports.scaling import recommended, scaling_charts, setup_table, terminal
from windlass.reports.write import report
from windlass.study.grid import WORLD
from windlass.study.setups import read_setups
from windlass.study.study import Scaling
from windlass.telemetry.measures import SETUP


@pytest.fixture(scope="module")
def strong(tmp_path_factory):
    """Worlds 1, 2, 4; the cell of the fourth world failed."""

    def step(a):
        took = 80 / a[WORLD] + 12 * (a[WORLD] > 1) + 4
        return phases(took) | {"peak_mb": 400 + 100 / a[WORLD]}

    return build_scaling(
        tmp_path_factory.mktemp("studies") / "strong",
        Scaling("strong"),
        worlds(1, 2, 4, 8),
        step,
        probe=lambda a: phases(82 / a[WORLD]),
        failed=[3],
        settings=["train.global_batch=64"],
        device="NVIDIA X1",
    )


@pytest.fixture(scope="module")
def strategies(tmp_path_factory):
    took = {"ddp": (100.0, 900.0), "shard_grad_op": (101.0, 500.0), "full_shard": (150.0, 400.0)}

    def step(a):
        ms, mb = took[a["parallel.strategy"]]
        on = a["parallel.activation_checkpointing"] == "full"
        return phases(ms * (1.3 if on else 1)) | {"peak_mb": mb * (0.7 if on else 1)}

    cells = [
        {WORLD: 4, "parallel.strategy": kind, "parallel.activation_checkpointing": how}
        for kind in took
        for how in ("none", "full")
    ]
    path = tmp_path_factory.mktemp("studies") / "strategies"
    return build_scaling(path, Scaling("strategies"), cells, step, device="NVIDIA A100")


def charts_of(study):
    return scaling_charts(study.scaling, read_setups(study))


def test_the_tables_have_every_setup_with_its_state_and_reasons(strong, tmp_path):
    written = report(strong.path, tmp_path / "out", plots=False)
    table = list(csv.DictReader(io.StringIO((tmp_path / "out" / "scaling.csv").read_text())))
    failed = "exit code 1: out of memory"
    assert [row["state"] for row in table] == ["finished"] * 3 + ["failed"]
    assert table[3]["reason"] == failed
    assert set(SETUP) <= set(table[0])
    assert float(table[1]["step_ms"]) == 56
    assert float(table[2]["efficiency"]) == pytest.approx(84 / (36 * 4))
    assert "exposed_ms: one rank does not communicate" in table[0]["reasons"]
    assert f"step_ms: failed: {failed}" in table[3]["reasons"] and table[3]["step_ms"] == ""
    text, latex = written.markdown.read_text(), (tmp_path / "out" / "scaling.tex").read_text()
    for said in (
        "Efficiency = T(N0) · N0 ÷ (T(N) · N)",
        "MFU: the peak of NVIDIA X1 is unknown.",
    ):
        assert said in text, said
    assert failed in text and "58.3 \\%" in latex
    html = written.page.read_text()
    assert html.count('<section id="scaling">') == 1
    assert 'data-chart="scaling-throughput"' in html and "84.0" in html
    assert "no best" not in html and "swept settings" not in html


def test_charts_have_the_ideal_line(strong):
    throughput, efficiency = charts_of(strong)
    measured, ideal = throughput.series
    assert list(ideal.y) == pytest.approx([64 / 0.084 * n for n in (1, 2, 4)])
    assert throughput.x.names == ["1", "2", "4"]
    assert measured.y[1] == pytest.approx(64 / 0.056)
    assert efficiency.series[0].y[0] == 100
    # a proportional line is straight, without a kink, if both scales are logarithmic
    assert throughput.x.log and throughput.y.log and draw(throughput).axes[0].get_yscale() == "log"
    assert draw(throughput).axes[0].get_legend_handles_labels()[1] == ["measured", "ideal"]


def test_the_recommended_strategy_has_the_command_that_trains_it(strategies, tmp_path):
    written = report(strategies.path, tmp_path, plots=False)
    html, table = written.page.read_text(), read_setups(strategies)
    [best] = recommended(strategies, table)
    assert best.text.startswith("shard_grad_op: 79.2 samples/s, 500 MB")
    assert "44 % less memory" in best.text
    assert "parallel.strategy=shard_grad_op" in best.command and best.command.endswith("--world 4")
    assert "Recommended" in html and best.command.split()[-4] in html
    assert best.command in "".join(str(part) for part in terminal(strategies, table, 120))
    assert charts_of(strategies) == [], "at one number of ranks"


def test_other_studies_name_the_layout_of_their_setups(tmp_path):
    def names(scaling, cells):
        path = tmp_path / scaling.mode
        settings = ["parallel.tensor=2"]
        study = build_scaling(path, scaling, cells, lambda a: phases(50.0), settings=settings)
        return [row.name for row in read_setups(study)]

    assert names(Scaling("strong"), worlds(2, 4)) == [
        "1 host, 2 ranks, tp 2",
        "1 host, 4 ranks, tp 2",
    ]
    cells = [{WORLD: 4, "parallel.strategy": kind} for kind in ("ddp", "full_shard")]
    assert names(Scaling("strategies"), cells) == ["ddp, tp 2", "full_shard, tp 2"]


def test_strategies_have_utilisation_steps_and_the_scores_of_the_suite(strategies, tmp_path):
    def shown(study):
        return rows_of(setup_table(study, read_setups(study)), shown=True)

    first, *_ = shown(strategies)
    assert (first["Steps/s"], first["Utilisation (%)"]) == ("10.000", "87.5") and "F1" not in first
    cells = [{WORLD: 2, "parallel.strategy": kind} for kind in ("ddp", "full_shard")]
    scored = build_scaling(
        tmp_path / "scored",
        Scaling("strategies"),
        cells,
        lambda a: phases(100.0),
        settings=["eval.suites=['loss', 'squad']", "data.format=squad", "data.source=squad"],
    )
    assert [(row["Exact match"], row["F1"]) for row in shown(scored)] == [("12.5", "25.0")] * 2
