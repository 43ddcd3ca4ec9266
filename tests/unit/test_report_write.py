import csv
import struct
import zlib

import matplotlib
import pytest
from report_fixtures import build_run, build_study

from windlass.cli import main
from windlass.errors import UserError
from windlass.recipe import Recipe
from windlass.reports import write_report
from windlass.reports.charts import charts
from windlass.reports.plots import draw
from windlass.reports.study import read_study
from windlass.reports.view import view
from windlass.reports.write import draw_again, write_study_report
from windlass.run import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def one(folder):
    return build_run(folder / "one", killed_at=263)


@pytest.fixture(scope="module")
def report(one):
    return write_report([one], one.report_dir)


def bytes_of(report):
    return {path.name: path.read_bytes() for path in report.paths}


def chunks(raw):
    """The chunks of a PNG as (kind, data); the checksums are checked."""
    assert raw[:8] == b"\x89PNG\r\n\x1a\n"
    found, at = [], 8
    while at < len(raw):
        length, kind = struct.unpack(">I4s", raw[at : at + 8])
        data = raw[at + 8 : at + 8 + length]
        assert struct.unpack(">I", raw[at + 8 + length : at + 12 + length])[0] == zlib.crc32(kind + data)
        found.append((kind, data))
        at += 12 + length
    return found


def test_a_report_has_a_page_tables_and_plots(report):
    names = sorted(path.name for path in report.paths)
    assert {"index.html", "report.md", "results.csv", "train.csv", "evaluations.csv", "settings.csv"} <= set(names)
    assert {
        "loss", "loss-late", "lr", "grad_norm", "throughput", "step_time", "mfu", "memory", "utilisation", "goodput",
    } <= set(report.plots)  # fmt: skip
    assert all(path.stat().st_size > 0 for path in report.paths)
    for link in [line for line in report.markdown.read_text().splitlines() if line.startswith("![")]:
        assert (report.markdown.parent / link[link.index("(") + 1 : -1]).is_file()


def test_plots_are_png_of_a_size_for_paper_and_say_nothing_of_when_and_who(report):
    for path in report.plots.values():
        parts = chunks(path.read_bytes())
        width, height = struct.unpack(">II", parts[0][1][:8])
        assert width == 1280
        assert height >= 250
        assert path.stat().st_size < 300_000
        assert {kind for kind, _ in parts} <= {b"IHDR", b"pHYs", b"IDAT", b"IEND"}


def test_the_same_run_gives_the_same_bytes_whatever_the_users_style(report, one, tmp_path):
    before = bytes_of(report)
    with matplotlib.rc_context({"figure.facecolor": "red", "lines.linewidth": 9, "savefig.dpi": 30}):
        again = write_report([Run(one.path)], tmp_path / "elsewhere")
        assert matplotlib.rcParams["lines.linewidth"] == 9
    assert bytes_of(again) == before


def test_pictures_of_an_earlier_report_that_are_no_longer_true_go(tmp_path):
    (tmp_path / "plots").mkdir()
    for name in ("samples_per_s.png", "suite-squad.png", "loss-against-lr.png", "my-own.png", "loss.png"):
        (tmp_path / "plots" / name).write_bytes(b"old")
    draw_again(lambda: {"loss": tmp_path / "plots" / "loss.png"}, tmp_path)
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["loss.png", "my-own.png"]


def test_without_plots_nothing_is_drawn(one, tmp_path):
    report = write_report([one], tmp_path / "r", plots=False)
    assert report.plots == {}
    assert not (tmp_path / "r" / "plots").exists()


def test_several_runs_are_stacked_under_their_names(folder, one, tmp_path):
    other = build_run(folder / "other", lr=1e-2, steps=100)
    report = write_report([one, other], tmp_path / "r", plots=False)
    with (tmp_path / "r" / "train.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["run"] for row in rows] == ["one"] * 40 + ["other"] * 10
    with (tmp_path / "r" / "evaluations.csv").open(newline="") as file:
        suites = {(row["run"], row["suite"]) for row in csv.DictReader(file)}
    assert suites == {(run, suite) for run in ("one", "other") for suite in ("loss", "hellaswag")}
    assert "optim.lr" in report.markdown.read_text().split("## Results")[1].splitlines()[2]


def test_a_study_is_written_with_its_cells_seeds_and_pictures(folder, tmp_path):
    report = write_study_report(read_study(build_study(folder / "study", rates=(1e-2, 1e-3))), tmp_path / "r")
    assert {"loss-against-lr", "loss-against-kind", "heat-map", "loss", "loss-late"} <= set(report.plots)
    text = report.markdown.read_text()
    assert "windlass train quickstart optim.lr=0.001" in text
    with (tmp_path / "r" / "cells.csv").open(newline="") as file:
        assert [row["state"] for row in csv.DictReader(file)].count("finished") == 6
    assert (tmp_path / "r" / "seeds.csv").is_file()


def test_a_study_that_has_not_begun_is_said(folder, tmp_path):
    path = build_study(folder / "new", rates=(1e-3,), seeds=(1,))
    for cell in (path / "runs").iterdir():
        (cell / "recipe.toml").unlink()
    with pytest.raises(UserError, match="has begun yet"):
        write_study_report(read_study(path), tmp_path)


def test_each_picture_of_one_run_is_drawn_with_its_curves(one):
    seen = view(one)
    figures = {chart.id: draw(chart, [seen]) for chart in charts([seen])}
    loss = figures["loss"].axes[0]
    assert list(loss.lines[0].get_ydata()) == list(seen.train["loss"])
    assert loss.get_legend_handles_labels()[1] == ["training", "validation", "resumed"]
    assert figures["memory"].axes[0].get_legend_handles_labels()[1] == [
        "rank 0, allocated", "rank 1, allocated", "rank 0, reserved", "rank 1, reserved", "resumed",
    ]  # fmt: skip


def test_nothing_to_report_on_and_nowhere_to_write(one, tmp_path):
    with pytest.raises(UserError, match="no run"):
        write_report([], tmp_path)
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="--out"):
        write_report([one], tmp_path / "file" / "report", plots=False)


def call(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["report", *map(str, arguments)])
    return end.value.code


def test_the_verb_prints_the_pages_path(one, folder, tmp_path, capsys):
    assert call(one.path, "--out", tmp_path / "r", "--no-plots") == 0
    assert capsys.readouterr().out == f"report: {tmp_path / 'r' / 'index.html'}\n"
    assert call(one.path, "--no-plots", "--demo", "--text", "--out", tmp_path / "r") == 0
    out = capsys.readouterr().out
    assert "sample at step 400" in out
    assert "\x1b" not in out
    assert "└" in out
    assert "Final training loss" in out


def test_the_verb_takes_a_study_and_several_of_anything(folder, tmp_path, capsys):
    study = build_study(folder / "again", rates=(1e-3,), seeds=(1,))
    assert call(study, "--no-plots") == 0
    assert capsys.readouterr().out == f"report: {study / 'report' / 'index.html'}\n"
    assert call(study, folder / "one", "--no-plots", "--out", tmp_path / "both") == 0
    assert "a comparison of runs" in (tmp_path / "both" / "index.html").read_text().lower()


def test_the_verb_takes_a_recipes_name_for_its_run(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call("quickstart") == 2
    assert "windlass train quickstart" in capsys.readouterr().err
    build_run(Recipe.load("quickstart").run_dir, steps=50)
    assert call("quickstart", "--no-plots") == 0


def test_a_users_mistake_is_one_message_and_code_2(tmp_path, capsys):
    assert call(tmp_path) == 2
    assert "no recipe.toml" in capsys.readouterr().err
