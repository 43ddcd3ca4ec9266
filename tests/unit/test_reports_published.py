"""Published tables: their columns in their order, values by hand, and a reason in words where there
is none.
"""

import csv
import json

import pytest
from report_fixtures import build_run, build_study, edit, loss_at, rows_of
from scaling_fixtures import build_scaling, phases, worlds

from helpers import refused
from windlass import report
from windlass.recipe import settings
from windlass.reports.published import heading_of, of_study, published, specifications
from windlass.reports.study import StudyView
from windlass.reports.view import RunView, views
from windlass.study.grid import WORLD
from windlass.study.study import Scaling
from windlass.telemetry.measures import EPOCH_LOSS, RUN, SETUP

BASELINE = (
    "Train Loss (Final)|Eval Loss (Epoch 1)|Eval Loss (Epoch 2)|Eval Loss (Epoch 3)|"
    "Training Speed (samples/sec)|Evaluation Speed (samples/sec)|Steps per Epoch|"
    "Memory Allocated (MB)|GPU Utilization (%)"
).split("|")
SCALING = (
    "Setup|Total GPUs|Samples/s|Samples/s Scale Factor|Runtime (s)|Runtime Scale Factor|Loss|"
    "GPU Memory Allocated (GB)"
).split("|")
GPT = (
    "Setup|Total GPUs|Samples/s (Default)|Samples/s (Callback)|GPU Memory (GB, Default)|"
    "GPU Memory (GB, Callback)|GPU Utilization (%)|Loss|Runtime (s)"
).split("|")
WEAK = (
    "GPUs|Num Layers|Per-GPU Batch|Total Params|Samples/s (Callback)|GPU Memory (GB, Callback)|"
    "GPU Utilization (%)|Loss|Runtime (s)|Efficiency (%)"
).split("|")
ENDED = {"train_loss_mean": 2.5, "samples_per_s_whole_run": 11.97, "avg_mem_used_mb": 2750.0}


def rows(table):
    return rows_of(table, shown=True)


def end(line):
    return line | ENDED if line["kind"] == "summary" else line


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    """Two runs of the preset: one that finished on GPUs, and one on a CPU that was killed before
    its first step.
    """
    top, preset = tmp_path_factory.mktemp("baseline"), "preset=bloom-squad-baseline"
    on_gpus = build_run(top / "gpus", preset, "eval.every=1 epoch", steps=500)
    edit(on_gpus, end)
    on_cpu = build_run(top / "cpu", preset, steps=100, device="cpu", finished=False)
    edit(on_cpu, lambda line: line if line["kind"] == "event" and line["step"] == 0 else None)
    return on_gpus, on_cpu


def test_every_column_of_a_table_has_a_value_that_exists():
    columns = {name: spec["columns"] for name, spec in specifications().items()}
    assert list(columns["bloom-squad-baseline"]) == BASELINE
    assert list(columns["gpt-squad-scaling"]) == GPT
    assert list(columns["bloom-squad-scaling"]) == SCALING
    assert list(columns["gpt-squad-weak"])[:-1] == WEAK
    kinds = {heading_of("", name).kind for name in ("eval_loss_epoch_2", "train_loss_mean")}
    assert kinds == {"loss"}, "as many digits"
    known = {*RUN, *settings(), *SETUP, "setup"}
    for name, own in columns.items():
        unknown = [x for x in own.values() if x not in known and not x.startswith(EPOCH_LOSS)]
        assert not unknown, name


def test_a_run_fills_the_table_of_its_preset(baseline, tmp_path):
    """What is missing has a reason."""
    filled = published([RunView(baseline[0])])
    (row,) = rows(filled)
    assert filled.name == "bloom-squad-baseline" and list(row) == BASELINE
    # 250 steps an epoch, and two epochs
    losses = [f"{loss_at(step, 1) + 0.06:.4f}" for step in (250, 500)]
    rest = ["no evaluation at epoch 3", "12.0", "256.0", "250", "1,510", "91.7"]
    assert [*row.values()] == ["2.5000", *losses, *rest]
    first, second = rows(published(views(baseline)))
    assert (first["Run"], second["Run"]) == ("gpus", "cpu")
    assert second["Memory Allocated (MB)"] == second["GPU Utilization (%)"] == "no GPU"
    assert second["Train Loss (Final)"] == second["Eval Loss (Epoch 1)"] == "not run yet"
    assert all(cell not in ("", "–") for row in (first, second) for cell in row.values())
    gpt = build_run(tmp_path / "gpt", "preset=gpt-squad", steps=100)
    edit(gpt, end)
    filled = published([RunView(gpt)])
    (row,) = rows(filled)
    assert filled.name == "gpt-squad" and list(row) == GPT
    assert list(row.values())[:3] == ["1 host, 2 ranks", "2", "12.0"]
    assert [row[f"GPU Memory (GB, {x})"] for x in ("Default", "Callback")] == ["2.750", "1.510"]
    assert published([RunView(build_run(tmp_path / "other", steps=20))]) is None


