import json
from pathlib import Path

import pytest
from report_fixtures import build_run, edit, stamp

from windlass.ledger import Ledger
from windlass.recipe import Recipe
from windlass.reports.overview import overview
from windlass.run import Run
from windlass.study.study import Study


def make(path, steps, last, event=None, evals=()):
    path.mkdir(parents=True, exist_ok=True)
    (path / "recipe.toml").write_text(Recipe.model_validate({"train": {"steps": 70}}).toml())
    ledger = Ledger(path / "metrics.jsonl", 0)
    ledger.write("event", 0, event="started", steps=steps)
    for step in range(1, last + 1):
        ledger.write("train", step, loss=4.0 - step / 100, tokens_per_s=1e6 / step, step_ms=step)
    for step, loss in evals:
        ledger.write("eval", step, suite="loss", loss=loss)
    ledger.write("eval", last, suite="hellaswag", loss=0.0)
    if event:
        ledger.write("event", last, event=event)
    ledger.close()


@pytest.fixture
def top(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    top = tmp_path / "runs"
    make(top / "done", 100, 100, "finished", [(50, 3.5), (75, 3.25), (100, float("nan"))])
    make(top / "study" / "cells" / "a", 50, 20)
    (top / "study" / "cells" / "a" / "heartbeat").touch()
    make(top / "stopped", 100, 40, "preempted", [(40, 3.75)])
    make(top / "killed", None, 30)
    (top / "no-run").mkdir()
    return top


def test_a_row_for_every_run_in_strict_json(top, call):
    edit(
        Run(top / "stopped"),
        lambda line: line | ({"loss": "Infinity"} if line["kind"] == "train" else {}),
    )
    rows = json.loads(
        call("runs", "runs", "--json")[0], parse_constant=lambda word: pytest.fail(word)
    )
    assert [
        (row["run"], row["state"], row["step"], row["steps"], row["best_loss"]) for row in rows
    ] == [
        ("done", "finished", 100, 100, 3.25),
        ("killed", "failed", 30, None, None),
        ("stopped", "preempted", 40, 100, 3.75),
        ("study/cells/a", "running", 20, 50, None),
    ]
    assert (rows[0]["loss"], rows[0]["left_s"], rows[2]["loss"]) == (3.0, None, "Infinity")
    assert rows[0]["tokens_per_s"] == pytest.approx(99e6 / 5049)


def test_the_table_and_its_order(top, call):
    text = call("runs", "runs")[0]
    names = [line.split()[0] for line in text.splitlines()[1:]]
    assert names == ["done", "killed", "stopped", "study/cells/a"]
    assert "100/100" in text and "20/50" in text and "3.2500" in text and "19.6k" in text


def test_where_runs_are_and_are_not_looked_for(top, call):
    assert [row.run for row in overview(top / "done")] == ["done"]
    edit(Run(top / "study" / "cells" / "a"), lambda line: line | {"time": stamp(6 * line["step"])})
    assert [(row.run, row.left_s) for row in overview(top / "study")] == [("cells/a", 180.0)]
    (top / "new").mkdir()
    (top / "new" / "recipe.toml").write_text("[unheard]\nof = 1\n")
    (row,) = overview(top / "new")
    assert (row.state, row.step, row.steps, row.loss) == ("new", 0, None, None)
    assert "new" in call("runs", top / "new")[0]
    assert "no runs here" in call("runs", top / "no-run")[0]
    assert "not a directory" in call("runs", "nowhere", code=2)[1]


def test_a_study_is_one_row(top, call):
    study = Study.create(
        Recipe.load("quickstart", ["train.steps=70"]), ["optim.lr=1,2,3"], top / "sweeps" / "seeds"
    )
    (row,) = [row for row in overview(top) if row.cells]
    assert (row.run, row.state, row.cells, row.cells_done) == ("sweeps/seeds", "new", 3, 0)
    make(study.run_of(study.cells[0]).path, 70, 70, "finished", [(70, 3.5)])
    make(study.run_of(study.cells[1]).path, 70, 20, "preempted", [(20, 3.25)])
    (row,) = [row for row in overview(top) if row.cells]
    assert (row.run, row.state, row.step, row.steps) == ("sweeps/seeds", "interrupted", 90, 210)
    assert row.best_loss == 3.5 == study.winners().groups[0].median
    (line,) = [line for line in call("runs", "runs")[0].splitlines() if line.startswith("sweeps")]
    assert line.split() == ["sweeps/seeds", "interrupted", "1/3", "90/210", "3.5000"]
    make(study.path / "probes" / "2-ranks" / "0", 9, 9, "finished")
    study.set_failure(study.cells[1], "no luck")
    rows = overview(study.path)
    assert [row.run for row in rows] == [cell.directory for cell in study.cells]
    assert [row.state for row in rows] == ["finished", "failed", "waiting"]
    assert [row.step for row in rows] == [70, 20, None]
    seeds = Study.create(study.recipe, ["run.seed=1,2"], top / "sweeps" / "only")
    make(seeds.run_of(seeds.cells[0]).path, 70, 70, "finished", [(70, 3.5)])
    assert next(row for row in overview(top) if row.run == "sweeps/only").best_loss is None
    (study.path / "recipe.toml").write_text("[train]\nsteps = 71\n")
    for damage in (lambda: None, (study.path / "recipe.toml").unlink):
        damage()
        rows = [row for row in overview(top) if row.run.startswith("sweeps/seeds")]
        assert [(row.run, row.state) for row in rows] == [("sweeps/seeds", "damaged")]


def test_hours_of_runs_and_studies_and_their_sum_in_one_line(tmp_path, monkeypatch, call):
    """Wall time times ranks, from the last stamp of each start; of the GPUs' those alone that ran
    on some.
    """
    monkeypatch.chdir(tmp_path)
    build_run(Path("runs/killed"), ranks=2, killed_at=150)
    build_run(Path("runs/plain"), ranks=1, steps=100, finished=False)
    study = Study.create(Recipe.load("quickstart"), ["run.seed=1,2,3"], Path("runs/study"))
    for cell in study.cells[:2]:
        build_run(study.run_of(cell).path, ranks=4, steps=100)
        about = {"ranks": [{"rank": 0, "device": "cuda:0"}]}
        (study.run_of(cell).path / "environment.json").write_text(json.dumps(about))
    rows = {row["run"]: row for row in json.loads(call("runs", "runs", "--json")[0])}

    def seconds(run):  # by hand: the last stamp of each attempt
        whole = [x for x in (run / "metrics.jsonl").read_text().splitlines() if x.endswith("}")]
        stamped = [x for x in map(json.loads, whole) if "seconds" in x]
        return sum({x["attempt"]: sum(x["seconds"].values()) for x in stamped}.values())

    cell = seconds(study.run_of(study.cells[0]).path)
    expected = {
        "killed": 2 * seconds(Path("runs/killed")) / 3600,
        "plain": seconds(Path("runs/plain")) / 3600,
        "study": 2 * 4 * cell / 3600,
    }
    assert {name: row["device_hours"] for name, row in rows.items()} == pytest.approx(expected)
    hours = pytest.approx(expected["study"])
    assert [rows[name]["gpu_hours"] for name in expected] == [None, None, hours]
    cpus = expected["killed"] + expected["plain"]
    line = f"in all: {expected['study']:.3f} GPU hours and {cpus:.3f} device-hours on CPUs"
    assert call("runs", "runs")[0].splitlines()[-1] == line
