"""Studies of real trainings on this machine, killed and given again: a sweep, a scaling study, its
probes.
"""

import json

import pytest

from helpers import TINY, kill_when, overrides, windlass, write_corpus
from windlass import Study
from windlass.fileio import read_json
from windlass.run import Run
from windlass.study.results import seed_groups
from windlass.study.setups import read_setups

pytestmark = pytest.mark.dist


@pytest.fixture
def recipe(tmp_path):
    """The overrides of cells of a second or two; settings as `train__steps=60`."""
    text = str(write_corpus(tmp_path / "text.txt"))

    def made(**settings):
        shared = {**TINY, "data.source": text, "data.dir": str(tmp_path / "data")}
        shared |= {key.replace("__", "."): value for key, value in settings.items()}
        return overrides(shared | {"parallel.device": "cpu"})

    return made


def test_killed_in_the_middle_of_a_cell_the_same_command_resumes_it(recipe, tmp_path):
    path = tmp_path / "study"
    given = ["scale", "quickstart", "--worlds", "1,2", "--no-probe", "--dir", path]
    given += recipe(train__steps=60, checkpoint__every=5)
    kill_when(given, lambda: list(path.glob("runs/world=2-*/checkpoints/step-*")))
    first, second = Study.open(path).runs()
    before = first.metrics_path.read_bytes()
    assert first.state == "finished"
    windlass(*given, timeout=200)
    assert first.metrics_path.read_bytes() == before
    assert "resumed" in [event["event"] for event in second.events] and second.state == "finished"
    assert [x["step"] for x in second.lines("train")] == list(range(1, 61))
    assert [row.values["world"] for row in read_setups(Study.open(path))] == [1, 2]
    assert not (path / "probes").exists()
    refusal = windlass("scale", str(path), "train.steps=7", code=2)
    assert "train.steps=7" in refusal.stderr and "leave" in refusal.stderr


@pytest.mark.full
def test_killed_in_the_middle_of_a_probe_it_is_measured_anew(recipe, tmp_path):
    path = tmp_path / "study"
    given = ["scale", "quickstart", "--worlds", "1,2", "--json", "--dir", path]
    given += recipe(train__steps=30)
    kill_when(given, lambda: list(path.glob("probes/*/*/metrics.jsonl")))
    study = Study.open(path)
    assert [result.state for result in study.results()] == ["finished"] * 2
    assert not list(path.glob("probes/*/probe.json"))
    done = windlass(*given, timeout=300)
    (probe,) = (path / "probes").iterdir()
    assert read_json(probe / "probe.json")["state"] == "finished"
    for run in ("0", "1"):
        (start,) = [event for event in Run(probe / run).events if event["event"] == "started"]
        assert (start["world"], start["strategy"]) == (1, "single")
        assert start["global_batch"] == TINY["train.global_batch"] // 2
        assert not list(probe.glob(f"{run}/checkpoints/*"))
    one, two = json.loads(done.stdout)
    assert (one["world"], two["world"], one["efficiency"]) == (1, 2, 1.0) and two["step_ms"] > 0
    parts = ("compute_ms", "exposed_ms", "data_ms", "host_ms")
    assert sum(two[part] for part in parts) == pytest.approx(two["step_ms"], rel=1e-6)


def test_a_killed_sweep_resumes_and_leaves_finished_cells_alone(recipe, tmp_path):
    path, grid = tmp_path / "study", ["optim.lr=1e-2,1e-3", "run.seed=1,2"]
    given = ["sweep", "quickstart", *grid, "--dir", path]
    for setting in recipe(train__steps=6, eval__every=3):
        given += ["--set", setting]

    def finished():
        runs = Study.open(path).runs() if Study.is_study(path) else []
        return [run.metrics_path for run in runs if run.state == "finished"]

    kill_when(given, finished)
    study, done = Study.open(path), {ledger: ledger.read_bytes() for ledger in finished()}
    assert done
    again = windlass(*given, "--json", "--workers", "2")
    assert all(ledger.read_bytes() == before for ledger, before in done.items())
    results = study.results()
    settings = [(*r.cell.assignment.values(), r.state, r.numbers.step) for r in results]
    assert settings == [(lr, seed, "finished", 6) for lr in (0.01, 0.001) for seed in (1, 2)]
    numbers = [result.numbers for result in results]
    for result, own in zip(results, numbers, strict=True):
        losses = [x["loss"] for x in result.run.lines("eval")]
        assert (own.eval_loss, own.best_loss, own.score) == (losses[-1], min(losses), min(losses))
    groups, best = seed_groups(study.results()), study.winners().groups[0]
    assert [group.seeds for group in groups] == ["2 seeds"] * 2
    assert groups[0].median == pytest.approx((numbers[0].score + numbers[1].score) / 2)
    assert best.median == min(group.median for group in groups)
    # the command that trains the winner
    assert f"optim.lr={best.assignment['optim.lr']}" in again.stderr
    assert [row["best_loss"] for row in json.loads(again.stdout)] == [n.best_loss for n in numbers]