def test_a_sweep_of_the_learning_rate_alone_has_a_row_a_cell(tmp_path):
    path = build_study(tmp_path / "study", seeds=(1,), overrides=("preset=c4-29m",))
    seen = StudyView(path)
    assert published(seen.views, seen) is None, "the schedule is varied too, and has no column"
    found = rows(published(seen.views, seen, "c4-29m"))
    assert [row["Learning Rate"] for row in found] == "0.01 0.01 0.001 0.001 0.0001 0.0001".split()
    assert found[0]["Validation Loss"] == f"{loss_at(200, 1, 1e-2) + 0.06:.4f}"
    assert found[0]["Memory Allocated (MB)"] == "1,510"
    assert set(found[5].values()) == {"0.0001", "not run yet"}
    with refused("table=bloom-squad-baseline", "a table of runs"):
        published(seen.views, seen, "bloom-squad-baseline")
    with refused("table=nothing", "c4-29m", "gpt-squad-weak"):
        published(seen.views, seen, "nothing")


def test_a_setup_of_a_scaling_study_in_the_units_of_its_headings(tmp_path):
    """Layers double with the ranks; of the third setup a cell failed, the fourth waits."""

    def step(a):
        return phases(100 if a[WORLD] == 1 else 125) | {"peak_mb": 500}

    def build(name, preset, **options):
        scaling = Scaling("weak", "model", preset=preset)
        cells = worlds(1, 2, 4, 8, model__layers=lambda n: 2 * n)
        return build_scaling(
            tmp_path / name, scaling, cells, step, failed=[2], waiting=[3], **options
        )

    study = build("gpu", "gpt-squad-weak", device="NVIDIA X1")
    for run in study.runs():
        place = json.dumps({"ranks": [{"device": "cuda:0"}]})
        (run.path / "environment.json").write_text(place)
    table = of_study(study)
    assert [column.name for column in table.columns] == [*WEAK, "Published Ratio (%)"]
    one, two, failed, waiting = rows(table)
    assert [two[x] for x in ("GPUs", "Num Layers", "Per-GPU Batch")] == ["2", "4", "4"]
    assert two["Samples/s (Callback)"] == "64.0" and 62 < float(two["Efficiency (%)"]) < 80
    assert one["Efficiency (%)"] == one["Published Ratio (%)"] == "100.0"
    assert "out of memory" in failed["Loss"] and waiting["Loss"] == "not run yet"
    on_cpu = rows(of_study(build("cpu", "gpt-squad-weak")))
    assert [row["GPUs"] for row in on_cpu][:2] == ["1 CPU rank", "2 CPU ranks"]


def test_the_report_writes_it_for_people_and_programs_and_shows_it(baseline, call):
    shown, _ = call("report", baseline[0].path, "--no-plots")
    assert "Fine-tuning on SQuAD" in shown and "no evaluation at epoch 3" in shown
    folder = baseline[0].path / "report"
    before = {file.name: file.read_bytes() for file in folder.glob("published.*")}
    (row,) = csv.DictReader((folder / "published.csv").read_text().splitlines())
    assert list(row) == BASELINE and float(row["GPU Utilization (%)"]) == 91.7
    assert (folder / "published.md").read_text() in (folder / "report.md").read_text()
    assert r"GPU Utilization (\%)" in (folder / "published.tex").read_text()
    page = (folder / "index.html").read_text()
    assert 'id="published"' in page and "no evaluation at epoch 3" in page
    report(baseline[0].path, plots=False)
    assert before == {file.name: file.read_bytes() for file in folder.glob("published.*")}
    assert len(before) == 3


def test_a_scaling_study_of_a_preset_fills_its_table_from_the_ledgers(tmp_path):
    """Two ranks take 60 ms for a step of 8, where one takes 100 ms; the third setup has not begun."""
    scaling = Scaling("strong", preset="bloom-squad-scaling")
    took = {1: phases(100), 2: phases(60)}
    cells, step = worlds(1, 2, 4), lambda cell: took[cell[WORLD]]
    study = build_scaling(tmp_path / "study", scaling, cells, step, waiting=[2])
    one, two, four = rows(of_study(study))
    assert list(one) == SCALING and one[SCALING[-1]] == "no GPU"
    assert one["Samples/s Scale Factor"] == one["Runtime Scale Factor"] == "1.000"
    assert (one["Samples/s"], two["Samples/s"]) == ("80.0", "133.3")
    assert two["Samples/s Scale Factor"] == "1.667"
    assert one["Total GPUs"] == "1 CPU rank"
    factor = float(one["Runtime (s)"]) / float(two["Runtime (s)"])
    assert float(two["Runtime Scale Factor"]) == pytest.approx(factor, rel=0.02)
    assert four["Setup"] == "1 host, 4 ranks"
    assert four["Samples/s"] == four["Runtime (s)"] == four["Loss"] == "not run yet"
    assert report(study.path, tmp_path / "a", plots=False).published == of_study(study)
