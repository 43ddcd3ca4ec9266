"""Scaling studies of real trainings on this machine: killed and given again, and probes."""

import json

import pytest

from helpers import TINY, kill_when, overrides, windlass
from windlass import Study
from windlass.fileio import read_json
from windlass.run import Run
from windlass.study.setups import read_setups

pytestmark = pytest.mark.dist


@pytest.fixture
def words(corpus, tmp_path):
    """The words of a scaling study over small trainings; the study is in `tmp_path / "study"`."""

    def made(*more, **settings):  # of cells of a second or two; settings as `train__steps=60`
        shared = {**TINY, "data.source": str(corpus), "data.dir": str(tmp_path / "data")}
        shared |= {key.replace("__", "."): value for key, value in settings.items()}
        recipe = overrides(shared | {"parallel.device": "cpu"})
        return ["scale", "quickstart", *recipe, "--dir", str(tmp_path / "study"), *more]

    return made


def test_killed_in_the_middle_of_a_cell_the_same_command_resumes_it(words, tmp_path):
    path = tmp_path / "study"
    options = ["--worlds", "1,2", "--no-probe"]
    given = words(*options, train__steps=60, checkpoint__every=5)
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
def test_killed_in_the_middle_of_a_probe_it_is_measured_anew(words, tmp_path):
    path = tmp_path / "study"
    given = words("--worlds", "1,2", "--json", train__steps=30)
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
