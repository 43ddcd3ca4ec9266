"""Sweeps of real trainings: killed and given again, one cell failing, strategies as an axis."""

import json

import pytest

from helpers import TINY, kill_when, overrides, windlass
from windlass.study.results import seed_groups
from windlass.study.study import Study

AXES = ["optim.lr=1e-2,1e-3", "run.seed=1,2"]


@pytest.fixture
def sweep(corpus, tmp_path):
    """The words of a sweep over small trainings; the study is in `tmp_path / "study"`."""

    def words(axes, *more, **settings):
        shared = {**TINY, "data.source": str(corpus), "data.dir": str(tmp_path / "data")}
        shared |= {"parallel.device": "cpu", "train.steps": 6, "eval.every": 3}
        shared |= {key.replace("__", "."): value for key, value in settings.items()}
        flags = [part for setting in overrides(shared) for part in ("--set", setting)]
        return ["sweep", "quickstart", *axes, "--dir", tmp_path / "study", *flags, *more]

    return words


@pytest.mark.dist
def test_a_killed_sweep_resumes_and_leaves_finished_cells_alone(sweep, tmp_path):
    path = tmp_path / "study"

    def finished():
        runs = Study.open(path).runs() if Study.is_study(path) else []
        return [run.metrics_path for run in runs if run.state == "finished"]

    kill_when(sweep(AXES), finished)
    study, done = Study.open(path), {ledger: ledger.read_bytes() for ledger in finished()}
    assert done
    again = windlass(*sweep(AXES, "--json", "--workers", "2"))
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
